"""The attention map of one call of ``scaled_dot_product_attention``, a reader that sees every such
call of a model, and what is captured of a forward pass.

Axis letters: B images, H heads, T tokens (class and register tokens, then patches), Q queries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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
    maps = scores.softmax(-1)
    if is_causal or attn_mask is not None:
        keyless = scores.isneginf().all(-1, keepdim=True)
        maps = maps.masked_fill(keyless, 0.0)
    return maps


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
        self.calls_in_blocks = 0
        """Those of timm's blocks, before one that the model's head has."""
        self.images: int | None = None
        """Images of the latest pass, where an argument of the model holds them."""
        self.watching = False
        """True while the model itself runs: other models may run beside it."""

    def start(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.maps.clear()
        self.calls = 0
        self.images = None
        images = args[0] if args else kwargs.get("pixel_values", kwargs.get("x"))
        # beside texts there may be any number of images
        if isinstance(images, Tensor) and images.ndim == 4 and "input_ids" not in kwargs:
            self.images = len(images)
        self.watching = True

    def end_blocks(self, *_hook: Any) -> None:
        self.calls_in_blocks = self.calls

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
        Raises UserError for queries that it has not, and for maps of parts of an image."""
        block = self.calls
        self.calls += 1
        if self.blocks is not None and block not in self.blocks:
            return
        try:
            self.maps[block] = make(*args, **kwargs, queries=self.queries)
        except IndexError as error:
            numbers = [] if self.queries is None else self.queries.tolist()
            raise UserError(f"queries {numbers}: {error}") from None
        shape = tuple(self.maps[block].shape)
        if len(shape) != 4 or self.images not in (None, shape[0]):
            raise UserError(
                f"attention {block} has maps of shape {shape}, not of [images, heads, queries, "
                "keys]: it sees parts of an image, which capture cannot read"
            )

    def see(self, *args: Any, **kwargs: Any) -> None:
        """Adds the map of a call of torch's attention while the model runs."""
        if self.watching:
            self.add(attention_map, *args, **kwargs)


def use_fused_attention(model: nn.Module) -> None:
    """Makes a timm model attend by ``scaled_dot_product_attention``, whose calls can be seen."""
    module: Any
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True
