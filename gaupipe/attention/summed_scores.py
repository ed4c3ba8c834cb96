"""Attention whose scores are the sum of several products, for a CPU.

A fused kernel takes one width for queries, keys and values. Scores Q K' + Z Z' as one product have
twice the width of V, so V has to be padded with zeros, and the kernel multiplies them. The function
here has no zeros: it takes a few heads at a time, whose maps stay in the processor's cache.

Axis letters: B images, H heads, T tokens, d_m head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gaupipe.attention.kernels import takes_operations_apart

CACHE_BYTES = 2**20
"""Of the maps that are made at a time: about a core's second level of cache."""
LONGEST = 512
"""Tokens up to which this is faster than the fused kernel with zeros: the map of one head then fits
into the cache."""


_function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: True)


def has_summed_scores(x: Tensor, dropout: float) -> bool:
    """Whether :func:`summed_scores_attention` is the better way for tokens [..., T, d], or their
    queries, with this rate of dropout."""
    if dropout or takes_operations_apart() or not 1 < x.shape[-2] <= LONGEST:
        return False
    if _function_modes():  # who looks at attention from outside knows the fused function alone
        return False
    wide = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    return x.device.type == "cpu" and wide


def summed_scores_attention(v: Tensor, scale: float, *products: tuple[Tensor, Tensor]) -> Tensor:
    """softmax((q k' + ...) scale) v [B, H, T, d_m] for ``products`` (q, k), each [B, H, T, .]; laid
    out as what a fused kernel returns."""
    return _SummedScores.apply(scale, v, *(x for product in products for x in product))


def plain(scale: float, v: Tensor, *scored: Tensor) -> Tensor:
    """:func:`summed_scores_attention` by operations that can be differentiated any number of times,
    of q, k, q, k and so on."""
    products = [q @ k.mT for q, k in zip(scored[::2], scored[1::2], strict=True)]
    return (sum(products[1:], products[0]) * scale).softmax(-1) @ v


class _SummedScores(torch.autograd.Function):
    """:func:`plain` with its gradient by hand, for which the maps are made again."""

    @staticmethod
    def forward(ctx, scale: float, v: Tensor, *scored: Tensor) -> Tensor:
        out = _empty_like_heads(v)
        for part in _parts(v):
            rows = _map([_rows(x, part) for x in scored], scale)
            _put(out, part, torch.bmm(rows, _rows(v, part)))
        ctx.save_for_backward(v, *scored)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, scale = ctx.saved_tensors, ctx.scale
        if torch.is_grad_enabled():  # a second derivative will be asked for
            return None, *torch.func.vjp(lambda *x: plain(scale, *x), *saved)[1](grad)
        grads = [_empty_like_heads(x) for x in saved]
        for part in _parts(grad):
            of_heads, v, *scored = (_rows(x, part) for x in (grad, *saved))
            rows = _map(scored, scale)
            slope = torch._softmax_backward_data(of_heads @ v.mT, rows, -1, rows.dtype).mul_(scale)
            _put(grads[0], part, rows.mT @ of_heads)
            for number in range(0, len(scored), 2):
                _put(grads[1 + number], part, slope @ scored[number + 1])
                _put(grads[2 + number], part, slope.mT @ scored[number])
        return None, *grads


def _map(scored: Sequence[Tensor], scale: float) -> Tensor:
    """The maps [R, T, T] of R heads from q, k, q, k and so on, each [R, T, .]."""
    scores = scored[0].new_zeros(())
    for number in range(0, len(scored), 2):
        q, k = scored[number : number + 2]
        scores = torch.baddbmm(scores, q, k.mT, beta=min(number, 1), alpha=scale)
    return scores.softmax(-1)


Part = tuple[slice, slice]


def _parts(heads: Tensor) -> Iterator[Part]:
    """Slices of images and heads [B, H, T, d_m] whose maps fit into the cache; at least one head
    at a time."""
    images, count, tokens, _ = heads.shape
    at_once = max(1, CACHE_BYTES // (tokens * tokens * heads.element_size()))
    step, of_heads = max(1, at_once // count), min(at_once, count)
    for image in range(0, images, step):
        for head in range(0, count, of_heads):
            yield slice(image, image + step), slice(head, head + of_heads)


def _rows(x: Tensor, part: Part) -> Tensor:
    return x[part].reshape(-1, *x.shape[-2:])


def _put(x: Tensor, part: Part, rows: Tensor) -> None:
    x[part] = rows.view(x[part].shape)


def _empty_like_heads(x: Tensor) -> Tensor:
    """[B, H, T, d_m] as fused kernels lay it out: the heads of a token side by side."""
    images, heads, tokens, width = x.shape
    return x.new_empty(images, tokens, heads, width).transpose(1, 2)
