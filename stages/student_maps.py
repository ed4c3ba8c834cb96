"""Where a trained student looks in training images, beside the stored maps it is compared with.

Axis letters: L blocks, H heads, T tokens on the student's grid, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.batches import Batch, Batches, load_data
from gaupipe.distillation.feature_loss import patch_map
from gaupipe.distillation.losses import without_keys
from gaupipe.vit.models import forward_with_maps
from stages.evaluate import load_student, open_maps
from stages.phase_b import PhaseB
from stages.runs.directory import RunDirectory


@dataclass
class Seen:
    """What a student makes of one image.

    maps     [L, H, T, T] float32, probabilities over keys, from patches to patches
    logits   [C]
    teacher  for each block the stored map [H, T, T] that it is compared with, without the keys that
             the student's attention hides; None for a block without one
    """

    label: int
    logits: Tensor
    maps: Tensor
    teacher: list[Tensor | None]


class StudentMaps:
    """A student of a run, loaded once; ``no_teacher`` says why no stored maps are compared with its
    own. Raises UserError where it is not there or damaged."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        student = load_student(run.path, name)
        settings, model, self.name = student.settings, student.model, student.name
        self.model, self.data = model, load_data(settings.data)
        self.attention = settings.phase_b.student
        self.layers = len(model.blocks)
        self.grid: tuple[int, int] = tuple(model.patch_embed.grid_size)
        device = torch.device("cpu")
        self._batches = Batches(self.data.train, self.data, device, batch_size=1)
        self._job = None
        maps = open_maps(student, self.data)
        self.no_teacher: str | None = None
        if maps is None:
            self.no_teacher = "there is no whole store that fits the student"
        elif maps.schema.extra.get("views") is not None:
            self.no_teacher = f"{maps.url} holds maps of views, not of the images themselves"
        else:
            self._job = PhaseB(settings, self.data, device, model, settings.phase_b.optim, maps)

    @torch.inference_mode()
    def see(self, image: int) -> Seen:
        """Where the student looks in a training image."""
        batch = next(self._batches.in_order(np.array([image])))
        logits, log_maps = forward_with_maps(self.model, batch.images)
        prefix = self.model.num_prefix_tokens
        maps = torch.stack([patch_map(block, prefix)[0].exp() for block in log_maps])
        return Seen(int(batch.labels[0]), logits[0], maps, self._teacher(batch, maps))

    def _teacher(self, batch: Batch, maps: Tensor) -> list[Tensor | None]:
        if self._job is None:
            return [None] * len(maps)
        image = int(batch.ids[0])
        batch.stored = self._job.teacher_store.read(image, image + 1)
        stored = self._job.teacher_maps(batch)
        compared: list[Tensor | None] = []
        for layer, own in enumerate(maps):
            if stored.layers[layer] is None:
                compared.append(None)
                continue
            teacher = stored.map(layer)[0].expand_as(own)  # [H, T, T]
            hidden = own == 0
            compared.append(without_keys(teacher, hidden) if hidden.any() else teacher)
        return compared
