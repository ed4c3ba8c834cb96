"""Attention as the decoders of Hugging Face's transformers call it: keys and values come from a
cache, with fewer heads than the queries, under a mask; each token's own value is among them.

Axis letters: B sequences, H query heads, H_kv key and value heads, T queries, S keys, d_m head
width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import sdpa_mask

from gaupipe.attention.base import fused_attention
from gaupipe.system.errors import UserError

VISIBLE, OWN = 1, 2
"""Bits of the masks that :func:`visible_and_own` makes."""

UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments with which some models change their attention, and which gaupipe's do not have."""


def visible_and_own(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask of gaupipe's attentions, uint8 [B, 1, T, S]: transformers' mask in the bit VISIBLE,
    the token's own key, which is not always among the last in a static cache, in the bit OWN.

    None where the last T of the S keys are the queries' own and the mask is causal or, with one
    query, shows all.
    """
    visible = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        allow_is_causal_skip=allow_is_causal_skip and q_length in (1, kv_length),
        device=device,
        **kwargs,
    )
    if visible is None:
        return None
    queries = torch.arange(q_length, device=device) + q_offset
    keys = torch.arange(kv_length, device=device) + kv_offset
    itself = queries.unsqueeze(-1) == keys
    return visible.to(torch.uint8) * VISIBLE + itself.to(torch.uint8) * OWN


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    hide_own: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """(MH, V), both [B, T, H, d_m]: the heads' weighted sums of values, and each token's own value.

    ``query`` [B, H, T, .], ``key`` and ``value`` [B, H_kv, S, .] come from a model's cache.
    ``attention_mask`` is one of :func:`visible_and_own`, or a user's [B, 1 or H, T, S], boolean or
    additive, with the queries' own keys last. ``hide_own`` hides each token from itself. A query
    without a key gets MH = 0. Raises UserError for cross-attention.
    """
    for name in UNKNOWN:
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} attends with {name}: gaupipe cannot do that")
    T, S = query.shape[2], key.shape[2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if S < T or (S > T and not causal) or is_cross_attention(module, causal):
        raise UserError(
            f"{type(module).__name__} attends to other tokens than its own (cross-attention): "
            "there a token has no value of its own"
        )
    visible, itself = attention_mask, None
    if attention_mask is not None and attention_mask.dtype == torch.uint8:
        visible, itself = (attention_mask & VISIBLE).bool(), (attention_mask & OWN).bool()
    v = own_entries(value, itself, T)
    if hide_own:
        if itself is None:
            ones = torch.ones(T, S, dtype=torch.bool, device=query.device)
            itself = ones.tril(S - T).triu(S - T)
        visible = hide(itself, visible, causal)
    key, value, v = (repeat_heads(x, query.shape[1]) for x in (key, value, v))
    future_hidden = causal and visible is None and T > 1
    mh = fused_attention(query, key, value, visible, future_hidden, scaling, dropout)
    return mh.transpose(1, 2), v.transpose(1, 2)


def is_cross_attention(module: nn.Module, causal: bool) -> bool:
    """True if an attention of transformers reads another sequence: it says so, is called so, or is
    the layer of a decoder that may look ahead."""
    return (
        getattr(module, "is_cross_attention", False)
        or "Cross" in type(module).__name__
        or (getattr(module, "is_decoder", False) and not causal)
    )


def own_entries(value: Tensor, itself: Tensor | None, queries: int) -> Tensor:
    """The queries' own entries [B, H_kv, T, .] of ``value`` [B, H_kv, S, .]: by ``itself`` [B, 1,
    T, S], else the last T."""
    if itself is None or value.shape[2] == queries:
        return value[:, :, -queries:]
    index = itself.int().argmax(-1).unsqueeze(-1)  # [B, 1, T, 1]
    return value.gather(2, index.expand(-1, value.shape[1], -1, value.shape[-1]))


def hide(itself: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
    """The mask ``visible`` (boolean, additive or None) without the keys ``itself``."""
    if visible is None:
        T, S = itself.shape[-2:]
        return (~itself).tril(S - T) if causal else ~itself
    if visible.dtype == torch.bool:
        return visible & ~itself
    return visible.masked_fill(itself, -torch.inf)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, H_kv, S, .] to [B, heads, S, .], each head as often as there are queries for it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
