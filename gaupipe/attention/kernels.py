"""Orthogonal projection, of vectors of any length. Axis letter: d model width."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def perpendicular(m: Tensor, v: Tensor) -> Tensor:
    """The part of m perpendicular to v over the last axis: m - a v, a = <m, v> / <v, v>, and a = 0
    where v = 0 (*BeliefFormer, eqs. 10-12*).

    Shapes [..., d] alike; computed in float32 or wider, also under autocast, and returned in the
    type of m. Both may have any length that leaves the gradient of v, which grows with |m| / |v|,
    within the type.

    Has derivatives of any order and works under torch.func's transforms.
    """
    return _perpendicular(m, v)


def parts(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """D of :func:`perpendicular`, and m - D, the part of m along v. The latter is small beside m,
    so only the difference is rounded to the type of m."""
    wide = at_least_float32(m)
    d = perpendicular(wide, v)
    return d.to(m.dtype), (wide - d).to(m.dtype)


def parallel(m: Tensor, v: Tensor) -> Tensor:
    """The second of the :func:`parts`."""
    return parts(m, v)[1]


@torch.fx.wrap  # in its own module: a node of traced graphs, whoever imports the function above
def _perpendicular(m: Tensor, v: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return project_out(m, v)
    return _Perpendicular.apply(m, v)[0]


def project_out(m: Tensor, v: Tensor) -> Tensor:
    """:func:`perpendicular` by operations whose gradients autograd knows."""
    wide_m = at_least_float32(m)
    wide_v = at_least_float32(v)
    u = wide_v / size_of(wide_v)
    squared = (u * u).sum(-1, keepdim=True)  # autocast would round torch.linalg.vecdot
    a = (wide_m * u).sum(-1, keepdim=True) / squared.masked_fill(squared == 0, 1)
    return torch.addcmul(wide_m, a, u, value=-1).to(m.dtype)


def size_of(v: Tensor) -> Tensor:
    """The largest entry [..., 1] of v, 1 where v = 0: v divided by it has a square that neither
    vanishes nor overflows."""
    v = v.detach()
    size = torch.maximum(v.amax(-1, keepdim=True), -v.amin(-1, keepdim=True))  # abs() would copy v
    return size.masked_fill(size == 0, 1)


class _Perpendicular(torch.autograd.Function):
    """:func:`project_out` with its gradient by hand: half the passes over memory that autograd
    would make.

    With u = v / size, D = m - a u, G its gradient and c = <G, u> / <u, u>: dm = G - c u (the
    projection is self-adjoint) and dv = -(a dm + c D) / size.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        wide_m = at_least_float32(m)
        wide_v = at_least_float32(v)
        size = size_of(wide_v)
        u = wide_v / size
        squared = torch.linalg.vector_norm(u, dim=-1, keepdim=True).square()
        squared = squared.masked_fill(squared == 0, 1)
        with torch.autocast(m.device.type, enabled=False):
            a = torch.linalg.vecdot(wide_m, u).unsqueeze(-1) / squared
        d = torch.addcmul(wide_m, a, u, value=-1).to(m.dtype)
        return d, a, squared, size

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_constants: Tensor) -> tuple[Tensor, Tensor]:
        m, v, d, a, squared, size = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative will be asked for
            return torch.func.vjp(project_out, m, v)[1](grad)
        wide_grad = at_least_float32(grad)
        u = at_least_float32(v) / size
        with torch.autocast(m.device.type, enabled=False):
            c = torch.linalg.vecdot(wide_grad, u).unsqueeze(-1) / squared
        grad_m = torch.addcmul(wide_grad, c, u, value=-1)
        grad_v = (grad_m * a).addcmul_(c, at_least_float32(d)).div_(-size)
        return grad_m.to(m.dtype), grad_v.to(v.dtype)

    @staticmethod
    def jvp(ctx: Any, along_m: Tensor, along_v: Tensor) -> tuple[Tensor | None, ...]:
        tangent = torch.func.jvp(project_out, ctx.saved_tensors, (along_m, along_v))[1]
        return tangent, None, None, None


def pad_to(x: Tensor, width: int) -> Tensor:
    """x [..., w] with zeros up to the width, [..., width]; x itself where it has that width."""
    missing = width - x.shape[-1]
    if missing == 0:
        return x
    return F.pad(x, (0, missing))
