"""The student of phase B: how it is built, and whether a teacher's maps can be compared with its
own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

from gaupipe.data.splits import ImageData
from gaupipe.distillation.warm_start import hand_over, warm_start
from gaupipe.settings import Settings
from gaupipe.system.errors import UserError
from gaupipe.training.optimizer import build_optimizer, build_vit


@dataclass(frozen=True)
class MapShape:
    """What :func:`check_fit` asks of the maps of a teacher or a store."""

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


def build_student(
    settings: Settings, data: ImageData, device: str | None = None
) -> VisionTransformer:
    """The student with the weights that the seed starts it with, on the CPU; without any on the
    ``device`` "meta"."""
    phase = settings.phase_b
    torch.manual_seed(settings.seed)
    return build_vit(
        settings.model,
        data,
        phase.student,
        device,
        ("phase_b.model_args", phase.model_args),
        attention_options=phase.attention_options,
        match_params=phase.match_params,
        rezero=phase.rezero,
    )


def layer_map(settings: Settings, depth: int, layers: int) -> list[int | None]:
    """For each of the student's ``depth`` blocks the stored block, of ``layers``, that it is
    compared with: ``phase_b.layer_map``, or evenly spaced from the first to the last."""
    if settings.phase_b.layer_map is not None:
        return settings.phase_b.layer_map
    if depth == 1:
        return [layers - 1]
    last, steps = layers - 1, depth - 1
    return [(2 * block * last + steps) // (2 * steps) for block in range(depth)]  # halves go up


def check_fit(student: VisionTransformer, schema: Any, settings: Settings, where: str) -> None:
    """Raises UserError if maps with the ``grid``, ``layers`` and ``heads`` of ``schema`` cannot be
    compared with the student's as the settings say. ``where`` names the store."""
    phase = settings.phase_b
    own = MapShape.of(student)
    depth, heads, grid = own.layers, own.heads, own.grid
    layers = layer_map(settings, depth, schema.layers)
    if len(layers) != depth or any(
        layer is not None and layer >= schema.layers for layer in layers
    ):
        raise UserError(
            f"phase_b.layer_map: should have {depth} entries, each null or 0 to "
            f"{schema.layers - 1}, got {phase.layer_map}"
        )
    if phase.layer_weights is not None and len(phase.layer_weights) != depth:
        raise UserError(
            f"phase_b.layer_weights: should have {depth} entries, got {len(phase.layer_weights)}"
        )
    compared = [
        weight and layer is not None
        for weight, layer in zip(phase.layer_weights or [1.0] * depth, layers, strict=True)
    ]
    if phase.gamma and not any(compared):
        raise UserError(
            "phase_b.layer_map and layer_weights leave no block to compare: set phase_b.gamma=0 "
            "for that"
        )
    check_heads(settings, heads, schema.heads, where)
    if tuple(schema.grid) != grid and not phase.match_grid:
        raise UserError(
            f"{where}: the maps have the grid {tuple(schema.grid)}, the student has {grid}: set "
            "phase_b.match_grid=true, or give the student as many patches as the teacher has"
        )
    if phase.copy_epochs and student.num_prefix_tokens:
        raise UserError(
            "phase_b.copy_epochs: the store has no attention of class and register tokens: take "
            "class_token and reg_tokens out of the student, or set copy_epochs to 0"
        )


def check_heads(settings: Settings, heads: int, stored: int, where: str) -> None:
    """Raises UserError unless each of the student's ``heads`` has a ``stored`` head to be compared
    with."""
    chosen = settings.phase_b.head_map
    if chosen is not None:
        if len(chosen) != heads or max(chosen, default=0) >= stored:
            raise UserError(
                f"phase_b.head_map: should have {heads} entries, each 0 to {stored - 1}, got "
                f"{chosen}"
            )
    elif not settings.phase_b.mean_heads and heads != stored:
        raise UserError(
            f"{where}: the maps have {stored} heads, the student has {heads}: set "
            "phase_b.mean_heads=true, name the stored head for each of the student's in "
            "phase_b.head_map, or give the student as many heads as the teacher has"
        )


def check_student(settings: Settings, data: ImageData, shape: MapShape, weights: Any) -> None:
    """Raises UserError now for what phase B could not do with a teacher after hours of phase A.

    ``shape`` is that of the teacher's maps, ``weights`` the state_dict of its ViT. Nothing is
    computed: the student is built on the meta device.
    """
    student = build_student(settings, data, "meta")
    check_fit(student, shape, settings, "the teacher")
    if settings.phase_b.warm_start != "none":
        (hand_over if settings.phase_b.warm_start == "exact" else warm_start)(student, weights)
    build_optimizer(student, settings.phase_b.optim, settings.phase_b.epochs, steps_per_epoch=100)


def check_baseline(settings: Settings, data: ImageData) -> None:
    """Raises UserError for what training on the labels alone could not do."""
    student = build_student(settings, data, "meta")
    build_optimizer(student, settings.baseline_optim, settings.phase_b.epochs, steps_per_epoch=100)
