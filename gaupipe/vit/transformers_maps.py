"""The attention maps of models of transformers, from the functions of its
``AttentionInterface``.

Axis letters: B images, H heads, T tokens, Q queries, S keys.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gaupipe.system.errors import UserError
from gaupipe.vit.attention_maps import CapturedMaps, attention_map


@contextlib.contextmanager
def interface_of_transformers(captured: CapturedMaps) -> Iterator[None]:
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

    sdpa is told by its arguments, and every other one by what it calls, as gaupipe's are, or by the
    weights that it returns, as each model's own eager attention does.
    """

    def attend(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not captured.watching:
            return function(module, query, key, *args, **kwargs)
        if implementation == "sdpa":  # it packs heads together before it calls torch's function
            captured.add(_map_of_sdpa, module, query, key, *args, **kwargs)
            with captured.paused():
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


def _biased(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """A mask, boolean or additive, with the position bias [B or 1, H, T, S] of the scores."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -torch.inf)
    return mask + bias
