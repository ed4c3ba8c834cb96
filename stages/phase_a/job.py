"""What export, verification and phase B ask of a finished teacher, whatever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaupipe.data.batches import Batch, Batches
from gaupipe.data.splits import ImageData, Split
from gaupipe.distillation.kinds import Attention
from gaupipe.distillation.student import MapShape
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.teachers.gaussian import Teacher
from gaupipe.teachers.vit import VitTeacher


@dataclass
class TeacherJob:
    """A teacher on the data of a run."""

    settings: Settings
    data: ImageData
    device: torch.device
    teacher: Teacher | VitTeacher

    @property
    def shape(self) -> MapShape:
        """Of the teacher's maps."""
        return MapShape.of(self.teacher)

    @property
    def has_parameters_of_images(self) -> bool:
        """Whether the teacher keeps numbers of single images."""
        return False

    def batches(self, split: Split, batch_size: int | None = None) -> Batches:
        """Batches of a split, by default of the size for evaluation."""
        data = self.settings.data
        size = batch_size or data.eval_batch_size
        return Batches(split, self.data, self.device, size, data.workers, data.num_buckets)

    def show(
        self, batch: Batch, generator: torch.Generator, maps: bool = False
    ) -> tuple[Attention, Tensor]:
        """The attention of a batch and its log-probabilities [B, C]. ``generator`` is for draws.
        ``maps`` says that the maps are wanted: what the forward pass knows of them is kept."""
        raise NotImplementedError

    def sha256(self) -> str:
        """A digest of everything that the teacher has learned."""
        raise NotImplementedError

    def common_sha256(self) -> str:
        """:meth:`sha256`, which has to be the same on all ranks. Raises Agreed, on every rank,
        where ranks hold other teachers."""
        sha256 = self.sha256()
        distributed.check_same(
            {f"teacher {self.settings.phase_a.teacher}, sha256": sha256},
            "every process should load the same trained weights",
        )
        return sha256

    def notes(self) -> dict[str, Any]:
        """What the teacher's store says of it beside the schema, as JSON."""
        raise NotImplementedError
