"""The student of phase B: how it is built, and whether a teacher's maps can be compared with its
own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gaupipe.building import build_optimizer, build_vit
from gaupipe.config import Settings
from gaupipe.data import ImageData
from gaupipe.errors import UserError
from gaupipe.stored_maps import KINDS
from gaupipe.teacher import Teacher
from gaupipe.warm_start import warm_start


@dataclass(frozen=True)
class MapShape:
    """What :func:`check_fit` asks of the maps of a teacher or a store."""

    kind: str
    grid: tuple[int, int]
    layers: int
    heads: int


def build_student(settings: Settings, data: ImageData, device: str | None = None) -> nn.Module:
    """The student with the weights that the seed starts it with, on the CPU; without any on the
    ``device`` "meta"."""
    phase = settings.phase_b
    torch.manual_seed(settings.seed)
    model = settings.model.model_copy(update={"args": {**settings.model.args, **phase.model_args}})
    return build_vit(
        model,
        data,
        phase.student,
        device,
        attention_options=phase.attention_options,
        match_params=phase.match_params,
        rezero=phase.rezero,
    )


def check_fit(student: nn.Module, schema: Any, settings: Settings, where: str) -> None:
    """Raises UserError if maps with the ``grid``, ``layers``, ``heads`` and ``kind`` of
    ``schema`` cannot be compared with the student's as the settings say. ``where`` names the
    store."""
    phase = settings.phase_b
    depth, heads = len(student.blocks), student.blocks[0].attn.num_heads
    grid = tuple(student.patch_embed.grid_size)
    if phase.layer_map is None and depth != schema.layers:
        raise UserError(
            f"{where}: the store holds maps with layers {schema.layers}, the student has {depth}: use the "
            "model of phase A, or name the stored block for each of the student's in phase_b.layer_map"
        )
    if phase.layer_map is not None and (
        len(phase.layer_map) != depth
        or any(layer is not None and layer >= schema.layers for layer in phase.layer_map)
    ):
        raise UserError(
            f"phase_b.layer_map: should have {depth} entries, each null or 0 to {schema.layers - 1}, got "
            f"{phase.layer_map}"
        )
    if (
        KINDS[schema.kind].are_maps
        and phase.augment.geometry == "follow"
        and (phase.augment.flip or phase.augment.crop_padding or phase.augment.resized_crop)
    ):
        raise UserError(
            "phase_b.augment: dense maps cannot move with a cropped or mirrored image: export a gaussian store, "
            "or set phase_b.augment.geometry=ignore"
        )
    if phase.layer_weights is not None and len(phase.layer_weights) != depth:
        raise UserError(
            f"phase_b.layer_weights: should have {depth} entries, got {len(phase.layer_weights)}"
        )
    if phase.gamma and not any(
        (weight and layer is not None)
        for weight, layer in zip(
            phase.layer_weights or [1.0] * depth,
            phase.layer_map or range(depth),
            strict=True,
        )
    ):
        raise UserError(
            "phase_b.layer_map and layer_weights leave no block to compare: set phase_b.gamma=0 for that"
        )
    if not phase.mean_heads and heads != schema.heads:
        raise UserError(
            f"{where}: the store holds maps with heads {schema.heads}, the student has {heads}: use the "
            "model of phase A, or set phase_b.mean_heads=true"
        )
    if grid != schema.grid and (not phase.match_grid or KINDS[schema.kind].are_maps):
        raise UserError(
            f"{where}: the store holds {schema.kind} maps with grid {schema.grid}, the student has {grid}: "
            "use the model of phase A, or a gaussian store and phase_b.match_grid=true"
        )


def check_student(
    settings: Settings, data: ImageData, teacher: Teacher, kind: str = "gaussian"
) -> None:
    """Raises UserError now for what phase B could not do with this teacher after hours of phase
    A. Nothing is computed: the student is built on the meta device."""
    student = build_student(settings, data, "meta")
    shape = MapShape(kind, teacher.grid, teacher.layers, teacher.heads)
    check_fit(student, shape, settings, "the teacher")
    if settings.phase_b.warm_start != "none":
        warm_start(student, teacher.vit.state_dict())
    build_optimizer(student, settings.phase_b.optim, settings.phase_b.epochs, steps_per_epoch=100)


def check_baseline(settings: Settings, data: ImageData) -> None:
    """Raises UserError for what training on the labels alone could not do."""
    student = build_student(settings, data, "meta")
    optim = settings.baseline.optim or settings.phase_b.optim
    build_optimizer(student, optim, settings.phase_b.epochs, steps_per_epoch=100)
