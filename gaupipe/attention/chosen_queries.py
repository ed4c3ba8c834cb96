"""L_feat on some of the queries: their divergence from a teacher's rows, with its gradient by hand.

No map of all queries is made. Axis letters: B images, H heads, T tokens, Q chosen queries, d_m head
width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gaupipe.attention.kernels import (
    additive_mask,
    at_least_float32,
    cpu_attention,
    cpu_attention_gradient,
    entropy_of,
    pad_to,
)
from gaupipe.maps.views import places_of, take_queries


@dataclass
class ChosenRows:
    """A teacher's rows for some of a student's queries.

    queries     [B, Q] int64
    make_rows   gives the rows [B, H or 1, Q, T]; called once for the loss and once for its
                gradient, so that no row is kept in between
    hidden      [B, 1, Q, T] bool: keys that the student does not see, and that have 0 in the rows
    entropy     [B, H or 1, Q] of the rows, where it is known
    """

    queries: Tensor
    make_rows: Callable[[], Tensor]
    hidden: Tensor | None = None
    entropy: Tensor | None = None

    def divergence(
        self, scored: Sequence[Tensor], scale: float, normaliser: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """KL(P || softmax(scale (q k' + ...))) [B, H, Q] for Q and K [B, H, T, d_m], and the
        log-normaliser Z [B, H, Q, 1] of the student's rows, which may be given. ``scored`` is q and
        k of each product in turn.

        KL = Z - sum_j P_j scale q k_j - H(P).
        """
        chosen, keys = self._side_by_side(scored)
        rows = self.make_rows().to(keys.dtype)
        if normaliser is None:
            scores = (chosen * scale) @ keys.mT  # [B, H, Q, T]
            towards = torch.linalg.vecdot(scores, rows)
            if self.hidden is not None:
                scores = scores.masked_fill_(self.hidden, -torch.inf)
            normaliser = scores.logsumexp(-1, keepdim=True)
        else:
            towards = torch.linalg.vecdot(chosen * scale, rows @ keys)
        entropy = entropy_of(rows) if self.entropy is None else self.entropy
        return normaliser.squeeze(-1) - towards - entropy, normaliser

    def slopes(
        self, scored: Sequence[Tensor], scale: float, normaliser: Tensor, grad: Tensor
    ) -> list[Tensor]:
        """The gradients in the chosen queries [B, H, Q, d_m] and in the keys [B, H, T, d_m] of each
        product in turn, of divergences with gradients ``grad`` [B, H, Q]: that in the scores is
        softmax - P."""
        chosen, keys = self._side_by_side(scored)
        slope = ((chosen * scale) @ keys.mT).sub_(normaliser).exp_()
        if self.hidden is not None:
            slope = slope.masked_fill_(self.hidden, 0.0)
        slope, grad = slope.sub_(self.make_rows()), grad.unsqueeze(-1) * scale
        widths = [k.shape[-1] for k in scored[1::2]]
        of_queries = (slope @ keys).mul_(grad).split(widths, dim=-1)
        of_keys = (slope.mT @ chosen.mul_(grad)).split(widths, dim=-1)
        found = [x for pair in zip(of_queries, of_keys, strict=True) for x in pair]
        return [x.to(of.dtype) for x, of in zip(found, scored, strict=True)]

    def _side_by_side(self, scored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The chosen queries [B, H, Q, .] and the keys [B, H, T, .] whose product is the sum of all
        products; float32 or wider, the keys laid out for several products."""
        chosen = [at_least_float32(take_queries(q, self.queries)) for q in scored[::2]]
        keys = [at_least_float32(k) for k in scored[1::2]]
        if len(keys) == 1:
            return chosen[0], keys[0].contiguous()
        return torch.cat(chosen, dim=-1), torch.cat(keys, dim=-1)


def chosen_divergence(
    teacher: ChosenRows, scale: float, *products: tuple[Tensor, Tensor]
) -> Tensor:
    """KL(teacher || student) as :func:`gaupipe.distillation.losses.feature_loss` has it, mean over
    images, heads and the chosen queries, for a student whose scores are the sum of ``products``
    (q, k), each [B, H, T, d_m]."""
    scored = (x for product in products for x in product)
    return _ChosenDivergence.apply(teacher, scale, *scored).mean()


class _ChosenDivergence(torch.autograd.Function):
    """KL(P || softmax(scale (q k' + ...))) [B, H, Q] of chosen queries, with its gradient by
    hand."""

    @staticmethod
    def forward(ctx, teacher: ChosenRows, scale: float, *scored: Tensor) -> Tensor:
        with torch.autocast(scored[0].device.type, enabled=False):
            divergence, normaliser = teacher.divergence(scored, scale)
        ctx.save_for_backward(normaliser, *scored)
        ctx.teacher, ctx.scale = teacher, scale
        return divergence

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        normaliser, *scored = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            found = ctx.teacher.slopes(scored, ctx.scale, normaliser, grad)
        for number in range(0, len(scored), 2):
            grad_q = torch.zeros_like(scored[number])
            grad_q[places_of(ctx.teacher.queries, grad_q.shape[1])] = found[number]
            found[number] = grad_q
        return None, None, *found


def attention_with_chosen_divergence(
    q: Tensor, k: Tensor, v: Tensor, teacher: ChosenRows, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q k' scale) v [B, H, T, d_m] without ``hidden`` keys [T, T] bool, and
    :func:`chosen_divergence`, by the CPU's fused kernel (see :func:`has_normaliser_kernel`).

    The kernel gives the log-normaliser, and the gradients of both are added in place.
    """
    heads, divergence = _AttentionWithChosenDivergence.apply(q, k, v, teacher, hidden, scale)
    return heads, divergence.mean()


class _AttentionWithChosenDivergence(torch.autograd.Function):
    """softmax(q k' scale) v without ``hidden`` keys, and KL [B, H, Q] of chosen queries."""

    @staticmethod
    def forward(ctx, q, k, v, teacher, hidden, scale) -> tuple[Tensor, Tensor]:
        wide, mask = pad_to(v, q.shape[-1]), additive_mask(hidden, q.dtype)
        heads, of_all = cpu_attention(q, k, wide, mask, scale)
        normaliser = take_queries(of_all, teacher.queries).unsqueeze(-1)
        ctx.save_for_backward(q, k, wide, mask, heads, of_all, normaliser)
        ctx.teacher, ctx.scale, ctx.width = teacher, scale, v.shape[-1]
        divergence, _ = teacher.divergence([q, k], scale, normaliser)
        return heads[..., : ctx.width], divergence

    @staticmethod
    def backward(ctx, grad_heads: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, wide, mask, heads, of_all, normaliser = ctx.saved_tensors
        dq, dk, dv = cpu_attention_gradient(
            pad_to(grad_heads, q.shape[-1]), q, k, wide, heads, of_all, mask, ctx.scale
        )
        by_chosen, by_keys = ctx.teacher.slopes([q, k], ctx.scale, normaliser, grad)
        dq[places_of(ctx.teacher.queries, q.shape[1])] += by_chosen
        return dq, dk.add_(by_keys), dv[..., : ctx.width], None, None, None
