"""GauViT models for timm: the class, the ReZero baseline, the entrypoints.

Importing this module makes ``gauvit_*`` known to ``timm.create_model`` and the attentions of
:data:`gaupipe.attention.ATTENTION` to timm's ``attn_layer`` as ``gau_<key>``. Axis letters: B
images, L blocks, H heads, T tokens, d model width.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    model_entrypoint,
    register_model,
    vision_transformer,
)
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from gaupipe.attention import ATTENTION, STUDENTS
from gaupipe.attention.base import StudentAttention, choice
from gaupipe.attention.options import attention_class, bind_options, count_parameters
from gaupipe.system.errors import UserError
from gaupipe.vit.stem import STEMS, ConvPatchEmbed

TIMM_ARGUMENTS = {
    name: parameter.default
    for name, parameter in inspect.signature(VisionTransformer).parameters.items()
}
"""Every keyword of timm's ``VisionTransformer`` with its default."""

PLACELESS = ("class_token", "reg_tokens", "patch_drop_rate", "dynamic_img_size")
"""Keywords of timm's with which a token may have no place on the grid."""

vision_transformer.ATTN_LAYERS.update({f"gau_{key}": cls for key, cls in ATTENTION.items()})


def register(name: str, attention: type[StudentAttention]) -> None:
    """Makes an attention of one's own known under a ``name``, as those of gaupipe are: to timm as
    ``gau_NAME``, to settings and commands as NAME. The same class may come again, as a cell of a
    notebook that runs twice defines it. Raises UserError for a name that is taken, and for what is
    no :class:`gaupipe.attention.base.StudentAttention` that takes timm's ``num_heads``."""
    from gaupipe.settings.teachers import TEACHERS  # with pydantic

    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise UserError(f"register {name!r}: should be lower-case letters, digits and _")
    if name in STUDENTS:
        raise UserError(f"register {name!r}: gaupipe has an attention of this name: choose another")
    if name in TEACHERS:
        raise UserError(f"register {name!r}: a teacher has this name: choose another")
    if not (isinstance(attention, type) and issubclass(attention, StudentAttention)):
        raise UserError(f"register {name!r}: {attention!r} should be a StudentAttention")
    parameters = inspect.signature(attention).parameters.values()
    if not any(p.name == "num_heads" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise UserError(f"register {name!r}: {attention.__name__} should take timm's num_heads")
    present = ATTENTION.get(name, attention)
    if (present.__module__, present.__qualname__) != (
        attention.__module__,
        attention.__qualname__,
    ):
        raise UserError(
            f"register {name!r}: {present.__module__}.{present.__qualname__} has this name: choose "
            "another"
        )
    ATTENTION[name] = vision_transformer.ATTN_LAYERS[f"gau_{name}"] = attention


class ReZero(nn.Module):
    """Multiplies by a learned scalar that starts at 0 (*ReZero baseline*: x + a * f(x))."""

    def __init__(self, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros((), device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class ReZeroBlock(Block):
    """timm's block without normalisation, each branch behind a scalar that starts at 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm1 = nn.Identity()
        self.norm2 = nn.Identity()
        for scale in ("ls1", "ls2"):
            self.add_module(scale, ReZero(kwargs.get("device"), kwargs.get("dtype")))


class NoFFN(nn.Module):
    """An FFN that adds nothing (*Belief2, table 3, "without FFN layers"*)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def without_ffn(block_class: Callable[..., Block]) -> Callable[..., Block]:
    """A ``block_fn`` for timm: blocks of ``block_class`` that consist of their attention only."""

    def block_fn(*args: Any, **kwargs: Any) -> Block:
        block = block_class(*args, **{**kwargs, "mlp_ratio": 1})
        block.norm2 = block.ls2 = block.drop_path2 = nn.Identity()
        block.mlp = NoFFN()
        return block

    return block_fn


class GauViT(VisionTransformer):
    """timm's ``VisionTransformer`` with an attention chosen by key.

    ``attention``: a key of :data:`gaupipe.attention.ATTENTION`; ``attention_options``: keyword
    arguments of its class; ``rezero``: blocks without normalisation, behind scalars that start at
    0; ``match_params``: the FFN shrinks by what the attention adds to the standard one; ``stem``:
    ``conv`` puts convolutions in place of the patch embedding
    (:class:`~gaupipe.vit.stem.ConvPatchEmbed`), ``residual`` convolutions and residual blocks
    (:class:`~gaupipe.vit.stem.ResidualPatchEmbed`). ``mlp_ratio=0`` leaves the FFN out. Everything
    else goes to timm's class. ``gaupipe_args`` holds the keywords that rebuild the model. Raises
    UserError for an unknown attention, option or stem.
    """

    def __init__(
        self,
        attention: str = "standard",
        attention_options: dict[str, Any] | None = None,
        rezero: bool = False,
        match_params: bool = False,
        stem: str = "patch",
        **kwargs: Any,
    ) -> None:
        options = dict(attention_options or {})
        attention_type = attention_class(attention)
        if kwargs.get("attn_layer"):
            raise UserError("attn_layer: a gauvit model takes attention='belief' and the like")
        more = {}
        if "grid" in inspect.signature(attention_type).parameters:
            more["grid"] = grid_of({**TIMM_ARGUMENTS, **kwargs})
        attn_layer = bind_options(attention_type, options, **more)
        block_fn: Callable[..., Block] = ReZeroBlock if rezero else kwargs.get("block_fn", Block)
        if match_params:
            all_arguments = {**TIMM_ARGUMENTS, **kwargs, "block_fn": block_fn}
            all_arguments |= {"device": "meta", "weight_init": "skip"}
            kwargs["mlp_ratio"] = matching_mlp_ratio(
                attn_layer,
                lambda **changes: VisionTransformer(**{**all_arguments, **changes}),
                all_arguments["embed_dim"],
                all_arguments["mlp_ratio"],
            )
        if kwargs.get("mlp_ratio") == 0:
            block_fn = without_ffn(block_fn)
        layers: dict[str, Any] = {"attn_layer": attn_layer, "block_fn": block_fn}
        if stem != "patch":
            layers["embed_layer"] = STEMS[choice("stem", stem, STEMS)]
        super().__init__(**{**kwargs, **layers})
        if isinstance(self.patch_embed, ConvPatchEmbed):
            # timm adapts this layer to other channels than three, and notes its name in config.json
            self._traits = {"first_conv": self.patch_embed.first_conv}
        given = {**TIMM_ARGUMENTS, **kwargs}
        for name in PLACELESS:
            if given[name] and self.priors():
                raise UserError(
                    f"attention {attention!r}: with {name} a token has no place on the grid that "
                    f"Gaussians lie on: take {name} out"
                )
        ours = dict(attention=attention, attention_options=options, rezero=rezero, stem=stem)
        self.gaupipe_args = {**kwargs, **ours}
        for placement in ("device", "dtype"):
            self.gaupipe_args.pop(placement, None)

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """As timm's. Raises UserError where tokens have their place on the grid."""
        if any(name.endswith(".positions") for name, _ in self.named_buffers()):
            raise UserError("set_input_size: this attention has a fixed grid: build another model")
        super().set_input_size(*args, **kwargs)

    def priors(self) -> set[str]:
        """Names of the Gaussians that its attentions have learned for their tokens."""
        return {name for name, _ in self.named_parameters() if name.endswith(".attn.prior")}

    @torch.jit.ignore  # type: ignore[untyped-decorator]  # torch declares no types for it
    def no_weight_decay(self) -> set[str]:
        """As timm's; and the priors, which would decay towards the middle of the grid."""
        return {*super().no_weight_decay(), *self.priors()}


def grid_of(arguments: dict[str, Any]) -> tuple[int, int] | None:
    """(h, w) in tokens by the arguments of timm's ``VisionTransformer``; None without a size."""
    if arguments["img_size"] is None:
        return None
    (height, width), patch = (to_2tuple(arguments[name]) for name in ("img_size", "patch_size"))
    return height // patch[0], width // patch[1]


def matching_mlp_ratio(
    attn_layer: type[nn.Module], build: Callable[..., Any], dim: int, mlp_ratio: float
) -> float:
    """The FFN's width, over d, at which a block with this attention has as many parameters as one
    with the standard attention; 0 where nothing is left of the FFN.

    ``build`` makes a ViT, without memory, of keywords of timm's ``VisionTransformer``; ``dim`` and
    ``mlp_ratio`` are those that it has without them. Parameters are counted, so with any
    ``mlp_layer``. Raises UserError where the attention adds more than the FFN has.
    """
    hidden = int(dim * mlp_ratio)

    def size(attention: type[nn.Module], hidden: int) -> int:
        """Parameters of a block whose FFN has a hidden width of at least 1."""
        ratio = (hidden + 0.5) / dim  # timm takes int(dim * mlp_ratio)
        return count_parameters(build(attn_layer=attention, mlp_ratio=ratio, depth=1).blocks)

    some = hidden or 2  # without an FFN any width tells what the attention adds
    extra = size(attn_layer, some) - size(ATTENTION["standard"], some)
    if not extra:
        return mlp_ratio
    a_unit = (size(attn_layer, 2 * some) - size(attn_layer, some)) / some
    exact = hidden - extra / a_unit
    nearest = round(exact)
    if nearest < 0:
        raise UserError(
            f"match_params: the attention adds {extra} parameters to a block, more than an FFN of "
            f"mlp_ratio {mlp_ratio} has; use a larger mlp_ratio or leave match_params "
            "out"
        )
    try:
        size(attn_layer, nearest or 2)
    except AssertionError:  # gated FFNs halve their width, which must be even
        nearest = 2 * round(exact / 2)
    return (nearest + 0.5) / dim if nearest else 0


def config_of(size: int, num_classes: int) -> dict[str, Any]:
    """timm's configuration of a model without trained weights."""
    return dict(
        input_size=(3, size, size),
        num_classes=num_classes,
        pool_size=None,
        crop_pct=1.0,
        fixed_input_size=True,
        interpolation="bicubic",
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        first_conv="patch_embed.proj",
        classifier="head",
    )


default_cfgs = generate_default_cfgs(
    {
        "gauvit_atto_patch4_32": config_of(32, 10),
        "gauvit_tiny_patch16_224": config_of(224, 1000),
        "gauvit_pico_patch2_8": config_of(8, 10),
    }
)


def create_gauvit(
    variant: str,
    pretrained: bool,
    preset: dict[str, Any],
    given: dict[str, Any],
    model_class: type[GauViT] = GauViT,
) -> Any:
    """A model of timm's registry: its ``preset`` keywords, those ``given`` in their place."""
    common = dict(class_token=False, global_pool="avg", qkv_bias=True)
    model: Any = build_model_with_cfg(  # timm declares no pretrained_cfg
        model_class,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=3, feature_cls="getter"),
        **{**common, **preset, **given},
    )
    return model


@register_model
def gauvit_atto_patch4_32(pretrained: bool = False, **kwargs: Any) -> GauViT:
    """GauViT-Atto (*GauTransformer, table 1*): 6.3 M parameters, 64 tokens, CIFAR sizes."""
    preset = dict(img_size=32, patch_size=4, embed_dim=384, depth=7, num_heads=12, mlp_ratio=1)
    return create_gauvit("gauvit_atto_patch4_32", pretrained, preset, kwargs)


@register_model
def gauvit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> GauViT:
    """GauViT-Tiny (*GauTransformer, table 1*): 29.9 M parameters, 196 tokens, ImageNet sizes."""
    preset = dict(img_size=224, patch_size=16, embed_dim=768, depth=8, num_heads=12, mlp_ratio=1)
    return create_gauvit("gauvit_tiny_patch16_224", pretrained, preset, kwargs)


@register_model
def gauvit_pico_patch2_8(pretrained: bool = False, **kwargs: Any) -> GauViT:
    """GauViT-Pico (ours): under 0.3 M parameters, 16 tokens, for the 8 x 8 digits."""
    preset = dict(img_size=8, patch_size=2, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2)
    return create_gauvit("gauvit_pico_patch2_8", pretrained, preset, kwargs)


@register_model
def gauvit_converted(
    pretrained: bool = False,
    base: str = "deit_small_patch16_224",
    attention: str = "standard",
    attention_options: dict[str, Any] | None = None,
    match_params: bool = False,
    **kwargs: Any,
) -> VisionTransformer:
    """Any of timm's entrypoints of a ``VisionTransformer``, ``base``, with another attention, its
    options, and ``match_params`` as :class:`GauViT` has it. What :func:`gaupipe.models.convert`
    makes of a timm model is saved under this name."""
    options = dict(attention_options or {})
    attention_type = bind_options(attention_class(attention), options)
    build = model_entrypoint(base)
    if match_params:
        if pretrained:
            raise UserError("match_params: trained weights keep their FFN: leave it out")
        without_memory = partial(build, **{**kwargs, "device": "meta"})
        first: Any = without_memory().blocks[0]
        ffn = getattr(first.mlp, "fc1", None)
        if ffn is None:
            raise UserError(f"match_params: {base} has an FFN without fc1: leave it out")
        dim = ffn.in_features
        ratio = ffn.out_features / dim
        kwargs["mlp_ratio"] = matching_mlp_ratio(attention_type, without_memory, dim, ratio)
    model: Any = build(pretrained, attn_layer=attention_type, **kwargs)
    for block in model.blocks:
        if not any(isinstance(part, attention_type) for part in block.modules()):
            raise UserError(f"{base}: a {type(block).__name__} keeps its own attention")
    model.gaupipe_args = dict(kwargs, base=base, attention=attention, attention_options=options)
    return model
