"""The ViT that the settings name, sized for a data set."""

from __future__ import annotations

import difflib
import math
from typing import Any

import timm
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import gaupipe.vit.jit
import gaupipe.vit.resnet  # noqa: F401
from gaupipe.settings import ModelSettings
from gaupipe.settings.sections import LOCAL
from gaupipe.system.errors import UserError, one_line
from gaupipe.vit.initialisation import start_weights


def build_vit(
    model: ModelSettings,
    data: Any,
    attention: str = "standard",
    device: str | None = None,
    changes: tuple[str, dict[str, Any]] = ("model.args", {}),
    **options: Any,
) -> VisionTransformer:
    """The timm model of the settings, sized for the data (``image_size``, ``channels``,
    ``num_classes``), its weights started.

    ``device`` "meta" builds it without weights. ``changes`` are a setting, for messages, and its
    keywords, which win over those of ``model.args``. Raises UserError where it cannot be built, and
    for images that patches do not cover.
    """
    if not timm.is_model(model.name):
        near = difflib.get_close_matches(model.name, timm.list_models("gauvit_*"), n=1, cutoff=0)
        raise UserError(f"model.name: unknown model {model.name!r}; did you mean {near[0]!r}?")
    setting, changed = changes
    args = {**model.args, **changed}
    sizes = dict(img_size=data.image_size, in_chans=data.channels, num_classes=data.num_classes)
    try:
        placed: dict[str, Any] = {"device": device} if device else {}
        if model.stem != "patch":
            options["stem"] = model.stem
        vit = timm.create_model(
            model.name, attention=attention, **{**sizes, **args}, **options, **placed
        )
        assert isinstance(vit, VisionTransformer)  # no other model of timm's takes an attention
        source = setting if "patch_size" in changed else "model.args"
        _check_patches(vit.patch_embed.patch_size, data.image_size, source)
        start_weights(vit, model)
    except UserError:
        raise
    except Exception as error:  # timm's classes raise many kinds for a wrong keyword
        if "unexpected keyword argument 'attention'" in str(error):
            models = ", ".join(timm.list_models("gauvit_*_patch*"))
            reason = f"has no choice of attentions: take one of {models}"
            raise UserError(f"model.name: {model.name} {reason}") from None
        settings = f"model.args and {setting}" if changed else "model.args"
        raise UserError(
            f"{settings}: {model.name} cannot be built for {data.image_size}-pixel images with "
            f"{args}: {one_line(error)}"
        ) from None
    return vit


def width_of(model: ModelSettings) -> int:
    """Channels of the residual stream, for images of any size; 0 of a model that cannot be built,
    which :func:`build_vit` refuses."""
    if not timm.is_model(model.name) and not model.name.startswith(LOCAL):
        return 0  # without asking the hub
    try:
        vit: Any = timm.create_model(model.name, device="meta", **model.args)
    except Exception:
        return 0
    return vit.num_features


def _check_patches(patch: tuple[int, int], image_size: int, setting: str) -> None:
    """timm drops the border of an image that is no whole number of patches high and wide."""
    step = math.lcm(*patch)
    if image_size % step:
        below = image_size // step * step
        above = -(-image_size // step) * step
        near = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"data.image_size: patches of {patch[0]} x {patch[1]} pixels do not cover images of "
            f"{image_size} x {image_size}; {near} would fit, or another {setting}.patch_size"
        )


def create_model(name: str, arguments: dict[str, Any], **weights: Any) -> nn.Module:
    """``timm.create_model`` with the keywords ``arguments`` and ``weights``. Raises UserError for
    whatever timm or the hub makes of them."""
    try:
        return timm.create_model(name, **arguments, **weights)
    except LocalEntryNotFoundError:
        raise UserError(
            f"{name}: the hub with its weights cannot be reached; a download needs a connection, "
            "local-dir:FOLDER a folder with config.json and model.safetensors"
        ) from None
    except Exception as error:
        raise UserError(f"timm cannot build {name} with {arguments}: {one_line(error)}") from None
