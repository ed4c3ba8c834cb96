"""Key selection: the average attention that each key gets, after every epoch.

*GauTransformer, figure 4*
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gaupipe.data.batches import Batch, Batches
from gaupipe.data.buckets import Buckets
from gaupipe.data.splits import ImageData
from gaupipe.distillation.feature_loss import patch_map
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import whole_file
from gaupipe.vit.forward import forward_with_maps

Attention = Callable[[Tensor, Tensor], list[Tensor]]
"""(images [B, C, height, width], image ids [B]) -> attention maps [B, H, T, T] of every block."""
SNAPSHOTS = "key_attention"
"""The folder of the snapshots, in that of the model."""


@torch.no_grad()
def save_snapshot(
    folder: Path,
    epoch: int,
    settings: Settings,
    data: ImageData,
    attention: Attention,
) -> None:
    """Writes ``folder``/key_attention/NNNN.npy for an epoch: float32 [images, L, T].

    A value is the mean over heads and queries of the attention that a key gets. The images are
    ``settings.key_snapshots`` training images, evenly spaced; nothing is written where it is 0.
    """
    if not settings.key_snapshots:
        return
    batches = Batches(data.train, data, torch.device("cpu"), settings.data.batch_size)
    ids = data.train.evenly_spaced(settings.key_snapshots)
    buckets = Buckets(len(data.train), settings.data.num_buckets)
    mine = ids[np.isin(buckets.of(ids), buckets.of_rank())]  # a rank knows its own images
    snapshots: dict[int, np.ndarray] = {}
    for batch in batches.in_order(mine):
        keys = of_keys(attention, batch)
        snapshots |= dict(zip(batch.ids.tolist(), keys, strict=True))
    whole = distributed.all_gather_dict(snapshots)
    if distributed.is_main():
        (folder / SNAPSHOTS).mkdir(parents=True, exist_ok=True)
        in_order = np.stack([whole[number] for number in ids.tolist()])
        with whole_file(snapshot_file(folder, epoch)) as partial:
            np.save(partial, in_order)


def of_keys(attention: Attention, batch: Batch) -> np.ndarray:
    """The attention that each key gets, mean over heads and queries: float32 [B, L, T]."""
    means = [maps.mean((1, 2)) for maps in attention(batch.images, batch.ids)]  # of [B, T] each
    return torch.stack(means, dim=1).float().cpu().numpy()


def student_attention(student: VisionTransformer, device: torch.device) -> Attention:
    """The attention maps of a student, in eval mode, from patches to patches."""

    def attention(images: Tensor, _image_ids: Tensor) -> list[Tensor]:
        student.eval()
        log_probabilities = forward_with_maps(student, images.to(device))[1]
        prefix = student.num_prefix_tokens
        return [patch_map(block, prefix).exp() for block in log_probabilities]

    return attention


def epochs_in(folder: Path) -> list[int]:
    """The epochs, counted from 1, of which there are snapshots in ``folder``, in order. Raises
    UserError for a file that is no snapshot by its name."""
    epochs = []
    for path in (folder / SNAPSHOTS).glob("*.npy"):
        if path.name.startswith("."):  # a killed training left it
            continue
        if not re.fullmatch("[0-9]{4,9}", path.stem):
            raise UserError(f"{path}: is no snapshot: its name should be an epoch, as in 0001.npy")
        epochs.append(int(path.stem))
    return sorted(epochs)


def read(folder: Path) -> np.ndarray:
    """All snapshots in ``folder``: float32 [epochs, images, L, T].

    Without epochs where there are no snapshots, or not all are of the same images. Raises UserError
    for a file that is no snapshot.
    """
    snapshots = []
    for epoch in epochs_in(folder):
        path = snapshot_file(folder, epoch)
        try:
            snapshots.append(np.load(path))
        except (ValueError, EOFError, OSError) as error:
            raise UserError(f"{path}: the snapshot is damaged: {error}") from None
    same = len({snapshot.shape for snapshot in snapshots}) == 1
    return np.stack(snapshots) if same else np.empty((0, 0, 0, 0))


def snapshot_file(folder: Path, epoch: int) -> Path:
    return folder / SNAPSHOTS / f"{epoch:04d}.npy"
