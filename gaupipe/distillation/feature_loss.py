"""The student's side of L_feat: a forward pass that compares attention maps block by block.

Axis letters: B images, H heads, T tokens on a grid (h, w), Q chosen queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gaupipe.attention.chosen_queries import (
    ChosenRows,
    attention_with_chosen_divergence,
    chosen_divergence,
)
from gaupipe.attention.functional import StudentAttention
from gaupipe.attention.kernels import (
    attention_with_normaliser,
    entropy_of,
    has_normaliser_kernel,
    map_divergence,
    map_of_factors,
    separable_divergence,
)
from gaupipe.data.augment import Mix, mixed_map, mixed_rows
from gaupipe.distillation.kinds import StoredAttention
from gaupipe.distillation.losses import feature_loss, without_keys
from gaupipe.maps.gaussians import Geometry
from gaupipe.maps.views import take_queries
from gaupipe.vit.models import run_blocks


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
    queries     [B, Q] int64: the queries of each view that are compared; None is all
    """

    stored: StoredAttention
    layers: list[int | None]
    grid: tuple[int, int]
    heads: list[int] | None = None
    mean_heads: bool = False
    geometry: Geometry | None = None
    mixed: Mix | None = None
    queries: Tensor | None = None

    def axes(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The two factors ([B, H, T, h], [B, H, T, w]) of the rows that are compared with a block
        of the student, where they have factors."""
        if self.mean_heads or self.mixed:
            return None
        return self.stored.axes(*self._choice(layer, self.queries))

    def map(self, layer: int) -> Tensor:
        """The map [B, H or 1, T, T] float32 for a block of the student; rows sum to 1."""
        maps = mixed_map(self.stored.map(*self._choice(layer)), self.mixed, self.grid)
        return maps.mean(1, keepdim=True) if self.mean_heads else maps

    def rows(self, layer: int) -> Tensor:
        """The rows [B, H or 1, Q, T] of the map that are compared with a block of the student."""
        if self.queries is None:
            return self.map(layer)

        def rows(queries: Tensor) -> Tensor:
            return self.stored.map(*self._choice(layer, queries))

        maps = mixed_rows(rows, self.queries, self.mixed, self.grid)
        return maps.mean(1, keepdim=True) if self.mean_heads else maps

    def chosen_rows(self, layer: int, queries: Tensor, hidden: Tensor | None) -> ChosenRows:
        """The rows of ``queries`` [B, Q], for a block of the student that hides keys [T, T] from
        each query."""
        unseen = None if hidden is None else hidden[queries][:, None]  # [B, 1, Q, T]
        if factors := self.axes(layer):
            entropy = None
            if hidden is None:
                along_y, along_x = map(entropy_of, factors)
                entropy = along_y + along_x
            return ChosenRows(queries, partial(map_of_factors, *factors, unseen), unseen, entropy)

        def rows() -> Tensor:
            return self.rows(layer) if unseen is None else without_keys(self.rows(layer), unseen)

        return ChosenRows(queries, rows, unseen)

    def _choice(self, layer: int, queries: Tensor | None = None) -> tuple:
        new_grid = self.grid if self.grid != tuple(self.stored.grid) else None
        return self.layers[layer], self.heads, self.geometry, new_grid, queries


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

    Where the teacher has chosen ``queries``, L_feat is the mean over these alone, and no map of all
    queries is made, neither of the student nor of the teacher.

    A student may have class and register tokens, which the teacher has not: what is compared are
    the rows of its patches over the keys of patches, renormalised (:func:`patch_map`).
    """
    divergences = []
    prefix, queries = student.num_prefix_tokens, teacher.queries

    def attend_and_compare(
        layer: int, attention: StudentAttention, tokens: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """V [B, H, prefix + T, d_m], the heads, None where the teacher's are copied, and the
        divergence."""
        q, k, v = attention.project(tokens)  # [B, H, prefix + T, d_m]
        dropout = attention.attn_drop.p if attention.training else 0.0
        fused = temperature == 1.0 and direction == "teacher_student" and not (prefix or copy)
        fused = fused and queries is None and has_normaliser_kernel(q, dropout)
        factors = teacher.axes(layer) if fused else None  # [B, H, T, h], [B, H, T, w]
        if factors or (fused and not torch.compiler.is_compiling()):
            heads, normaliser = attention_with_normaliser(q, k, v, hidden, attention.scale)
            scores = q, k, normaliser
            if factors:
                divergence = separable_divergence(*scores, factors, attention.scale, hidden)
            else:
                make_map = partial(teacher.map, layer)
                divergence = map_divergence(*scores, make_map, attention.scale, hidden)
            return v, heads, divergence

        def compare(q: Tensor, k: Tensor) -> Tensor:
            # softmax over the scores of patches is the whole row's, renormalised over patches
            if queries is None:
                log_map, unseen = attention.log_map(q, k, None, False), hidden  # [B, H, T, T]
            else:
                unseen = None if hidden is None else hidden[queries][:, None]  # [B, 1, Q, T]
                visible, chosen = None if unseen is None else ~unseen, take_queries(q, queries)
                log_map = StudentAttention.log_map(attention, chosen, k, visible, False)
            return feature_loss(log_map, teacher.rows(layer), temperature, direction, unseen)

        patch_q, patch_k = q[..., prefix:, :], k[..., prefix:, :]  # [B, H, T, d_m]
        divergence = checkpoint(
            compare, patch_q, patch_k, use_reentrant=False, preserve_rng_state=False
        )
        return v, None if copy else attention.attend(q, k, v, None, False), divergence

    def attend(layer: int, attention: StudentAttention, tokens: Tensor) -> Tensor:
        weight = 1.0 if layer_weights is None else layer_weights[layer]
        if teacher.layers[layer] is None or not (weight or copy):
            return attention(tokens)
        patches = tokens.shape[1] - prefix  # T
        hidden = attention.hidden_keys(patches, tokens.device)  # [T, T]
        plain = temperature == 1.0 and direction == "teacher_student"
        by_hand = plain and patches > 1 and not torch.compiler.is_compiling()
        if by_hand and queries is not None:
            rows = teacher.chosen_rows(layer, queries, hidden)
            v, heads, divergence = attend_and_compare_chosen(
                attention, tokens, rows, hidden, prefix, copy
            )
        else:
            v, heads, divergence = attend_and_compare(layer, attention, tokens, hidden)
        if copy:
            shown = teacher.map(layer)  # [B, H or 1, T, T]
            shown = shown if hidden is None else without_keys(shown, hidden)
            heads = attention.attn_drop(shown).to(v.dtype) @ v  # [B, H, T, d_m]
        assert heads is not None
        divergences.append(weight * divergence)
        return attention.output(heads, v, tokens)  # [B, prefix + T, d]

    logits = run_blocks(student, images, attend)
    return logits, sum(divergences, logits.new_zeros((), dtype=torch.float32))


def attend_and_compare_chosen(
    attention: StudentAttention,
    tokens: Tensor,
    rows: ChosenRows,
    hidden: Tensor | None,
    prefix: int,
    copy: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """V [B, H, prefix + T, d_m], the heads, None for attention copy, and the divergence from the
    teacher's ``rows`` alone."""
    v, products = attention.products(tokens)
    q, k = products[0]
    dropout = attention.attn_drop.p if attention.training else 0.0
    if len(products) == 1 and not (prefix or copy) and has_normaliser_kernel(q, dropout):
        return v, *attention_with_chosen_divergence(q, k, v, rows, hidden, attention.scale)
    of_patches = [(q[..., prefix:, :], k[..., prefix:, :]) for q, k in products]
    divergence = chosen_divergence(rows, attention.scale, *of_patches)
    return v, None if copy else attention.attend_to_products(v, products), divergence


def patch_map(rows: Tensor, prefix: int) -> Tensor:
    """The rows of a student's patches over the keys of patches, renormalised: log-probabilities
    [B, H, T, T] of rows [B, H, prefix + T, prefix + T] with class and register tokens in front."""
    return rows[..., prefix:, prefix:].log_softmax(-1) if prefix else rows
