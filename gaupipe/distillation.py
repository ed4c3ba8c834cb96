"""The student's side of L_feat: a forward pass that compares attention maps block by block.

Axis letters: B images, L stored blocks, H heads, T tokens on a grid (h, w).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gaupipe.attention.functional import StudentAttention, merge_heads
from gaupipe.attention.kernels import (
    attention_with_normaliser,
    has_normaliser_kernel,
    separable_divergence,
)
from gaupipe.augment import Mix, mixed_map
from gaupipe.gaussians import Geometry, expected_axes, move, outer, resample_queries
from gaupipe.losses import feature_loss
from gaupipe.models import run_blocks


@dataclass
class TeacherMaps:
    """The stored attention of a batch, made into maps one block at a time.

    stored      Gaussians [B, L, H, T, 4] or, for a dense store, maps [B, L, H, T, T]
    grid        (h, w) of the stored maps
    layers      for each block of the student the stored block it is compared with, or None
    mean_heads  compare every head with the mean over the teacher's heads
    match_grid  (h, w) of the student where it differs; Gaussians only
    dense       ``stored`` holds maps
    geometry    where the views of the batch lie in their images; Gaussians only
    mixed       which images of the batch were mixed, and where
    """

    stored: Tensor
    grid: tuple[int, int]
    layers: list[int | None]
    mean_heads: bool = False
    match_grid: tuple[int, int] | None = None
    dense: bool = False
    geometry: Geometry | None = None
    mixed: Mix | None = None

    def axes(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The two factors ([B, H, T, h], [B, H, T, w]) of the map for a block of the student,
        where it has factors."""
        if self.dense or self.mean_heads or self.mixed:
            return None
        return self._axes(layer)

    def map(self, layer: int) -> Tensor:
        """The map [B, H or 1, T, T] float32 for a block of the student; rows sum to 1."""
        rows = (
            self.stored[:, self.layers[layer]].float() if self.dense else outer(*self._axes(layer))
        )
        rows = mixed_map(rows, self.mixed, self.match_grid or self.grid)
        return rows.mean(1, keepdim=True) if self.mean_heads else rows

    def _axes(self, layer: int) -> tuple[Tensor, Tensor]:
        gaussians = move(self.stored[:, self.layers[layer]].float(), self.geometry, self.grid)
        if self.match_grid:
            gaussians = resample_queries(gaussians, self.grid, self.match_grid)
        return expected_axes(gaussians, self.match_grid or self.grid)


def forward_with_feature_loss(
    student: nn.Module,
    images: Tensor,
    teacher: TeacherMaps,
    layer_weights: list[float] | None = None,
    temperature: float = 1.0,
    direction: str = "teacher_student",
) -> tuple[Tensor, Tensor]:
    """(logits [B, C], L_feat): the pass of ``student(images)`` with the divergence of each block's
    rows from the teacher's.

    The update comes from the same fused kernel as in plain training, and no T x T map is kept for
    the backward pass, so memory stays close to that of plain training. For an attention that hides
    the diagonal, the teacher's rows lose theirs too and are renormalised. ``layer_weights`` holds
    one weight for each block of the student.

    A student may have class and register tokens, which the teacher has not: what is compared are
    the rows of its patches over the keys of patches, renormalised (:func:`patch_map`).
    """
    divergences = []
    prefix = student.num_prefix_tokens

    def attend(layer: int, attention: StudentAttention, tokens: Tensor) -> Tensor:
        weight = 1.0 if layer_weights is None else layer_weights[layer]
        if teacher.layers[layer] is None or not weight:
            return attention(tokens)
        q, k, v = attention.project(tokens)  # [B, H, prefix + T, d_m]
        patch_q, patch_k = q[..., prefix:, :], k[..., prefix:, :]  # [B, H, T, d_m]
        hidden = attention.hidden_keys(patch_q.shape[-2], q.device)  # [T, T]
        dropout = attention.attn_drop.p if attention.training else 0.0
        factors = None
        if temperature == 1.0 and direction == "teacher_student" and not prefix:
            factors = teacher.axes(layer)  # [B, H, T, h], [B, H, T, w]
        if factors and has_normaliser_kernel(q, dropout):
            heads, normaliser = attention_with_normaliser(q, k, v, hidden, attention.scale)
            divergence = separable_divergence(q, k, normaliser, factors, attention.scale, hidden)
        else:

            def compare(q: Tensor, k: Tensor) -> Tensor:
                # softmax over the scores of patches is the whole row's, renormalised over patches
                log_map = attention.log_map(q, k, None, False)  # [B, H, T, T]
                return feature_loss(log_map, teacher.map(layer), temperature, direction, hidden)

            divergence = checkpoint(
                compare, patch_q, patch_k, use_reentrant=False, preserve_rng_state=False
            )
            heads = attention.attend(q, k, v, None, False)  # [B, H, prefix + T, d_m]
        divergences.append(weight * divergence)
        mh = attention.merge(heads, tokens)  # [B, prefix + T, d]
        return attention.proj_drop(attention.combine(mh, merge_heads(v)))

    logits = run_blocks(student, images, attend)
    return logits, sum(divergences, logits.new_zeros((), dtype=torch.float32))


def patch_map(rows: Tensor, prefix: int) -> Tensor:
    """The rows of a student's patches over the keys of patches, renormalised: log-probabilities
    [B, H, T, T] of rows [B, H, prefix + T, prefix + T] with class and register tokens in front."""
    return rows[..., prefix:, prefix:].log_softmax(-1) if prefix else rows
