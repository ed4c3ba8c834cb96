"""The attentions for Hugging Face's transformers. Needs the extra ``gaupipe[transformers]``.

Importing this module makes ``attn_implementation="gau_belief"``, ``"gau_xsa"`` and
``"gau_attentionx"`` known to the decoders of transformers, and what :func:`convert` makes to its
``Auto`` classes.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from gaupipe.attention import ATTENTION
from gaupipe.attention.base import StudentAttention, choice
from gaupipe.attention.kernels import perpendicular
from gaupipe.attention.options import attention_class, check_options
from gaupipe.system.errors import UserError
from gaupipe.vit.cached_attention import attend, visible_and_own

__all__ = [
    "GauGPT2Config",
    "GauGPT2LMHeadModel",
    "GauLlamaConfig",
    "GauLlamaForCausalLM",
    "GauMistralConfig",
    "GauMistralForCausalLM",
    "GauQwen2Config",
    "GauQwen2ForCausalLM",
    "GauQwen3Config",
    "GauQwen3ForCausalLM",
    "convert",
]

REGISTERED = {"gau_belief": "belief", "gau_xsa": "xsa", "gau_attentionx": "attentionx"}
"""The attention that an implementation of transformers computes; of others the standard one."""

OUTPUTS = ("o_proj", "c_proj")
"""Names of the output projection in an attention of transformers."""


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
    if not options.keys() <= {"gamma", "mask_diagonal"}:
        check_options(ATTENTION["attentionx"], options)
    mh, v = attend(module, *args, hide_own=options.get("mask_diagonal", True), **kwargs)
    return torch.sub(v, mh, alpha=options.get("gamma", 1.0)), None


def converted(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """[MH, V] side by side [B, T, 2 H, d_m], for the :class:`Update` of a converted model."""
    attention = output_of(module).attention
    hide_own = getattr(attention, "mask_diagonal", False)
    width = module.head_dim if getattr(attention, "z", None) is not None else None
    mh, v = attend(module, *args, hide_own=hide_own, width=width, **kwargs)
    return torch.cat([mh, v], dim=2), None


class Update(nn.Module):
    """Takes the place of the output projection: from [MH, V] [B, T, 2 H d_m] the update [B, T, d]
    of one of :data:`gaupipe.attention.ATTENTION`."""

    def __init__(self, attention: StudentAttention) -> None:
        super().__init__()
        self.attention = attention

    @property
    def weight(self) -> Tensor:
        """W, where transformers initialises an output projection."""
        return self.attention.proj.weight

    def forward(self, signals: Tensor) -> Tensor:
        mh, v = signals.chunk(2, dim=-1)
        return self.attention.combine(mh, v)


class Widened:
    """A cache, or None, that keeps Z beside the values."""

    def __init__(self, cache: Any, z: Tensor) -> None:
        self.cache, self.z = cache, z

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        both = key, torch.cat([value, self.z], dim=-1)
        return both if self.cache is None else self.cache.update(*both, *args, **kwargs)


def keep_z(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Before the forward pass of an attention with Z Z': lets the model's cache keep Z = X W_Z."""
    x = args[0] if args else kwargs["hidden_states"]
    z = output_of(module).attention.z(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    return args, {**kwargs, "past_key_values": Widened(kwargs.get("past_key_values"), z)}


def output_of(module: nn.Module) -> Any:
    """The output projection of an attention of transformers, or what stands in its place."""
    return next(getattr(module, name) for name in OUTPUTS if hasattr(module, name))


def attentions(model: nn.Module) -> list[Any]:
    """The self-attentions of a decoder of transformers."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and any(hasattr(module, name) for name in OUTPUTS)
    ]


class Converted(PreTrainedModel):
    """A decoder of transformers with an attention of gaupipe, by its configuration:
    ``gau_attention``, a key of :data:`gaupipe.attention.ATTENTION`, and ``gau_options``. Raises
    UserError for an unknown attention or option."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        attention_type = student_class(config.gau_attention, config.gau_options)
        if getattr(config, "add_cross_attention", False):
            raise UserError("add_cross_attention: a model that is converted has none")
        config._attn_implementation = "gau_converted"
        super().__init__(config, *args, **kwargs)
        for module in attentions(self):
            insert(module, config, attention_type)

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the output projections fit the attention of the configuration alone."""
        raise UserError(f"the model has {self.config.gau_attention!r}: convert it to another one")


def student_class(key: str, options: dict | None) -> type[StudentAttention]:
    """The class of an attention that a decoder can have."""
    attention_type = attention_class(key)
    if not attention_type.compares:
        raise UserError(f"{key!r} has no queries and keys: a language model cannot have it")
    check_options(attention_type, options or {})
    return attention_type


def insert(module: Any, config: Any, attention_type: type[StudentAttention]) -> None:
    """Puts an :class:`Update` in the place of an output projection, with its weights. Matrices
    beside it start as wide."""
    options = config.gau_options or {}
    new = with_projection(output_of(module), attention_type, module, config, **options)
    weight = new.proj.weight
    if not weight.is_meta:
        std = weight.std().item()
        for child in new.children():
            if isinstance(child, nn.Linear) and child is not new.proj:
                nn.init.normal_(child.weight, std=std)
    if getattr(new, "z", None) is not None:  # Z has as many heads as the keys
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        new.z = nn.Linear(config.hidden_size, heads * module.head_dim, bias=False).to(weight)
        nn.init.normal_(new.z.weight, std=config.initializer_range)
        module.register_forward_pre_hook(keep_z, with_kwargs=True)
    setattr(module, next(name for name in OUTPUTS if hasattr(module, name)), Update(new))


def with_projection(
    projection: Any, attention_type: type, module: Any, config: Any, **options: Any
) -> Any:
    """An attention of gaupipe without Q, K and V, with the W of an output projection."""
    weight, bias = projection.weight, projection.bias
    new = attention_type(
        config.hidden_size,
        config.num_attention_heads,
        attn_head_dim=module.head_dim,
        proj_bias=bias is not None,
        device=weight.device,
        dtype=weight.dtype,
        **options,
    )
    del new.qkv
    if isinstance(projection, Conv1D):  # its weight lies the other way round
        new.proj.load_state_dict(dict(weight=weight.T.contiguous(), bias=bias), assign=True)
    else:
        new.proj = projection
    return new


def convert(model: PreTrainedModel, attention: str, **options: Any) -> Converted:
    """A copy of a decoder of transformers with another attention of
    :data:`gaupipe.attention.ATTENTION` and its ``options``, every common weight kept.
    ``from_pretrained`` of a saved one needs ``import gaupipe.transformers``.

    Takes the language models of GPT-2, Llama, Mistral, Qwen2 and Qwen3, and converted ones. For the
    cases in which outputs do not change see :func:`gaupipe.models.convert`. Raises UserError
    for an unknown attention or option, for "gaussian", and for another model.
    """
    attention_type = student_class(attention, options)
    options = {**attention_type.conversion_options, **options}
    families: list[Any] = Converted.__subclasses__()  # each before the class that it converts
    target = next((cls for cls in families if type(model) in (cls, cls.__bases__[1])), None)
    if target is None:
        known = ", ".join(cls.__bases__[1].__name__ for cls in families)
        raise UserError(f"cannot convert a {type(model).__name__}: only {known}")
    config = model.config.to_dict()
    config.update(gau_attention=attention, gau_options=options)
    for replaced in ("model_type", "gau_implementation"):
        config.pop(replaced, None)
    converted = target._from_config(target.config_class(**config), dtype=model.dtype)
    converted.to(model.device).train(model.training)
    converted.generation_config = copy.deepcopy(model.generation_config)
    converted.load_state_dict(model.state_dict(), strict=False)
    old_type = ATTENTION[REGISTERED.get(model.config._attn_implementation, "standard")]
    for old, new in zip(attentions(model), attentions(converted), strict=True):
        output = output_of(old)
        if not isinstance(output, Update):
            output = Update(with_projection(output, old_type, old, model.config))
        output_of(new).attention.take_over(copy.deepcopy(output.attention))
    return converted


def family(config: type, model: type) -> tuple[Any, Any]:
    """The configuration and the model that :func:`convert` makes of two classes of transformers,
    known to its ``Auto`` classes."""
    fields: dict[str, Any] = {
        "gau_attention": "belief",
        "gau_options": None,
        "model_type": f"gau_{config.model_type}",  # type: ignore[attr-defined]
        "__module__": __name__,
        "__annotations__": {"gau_attention": str, "gau_options": dict | None},
    }
    gau_config: Any = type(f"Gau{config.__name__}", (config,), fields)
    members = {"config_class": gau_config, "__module__": __name__}
    gau_model: Any = type(f"Gau{model.__name__}", (Converted, model), members)
    AutoConfig.register(gau_config.model_type, gau_config)
    AutoModelForCausalLM.register(gau_config, gau_model)
    return gau_config, gau_model


GauGPT2Config, GauGPT2LMHeadModel = family(GPT2Config, GPT2LMHeadModel)
GauLlamaConfig, GauLlamaForCausalLM = family(LlamaConfig, LlamaForCausalLM)
GauMistralConfig, GauMistralForCausalLM = family(MistralConfig, MistralForCausalLM)
GauQwen2Config, GauQwen2ForCausalLM = family(Qwen2Config, Qwen2ForCausalLM)
GauQwen3Config, GauQwen3ForCausalLM = family(Qwen3Config, Qwen3ForCausalLM)


def register() -> None:
    """Makes the attentions known to transformers. Models with an attention of their own are refused
    by UserError; a model trained with one of the attentions and loaded with another one warns."""
    functions = {f"gau_{f.__name__}": f for f in (belief, xsa, attentionx, converted)}
    for name, function in functions.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, visible_and_own)
    accepted = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(accepted)
    def checked(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> str:
        before = getattr(self.config, "gau_implementation", None)
        if str(requested).startswith("gau_"):
            choice("attn_implementation", str(requested), functions)
        if requested in functions and not self._can_set_attn_implementation():
            raise UserError(
                f"{type(self).__name__} has its own attention, which transformers cannot replace "
                f"by {requested!r}"
            )
        if requested in REGISTERED:
            self.config.gau_implementation = requested  # config.json keeps it
        elif before and requested not in functions:
            warnings.warn(
                f"the model had attn_implementation={before!r}, which its weights expect, and has "
                f"{requested or 'the standard attention'} now",
                stacklevel=2,
            )
        return accepted(self, requested, *args, **kwargs)

    if not hasattr(accepted, "__wrapped__"):
        PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign, assignment]


register()
