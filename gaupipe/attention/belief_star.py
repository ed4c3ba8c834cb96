"""Belief-attention*: perpendicular over all heads together and head by head, each with its projection."""

from __future__ import annotations

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gaupipe.attention.functional import StudentAttention, at_least_float32, choice

SIGNALS = {
    "perpendicular": lambda mh, v, heads: perpendicular_twice(mh, v, heads),
    "projected": lambda mh, v, heads: tuple(mh - d for d in perpendicular_twice(mh, v, heads)),
    "concat": lambda mh, v, heads: (mh, v),
}


class BeliefStarAttention(StudentAttention):
    """Update D W + D_s W_s, D perpendicular to V over all heads together and D_s in each head (*BeliefFormer,
    eqs. 15-17*; *Belief2, eqs. 2-7*). Adds ``proj_local`` (W_s, d x d).

    ``signal``: "perpendicular" (D, D_s) or, as ablations, "projected" (MH - D, MH - D_s) (*Belief2, figure 3*) and
    "concat" (MH, V), which is [MH, V] through one projection of twice the size (*BeliefFormer, appendix C*).
    """

    def __init__(self, *args, signal: str = "perpendicular", **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.signal = choice("signal", signal, SIGNALS)
        self.proj_local = nn.Linear(self.proj.in_features, self.proj.out_features, bias=False,
                                    device=self.proj.weight.device, dtype=self.proj.weight.dtype)

    def take_over(self, old: Attention) -> set[str]:
        added = super().take_over(old)
        if "proj_local" in added:
            nn.init.zeros_(self.proj_local.weight)  # belief-attention to begin with
        return added

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        over_all, in_each = SIGNALS[self.signal](mh, v, self.num_heads)
        return self.proj(over_all) + self.proj_local(in_each)


def perpendicular_twice(mh: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(D, D_s), both [B, T, d]: the part of MH perpendicular to V over all heads together and in each head. As
    :func:`gaupipe.attention.functional.perpendicular` applied to both, with fewer passes over memory."""
    m, v = mh.unflatten(-1, (heads, -1)), v.unflatten(-1, (heads, -1))     # [B, T, H, d_m]
    both = _perpendicular_twice(m, v)[:2] if torch.compiler.is_compiling() else _PerpendicularTwice.apply(m, v)
    return both[0].flatten(-2), both[1].flatten(-2)


def _perpendicular_twice(m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """(D, D_s, a, a_s, <v, v>, <v, v> in each head) of m and v [B, T, H, d_m]."""
    wide_m, wide_v = at_least_float32(m), at_least_float32(v)
    squared_each = torch.linalg.vector_norm(wide_v, dim=-1, keepdim=True).square()        # [B, T, H, 1]
    dot_each = torch.linalg.vecdot(wide_m, wide_v).unsqueeze(-1)
    squared, dot = squared_each.sum(-2, keepdim=True), dot_each.sum(-2, keepdim=True)     # [B, T, 1, 1]
    squared_each, squared = (s.masked_fill(s == 0, torch.inf) for s in (squared_each, squared))
    a_each, a = dot_each / squared_each, dot / squared
    d, d_each = (torch.addcmul(wide_m, by, wide_v, value=-1).to(m.dtype) for by in (a, a_each))
    return d, d_each, a, a_each, squared, squared_each


class _PerpendicularTwice(torch.autograd.Function):
    """The gradients of D and D_s by hand. With c = <G, v> / <v, v> for each of the two: dm is the sum of G - c v, and dv
    minus the sum of a G + c m - 2 a c v."""

    @staticmethod
    def forward(ctx, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        d, d_each, a, a_each, squared, squared_each = _perpendicular_twice(m, v)
        ctx.save_for_backward(m, v, a, a_each, squared, squared_each)
        return d, d_each

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_each: Tensor) -> tuple[Tensor, Tensor]:
        m, v, a, a_each, squared, squared_each = ctx.saved_tensors
        wide, wide_each, wide_m, wide_v = (at_least_float32(x) for x in (grad, grad_each, m, v))
        c = torch.linalg.vecdot(wide, wide_v).sum(-1)[..., None, None] / squared
        c_each = torch.linalg.vecdot(wide_each, wide_v).unsqueeze(-1) / squared_each
        grad_m = (wide + wide_each).addcmul_(c + c_each, wide_v, value=-1)
        grad_v = (wide * -a).addcmul_(a_each, wide_each, value=-1).addcmul_(c + c_each, wide_m, value=-1)
        grad_v.addcmul_(a * c + a_each * c_each, wide_v, value=2)
        return grad_m.to(m.dtype), grad_v.to(v.dtype)
