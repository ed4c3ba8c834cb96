"""Belief-attention*: perpendicular over all heads together and head by head, each with its projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gaupipe.attention.functional import (
    StudentAttention,
    at_least_float32,
    bounded,
    choice,
    matrix_of_mh,
    project_out,
    scale_to_unit_length,
    takes_operations_apart,
)

SIGNALS = {
    "perpendicular": lambda mh, v, heads: perpendicular_twice(mh, v, heads),
    "projected": lambda mh, v, heads: tuple(mh - d for d in perpendicular_twice(mh, v, heads)),
    "concat": lambda mh, v, heads: (mh, v),
}
MULTIPLIED = {"perpendicular": ("D", "D_s"), "projected": ("MH - D", "MH - D_s"), "concat": ("MH", "V")}
"""What W and W_s multiply with each signal."""


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

    def matrices(self) -> dict[str, Tensor]:
        first, second = MULTIPLIED[self.signal]
        return {first: self.proj.weight, second: self.proj_local.weight}

    def start_from(self, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
        """W_s is 0, and so this is belief-attention, unless the trained attention has a matrix for
        D_s; one that has no other, exclusive self-attention, leaves W at 0."""
        _first, second = MULTIPLIED[self.signal]
        rest = {name: weight for name, weight in matrices.items() if name != second}
        nothing = torch.zeros_like(self.proj.weight)
        return {"proj": matrix_of_mh(rest) if rest else nothing,
                "proj_local": matrices.get(second, nothing)}

    def combine(self, mh: Tensor, v: Tensor) -> Tensor:
        over_all, in_each = SIGNALS[self.signal](mh, v, self.num_heads)
        return self.proj(over_all) + self.proj_local(in_each)


def perpendicular_twice(mh: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(D, D_s), both [B, T, d]: the part of MH perpendicular to V over all heads together and in
    each head. As :func:`gaupipe.attention.functional.perpendicular` applied to both, with fewer
    passes over memory."""
    m, v = mh.unflatten(-1, (heads, -1)), v.unflatten(-1, (heads, -1))          # [B, T, H, d_m]
    project = project_out_twice if takes_operations_apart() else _PerpendicularTwice.apply
    d, d_each = project(m, v)
    return d.flatten(-2), d_each.flatten(-2)


def project_out_twice(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """D and D_s [B, T, H, d_m] of m and v [B, T, H, d_m], one after the other."""
    over_all = project_out(m.flatten(-2), v.flatten(-2)).unflatten(-1, m.shape[-2:])
    return over_all, project_out(m, v)


class _PerpendicularTwice(torch.autograd.Function):
    """D and D_s [B, T, H, d_m] of m and v [B, T, H, d_m], with their gradients by hand.

    u is scale_s * v, with a scale for each head. Over all heads together the scale is one, the
    smallest: there a head counts with u * share, share = scale / scale_s at most 1.

    With c = <G, u> / <u, u> for each of the two: dm is the sum of G - c u, and dv minus the sum of
    scale (a G + c m - 2 a c u).
    """

    @staticmethod
    def forward(ctx, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        wide_m, wide_v = at_least_float32(m), at_least_float32(v)
        scale_each = scale_to_unit_length(wide_v)                                    # [B, T, H, 1]
        scale = scale_each.amin(-2, keepdim=True)                                    # [B, T, 1, 1]
        share = scale / scale_each
        u = wide_v * scale_each
        squared_each = torch.linalg.vector_norm(u, dim=-1, keepdim=True).square()
        dot_each = torch.linalg.vecdot(wide_m, u).unsqueeze(-1)
        squared = (squared_each * share.square()).sum(-2, keepdim=True)
        dot = (dot_each * share).sum(-2, keepdim=True)
        tiny = torch.finfo(u.dtype).tiny                           # where v is 0, and so are the dots
        squared_each, squared = squared_each.clamp_min(tiny), squared.clamp_min(tiny)
        a_each, a = dot_each / squared_each, dot / squared
        d = torch.addcmul(wide_m, a * share, u, value=-1).to(m.dtype)
        d_each = torch.addcmul(wide_m, a_each, u, value=-1, out=u).to(m.dtype)
        ctx.save_for_backward(m, v, a, a_each, squared, squared_each, scale, scale_each)
        return d, d_each

    @staticmethod
    def backward(ctx, grad: Tensor, grad_each: Tensor) -> tuple[Tensor, Tensor]:
        m, v, a, a_each, squared, squared_each, scale, scale_each = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative will be asked for
            return torch.func.vjp(project_out_twice, m, v)[1]((grad, grad_each))
        share = scale / scale_each
        wide, wide_each, wide_m = (at_least_float32(x) for x in (grad, grad_each, m))
        u = at_least_float32(v) * scale_each
        dot = torch.linalg.vecdot(wide, u).unsqueeze(-1)
        c = (dot * share).sum(-2, keepdim=True) / squared
        c_each = torch.linalg.vecdot(wide_each, u).unsqueeze(-1) / squared_each
        by, by_each = bounded(scale, squared), bounded(scale_each, squared_each)
        grad_m = (wide + wide_each).addcmul_(c * share + c_each, u, value=-1)
        grad_v = (wide * (-a * by)).addcmul_(a_each * by_each, wide_each, value=-1)
        grad_v = grad_v.addcmul_(c * by + c_each * by_each, wide_m, value=-1)
        grad_v = grad_v.addcmul_(a * c * by * share + a_each * c_each * by_each, u, value=2)
        return grad_m.to(m.dtype), grad_v.to(v.dtype)
