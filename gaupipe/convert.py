"""Conversion of a timm vision transformer to another attention, weights kept."""

from __future__ import annotations

import copy

import torch
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from gaupipe.attention import attention_class, check_options
from gaupipe.attention.functional import StudentAttention
from gaupipe.errors import UserError


def convert(model: VisionTransformer, attention: str, **options) -> VisionTransformer:
    """A copy of a timm ``VisionTransformer`` (DeiT, class and register tokens, qk-norm and gates included), pretrained
    or not, with its attention swapped for another of :data:`gaupipe.attention.ATTENTION`; every weight is kept.

    Matrices that the new attention adds start where they change least (``initialise_for_conversion`` of its class). To
    "belief2" the outputs do not change: phi is the identity unless given, W_p = W, and Z is so small that it drowns in
    float32 rounding (*Belief2, proposition 1*). To the others they change, and the model wants fine-tuning.

    Raises UserError for an unknown attention or option, and for what has no Q, K and V to convert: a model that is not a
    timm ``VisionTransformer``, a block without timm's standard ``Attention``, and "gaussian" as the target.
    """
    attention_type = attention_class(attention)
    if not issubclass(attention_type, StudentAttention):
        raise UserError(f"cannot convert to {attention!r}: it has no queries and keys to take over; train it instead")
    check_options(attention_type, options)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"cannot convert a {type(model).__name__}: its attention is not laid out as in timm's "
                        "VisionTransformer, which is what can be converted")
    for layer, block in enumerate(model.blocks):
        found = getattr(block, "attn", block)
        if type(found) is not Attention and not isinstance(found, StudentAttention):
            raise UserError(f"cannot convert block {layer}: its attention is a {type(found).__name__}; "
                            "only timm's standard Attention and gaupipe's can be converted")
    converted = copy.deepcopy(model)
    for block in converted.blocks:
        block.attn = swap(block.attn, attention_type, options)
    return converted


def swap(old: Attention, attention_type: type[StudentAttention], options: dict) -> StudentAttention:
    """An attention of another class that shares the modules and the weights of ``old``."""
    weight = old.qkv.weight
    defaults = attention_type.options_for_conversion
    new = attention_type(weight.shape[1], old.num_heads, attn_head_dim=old.head_dim, dim_out=old.proj.out_features,
                         device=weight.device, dtype=weight.dtype, **{**defaults, **options})
    for name, module in old.named_children():
        if name in TIMM_MODULES:
            setattr(new, name, module)
    ...
