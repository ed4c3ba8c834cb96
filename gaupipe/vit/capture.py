"""Attention maps of any vision transformer, taken while its fused attention runs.

Maps are computed beside the model, from the queries, keys and masks of its calls: of torch's
``scaled_dot_product_attention``, of gaupipe's own, and of the functions of transformers'
``AttentionInterface``. The model's own computation stays as it is, to the bit.

Axis letters: B images, H heads, T tokens (class and register tokens, then patches), Q queries.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from gaupipe.attention.base import fused_attention, hidden_by
from gaupipe.system.errors import UserError


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
    """Hands the arguments of every ``scaled_dot_product_attention``, and of gaupipe's
    ``fused_attention``, to ``see`` while it is active.

    ``see`` is called as torch's attention is, before it. What it returns, unless that is None,
    takes the place of the attention's output.
    """

    def __init__(self, see: Callable[..., Tensor | None]) -> None:
        super().__init__()
        self.see = see

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = None
        if func is scaled_dot_product_attention:
            with torch._C.DisableTorchFunction():
                output = self.see(*args, **kwargs)
        elif func is fused_attention:
            with torch._C.DisableTorchFunction():
                query, key, value, mask, *others = args
                output = self.see(query, key, value, with_infinities(mask), *others)
        return func(*args, **kwargs) if output is None else output


def with_infinities(mask: Tensor | None) -> Tensor | None:
    """An additive mask with -inf for the lowest numbers, as gaupipe's attentions read it."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask.masked_fill(hidden_by(mask), -torch.inf)


def use_fused_attention(model: nn.Module) -> None:
    """Makes a timm model attend by ``scaled_dot_product_attention``, whose calls can be seen."""
    module: Any
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True


class CapturedMaps:
    """The attention maps of a model's latest forward pass, by the number of the attention.

    blocks   numbers of the attentions whose maps are kept; None keeps all
    queries  numbers of the tokens whose rows are kept; None keeps all
    """

    def __init__(self, blocks: Collection[int] | None, queries: Sequence[int] | None) -> None:
        self.blocks = blocks
        self.queries = None if queries is None else torch.tensor(list(queries), dtype=torch.int64)
        self.maps: dict[int, Tensor] = {}
        self.calls = 0
        """Attentions of the latest pass until now."""
        self.watching = False
        """True while the model itself runs: other models may run beside it."""

    def start(self, *_hook: Any) -> None:
        self.maps.clear()
        self.calls = 0
        self.watching = True

    def stop(self, *_hook: Any) -> None:
        self.watching = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For an attention that has been counted and may call another one."""
        self.watching = False
        try:
            yield
        finally:
            self.watching = True

    @torch.no_grad()
    def add(self, make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
        """Counts an attention, and keeps ``make(*args, queries=..., **kwargs)`` if it is wanted.
        Raises UserError for queries that it has not."""
        block = self.calls
        self.calls += 1
        if self.blocks is not None and block not in self.blocks:
            return
        try:
            self.maps[block] = make(*args, **kwargs, queries=self.queries)
        except IndexError as error:
            numbers = [] if self.queries is None else self.queries.tolist()
            raise UserError(f"queries {numbers}: {error}") from None

    def see(self, *args: Any, **kwargs: Any) -> None:
        """Adds the map of a call of torch's attention while the model runs."""
        if self.watching:
            self.add(attention_map, *args, **kwargs)


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

    model    a ViT of timm, or a model of transformers with the ``attn_implementation`` ``eager``,
             ``sdpa``, ``flex_attention`` or one of gaupipe's. Compiled, it runs uncompiled while
             its maps are captured
    blocks   numbers of the attention layers to keep, in the order of their calls; negative ones
             count from the end. None keeps all
    queries  numbers of the tokens whose rows are kept; the class token is 0. None keeps all

    Yields the dictionary {block: float32 [B, H, Q, T]} of the latest ``model(...)``, detached, on
    the model's device. Other models called meanwhile add nothing. Rows sum to 1, but for a model
    with attention sinks, which take a part, and for queries without a key, whose rows are 0.

    Raises UserError for a model whose attention is not fused (``fused_attn = False``), for one in
    which no attention was seen, for one whose weights cannot be told from the arguments of its
    attention, and for a block or a query that the model has not.
    """
    unfused = [
        name for name, part in model.named_modules() if getattr(part, "fused_attn", True) is False
    ]
    if unfused:
        raise UserError(f"{unfused[0]} does not use fused attention: set its fused_attn to True")
    count = _number_of_blocks(model)
    if blocks is not None and min(blocks, default=0) < 0 and count is None:
        raise UserError("the model does not tell its number of blocks: count them from 0")
    wanted = None if blocks is None else {b + count if b < 0 and count else b for b in blocks}
    captured = CapturedMaps(wanted, queries)
    hooks = [
        model.register_forward_pre_hook(captured.start),
        model.register_forward_hook(captured.stop, always_call=True),
    ]
    try:
        with (
            torch.compiler.set_stance("force_eager"),  # a graph runs without what is to be seen
            AttentionReader(captured.see),
            _interface_of_transformers(captured),
        ):
            yield captured.maps
    finally:
        for hook in hooks:
            hook.remove()
    if not captured.calls:
        name = type(model).__name__
        raise UserError(
            f"no attention of {name} was seen: was the model called, as model(...) and not by "
            "another method?"
        )
    missing = sorted((wanted or set()) - captured.maps.keys())
    if missing:
        raise UserError(f"block {missing[0]}: the model has {captured.calls} attention layers")


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
def _interface_of_transformers(captured: CapturedMaps) -> Iterator[None]:
    """Adds the maps of the attention functions of transformers, where that is imported."""
    utilities = sys.modules.get("transformers.modeling_utils")
    if utilities is None:
        yield
        return
    interface = utilities.AttentionInterface
    original = interface.get_interface

    def get_interface(
        self: Any, implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        function = original(self, implementation, default)
        return _seen(function, str(implementation), captured)

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def _seen(
    function: Callable[..., Any], implementation: str, captured: CapturedMaps
) -> Callable[..., Any]:
    """An attention ``function`` of transformers that adds its map to those captured.

    sdpa and flex_attention are told by their arguments, and every other one by what it calls, as
    gaupipe's are, or by the weights that it returns, as each model's own eager attention does.
    """
    maps: dict[str, Callable[..., Tensor]] = {"sdpa": _map_of_sdpa, "flex_attention": _map_of_flex}
    map_of = maps.get(implementation)

    def attend(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not captured.watching:
            return function(module, query, key, *args, **kwargs)
        if map_of is not None:
            captured.add(map_of, module, query, key, *args, **kwargs)
            # what transformers compiles itself stays so, for the same outputs to the bit
            with captured.paused(), torch.compiler.set_stance("default"):
                return function(module, query, key, *args, **kwargs)
        calls = captured.calls
        output = function(module, query, key, *args, **kwargs)
        if captured.calls > calls:
            return output
        weights = output[1]
        if weights is None or weights.shape != (*query.shape[:-1], key.shape[-2]):
            raise UserError(
                f"{type(module).__name__} does not show the weights of its attention "
                f"{implementation!r}: load the model with attn_implementation='eager'"
            )
        if kwargs.get("dropout") and module.training:
            raise UserError(
                f"{type(module).__name__} shows the weights of its attention {implementation!r} "
                "only after dropout: call model.eval()"
            )
        captured.add(_rows, weights)
        return output

    return attend


def _rows(weights: Tensor, queries: Tensor | None) -> Tensor:
    """Rows [B, H, Q, T] float32 of the weights [B, H, T, T] of an attention."""
    if queries is None:
        return weights.float()
    return weights[..., queries.to(weights.device), :].float()


def _map_of_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    *,
    queries: Tensor | None,
    **_without_effect: Any,
) -> Tensor:
    """The map [B, H, Q, S] of transformers' ``sdpa_attention_forward``, from its arguments."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = bool(is_causal) and attention_mask is None and query.shape[-2] > 1
    if position_bias is not None and is_causal:
        position_bias = position_bias[..., : key.shape[-2]]
    return attention_map(
        query,
        key,
        attn_mask=_biased(attention_mask, position_bias),
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        queries=queries,
    )


def _map_of_flex(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    queries: Tensor | None,
    **_without_effect: Any,
) -> Tensor:
    """The map [B, H, Q, S] of transformers' ``flex_attention_forward``, from its arguments."""
    if softcap is not None or s_aux is not None:
        raise UserError(
            f"{type(module).__name__} caps its scores or has attention sinks, whose maps cannot "
            "be told from flex_attention: load the model with attn_implementation='eager'"
        )
    if isinstance(attention_mask, BlockMask):
        sequences, heads, *_rounded_up = attention_mask.shape
        tokens = query.shape[-2], key.shape[-2]
        attention_mask = create_mask(
            attention_mask.mask_mod, sequences, heads, *tokens, device=str(query.device)
        )
    elif attention_mask is not None:
        # it is added to the scores, even a boolean one
        attention_mask = attention_mask[..., : key.shape[-2]].float()
    return attention_map(
        query,
        key,
        attn_mask=_biased(attention_mask, position_bias),
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        queries=queries,
    )


def _biased(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """A mask, boolean or additive, with the position bias [B or 1, H, T, S] of the scores."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -torch.inf)
    return mask + bias
