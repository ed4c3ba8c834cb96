"""Attention of a trained student to training images, beside the stored maps it is compared with.

Axis letters: L blocks, H heads, T tokens on the student's grid, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batch, Batches
from gaupipe.data.splits import load_data
from gaupipe.distillation.feature_loss import patch_map
from gaupipe.distillation.losses import without_keys
from gaupipe.settings.augment import AugmentSettings
from gaupipe.vit.forward import forward_with_maps
from stages.phase_b import PhaseB
from stages.runs.directory import RunDirectory
from stages.students import load_student, open_maps


@dataclass
class Seen:
    """Predictions and maps of a student for one image.

    maps        [L, H, T, T] float32, probabilities over keys, from patches to patches
    logits      [C]
    teacher     for each block the stored map [H, T, T] that it is compared with, without the keys
                that the student's attention hides; None for a block without one
    no_teacher  why no block has a stored map; None where blocks have one
    """

    label: int
    logits: Tensor
    maps: Tensor
    teacher: list[Tensor | None]
    no_teacher: str | None


class StudentMaps:
    """A student of a run, loaded once, with the ``store`` that it learned from, or its run's; None
    where there is none that fits it. Raises UserError where the student is not there or damaged."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        student = load_student(run.path, name)
        settings, model, self.name = student.settings, student.model, student.name
        self.model, self.data = model, load_data(settings.data, settings.download)
        self.attention = settings.phase_b.student
        self.layers = len(model.blocks)
        self.grid: tuple[int, int] = tuple(model.patch_embed.grid_size)
        device = torch.device("cpu")
        self._batches = Batches(self.data.train, self.data, device, batch_size=1)
        self.store = open_maps(student, self.data)
        self._job = PhaseB(settings, self.data, device, model, settings.phase_b.optim, self.store)

    @torch.inference_mode()
    def see(self, image: int, views: dict[str, Any] | None = None, view: int = 0) -> Seen:
        """The student's attention to a training image or, with ``views``, in that ``view`` of it.

        ``views`` says how views are drawn, as a store of views does in its schema's extra["views"].
        """
        batch = next(self._batch(image, views, view))
        logits, log_maps = forward_with_maps(self.model, batch.images)
        prefix = self.model.num_prefix_tokens
        maps = torch.stack([patch_map(block, prefix)[0].exp() for block in log_maps])
        reason = self.no_teacher(views)
        compared: list[Tensor | None] = [None] * len(maps)
        if reason is None:
            compared = self._teacher(image, view, batch, maps)
        return Seen(int(batch.labels[0]), logits[0], maps, compared, reason)

    def no_teacher(self, views: dict[str, Any] | None = None) -> str | None:
        """Why the stored maps are not those of what the student sees; None where they are."""
        if self.store is None:
            return "there is no whole store that fits the student"
        stored = self.store.schema.extra.get("views")
        if stored == views:
            return None
        others = "the images themselves" if stored is None else "other views"
        return f"{self.store.url} holds maps of {others}, which are not shown here"

    def _batch(self, image: int, views: dict[str, Any] | None, view: int) -> Iterator[Batch]:
        if views is None:
            return self._batches.in_order(np.array([image]))
        augment = Augment(AugmentSettings.model_validate(views["augment"]), views["seed"])
        return self._batches.views(np.array([image * (view + 1) + view]), augment, view + 1)

    def _teacher(self, image: int, view: int, batch: Batch, maps: Tensor) -> list[Tensor | None]:
        entry = image * self._job.teacher_store.schema.views + view
        batch.stored = self._job.teacher_store.read(entry, entry + 1)
        stored = self._job.teacher_maps(batch)
        compared: list[Tensor | None] = []
        for layer, block in enumerate(maps):
            teacher, hidden = None, block == 0
            if stored.layers[layer] is not None:
                teacher = stored.map(layer)[0].expand_as(block)  # [H, T, T]
                teacher = without_keys(teacher, hidden) if hidden.any() else teacher
            compared.append(teacher)
        return compared
