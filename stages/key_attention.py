"""Key selection: the average attention that each key gets, kept after every epoch (*GauTransformer, figure 4*)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gaupipe.config import Settings
from gaupipe.data import Batches, ImageData
from gaupipe.distillation import patch_rows
from gaupipe.models import forward_with_maps

Rows = Callable[[Tensor, Tensor], list[Tensor]]
"""(images [B, C, height, width], image ids [B]) -> the maps [B, H, T, T] of every block."""


@torch.no_grad()
def save_snapshot(folder: Path, epoch: int, settings: Settings, data: ImageData, rows: Rows) -> None:
    """Writes ``folder``/key_attention/NNNN.npy for an epoch, float32 [images, L, T]: the mean over heads and queries of
    what each key gets. Nothing where ``settings.key_snapshots`` is 0."""
    if not settings.key_snapshots:
        return
    batches = Batches(data.train, data, torch.device("cpu"), settings.data.batch_size)
    ids = data.train.evenly_spaced(settings.key_snapshots)
    kept = [torch.stack([row.mean((1, 2)) for row in rows(batch.images, batch.ids)], dim=1).float().cpu()
            for batch in batches.in_order(ids)]
    (folder / "key_attention").mkdir(parents=True, exist_ok=True)
    np.save(folder / "key_attention" / f"{epoch:04d}.npy", torch.cat(kept).numpy())


def student_maps(student: nn.Module, device: torch.device) -> Rows:
    """What :func:`save_snapshot` needs of a student: its patches' attention to patches."""
    def rows(images: Tensor, _image_ids: Tensor) -> list[Tensor]:
        student.eval()
        maps = forward_with_maps(student, images.to(device))[1]
        return [patch_rows(row, student.num_prefix_tokens).exp() for row in maps]
    return rows


def read(folder: Path) -> np.ndarray:
    """All snapshots in ``folder``: float32 [epochs, images, L, T]; of no epochs where there are none or not all are of the
    same images."""
    kept = [np.load(path) for path in sorted((folder / "key_attention").glob("*.npy"))]
    return np.stack(kept) if len({snapshot.shape for snapshot in kept}) == 1 else np.empty((0, 0, 0, 0))
