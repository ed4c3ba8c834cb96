"""Attention maps of any vision transformer, taken while its fused attention runs.

Maps are computed beside the model, from the queries, keys and masks of its calls: of torch's
``scaled_dot_product_attention``, and of the functions of transformers' ``AttentionInterface``. The
model's own computation stays as it is, to the bit.

Axis letters: B images, H heads, T tokens (class and register tokens, then patches), Q queries.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


def attention_map(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    queries: Tensor | None = None,
) -> Tensor:
    """The weights that ``scaled_dot_product_attention`` gives to the keys, from its arguments.

    query, key   [..., H, T, d_m], any floating dtype; ``value`` and ``dropout_p`` play no part
    queries      int64 [Q]: the tokens whose rows are computed; None computes all

    Returns float32 [..., H, Q, T]. Rows sum to 1; the row of a query without a key is 0.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    rows = torch.arange(query.shape[-2], device=query.device)
    if queries is not None:
        rows = rows[queries.to(rows.device)]  # [Q]; negative numbers count from the end
        query = query[..., rows, :]  # [..., H, Q, d_m]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    device = "cpu" if query.is_meta else query.device.type  # "meta" has no autocast
    with torch.autocast(device, enabled=False):
        scores = (query.float() * scale) @ key.float().mT  # [..., H, Q, T]
    if is_causal:
        columns = torch.arange(key.shape[-2], device=query.device)
        scores = scores.masked_fill(columns > rows[:, None], -torch.inf)
    if attn_mask is not None:
        if queries is not None and attn_mask.shape[-2] > 1:
            attn_mask = attn_mask[..., rows, :]
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        else:
            scores = scores + attn_mask
    keyless = scores.isneginf().all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(keyless, 0.0)


class AttentionReader(TorchFunctionMode):
    """Hands the arguments of every ``scaled_dot_product_attention`` to ``see`` while it is active.

    ``see`` is called as the attention is, before it. What it returns, unless that is None, takes
    the place of the attention's output.
    """

    def __init__(self, see: Callable[..., Tensor | None]) -> None:
        super().__init__()
        self.see = see

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = None
        if func is scaled_dot_product_attention:
            with torch._C.DisableTorchFunction():
                output = self.see(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if output is None else output


def use_fused_attention(model: nn.Module) -> None:
    """Makes a timm model attend by ``scaled_dot_product_attention``, whose calls can be seen."""
    module: Any
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True


@contextlib.contextmanager
def capture(
    model: nn.Module,
    blocks: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Iterator[dict[int, Tensor]]:
    """Collects the attention maps of a vision transformer's forward passes.

    .. code-block:: python

        with gaupipe.capture(model, blocks=[-1], queries=[0]) as maps:
            logits = model(images)
        maps[11]  # [B, H, 1, T] float32: the class token's attention in the last block

    model    a ViT of timm, or of transformers with any ``attn_implementation``
    blocks   numbers of the attention layers to keep, in the order of their calls; negative ones
             count from the end. None keeps all
    queries  numbers of the tokens whose rows are kept; the class token is 0. None keeps all

    Yields the dictionary {block: float32 [B, H, Q, T]} of the latest ``model(...)``, detached, on
    the model's device. Raises ValueError for a model whose attention is not fused
    (``fused_attn = False``), for one in which no attention was seen, and for a block or a query
    that the model has not.
    """
    unfused = [
        name for name, part in model.named_modules() if getattr(part, "fused_attn", True) is False
    ]
    if unfused:
        raise ValueError(f"{unfused[0]} does not use fused attention: set its fused_attn to True")
    maps: dict[int, Tensor] = {}
    count = _number_of_blocks(model)
    if blocks is not None and min(blocks, default=0) < 0 and count is None:
        raise ValueError("the model does not tell its number of blocks: count them from 0")
    wanted = None if blocks is None else {b + count if b < 0 and count else b for b in blocks}
    rows = None if queries is None else torch.tensor(list(queries), dtype=torch.int64)
    calls = 0

    def start(module: nn.Module, args: Any) -> None:
        nonlocal calls
        maps.clear()
        calls = 0

    @torch.no_grad()
    def see(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        block, calls = calls, calls + 1
        if wanted is None or block in wanted:
            try:
                maps[block] = attention_map(*args, **kwargs, queries=rows)
            except IndexError as error:
                raise ValueError(f"queries {list(queries or [])}: {error}") from None

    hook = model.register_forward_pre_hook(start)
    try:
        with AttentionReader(see) as reader, _interface_of_transformers(reader):
            yield maps
    finally:
        hook.remove()
    if not calls:
        raise ValueError(f"no attention of {type(model).__name__} was seen: was the model called?")
    missing = sorted((wanted or set()) - maps.keys())
    if missing:
        raise ValueError(f"block {missing[0]}: the model has {calls} attention layers")


def gradient_rollout(model: nn.Module, images: Tensor, classes: Tensor, blocks: int) -> Tensor:
    """The relevance of each token for each token of a ViT, for one class of each image.

    images   [B, channels, height, width], as the model takes them
    classes  int64 [B]: the classes whose logits are explained
    blocks   the number of the model's first attentions that count: those of its blocks

    Returns float32 [B, L, T, T]: block by block R - I of *Chefer, Gur and Wolf 2021, Generic
    Attention-model Explainability (arXiv 2103.15679), eqs 5 and 6*: from R = I on, R += mean over
    heads of (dlogit/dA * A)+ times R, with the attention map A of the block. Raises ValueError for
    attention that is not fused.
    """
    maps: list[Tensor] = []

    def see(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        maps.append(attention_map(query, key, value, *args, **kwargs))
        return maps[-1].to(value.dtype) @ value

    with torch.enable_grad(), AttentionReader(see):
        logits = model(images.detach().clone().requires_grad_())  # so that maps have gradients
        chosen = logits.gather(1, classes[:, None]).sum()
    if len(maps) < blocks:
        raise ValueError(f"{blocks - len(maps)} blocks do not use fused attention")
    maps = maps[:blocks]
    gradients = torch.autograd.grad(chosen, maps)
    relevance = torch.eye(maps[0].shape[-1], device=images.device)
    steps = []
    for map, gradient in zip(maps, gradients, strict=True):
        weighted = (map.detach() * gradient).clamp_min(0).mean(1)  # [B, T, T]
        relevance = relevance + weighted @ relevance
        steps.append(relevance - torch.eye(relevance.shape[-1], device=images.device))
    return torch.stack(steps, 1)


def _number_of_blocks(model: Any) -> int | None:
    """The number of blocks, as a ViT of timm or a configuration of transformers tells it."""
    if hasattr(model, "blocks"):
        return len(model.blocks)
    return getattr(getattr(model, "config", None), "num_hidden_layers", None)


@contextlib.contextmanager
def _interface_of_transformers(reader: AttentionReader) -> Iterator[None]:
    """Lets the reader see the attention functions of transformers, where that is imported."""
    utilities = sys.modules.get("transformers.modeling_utils")
    if utilities is None:
        yield
        return
    interface = utilities.AttentionInterface
    original = interface.get_interface

    def get_interface(self: Any, implementation: str, default: Callable) -> Callable:
        return _seen(original(self, implementation, default), reader)

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def _seen(function: Callable, reader: AttentionReader) -> Callable:
    """An attention function of transformers whose arguments the reader sees first."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        causal = kwargs.get("is_causal", getattr(module, "is_causal", False))
        reader.see(
            query,
            key,
            attn_mask=mask if isinstance(mask, Tensor) else None,
            is_causal=bool(causal) and mask is None and query.shape[-2] > 1,
            scale=kwargs.get("scaling"),
            enable_gqa=key.shape[1] != query.shape[1],
        )
        # it may call torch's attention itself
        see, reader.see = reader.see, lambda *_args, **_kwargs: None
        try:
            return function(module, query, key, value, mask, *args, **kwargs)
        finally:
            reader.see = see

    return attend
