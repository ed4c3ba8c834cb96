"""Conversion of a timm vision transformer to another attention, weights kept."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from timm.utils import unwrap_model
from torch import Tensor

from gaupipe.attention.base import StudentAttention
from gaupipe.attention.options import attention_class, check_options
from gaupipe.system.errors import UserError

Model = TypeVar("Model", bound=VisionTransformer)


def convert(model: Model, attention: str, **options: Any) -> Model:
    """A copy of a timm ``VisionTransformer`` (DeiT, DINOv2, class and register tokens, qk-norm and
    gates included), pretrained or not, with its attention swapped for another of
    :data:`gaupipe.attention.ATTENTION`, every common weight kept.

    Output matrices start by :meth:`~gaupipe.attention.base.StudentAttention.start_from`:
    AttentionX's update is (V - gamma MH) W, so W (``proj.weight``) changes its sign on the way to
    "attentionx" and back. The outputs do not change

    * from "standard" to "belief2": phi is the identity unless given, W_p = W, and Z is too small
      for float32 to see (*Belief2, proposition 1*);
    * from "standard" to "belief" with ``gated=True``, whose gates begin at 0;
    * from "belief" to "belief_star" (W_s = 0) and to "belief2" (W_p = 0, Z as above);
    * from "xsa" to "belief_star" (W = 0, W_s = W);
    * on the way back, as long as the converted model has not been trained.

    In every other case they do change, and the model wants fine-tuning.

    Raises UserError for an unknown attention or option, and for what it cannot convert: another
    model of timm, a block with another attention, and "gaussian" as the target.
    """
    model = unwrap_model(model)
    attention_type = attention_class(attention)
    check_options(attention_type, options)
    if not attention_type.compares:
        raise UserError(
            f"cannot convert to {attention!r}: it has no queries and keys that could take over the "
            "weights"
        )
    if not isinstance(model, VisionTransformer):
        raise UserError(
            f"cannot convert a {type(model).__name__}: only timm's VisionTransformer and its "
            "subclasses"
        )
    built = getattr(model, "gaupipe_args", None) or {}
    usual = attention_type.conversion_options
    if built.get("attention") == attention:  # it keeps the options that it has
        usual = built.get("attention_options") or {}
    options = {**usual, **options}
    converted: Any = copy.deepcopy(model)  # gaupipe_args is no attribute that timm declares
    for layer, block in enumerate(converted.blocks):
        block.attn = swap(getattr(block, "attn", block), attention_type, options, f"block {layer}")
    arguments = getattr(model, "gaupipe_args", None)
    timm_cfg = getattr(model, "pretrained_cfg", None)
    if arguments is None and timm_cfg:
        arguments = dict(getattr(model, "_model_args", {}), base=timm_cfg["architecture"])
        arguments.pop("attn_layer", None)
    if arguments is not None:  # else the model was built by hand, and save_student will say so
        converted.gaupipe_args = dict(arguments, attention=attention, attention_options=options)
    return converted


def swap(
    old: Any, attention_type: type[StudentAttention], options: dict[str, Any], where: str
) -> StudentAttention:
    """An attention of another class that shares the modules of ``old``. Raises UserError, naming
    ``where``, for a class that it does not know."""
    if getattr(old, "compares", True) and getattr(old, "prior", None) is not None:
        raise UserError(
            f"cannot convert {where}: its scores have log P of a learned prior, which no other "
            "attention has"
        )
    if type(old) is not Attention and not getattr(old, "compares", False):
        raise UserError(
            f"cannot convert {where}: its attention is a {type(old).__name__}; only timm's "
            "Attention and gaupipe's own have the same queries, keys and values"
        )
    weight = getattr(old.qkv, "weight", None)
    if not isinstance(weight, Tensor):
        raise UserError(
            f"cannot convert {where}: its qkv, a {type(old.qkv).__name__}, is no matrix"
        )
    new = attention_type(
        weight.shape[1],
        old.num_heads,
        attn_head_dim=old.head_dim,
        dim_out=old.proj.out_features,
        device=weight.device,
        dtype=weight.dtype,
        **options,
    )
    new.take_over(old)
    return new.train(old.training)
