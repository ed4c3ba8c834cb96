"""A teacher of any kind on the data of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import store
from gaupipe.data.batches import Batch, Batches
from gaupipe.data.splits import ImageData, Split
from gaupipe.distillation.kinds import Attention
from gaupipe.settings import ExportSettings, PhaseASettings, Settings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.system.progress import EpochMetrics
from gaupipe.teachers.gaussian_vit import Teacher
from gaupipe.teachers.image_state import ImageState
from gaupipe.teachers.notes import StoreNotes
from gaupipe.teachers.probe import Probe
from gaupipe.teachers.readable_vit import VitTeacher
from gaupipe.training.state import Identity
from gaupipe.training.student import untrained_student
from gaupipe.vit.inputs import as_taken


@dataclass(frozen=True)
class MapShape:
    """The shape of the maps of a teacher or a store."""

    grid: tuple[int, int]
    layers: int
    heads: int

    @classmethod
    def of(cls, model: Any) -> MapShape:
        """Of the maps of a teacher, which knows them, or of a ViT of timm's."""
        if not isinstance(model, VisionTransformer):
            return cls(model.grid, model.layers, model.heads)
        first: Any = model.blocks[0]
        return cls(tuple(model.patch_embed.grid_size), len(model.blocks), first.attn.num_heads)

    @classmethod
    def of_store(cls, schema: store.Schema) -> MapShape | None:
        """Of the maps in a store; None for a store without maps."""
        return cls(*schema.maps) if schema.has_maps else None

    def stored(self, export: ExportSettings) -> MapShape | None:
        """Of the maps that an ``export`` stores of these; None where it stores none."""
        assert export.kind is not None  # chosen() names it
        if not store.KINDS[export.kind].has_maps:
            return None
        layers = self.layers if export.layers is None else len(export.layers)
        return MapShape(export.grid or self.grid, layers, self.heads)

    def in_store(self, export: ExportSettings) -> dict[str, Any]:
        """The fields of a store's schema for :meth:`stored`."""
        stored = self.stored(export)
        return {} if stored is None else vars(stored)


MOST_NUMBERS = 10**8
"""Of the maps of a batch from a trained ViT, all blocks together; each takes 4 bytes, or 8 with
what is stored of it."""


def images_at_once(batch_size: int, layers: int, heads: int, tokens: int) -> int:
    """The size of a batch whose maps have no more than :data:`MOST_NUMBERS`, at least 1."""
    return min(batch_size, max(1, MOST_NUMBERS // (layers * heads * tokens**2)))


Kind = TypeVar("Kind", bound=Teacher | VitTeacher)


@dataclass
class TeacherJob(Generic[Kind]):
    """A teacher on the data of a run; ``per_image`` is None for one without such parameters, and
    ``probe`` for one that predicts the classes itself, or none of them."""

    settings: Settings
    data: ImageData
    device: torch.device
    teacher: Kind
    per_image: ImageState | None = None
    probe: Probe | None = None

    @property
    def shape(self) -> MapShape:
        """The shape of the teacher's maps."""
        return MapShape.of(self.teacher)

    @property
    def student_shape(self) -> MapShape | None:
        """The shape of the maps of the student that the settings describe."""
        return MapShape.of(untrained_student(self.settings, self.data))

    def batches(self, split: Split, batch_size: int | None = None) -> Batches:
        """Batches of a split, as the teacher takes its images, by default of the size for
        evaluation, or fewer at a time, where the maps of so many are large."""
        settings = self.settings.data
        data = self.data
        size = batch_size or settings.eval_batch_size
        if isinstance(self.teacher, VitTeacher):
            teacher = self.teacher
            split, data = as_taken(split, data, teacher.takes)
            tokens = teacher.prefix + math.prod(teacher.grid)
            size = images_at_once(size, teacher.layers, teacher.heads, tokens)
        return Batches(split, data, self.device, size, settings.workers, settings.num_buckets)

    def parameters(self, image_ids: Tensor) -> Tensor | None:
        """The per-image parameters [B, ...] of training images, on the device."""
        return None if self.per_image is None else self.per_image.read(image_ids).to(self.device)

    def forward_with_maps(
        self, batch: Batch, generator: torch.Generator, layers: Sequence[int] | None = None
    ) -> tuple[Tensor, Attention]:
        """The log-probabilities [B, C] of a batch of training images and their attention, of a
        trained ViT that of the blocks ``layers``, None for all. ``generator`` is for draws."""
        if isinstance(self.teacher, VitTeacher):
            return self.teacher.forward_with_maps(batch.images, layers=layers)
        parameters = self.parameters(batch.ids)
        return self.teacher.forward_with_maps(batch.images, parameters, generator)

    @cached_property
    def sha256(self) -> str:
        """A digest of everything that a finished teacher has learned. Collective."""
        return self.teacher.sha256(self.per_image)

    def named_sha256(self) -> dict[str, str]:
        """:attr:`sha256` by a name for messages. Collective."""
        return {f"teacher {self.settings.phase_a.teacher}, sha256": self.sha256}

    def notes(self) -> StoreNotes:
        """What a store notes of the teacher and its images."""
        phase = self.settings.phase_a
        data = self.settings.data.model_dump(mode="json", exclude={"buckets"})
        if isinstance(self.teacher, VitTeacher):
            probe = self.probe is not None
            predicts = probe or self.teacher.predicts
            return StoreNotes(teacher=phase.teacher, predicts=predicts, probe=probe, data=data)
        return StoreNotes(mode=phase.mode, label_passes=self.teacher.passes or 1, data=data)


UPPER_ACCURACY = 0.98
"""Upper bound of the window for the training accuracy (*GauTransformer, section 3.3.1*)."""


def ending(phase: PhaseASettings, metrics: list[EpochMetrics]) -> str:
    """A line about a teacher that is trained: why its training ended, and whether its accuracy on
    the training images lies in the window."""
    rate = "phase_a.optim.lr"
    if phase.learns_of_images:
        rate = "phase_a.rows.lr"
    accuracy = metrics[-1]["train_acc"]
    epochs = len(metrics)
    assert accuracy is not None  # it was trained
    if accuracy < phase.stop_accuracy:
        return (
            f"{epochs} epochs were not enough for a training accuracy of {phase.stop_accuracy}: "
            f"{accuracy:.4f}; raise phase_a.max_epochs or {rate}"
        )
    if accuracy > max(UPPER_ACCURACY, phase.stop_accuracy):
        return (
            f"the training accuracy {accuracy:.4f} is above the window's upper bound "
            f"{UPPER_ACCURACY}: the teacher has begun to memorise; lower {rate}"
        )
    return (
        f"ended after {epochs} of {phase.max_epochs} epochs: the training accuracy {accuracy:.4f} "
        f"has reached phase_a.stop_accuracy={phase.stop_accuracy}"
    )


def identity(settings: Settings, data: ImageData) -> Identity:
    """Every setting that phase A reads, and the data set."""
    read_by_phase_a = flatten(settings.without_student(), Scope.ANYTIME)
    return read_by_phase_a | {"the data set": data.sha256}
