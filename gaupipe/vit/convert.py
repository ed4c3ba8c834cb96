"""Conversion of a timm vision transformer to another attention, weights kept."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from gaupipe.attention import ATTENTION
from gaupipe.attention.base import StudentAttention
from gaupipe.attention.options import attention_class, check_options
from gaupipe.system.errors import UserError

Model = TypeVar("Model", bound=VisionTransformer | Eva)


def convert(model: Model, attention: str, **options) -> Model:
    """A copy of a timm ``VisionTransformer`` (DeiT, DINOv2, class and register tokens, qk-norm and
    gates included) or ``Eva`` (EVA, EVA-02, DINOv3, Perception Encoder and others with rotary
    positions), pretrained or not, with its attention swapped for another of
    :data:`gaupipe.attention.ATTENTION`, every common weight kept.

    Output matrices start by :meth:`~gaupipe.attention.base.StudentAttention.start_from`:
    AttentionX's update is (V - gamma MH) W, so W (``proj.weight``) changes its sign on the way to
    "attentionx" and back. The outputs do not change

    * from "standard" to "belief2": phi is the identity unless given, W_p = W, and Z is too small
      for float32 to see (*Belief2, proposition 1*);
    * from "belief" to "belief_star" (W_s = 0) and to "belief2" (W_p = 0, Z as above);
    * from "xsa" to "belief_star" (W = 0, W_s = W);
    * on the way back, as long as the converted model has not been trained.

    In every other case they do change, and the model wants fine-tuning.

    In an ``Eva`` the separate matrices and biases of Q, K and V become one matrix and one bias.

    Raises UserError for an unknown attention or option, and for what it cannot convert: another
    model of timm, a block with another attention, one with fewer keys than queries (grouped-query
    attention), and "gaussian" as the target.
    """
    attention_type = attention_class(attention)
    check_options(attention_type, options)
    if not attention_type.compares:
        raise UserError(
            f"cannot convert to {attention!r}: it has no queries and keys that could take over the "
            "weights"
        )
    if not isinstance(model, VisionTransformer | Eva):
        raise UserError(
            f"cannot convert a {type(model).__name__}: only timm's VisionTransformer and Eva, and "
            "their subclasses"
        )
    options = {**attention_type.conversion_options, **options}
    converted: Any = copy.deepcopy(model)  # gaupipe_args is no attribute that timm declares
    for layer, block in enumerate(converted.blocks):
        block.attn = swap(getattr(block, "attn", block), attention_type, options, f"block {layer}")
    arguments = getattr(model, "gaupipe_args", None)
    timm_cfg = getattr(model, "pretrained_cfg", None)
    if arguments is None and timm_cfg is not None:
        arguments = dict(getattr(model, "_model_args", {}), base=timm_cfg["architecture"])
        arguments.pop("attn_layer", None)
    if arguments is not None:  # else the model was built by hand, and save_student will say so
        converted.gaupipe_args = dict(arguments, attention=attention, attention_options=options)
    return converted


def swap(
    old: nn.Module, attention_type: type[StudentAttention], options: dict, where: str
) -> StudentAttention:
    """An attention of another class that shares the modules of ``old``. Raises UserError, naming
    ``where``, for a class that it does not know."""
    trained: Any = old
    if getattr(old, "compares", True) and getattr(old, "prior", None) is not None:
        raise UserError(
            f"cannot convert {where}: its scores have log P of a learned prior, which no other "
            "attention has"
        )
    if isinstance(old, EvaAttention | AttentionRope):
        trained = with_one_matrix(old, where)
    elif type(old) is not Attention and not getattr(old, "compares", False):
        raise UserError(
            f"cannot convert {where}: its attention is a {type(old).__name__}; only timm's "
            "Attention, AttentionRope and EvaAttention and gaupipe's own have the same queries, "
            "keys and values"
        )
    new = like(trained, attention_type, trained.qkv.weight, **options)
    new.take_over(trained)
    return new.train(old.training)


def like(
    old: Any, attention_type: type[StudentAttention], weight: torch.Tensor, **options: Any
) -> StudentAttention:
    """An attention with the sizes of ``old`` and the width, type and device of its ``weight``."""
    return attention_type(
        weight.shape[1],
        old.num_heads,
        attn_head_dim=old.head_dim,
        dim_out=old.proj.out_features,
        device=weight.device,
        dtype=weight.dtype,
        **options,
    )


@torch.no_grad()
def with_one_matrix(old: Any, where: str) -> StudentAttention:
    """An ``EvaAttention`` or ``AttentionRope`` as standard attention: queries, keys and values in
    one matrix and one bias, everything else shared."""
    if getattr(old, "num_kv_groups", 1) > 1:
        raise UserError(
            f"cannot convert {where}: it has {old.num_kv_heads} heads of keys for {old.num_heads} "
            "of queries (grouped-query attention)"
        )
    if old.qkv is not None:
        weight, bias = old.qkv.weight, old.qkv.bias
        parts = [getattr(old, name, None) for name in ("q_bias", "k_bias", "v_bias")]
    else:
        projections = [old.q_proj, old.k_proj, old.v_proj]
        weight, bias = torch.cat([projection.weight for projection in projections]), None
        parts = [projection.bias for projection in projections]
    if any(part is not None for part in parts):
        nothing = weight.new_zeros(len(weight) // 3)  # the keys of an EVA have no bias
        bias = torch.cat([nothing if part is None else part for part in parts])
    new = like(old, ATTENTION["standard"], weight, qkv_bias=bias is not None)
    new.qkv.weight.copy_(weight)
    if bias is not None:
        new.qkv.bias.copy_(bias)
    new.qkv.requires_grad_((old.qkv or old.q_proj).weight.requires_grad)
    for name in ("q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"):
        setattr(new, name, getattr(old, name))
    new.scale, new.num_prefix_tokens = old.scale, old.num_prefix_tokens
    new.rotate_half = getattr(old, "rotate_half", False)
    return new
