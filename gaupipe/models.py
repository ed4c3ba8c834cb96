"""GauViT models for timm: entrypoints, the ReZero baseline, forward passes that show the attention, student folders.

Importing this module makes ``gauvit_*`` known to ``timm.create_model`` and the attentions of
:data:`gaupipe.attention.ATTENTION` to timm's ``attn_layer`` as ``gau_<key>``. Axis letters: B images, L blocks, H heads,
T tokens, d model width.
"""

from __future__ import annotations

import copy
import inspect
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._hub import save_for_hf
from timm.models.vision_transformer import ATTN_LAYERS, Block, VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from gaupipe.attention import ATTENTION, attention_class, bind_options, count_parameters
from gaupipe.errors import UserError

__all__ = ["GauViT", "ReZeroBlock", "forward_with_maps", "run_blocks", "save_student"]

STOCK_ARCHITECTURE = "vit_tiny_patch16_224"
"""The timm model whose name a plain student is saved under; every size is overridden by ``model_args``."""

ATTN_LAYERS.update({f"gau_{key}": cls for key, cls in ATTENTION.items()})


class ReZero(nn.Module):
    """Multiplies by a learned scalar that starts at 0 (*ReZero baseline*: x + a * f(x))."""

    def __init__(self, device=None, dtype=None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros((), device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class ReZeroBlock(Block):
    """timm's block without normalisation, each branch behind a scalar that starts at 0."""

    def __init__(self, *args, device=None, dtype=None, **kwargs) -> None:
        super().__init__(*args, device=device, dtype=dtype, **kwargs)
        self.norm1, self.norm2 = nn.Identity(), nn.Identity()
        self.ls1, self.ls2 = ReZero(device, dtype), ReZero(device, dtype)


class NoFFN(nn.Module):
    """Stands where a block has its FFN and adds nothing (*Belief2, table 3, "without FFN layers"*)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def without_ffn(block_class: type[Block]) -> type[Block]:
    """A ``block_fn`` for timm: blocks of ``block_class`` that consist of their attention only."""

    def block_fn(*args, mlp_ratio: float, **kwargs) -> Block:
        block = block_class(*args, mlp_ratio=1, **kwargs)
        block.norm2, block.mlp, block.ls2, block.drop_path2 = nn.Identity(), NoFFN(), nn.Identity(), nn.Identity()
        return block

    return block_fn


class GauViT(VisionTransformer):
    """timm's ``VisionTransformer`` with an attention chosen by key.

    ``attention``: a key of :data:`gaupipe.attention.ATTENTION`; ``attention_options``: keyword arguments of its class;
    ``rezero``: blocks without normalisation, behind scalars that start at 0; ``match_params``: the FFN shrinks by what
    the attention adds to the standard one. ``mlp_ratio=0`` leaves the FFN out. Everything else goes to timm's class,
    and all of it is kept in ``gaupipe_args``. Raises UserError for an unknown attention or option.
    """

    def __init__(self, attention: str = "standard", attention_options: dict | None = None, rezero: bool = False,
                 match_params: bool = False, **kwargs) -> None:
        given = dict(kwargs, attention=attention, attention_options=dict(attention_options or {}),
                     rezero=rezero, match_params=match_params)
        sizes = {name: parameter.default for name, parameter in inspect.signature(VisionTransformer).parameters.items()}
        sizes.update(kwargs)
        attention_type = attention_class(attention)
        if match_params:
            kwargs["mlp_ratio"] = sizes["mlp_ratio"] = matching_mlp_ratio(attention_type, attention_options or {}, sizes)
        block_fn = ReZeroBlock if rezero else sizes["block_fn"]
        if sizes["mlp_ratio"] == 0:
            block_fn = without_ffn(block_fn)
        kwargs.update(attn_layer=bind_options(attention_type, attention_options or {}), block_fn=block_fn)
        super().__init__(**kwargs)
        self.gaupipe_args = given


def matching_mlp_ratio(attention_type: type[nn.Module], options: dict, sizes: dict) -> float:
    """The FFN's width, over d, at which a block of this attention has as many parameters as a standard one."""
    dim = sizes["embed_dim"]
    arguments = dict(dim=dim, num_heads=sizes["num_heads"], qkv_bias=sizes["qkv_bias"], proj_bias=sizes["proj_bias"])
    extra = count_parameters(attention_type(**arguments, **options, device="meta"))
    extra -= count_parameters(ATTENTION["standard"](**arguments, device="meta"))
    hidden = int(dim * sizes["mlp_ratio"]) - round(extra / (2 * dim + 1))  # a hidden unit: two weight rows, one bias
    if hidden < 0:
        raise UserError(f"match_params: the attention adds {extra} parameters to a block, more than an FFN of mlp_ratio "
                        f"{sizes['mlp_ratio']} has; use a larger mlp_ratio or leave match_params out")
    return (hidden + 0.5) / dim if hidden else 0  # timm takes int(dim * mlp_ratio)


def run_blocks(model: VisionTransformer, images: Tensor, attend: Callable[[int, nn.Module, Tensor], Tensor]) -> Tensor:
    """The forward pass of a pre-norm timm ViT, block by block, with the attention in the caller's hands.

    ``attend(layer, attention, tokens)`` gets the index of the block, its attention module and the normalised tokens
    [B, T, d], and returns the update [B, T, d]. Images [B, C, height, width]; returns logits [B, classes].
    """
    x = embed(model, images)
    for layer, block in enumerate(model.blocks):
        x = x + block.drop_path1(block.ls1(attend(layer, block.attn, block.norm1(x))))
        x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    return model.forward_head(model.norm(x))


def embed(model: VisionTransformer, images: Tensor) -> Tensor:
    """The tokens [B, T, d] that the first block of a timm ViT gets."""
    return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))


def forward_with_maps(model: VisionTransformer, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(logits [B, classes], rows): rows is a list over blocks of float32 log-probabilities [B, H, T, T], the attention
    maps that the logits were computed with."""
    maps = []

    def attend(layer: int, attention: nn.Module, tokens: Tensor) -> Tensor:
        update, rows = attention.forward_with_rows(tokens)
        maps.append(rows)
        return update

    return run_blocks(model, images, attend), maps


def save_student(model: GauViT, folder: str | Path, label_names: list[str] | None = None, **data_config) -> None:
    """Writes a folder that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` rebuilds the model from:
    config.json and model.safetensors. A folder that is there is replaced as a whole.

    A model with standard attention and ordinary blocks is saved as a stock timm model, which loads without gaupipe;
    any other as the ``gauvit`` it is. ``data_config`` (``mean``, ``std``, ...) says how images are to be prepared.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    architecture, model_args = stock_or_gauvit(model)
    pretrained_cfg = dict(architecture=architecture, input_size=[model.in_chans, *model.patch_embed.img_size],
                          num_classes=model.num_classes, **data_config)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    described = copy.copy(model)
    described._model_args = model_args  # timm adds to model_args what create_model was given, also gaupipe's keywords
    save_for_hf(described, str(fresh), model_args=model_args, safe_serialization=True,
                model_config=dict(pretrained_cfg=pretrained_cfg, label_names=label_names))
    fresh.chmod(0o755)
    if folder.exists():
        old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-"))
        folder.rename(old / folder.name)
        fresh.rename(folder)
        shutil.rmtree(old)
    else:
        fresh.rename(folder)


def stock_or_gauvit(model: GauViT) -> tuple[str, dict]:
    """(timm architecture, model_args) that rebuild the model; a stock architecture where that is enough."""
    changed_since = {key: value for key, value in getattr(model, "_model_args", {}).items() if key != "pretrained"}
    args = {**model.gaupipe_args, **changed_since, "num_classes": model.num_classes}
    ordinary = {key: args.pop(key) for key in ("attention", "attention_options", "rezero", "match_params")}
    if ordinary["attention"] == "standard" and not ordinary["rezero"] and args.get("mlp_ratio") != 0:
        return STOCK_ARCHITECTURE, args
    return model.pretrained_cfg["architecture"], dict(args, **ordinary)


def _cfg(size: int, num_classes: int) -> dict:
    return dict(input_size=(3, size, size), num_classes=num_classes, pool_size=None, crop_pct=1.0, fixed_input_size=True,
                interpolation="bicubic", mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD,
                first_conv="patch_embed.proj", classifier="head")


default_cfgs = generate_default_cfgs({
    "gauvit_atto_patch4_32": _cfg(32, 10),
    "gauvit_tiny_patch16_224": _cfg(224, 1000),
    "gauvit_pico_patch2_8": _cfg(8, 10),
})


def _create_gauvit(variant: str, pretrained: bool, preset: dict, given: dict) -> GauViT:
    common = dict(class_token=False, global_pool="avg", qkv_bias=True)
    return build_model_with_cfg(GauViT, variant, pretrained, pretrained_filter_fn=checkpoint_filter_fn,
                                feature_cfg=dict(out_indices=3, feature_cls="getter"), **{**common, **preset, **given})


@register_model
def gauvit_atto_patch4_32(pretrained: bool = False, **kwargs) -> GauViT:
    """GauViT-Atto (*GauTransformer, table 1*): 6.3 M parameters, 64 tokens, CIFAR sizes."""
    preset = dict(img_size=32, patch_size=4, embed_dim=384, depth=7, num_heads=12, mlp_ratio=1, num_classes=10)
    return _create_gauvit("gauvit_atto_patch4_32", pretrained, preset, kwargs)


@register_model
def gauvit_tiny_patch16_224(pretrained: bool = False, **kwargs) -> GauViT:
    """GauViT-Tiny (*GauTransformer, table 1*): 29.9 M parameters, 196 tokens, ImageNet sizes."""
    preset = dict(img_size=224, patch_size=16, embed_dim=768, depth=8, num_heads=12, mlp_ratio=1, num_classes=1000)
    return _create_gauvit("gauvit_tiny_patch16_224", pretrained, preset, kwargs)


@register_model
def gauvit_pico_patch2_8(pretrained: bool = False, **kwargs) -> GauViT:
    """GauViT-Pico (ours): under 0.3 M parameters, 16 tokens, for the 8 x 8 digits."""
    preset = dict(img_size=8, patch_size=2, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2, num_classes=10)
    return _create_gauvit("gauvit_pico_patch2_8", pretrained, preset, kwargs)
