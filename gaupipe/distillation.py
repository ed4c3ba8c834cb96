"""The student's side of L_feat: a forward pass that compares attention maps block by block.

Axis letters: B images, H heads, T tokens on a grid (h, w).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gaupipe.attention.functional import StudentAttention, merge_heads
from gaupipe.attention.kernels import (
    attention_with_normaliser,
    has_normaliser_kernel,
    map_divergence,
    separable_divergence,
)
from gaupipe.augment import Mix, mixed_map
from gaupipe.gaussians import Geometry
from gaupipe.losses import feature_loss, without_keys
from gaupipe.models import run_blocks
from gaupipe.stored_maps import StoredAttention


@dataclass
class TeacherMaps:
    """The stored attention of a batch, made into maps one block at a time.

    stored      the attention of the batch, as a kind of store gives it
    layers      for each block of the student the stored block it is compared with, or None
    heads       for each head of the student the stored head it is compared with; None is all
    mean_heads  compare every head with the mean over the teacher's heads
    grid        (h, w) of the student
    geometry    where the views of the batch lie in the images that the maps are of
    mixed       which images of the batch were mixed, and where
    """

    stored: StoredAttention
    layers: list[int | None]
    grid: tuple[int, int]
    heads: list[int] | None = None
    mean_heads: bool = False
    geometry: Geometry | None = None
    mixed: Mix | None = None

    def axes(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The two factors ([B, H, T, h], [B, H, T, w]) of the map for a block of the student,
        where it has factors."""
        if self.mean_heads or self.mixed:
            return None
        return self.stored.axes(*self._choice(layer))

    def map(self, layer: int) -> Tensor:
        """The map [B, H or 1, T, T] float32 for a block of the student; rows sum to 1."""
        maps = mixed_map(self.stored.map(*self._choice(layer)), self.mixed, self.grid)
        return maps.mean(1, keepdim=True) if self.mean_heads else maps

    def _choice(self, layer: int) -> tuple:
        new_grid = self.grid if self.grid != tuple(self.stored.grid) else None
        return self.layers[layer], self.heads, self.geometry, new_grid


def forward_with_feature_loss(
    student: VisionTransformer,
    images: Tensor,
    teacher: TeacherMaps,
    layer_weights: list[float] | None = None,
    temperature: float = 1.0,
    direction: str = "teacher_student",
    copy: bool = False,
) -> tuple[Tensor, Tensor]:
    """(logits [B, C], L_feat): the pass of ``student(images)`` with the divergence of each block's
    rows from the teacher's.

    The update comes from the same fused kernel as in plain training, and no T x T map is kept for
    the backward pass, so memory stays close to that of plain training. For an attention that hides
    the diagonal, the teacher's rows lose theirs too and are renormalised. ``layer_weights`` holds
    one weight for each block of the student.

    With ``copy`` the student attends with the teacher's maps in place of its own (attention copy):
    the logits then say nothing of Q and K, which learn from the divergence alone.

    A student may have class and register tokens, which the teacher has not: what is compared are
    the rows of its patches over the keys of patches, renormalised (:func:`patch_map`).
    """
    divergences = []
    prefix = student.num_prefix_tokens

    def attend(layer: int, attention: StudentAttention, tokens: Tensor) -> Tensor:
        weight = 1.0 if layer_weights is None else layer_weights[layer]
        if teacher.layers[layer] is None or not (weight or copy):
            return attention(tokens)
        q, k, v = attention.project(tokens)  # [B, H, prefix + T, d_m]
        patch_q, patch_k = q[..., prefix:, :], k[..., prefix:, :]  # [B, H, T, d_m]
        hidden = attention.hidden_keys(patch_q.shape[-2], q.device)  # [T, T]
        dropout = attention.attn_drop.p if attention.training else 0.0
        fused = temperature == 1.0 and direction == "teacher_student" and not (prefix or copy)
        fused = fused and has_normaliser_kernel(q, dropout)
        factors = teacher.axes(layer) if fused else None  # [B, H, T, h], [B, H, T, w]
        if factors or (fused and not torch.compiler.is_compiling()):
            heads, normaliser = attention_with_normaliser(q, k, v, hidden, attention.scale)
            scores = q, k, normaliser
            if factors:
                divergence = separable_divergence(*scores, factors, attention.scale, hidden)
            else:
                make_map = partial(teacher.map, layer)
                divergence = map_divergence(*scores, make_map, attention.scale, hidden)
        else:

            def compare(q: Tensor, k: Tensor) -> Tensor:
                # softmax over the scores of patches is the whole row's, renormalised over patches
                log_map = attention.log_map(q, k, None, False)  # [B, H, T, T]
                return feature_loss(log_map, teacher.map(layer), temperature, direction, hidden)

            divergence = checkpoint(
                compare, patch_q, patch_k, use_reentrant=False, preserve_rng_state=False
            )
            if copy:
                shown = teacher.map(layer)  # [B, H or 1, T, T]
                shown = shown if hidden is None else without_keys(shown, hidden)
                heads = attention.attn_drop(shown).to(v.dtype) @ v  # [B, H, T, d_m]
            else:
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
