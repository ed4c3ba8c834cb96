"""The teacher ``local``: fixed Gaussians round the tokens, which need no network and no store.

Axis letters: H heads, T tokens on a grid (h, w).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gaupipe.maps.gaussians import local_axes, outer
from gaupipe.maps.stored import AS_STORED, Seen, StoredAttention, select_heads, select_queries
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import MapShape, Teacher


class LocalMaps(StoredAttention):
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

    def map(self, layer: int, seen: Seen = AS_STORED) -> Tensor:
        """A block's map [1, H, Q, T]."""
        factors = (select_heads(axis, seen.heads) for axis in self.factors)
        return outer(*(select_queries(axis, seen.queries) for axis in factors))


@dataclass
class LocalTeacher(Teacher):
    """Fixed Gaussians. It has no network, and no store holds its maps."""

    def constant_maps(self, student: VisionTransformer) -> LocalMaps:
        """The maps for a student, on the CPU. Raises UserError where the settings and the student
        do not fit."""
        local = self.settings.phase_a.local
        shape = MapShape.of(student)
        if self.settings.phase_b.shuffle_maps:
            raise UserError(
                "phase_b.shuffle_maps: local has the same maps for all images; the control "
                "is phase_a.local.permuted=true"
            )
        if len(local.std) > shape.heads:
            raise UserError(
                f"phase_a.local.std: has {len(local.std)} numbers for the {shape.heads} heads of "
                f"the student: give at most {shape.heads}"
            )
        stds = [local.std[head % len(local.std)] for head in range(shape.heads)]
        permutation = None
        if local.permuted:
            generator = torch.Generator().manual_seed(self.settings.seed)
            permutation = wrong_places(shape.grid[0] * shape.grid[1], generator)
        return LocalMaps(shape, stds, permutation)

    def describe(self) -> str:
        local = self.settings.phase_a.local
        stds = ", ".join(f"{std:g}" for std in local.std)
        places = "at a wrong place for each query" if local.permuted else "round each token"
        return f"Gaussians of std {stds} tokens {places}, the same for all images"


def wrong_places(tokens: int, generator: torch.Generator) -> Tensor:
    """A permutation int64 [tokens] that is one cycle, so that no token keeps its place."""
    order = torch.randperm(tokens, generator=generator)
    places = torch.empty_like(order)
    places[order] = order.roll(1)
    return places
