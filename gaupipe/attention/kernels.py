"""Orthogonal projection, and fused attention that also gives its log-normaliser.

Axis letters: B images, H heads, T tokens, d model width, d_m = d / H head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def perpendicular(m: Tensor, v: Tensor) -> Tensor:
    """The part of m perpendicular to v over the last axis: m - a v, a = <m, v> / <v, v>, and a = 0
    where v = 0 (*BeliefFormer, eqs. 10-12*).

    Shapes [..., d] alike; computed in float32 or wider, also under autocast, and returned in the
    type of m. v may have any length, and m up to 1 / d of the largest that its type can hold. The
    gradient of v grows with |m| / |v|: where it would leave the type v gets none.

    Has derivatives of any order and works under torch.func's transforms.
    """
    return _perpendicular(m, v)


@torch.fx.wrap  # in its own module: a node of traced graphs, whoever imports the function above
def _perpendicular(m: Tensor, v: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return project_out(m, v)
    return _Perpendicular.apply(m, v)[0]


def project_out(m: Tensor, v: Tensor) -> Tensor:
    """:func:`perpendicular` by operations whose gradients autograd knows."""
    wide_m = at_least_float32(m)
    wide_v = at_least_float32(v)
    size, has_slope = size_of(wide_m, wide_v)
    u = torch.where(has_slope, wide_v, wide_v.detach()) / size
    squared = (u * u).sum(-1, keepdim=True)  # autocast would round torch.linalg.vecdot
    a = (wide_m * u).sum(-1, keepdim=True) / squared.masked_fill(squared == 0, 1)
    return torch.addcmul(wide_m, a, u, value=-1).to(m.dtype)


LARGEST_SLOPE = {torch.float32: 1e35, torch.float64: 1e300}
"""|m| / |v| up to which the gradient of v fits into the type."""


def size_of(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """([..., 1] largest entry of v, 1 where v = 0; [..., 1] true where v has a gradient): v divided
    by the first has a square that neither vanishes nor overflows."""
    largest_m = largest_entry(m.detach())
    size = largest_entry(v.detach())
    has_slope = largest_m < LARGEST_SLOPE[v.dtype] * size
    return size.masked_fill(size == 0, 1), has_slope


def largest_entry(x: Tensor) -> Tensor:
    """The largest magnitude [..., 1] of x [..., d], without the copy that ``abs`` would make."""
    return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))


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
        size, has_slope = size_of(wide_m, wide_v)
        u = wide_v / size
        squared = torch.linalg.vector_norm(u, dim=-1, keepdim=True).square()
        squared = squared.masked_fill(squared == 0, 1)
        with torch.autocast(m.device.type, enabled=False):
            a = torch.linalg.vecdot(wide_m, u).unsqueeze(-1) / squared
        d = torch.addcmul(wide_m, a, u, value=-1).to(m.dtype)
        return d, a, squared, size, has_slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_constants: Tensor) -> tuple[Tensor, Tensor]:
        m, v, d, a, squared, size, has_slope = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative will be asked for
            return torch.func.vjp(project_out, m, v)[1](grad)
        wide_grad = at_least_float32(grad)
        u = at_least_float32(v) / size
        with torch.autocast(m.device.type, enabled=False):
            c = torch.linalg.vecdot(wide_grad, u).unsqueeze(-1) / squared
        grad_m = torch.addcmul(wide_grad, c, u, value=-1)
        root = size.sqrt()  # the products with a and c fit the type halfway to a / size
        a = torch.where(has_slope, a / -root, 0)
        c = torch.where(has_slope, c / -root, 0)
        grad_v = (grad_m * a).addcmul_(c, at_least_float32(d)).div_(root)
        return grad_m.to(m.dtype), grad_v.to(v.dtype)

    @staticmethod
    def jvp(ctx: Any, along_m: Tensor, along_v: Tensor) -> tuple[Tensor | None, ...]:
        tangent = torch.func.jvp(project_out, ctx.saved_tensors, (along_m, along_v))[1]
        return tangent, None, None, None, None


def pad_to(x: Tensor, width: int) -> Tensor:
    """x [..., w] with zeros up to the width, [..., width]; x itself where it has that width."""
    missing = width - x.shape[-1]
    if missing == 0:
        return x
    return F.pad(x, (0, missing))


CPU_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
"""A private operator: later versions of torch may be without it."""


def has_normaliser_kernel(device: torch.device, compiled: bool) -> bool:
    """True if :func:`attention_with_normaliser` works: on a CPU whose torch has the operator, on a
    GPU inside torch.compile."""
    if device.type == "cpu":
        return hasattr(torch.ops.aten, CPU_KERNEL)
    return device.type == "cuda" and compiled


def attention_with_normaliser(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q k' scale) v [B, H, T, d_m] without ``hidden`` keys [T, T] bool, and the
    log-normaliser of each query [B, H, T], both differentiable, by a fused kernel; more than one
    token."""
    if q.device.type == "cpu":
        return _AttentionWithNormaliser.apply(q, k, v, hidden, scale)
    return flex_with_normaliser(q, k, v, hidden, scale)


def flex_with_normaliser(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """:func:`attention_with_normaliser` by flex_attention, which has no backward pass on a CPU."""
    mask = None
    if hidden is not None:

        def visible(_image: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return ~hidden[query, key]

        size = hidden.shape[-1]
        mask = create_block_mask(visible, None, None, size, size, device=q.device)
    lse = AuxRequest(lse=True)
    heads, more = flex_attention(q, k, v, block_mask=mask, scale=scale, return_aux=lse)
    assert more.lse is not None
    return heads, more.lse


class _AttentionWithNormaliser(torch.autograd.Function):
    """:func:`attention_with_normaliser` by the CPU's fused kernel, whose own gradient leaves the
    normaliser out.

    The kernel's gradient of the scores is s_ij (dO_i v_j - D_i), where it takes D_i = sum(dO_i *
    O_i) from the output O that it is given. The normaliser's gradient g adds g_i s_ij, so the
    kernel is given O_i - g_i dO_i / |dO_i|^2, which makes D_i smaller by g_i.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.width = v.shape[-1]
        ctx.scale = scale
        mask = None
        v = pad_to(v, q.shape[-1])
        if hidden is not None:
            mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        kernel = getattr(torch.ops.aten, CPU_KERNEL)
        heads, log_normaliser = kernel(q, k, v, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, mask, heads, log_normaliser)
        return heads[..., : ctx.width], log_normaliser

    @staticmethod
    def backward(
        ctx: Any, grad_heads: Tensor, grad_normaliser: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, mask, heads, log_normaliser = ctx.saved_tensors
        grad_heads = pad_to(grad_heads, q.shape[-1])
        if q.dtype == torch.float16:  # too narrow for the quotient
            q, k, v, heads, grad_heads = (x.float() for x in (q, k, v, heads, grad_heads))
            mask = None if mask is None else mask.float()
        squared = at_least_float32(grad_heads).square().sum(-1, keepdim=True)  # [B, H, T, 1]
        # A row without a gradient, such as a patch's where only the class token is read, gets one
        # too small to be seen in dv.
        lacks = squared < LEAST_GRADIENT**2
        grad_heads = grad_heads.masked_fill(lacks, LEAST_GRADIENT)
        squared = squared.masked_fill(lacks, LEAST_GRADIENT**2 * q.shape[-1])
        factor = grad_normaliser.unsqueeze(-1) / squared
        dq, dk, dv = getattr(torch.ops.aten, f"{CPU_KERNEL}_backward")(
            grad_heads,
            q,
            k,
            v,
            torch.addcmul(heads, factor.to(heads.dtype), grad_heads, value=-1),
            log_normaliser,
            0.0,
            False,
            attn_mask=mask,
            scale=ctx.scale,
        )
        return dq, dk, dv[..., : ctx.width], None, None


LEAST_GRADIENT = 1e-15
"""Length of the gradient of a row's output. Its square is a normal number in float32."""
