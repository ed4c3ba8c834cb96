"""Gradients by hand: the orthogonal projection, and fused attention that also gives its
log-normaliser.

Every function here has a plain counterpart with the same values; these make fewer passes over
memory. Axis letters: B images, H heads, T tokens, d model width, d_m = d / H head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gaupipe.distillation.losses import without_keys
from gaupipe.maps.gaussians import outer


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def perpendicular(m: Tensor, v: Tensor) -> Tensor:
    """The part of m perpendicular to v over the last axis: m - a v, a = <m, v> / <v, v>, and a = 0
    where v = 0 (*BeliefFormer, eqs. 10-12*).

    Shapes [..., d] alike; computed in float32 or wider, returned in the type of m. m and v may have
    any length that the type can hold. Where |v| is below 1e-30 (in float64 1e-270) v gets no
    gradient: it grows with 1 / |v|, and the type could not hold it much longer.

    Has derivatives of any order and works under torch.func's transforms.
    """
    if takes_operations_apart():
        return project_out(m, v)
    return _Perpendicular.apply(m, v)


def takes_operations_apart() -> bool:
    """Whether torch.compile, an export or one of torch.func's transforms is at work: they know
    every plain operation, and have no use for a gradient written by hand."""
    return torch.compiler.is_compiling() or _transforms_active()


_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def project_out(m: Tensor, v: Tensor) -> Tensor:
    """:func:`perpendicular` by operations that can be differentiated any number of times."""
    wide_m, wide_v = at_least_float32(m), at_least_float32(v)
    short = wide_v.detach().abs().amax(-1, keepdim=True) < SHORTEST_WITH_GRADIENT[wide_v.dtype]
    u = torch.where(short, wide_v.detach(), wide_v) * scale_to_unit_length(wide_v)
    squared = torch.linalg.vecdot(u, u).unsqueeze(-1)
    squared = squared.masked_fill(squared == 0, torch.inf)  # a and all its derivatives are 0
    a = torch.linalg.vecdot(wide_m, u).unsqueeze(-1) / squared
    return torch.addcmul(wide_m, a, u, value=-1).to(m.dtype)


LARGEST_SCALE = {torch.float32: 2.0**90, torch.float64: 2.0**700}
"""Brings the shortest v there is to a length that can be squared; 1 / this does so for the
longest."""

SHORTEST_WITH_GRADIENT = {torch.float32: 1e-30, torch.float64: 1e-270}


def scale_to_unit_length(v: Tensor) -> Tensor:
    """What to multiply v [..., d] by so that <v, v> neither vanishes nor overflows: [..., 1], a
    constant to autograd. A projection does not depend on it, only its rounding."""
    largest = LARGEST_SCALE[v.dtype]
    length = torch.linalg.vector_norm(v.detach(), dim=-1, keepdim=True)
    return length.reciprocal().clamp(1 / largest, largest)


def bounded(scale: Tensor, squared: Tensor) -> Tensor:
    """``scale``, and 0 where v = u / scale with |u|^2 = ``squared`` is too short for a gradient."""
    limit = SHORTEST_WITH_GRADIENT[scale.dtype]
    return scale.masked_fill(squared < (scale * limit).square(), 0)


class _Perpendicular(torch.autograd.Function):
    """:func:`project_out` with its gradient by hand: half the passes over memory that autograd
    would make.

    With G the gradient of D = m - a u and c = <G, u> / <u, u>: dm = G - c u (the projection is
    self-adjoint) and dv = -scale (a dm + c D).
    """

    @staticmethod
    def forward(ctx, m: Tensor, v: Tensor) -> Tensor:
        wide_m, wide_v = at_least_float32(m), at_least_float32(v)
        scale = scale_to_unit_length(wide_v)
        u = wide_v * scale
        squared = torch.linalg.vector_norm(u, dim=-1, keepdim=True).square()
        squared = squared.clamp_min(torch.finfo(u.dtype).tiny)  # 0 where v is, and so is <m, u>
        a = torch.linalg.vecdot(wide_m, u).unsqueeze(-1) / squared
        d = torch.addcmul(wide_m, a, u, value=-1, out=u).to(m.dtype)
        ctx.save_for_backward(m, v, d, a, squared, scale)
        return d

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        m, v, d, a, squared, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative will be asked for
            return torch.func.vjp(perpendicular, m, v)[1](grad)
        wide_grad, u = at_least_float32(grad), at_least_float32(v) * scale
        c = torch.linalg.vecdot(wide_grad, u).unsqueeze(-1) / squared
        grad_m = torch.addcmul(wide_grad, c, u, value=-1)
        scale = bounded(scale, squared)
        grad_v = (grad_m * (-a * scale)).addcmul_(c * scale, at_least_float32(d), value=-1)
        return grad_m.to(grad.dtype), grad_v.to(v.dtype)


def perpendicular_twice(mh: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(D, D_s), both [B, T, d]: the part of MH perpendicular to V over all heads together and in
    each head. As :func:`perpendicular` applied to both, with fewer
    passes over memory."""
    m, v = mh.unflatten(-1, (heads, -1)), v.unflatten(-1, (heads, -1))  # [B, T, H, d_m]
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
        scale_each = scale_to_unit_length(wide_v)  # [B, T, H, 1]
        scale = scale_each.amin(-2, keepdim=True)  # [B, T, 1, 1]
        share = scale / scale_each
        u = wide_v * scale_each
        squared_each = torch.linalg.vector_norm(u, dim=-1, keepdim=True).square()
        dot_each = torch.linalg.vecdot(wide_m, u).unsqueeze(-1)
        squared = (squared_each * share.square()).sum(-2, keepdim=True)
        dot = (dot_each * share).sum(-2, keepdim=True)
        tiny = torch.finfo(u.dtype).tiny  # where v is 0, and so are the dots
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


SMALLEST = torch.finfo(torch.float32).tiny


def separable_divergence(
    q: Tensor,
    k: Tensor,
    log_normaliser: Tensor,
    axes: tuple[Tensor, Tensor],
    scale: float,
    hidden: Tensor | None = None,
) -> Tensor:
    """KL(teacher || student) as :func:`gaupipe.distillation.losses.feature_loss` has it, for a
    teacher's map with two factors.

    With log s_j = scale q k_j - Z and P the map, sum_j P_j (log P_j - log s_j) = Z - scale q (P k)
    - H(P): the student's map is not needed, only its log-normaliser Z [B, H, T], and the entropy of
    P is that of its factors. Keys that are ``hidden`` [T, T] leave P without factors, so its
    entropy is then taken entry by entry.
    """
    pulled, entropy = _MapTimesKeys.apply(*axes, hidden, k)
    return (log_normaliser - scale * (q.float() * pulled.float()).sum(-1) - entropy).mean()


def map_divergence(
    q: Tensor,
    k: Tensor,
    log_normaliser: Tensor,
    make_map: Callable[[], Tensor],
    scale: float,
    hidden: Tensor | None = None,
) -> Tensor:
    """As :func:`separable_divergence`, for a teacher's map [B, H or 1, T, T] without factors.

    ``make_map`` is called once now and once for the gradient, so that no map is kept until then.
    """

    def rows() -> Tensor:
        return make_map() if hidden is None else without_keys(make_map(), hidden)

    pulled, entropy = _RemadeMapTimesKeys.apply(rows, k)
    return (log_normaliser - scale * (q.float() * pulled.float()).sum(-1) - entropy).mean()


class _RemadeMapTimesKeys(torch.autograd.Function):
    """P k [B, H, T, d_m] for keys k and a map P that is made again for the gradient; and H(P)."""

    @staticmethod
    def forward(ctx, make_map: Callable[[], Tensor], k: Tensor) -> tuple[Tensor, Tensor]:
        ctx.make_map = make_map
        rows = make_map()
        entropy = torch.special.entr(rows).sum(-1)
        ctx.mark_non_differentiable(entropy)
        return rows.to(k.dtype) @ k, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _grad_entropy: Tensor) -> tuple[None, Tensor]:
        rows = ctx.make_map().to(grad.dtype)
        if rows.shape[1] == grad.shape[1]:
            return None, rows.mT @ grad
        return None, rows.expand(-1, grad.shape[1], -1, -1).mT @ grad


def entropy_of(rows: Tensor) -> Tensor:
    """-sum p log p over the last axis of probabilities [..., T]: [...]."""
    return -torch.linalg.vecdot(rows, rows.clamp_min(SMALLEST).log_())


def map_of_factors(along_y: Tensor, along_x: Tensor, hidden: Tensor | None) -> Tensor:
    """The map of two factors, [B, H, T, T]; without its hidden keys, and renormalised, where
    there are some."""
    maps = outer(along_y, along_x)
    if hidden is None:
        return maps
    # a query that looked at hidden keys alone looks at all others alike
    maps = maps.clamp_min_(SMALLEST).masked_fill_(hidden, 0.0)
    return maps.div_(maps.sum(-1, keepdim=True))


class _MapTimesKeys(torch.autograd.Function):
    """P k [B, H, T, d_m] for keys k and the map P of two factors, which is made again for the
    gradient; and H(P) [B, H, T]."""

    @staticmethod
    def forward(
        ctx, along_y: Tensor, along_x: Tensor, hidden: Tensor | None, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(along_y, along_x, hidden)
        maps = map_of_factors(along_y, along_x, hidden)
        if hidden is None:
            entropy = torch.special.entr(along_y).sum(-1) + torch.special.entr(along_x).sum(-1)
        else:
            entropy = entropy_of(maps)
        ctx.mark_non_differentiable(entropy)
        return maps.to(k.dtype) @ k, entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _grad_entropy: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, map_of_factors(*ctx.saved_tensors).to(grad.dtype).mT @ grad


def has_normaliser_kernel(q: Tensor, dropout: float) -> bool:
    """Whether :func:`attention_with_normaliser` can take queries [B, H, T, d_m] with this rate of
    dropout: on a CPU where torch has the operator, on a GPU inside torch.compile."""
    if dropout or q.shape[-2] == 1:
        return False
    if q.device.type == "cpu":
        return hasattr(torch.ops.aten, CPU_KERNEL)
    return q.device.type == "cuda" and torch.compiler.is_compiling()


CPU_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
"""A private operator: later versions of torch may be without it."""


def attention_with_normaliser(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q k' scale) v [B, H, T, d_m] without ``hidden`` keys [T, T] bool, and the
    log-normaliser of each query [B, H, T], both differentiable, by a fused kernel."""
    if q.device.type == "cpu":
        return _AttentionWithNormaliser.apply(q, k, v, hidden, scale)
    return flex_with_normaliser(q, k, v, hidden, scale)


def flex_with_normaliser(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """:func:`attention_with_normaliser` by torch's flex_attention, whose log-normaliser has a
    gradient. On a CPU it has no backward pass."""
    mask = None
    if hidden is not None:

        def visible(_image: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return ~hidden[query, key]

        size = hidden.shape[-1]
        mask = create_block_mask(visible, None, None, size, size, device=q.device)
    return flex_attention(q, k, v, block_mask=mask, scale=scale, return_lse=True)


def additive_mask(hidden: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``hidden`` keys, bool, as -inf to add to the scores; None stays None."""
    if hidden is None:
        return None
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q k' scale + mask) v [B, H, T, d_m] and the log-normalisers [B, H, T], by the CPU's
    fused kernel; without gradients of the latter. q, k and v have one width."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=scale
    )


def cpu_attention_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Tensor,
    log_normaliser: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in q, k and v of the heads of :func:`cpu_attention`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, heads, log_normaliser, 0.0, False, attn_mask=mask, scale=scale
    )


def pad_to(x: Tensor, width: int) -> Tensor:
    """x [..., w] with zeros up to the width, [..., width]; x itself where it has that width."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


class _AttentionWithNormaliser(torch.autograd.Function):
    """softmax(q k' scale) v without ``hidden`` keys, and the log-normaliser of each query, both
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
        v = pad_to(v, q.shape[-1])
        mask = additive_mask(hidden, q.dtype)
        heads, log_normaliser = cpu_attention(q, k, v, mask, scale)
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
            [pad_to(grad_heads, width), grad_normaliser.unsqueeze(-1).to(dtype)],
            dim=-1,
        )
        dq, dk, dv = cpu_attention_gradient(
            grad,
            F.pad(q, (0, 1)),
            F.pad(k, (0, 1)),
            F.pad(v, (0, 1), value=1.0),
            F.pad(heads, (0, 1)),
            log_normaliser,
            mask,
            ctx.scale,
        )
        return dq[..., :width], dk[..., :width], dv[..., : ctx.width], None, None
