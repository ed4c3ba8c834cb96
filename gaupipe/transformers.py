"""The attentions for Hugging Face's transformers. Needs the extra ``gaupipe[transformers]``.

Importing this module makes ``attn_implementation="gau_belief"``, ``"gau_xsa"`` and
``"gau_attentionx"`` known to the decoders of transformers: keys and values come from a cache, with
fewer heads than the queries, under a mask; each token's own value is among them.

Axis letters: B sequences, H query heads, H_kv key and value heads, T queries, S keys, d_m head
width.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from gaupipe.attention import ATTENTION
from gaupipe.attention.base import choice, fused_attention
from gaupipe.attention.kernels import perpendicular
from gaupipe.attention.options import check_options
from gaupipe.system.errors import UserError

VISIBLE = 1
OWN = 2
"""Bits of the masks that :func:`visible_and_own` makes."""

UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments with which some models change their attention, and which gaupipe's do not have."""


def belief(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """D [B, T, H, d_m], what belief-attention gives to the output projection (*BeliefFormer, eqs.
    10-14*)."""
    mh, v = attend(module, *args, **kwargs)
    return perpendicular(mh.flatten(2), v.flatten(2)).view_as(mh), None


def xsa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """D_s [B, T, H, d_m], perpendicular to V in each head (*BeliefFormer, eqs. 15-16*)."""
    return perpendicular(*attend(module, *args, **kwargs)), None


def attentionx(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """V - gamma MH [B, T, H, d_m] (*AttentionX, eq. 10*). ``gau_options`` of the model's
    configuration may hold ``gamma`` and ``mask_diagonal``."""
    options = getattr(module.config, "gau_options", None) or {}
    gamma = options.get("gamma", 1.0)
    hide_own = options.get("mask_diagonal", True)
    known = options.keys() <= {"gamma", "mask_diagonal"} and isinstance(hide_own, bool)
    if not (known and isinstance(gamma, int | float) and math.isfinite(gamma)):
        check_options(ATTENTION["attentionx"], options)  # too slow for every call
    mh, v = attend(module, *args, hide_own=hide_own, **kwargs)
    return torch.sub(v, mh, alpha=gamma), None


def visible_and_own(
    *,
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
    T = query.shape[2]
    S = key.shape[2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if S < T or (S > T and not causal) or is_cross_attention(module, causal):
        raise UserError(
            f"{type(module).__name__} attends to other tokens than its own (cross-attention): "
            "there a token has no value of its own"
        )
    visible = attention_mask
    itself = None
    if attention_mask is not None and attention_mask.dtype == torch.uint8:
        visible = (attention_mask & VISIBLE).bool()
        itself = (attention_mask & OWN).bool()
    v = own_entries(value, itself, T)
    if hide_own:
        if itself is None:
            ones = torch.ones(T, S, dtype=torch.bool, device=query.device)
            itself = ones.tril(S - T).triu(S - T)
        visible = hide(itself, visible, causal)
    key, value, v = (repeat_heads(x, query.shape[1]) for x in (key, value, v))
    future_hidden = causal and visible is None and T > 1
    mh = fused_attention(query, key, value, visible, dropout, future_hidden, scaling)
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


def check_name(name: str, known: Iterable[str]) -> None:
    """Raises UserError for a ``gau_`` name that is none of ``known``."""
    if name not in known and name.removeprefix("gau_") in ATTENTION:
        raise UserError(
            f"attn_implementation {name!r}: this attention is for vision transformers alone; "
            f"decoders have {', '.join(known)}"
        )
    choice("attn_implementation", name, known)


def register() -> None:
    """Makes the attentions known to transformers. Models with an attention of their own are refused
    by UserError; a model trained with one of the attentions and loaded with another one warns;
    one that ``set_attn_implementation`` gives another attention forgets the first."""
    functions = {f"gau_{f.__name__}": f for f in (belief, xsa, attentionx)}
    for name, function in functions.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, visible_and_own)
    accepted = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(accepted)
    def checked(self: PreTrainedModel, requested: str | None, is_init_check: bool = False) -> str:
        before = getattr(self.config, "gau_implementation", None)
        if str(requested).startswith("gau_"):
            check_name(str(requested), functions)
        if requested in functions and not self._can_set_attn_implementation():
            raise UserError(
                f"{type(self).__name__} has its own attention, which transformers cannot replace "
                f"by {requested!r}"
            )
        implementation = accepted(self, requested, is_init_check)
        if requested in functions:
            self.config.gau_implementation = requested  # config.json keeps it
        elif before and not is_init_check:  # by set_attn_implementation
            del self.config.gau_implementation
        elif before:
            warnings.warn(
                # one text for the model and for the models in it, so that Python shows it once
                f"the model had attn_implementation={before!r}, which its weights expect, and is "
                f"loaded without it: give from_pretrained attn_implementation={before!r}",
                stacklevel=2,
            )
        return implementation

    if not hasattr(accepted, "__wrapped__"):
        PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign, assignment]


register()
