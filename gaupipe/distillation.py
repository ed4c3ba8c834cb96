"""The student's side of L_feat: a forward pass that compares attention maps block by block.

Axis letters: B images, L stored blocks, H heads, T tokens on a grid (h, w).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gaupipe.attention.functional import StudentAttention, merge_heads
from gaupipe.augment import Mix, mixed_map
from gaupipe.gaussians import Geometry, expected_axes, move, outer, resample_queries
from gaupipe.losses import feature_loss
from gaupipe.models import run_blocks


SMALLEST = torch.finfo(torch.float32).tiny


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
    the rows of its patches over the keys of patches, renormalised (:func:`patch_rows`).
    """
    divergences = []
    prefix = student.num_prefix_tokens

    def attend(layer: int, attention: StudentAttention, tokens: Tensor) -> Tensor:
        weight = 1.0 if layer_weights is None else layer_weights[layer]
        if teacher.layers[layer] is None or not weight:
            return attention(tokens)
        q, k, v = attention.project(tokens)
        patch_q, patch_k = q[..., prefix:, :], k[..., prefix:, :]
        hidden = None
        if getattr(attention, "mask_diagonal", False):
            hidden = torch.eye(patch_q.shape[-2], dtype=torch.bool, device=q.device)
        axes = teacher.axes(layer)
        if (
            axes
            and temperature == 1.0
            and direction == "teacher_student"
            and q.device.type == "cpu"
            and q.shape[-2] > 1
            and not prefix
            and not (attention.training and attention.attn_drop.p)
        ):
            heads, log_normaliser = _AttentionWithNormaliser.apply(q, k, v, hidden, attention.scale)
            divergence = separable_divergence(q, k, log_normaliser, axes, attention.scale, hidden)
        else:

            def compare(q: Tensor, k: Tensor) -> Tensor:
                # softmax over the scores of patches is the whole row's, renormalised over patches
                rows = attention.log_rows(q, k, None, False)
                return feature_loss(rows, teacher.map(layer), temperature, direction, hidden)

            divergence = checkpoint(
                compare, patch_q, patch_k, use_reentrant=False, preserve_rng_state=False
            )
            heads = attention.attend(q, k, v, None, False)
        divergences.append(weight * divergence)
        return attention.proj_drop(
            attention.combine(attention.merge(heads, tokens), merge_heads(v))
        )

    logits = run_blocks(student, images, attend)
    return logits, sum(divergences, logits.new_zeros((), dtype=torch.float32))


def patch_rows(rows: Tensor, prefix: int) -> Tensor:
    """The rows of a student's patches over the keys of patches, renormalised: log-probabilities
    [B, H, T, T] of rows [B, H, prefix + T, prefix + T] with class and register tokens in front."""
    return rows[..., prefix:, prefix:].log_softmax(-1) if prefix else rows


def separable_divergence(
    q: Tensor,
    k: Tensor,
    log_normaliser: Tensor,
    axes: tuple[Tensor, Tensor],
    scale: float,
    hidden: Tensor | None = None,
) -> Tensor:
    """KL(teacher || student) as :func:`gaupipe.losses.feature_loss` has it, for a teacher's map
    with two factors.

    With log s_j = scale q k_j - Z and P the map, sum_j P_j (log P_j - log s_j) = Z - scale q (P k)
    - H(P): the student's map is not needed, only its log-normaliser Z [B, H, T], and the entropy of
    P is that of its factors. Keys that are ``hidden`` [T, T] leave P without factors, so its
    entropy is then taken entry by entry.
    """
    pulled, entropy = _MapTimesKeys.apply(*axes, hidden, k)
    return (log_normaliser - scale * (q.float() * pulled.float()).sum(-1) - entropy).mean()


def _rows(rows_y: Tensor, rows_x: Tensor, hidden: Tensor | None) -> Tensor:
    """The map of two factors, [B, H, T, T]; without its hidden keys, and renormalised, where
    there are some."""
    rows = outer(rows_y, rows_x)
    if hidden is None:
        return rows
    rows = rows.clamp_min_(SMALLEST).masked_fill_(
        hidden, 0.0
    )  # a row of hidden keys becomes uniform
    return rows.div_(rows.sum(-1, keepdim=True))


class _MapTimesKeys(torch.autograd.Function):
    """P k [B, H, T, d_m] for keys k and the map P of two factors, which is made again for the
    gradient; and H(P) [B, H, T]."""

    @staticmethod
    def forward(
        ctx, rows_y: Tensor, rows_x: Tensor, hidden: Tensor | None, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows_y, rows_x, hidden)
        rows = _rows(rows_y, rows_x, hidden)
        if hidden is None:
            entropy = torch.special.entr(rows_y).sum(-1) + torch.special.entr(rows_x).sum(-1)
        else:
            entropy = -torch.linalg.vecdot(rows, rows.clamp_min(SMALLEST).log_())
        ctx.mark_non_differentiable(entropy)
        return rows.to(k.dtype) @ k, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _grad_entropy: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, _rows(*ctx.saved_tensors).to(grad.dtype).mT @ grad


class _AttentionWithNormaliser(torch.autograd.Function):
    """softmax(q k' scale) v without ``hidden`` keys, and the log-normaliser of its rows, both
    differentiable, by the CPU's fused kernel.

    The kernel's own gradient leaves the normaliser out. Its gradient adds g_i s_ij to the gradient
    of the scores, and the kernel computes s_ij (dO_i v_j - sum(dO_i * O_i)): one more channel in
    which v is 1, O is 0 and dO is g does it.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.width = v.shape[-1]
        v = F.pad(v, (0, q.shape[-1] - ctx.width))
        mask = (
            None
            if hidden is None
            else torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        )
        heads, log_normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
        ctx.save_for_backward(q, k, v, mask, heads, log_normaliser)
        ctx.scale = scale
        return heads[..., : ctx.width], log_normaliser

    @staticmethod
    def backward(
        ctx, grad_heads: Tensor, grad_normaliser: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, mask, heads, log_normaliser = ctx.saved_tensors
        width, dtype = q.shape[-1], q.dtype
        grad = torch.cat(
            [F.pad(grad_heads, (0, width - ctx.width)), grad_normaliser.unsqueeze(-1).to(dtype)],
            dim=-1,
        )
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            F.pad(q, (0, 1)),
            F.pad(k, (0, 1)),
            F.pad(v, (0, 1), value=1.0),
            F.pad(heads, (0, 1)),
            log_normaliser,
            0.0,
            False,
            attn_mask=mask,
            scale=ctx.scale,
        )
        return dq[..., :width], dk[..., :width], dv[..., : ctx.width], None, None
