"""A ViT that starts from trained weights: fine-tuning, as ``model.name`` asks for it."""

from __future__ import annotations

import re
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from gaupipe.data.splits import ImageData
from gaupipe.settings import ModelSettings, Settings
from gaupipe.settings.places import folder_of
from gaupipe.settings.sections import LOCAL
from gaupipe.system import digests
from gaupipe.system.errors import UserError
from gaupipe.vit.build import create_model
from gaupipe.vit.convert import convert
from gaupipe.vit.inputs import input_of, spread_of
from gaupipe.vit.pretrained import find_published, load_pretrained
from gaupipe.vit.saving import WEIGHTS, check_scaling
from gaupipe.vit.slicing import VitSizes, slice_weights


def fine_tunes(name: str) -> bool:
    """True if a student called so starts from trained weights: a folder's, or those of a ViT of
    timm's."""
    return name.startswith(LOCAL) or (timm.is_model(name) and not name.startswith("gauvit_"))


def with_images_of_weights(settings: Settings) -> Settings:
    """The settings with the images that the weights of a fine-tuning expect, where the settings
    leave it open: their size, and how they are scaled. Raises UserError for weights of no ViT."""
    config = resolve_model_data_config(build_untrained(settings.model.name, {}, "meta"))
    scaling: dict[str, Any] = {"mean": list(config["mean"]), "std": list(config["std"])}
    if config["interpolation"] == "bicubic":
        scaling["interpolation"] = "bicubic"
    given = {name: value for name, value in settings.data.scaling.items() if value is not None}
    image_size = settings.data.image_size or config["input_size"][-1]
    return settings.with_section("data", image_size=image_size, scaling=scaling | given)


def with_weights(settings: Settings, data: ImageData) -> VisionTransformer:
    """The ViT that the settings fine-tune, with a new head for the classes, and converted to the
    attention of ``model.attention``. Its outputs are those of the trained ViT, but for the head,
    where :func:`~gaupipe.vit.convert.convert` keeps them. A smaller ViT starts with a slice of the
    weights.

    Raises UserError for weights that are not there, and for settings that do not fit.
    """
    name = settings.model.name
    arguments = arguments_for(settings.model, data)
    torch.manual_seed(settings.seed)  # a conversion draws, too
    stored, asked = fitting_sizes(settings.model, arguments)
    if asked == stored:
        vit = require_vit(name, load_pretrained(name, arguments, settings.download))
    else:
        given = {"in_chans": data.channels}
        whole = require_vit(name, load_pretrained(name, given, settings.download)).eval()
        spread = spread_of(whole, data, input_of(whole, data, name))
        vit = build_untrained(name, arguments, None)
        grid = tuple(whole.patch_embed.grid_size)
        kept = whole.state_dict()
        weights = slice_weights(kept, stored.heads, grid, vit, "model.args", spread)
        vit.load_state_dict(weights, strict=False)  # without a head for other classes
    return with_new_head(vit, settings.model, settings.seed)


def without_weights(settings: Settings, data: ImageData, device: str | None) -> VisionTransformer:
    """As :func:`with_weights`, but for the weights."""
    arguments = arguments_for(settings.model, data)
    torch.manual_seed(settings.seed)
    fitting_sizes(settings.model, arguments)
    vit = build_untrained(settings.model.name, arguments, device)
    return with_new_head(vit, settings.model, settings.seed)


def arguments_for(model: ModelSettings, data: ImageData) -> dict[str, Any]:
    """Keywords of ``timm.create_model`` for a ViT that is fine-tuned."""
    if model.match_params:
        raise UserError("model.match_params: a ViT that is fine-tuned keeps its FFN")
    sizes = dict(img_size=data.image_size, in_chans=data.channels, num_classes=data.num_classes)
    return {**sizes, **model.args, **model.student_args}


def remarks_on_start(model: ModelSettings) -> list[str]:
    """A line about settings of random weights, which a ViT that is fine-tuned does not have."""
    given = [
        f"model.{name}"
        for name in ("init", "init_std", "pos_embed_std")
        if getattr(model, name) != ModelSettings.model_fields[name].default
    ]
    if not given:
        return []
    return [f"starts with the weights of {model.name}: {', '.join(given)} changes nothing"]


def fitting_sizes(model: ModelSettings, arguments: dict[str, Any]) -> tuple[VitSizes, VitSizes]:
    """The sizes of trained weights, and those of the ViT that is to start with them. Raises
    UserError where it cannot."""
    stored = build_untrained(model.name, {}, "meta")
    vit = build_untrained(model.name, arguments, "meta")
    differing = sorted(parts_of(stored) ^ parts_of(vit))
    if differing:
        given = model.args | model.student_args
        raise UserError(
            f"model.args: {given} do not fit the weights of {model.name}, which the ViT differs "
            f"from in {', '.join(differing)}"
        )
    sizes = sizes_of(stored)
    asked = sizes_of(vit)
    sizes.check(asked, "model.args")
    return sizes, asked


def with_new_head(vit: VisionTransformer, model: ModelSettings, seed: int) -> VisionTransformer:
    """The ViT in the attention of ``model``, its head newly started. Raises UserError for a stem
    that it has not."""
    built = getattr(vit, "gaupipe_args", {})
    if model.stem != "patch" and built.get("stem") != model.stem:
        raise UserError(
            f"model.stem: {model.name} keeps the stem that its weights have: take model.stem=patch"
        )
    attention = built.get("attention", "standard")
    options = built.get("attention_options") or {}
    if (model.attention, model.attention_options) != (attention, options):
        vit = convert(vit, model.attention, **model.attention_options)
    torch.manual_seed(seed)
    heads: Any = vit.get_classifier()
    if not isinstance(heads, tuple):  # a distilled DeiT has two
        heads = (heads,)
    for head in heads:
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
    return vit


def sizes_of(vit: VisionTransformer) -> VitSizes:
    """What may be less than of trained weights."""
    first: Any = vit.blocks[0]  # timm says Module
    return VitSizes.of(vit.state_dict(), first.attn.num_heads)


def parts_of(vit: VisionTransformer) -> set[str]:
    """Names of the parameters but those of the head, the same for all blocks."""
    names = (name for name in vit.state_dict() if not name.startswith(("head.", "head_dist.")))
    return {re.sub(r"^blocks\.\d+", "blocks", name) for name in names}


def build_untrained(name: str, arguments: dict[str, Any], device: str | None) -> VisionTransformer:
    """A ViT without its trained weights. Raises UserError for a name without weights, and for a
    mean or std that is none."""
    source = name
    if name.startswith(LOCAL):
        source = f"{LOCAL}{folder_of(name)}"
    else:
        find_published(name)
    with torch.device(device or "cpu"):
        vit = require_vit(name, create_model(source, arguments))
    check_scaling(name, getattr(vit, "pretrained_cfg", None) or {})
    return vit


def require_vit(name: str, model: Any) -> VisionTransformer:
    """Returns the ``model`` if it can be a student; else raises UserError."""
    if isinstance(model, VisionTransformer):
        return model
    raise UserError(f"model.name: {name} is a {type(model).__name__}, no VisionTransformer of timm")


def weights_sha256(name: str) -> dict[str, str]:
    """{"the weights in FOLDER": their digest} of a fine-tuning from a folder."""
    if not name.startswith(LOCAL):
        return {}
    folder = folder_of(name)
    files = [folder / file for file in WEIGHTS if (folder / file).is_file()]
    return {f"the weights in {folder}, sha256": digests.sha256(file) for file in files[:1]}
