"""The teacher ``local``: fixed Gaussians round the tokens, which need no network and no store.

Axis letters: H heads, T tokens on a grid (h, w).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gaupipe.data.splits import ImageData
from gaupipe.distillation.job import StudentLosses, gammas
from gaupipe.distillation.losses import ConstantMaps
from gaupipe.distillation.student import check_fit, layer_map
from gaupipe.maps.gaussians import local_axes
from gaupipe.maps.stored import AS_STORED, Seen, StoredGaussians, select_heads
from gaupipe.settings import PhaseASettings, Settings
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import MapShape
from gaupipe.training.job import (
    EpochPlan,
    Training,
    remarks_on_patches,
    share_of_dropped_patches,
    student_training,
)
from gaupipe.training.student import checked_student


class LocalMaps(StoredGaussians):
    """The attention of every image alike, as :class:`~gaupipe.distillation.losses.TeacherMaps`
    reads it: B is 1, and neither a view nor another block changes it."""

    def __init__(
        self, shape: MapShape, stds: Sequence[float], permutation: Tensor | None = None
    ) -> None:
        """``stds`` are in tokens, one for each head; ``permutation`` int64 [T] gives query i the
        Gaussian of the token permutation[i]."""
        self.grid = shape.grid
        self.layers = shape.layers
        self.heads = shape.heads
        along_y, along_x = local_axes(self.grid, stds)
        if permutation is not None:
            along_y = along_y[:, permutation]
            along_x = along_x[:, permutation]
        self.factors = along_y[None], along_x[None]

    def to(self, device: torch.device) -> LocalMaps:
        along_y, along_x = self.factors
        self.factors = along_y.to(device), along_x.to(device)
        return self

    def axes(self, layer: int, seen: Seen = AS_STORED) -> tuple[Tensor, Tensor]:
        """The two factors ([1, H, T, h], [1, H, T, w]) of a block's map."""
        along_y, along_x = self.factors
        return select_heads(along_y, seen.heads), select_heads(along_x, seen.heads)


def local_maps(settings: Settings, student: VisionTransformer) -> LocalMaps:
    """The maps of ``phase_a.teacher: local`` for a student, on the CPU. Raises UserError where the
    settings and the student do not fit."""
    local = settings.phase_a.local
    shape = MapShape.of(student)
    if settings.phase_b.shuffle_maps:
        raise UserError(
            "phase_b.shuffle_maps: local has the same maps for all images; the control "
            "is phase_a.local.permuted=true"
        )
    if len(local.std) > shape.heads:
        raise UserError(
            f"phase_a.local.std: has {len(local.std)} numbers for the {shape.heads} heads of the "
            f"student: give at most {shape.heads}"
        )
    stds = [local.std[head % len(local.std)] for head in range(shape.heads)]
    permutation = None
    if local.permuted:
        generator = torch.Generator().manual_seed(settings.seed)
        permutation = wrong_places(shape.grid[0] * shape.grid[1], generator)
    check_fit(student, shape, settings.phase_b, "local")
    return LocalMaps(shape, stds, permutation)


def wrong_places(tokens: int, generator: torch.Generator) -> Tensor:
    """A permutation int64 [tokens] that is one cycle, so that no token keeps its place."""
    order = torch.randperm(tokens, generator=generator)
    places = torch.empty_like(order)
    places[order] = order.roll(1)
    return places


def without_predictions(settings: Settings) -> Settings:
    """The settings of a student of ``local``, which predicts nothing: alpha is 0. Raises
    UserError where nothing else is left to learn from."""
    if settings.phase_b.beta + settings.phase_b.gamma == 0:
        raise UserError(
            "phase_b.alpha: local predicts no classes, and beta and gamma are 0: set phase_b.beta=1"
        )
    return settings.with_section("phase_b", alpha=0.0)


def described(phase: PhaseASettings) -> str:
    """The maps in words."""
    local = phase.local
    stds = ", ".join(f"{std:g}" for std in local.std)
    places = "at a wrong place for each query" if local.permuted else "round each token"
    return f"Gaussians of std {stds} tokens {places}, the same for all images"


def constant_maps(
    settings: Settings, student: VisionTransformer, device: torch.device
) -> ConstantMaps:
    """The maps of ``phase_a.teacher: local`` as those of a student are compared with them. Raises
    UserError as :func:`local_maps`."""
    maps = local_maps(settings, student).to(device)
    phase = settings.phase_b
    return ConstantMaps(maps, layer_map(phase, maps.layers, maps.layers), maps.grid, phase.head_map)


def build(
    settings: Settings, data: ImageData, device: torch.device, student: VisionTransformer
) -> Training:
    """The training of a ``student`` that lies on the ``device``. Raises UserError as
    :func:`local_maps` and :func:`without_predictions`."""
    settings = without_predictions(settings)
    train = settings.student_training
    maps = constant_maps(settings, student, device)
    epochs = [
        EpochPlan(gamma, dropped=share_of_dropped_patches(train, epoch, gamma))
        for epoch, gamma in enumerate(gammas(settings))
    ]
    losses = StudentLosses(student, settings, lambda _batch: maps)
    teacher = described(settings.phase_a)
    remarks = [
        f"local has {teacher}; it predicts nothing, so phase_b.alpha is 0",
        *remarks_on_patches(train, epochs),
    ]
    return student_training(settings, data, device, student, train, losses, epochs, remarks)


@dataclass(frozen=True)
class LocalJob:
    """The teacher on the data of a run."""

    settings: Settings
    data: ImageData


def checked_job(settings: Settings, data: ImageData, students: bool = True) -> LocalJob:
    """The teacher of the settings. Raises UserError for what phase B could not do with it, unless
    ``students`` is False."""
    if students:
        train = without_predictions(settings).student_training
        local_maps(settings, checked_student(settings, data, train))
    return LocalJob(settings, data)
