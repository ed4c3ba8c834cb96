"""The images that a trained model takes, and a data set's images made into them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gaupipe.data.batches import Batches
from gaupipe.data.load import by_channel
from gaupipe.data.splits import ImageData, Split
from gaupipe.system.errors import UserError
from gaupipe.vit.saving import check_scaling
from gaupipe.vit.slicing import spread_of_stream

SETTING = "phase_a.teacher"

IMAGES_OF_SPREAD = 128


@dataclass(frozen=True)
class Input:
    """The images that a trained ViT takes: squares of ``size`` pixels a side, resized by
    ``interpolation`` and normalised by the ``mean`` and ``std`` of each channel, shares of 255."""

    size: int
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


def input_of(model: Any, data: ImageData, name: str) -> Input:
    """The images that a model was built and trained for. Its ``crop_pct`` is left out: a teacher
    sees what its student sees, or its maps would be of another part of the image.

    Raises UserError for a size that is no fixed square, for another number of channels, and for a
    mean or std that is none.
    """
    config = getattr(model, "pretrained_cfg", None) or {}
    check_scaling(f"{SETTING}: {name}", config)
    sizes = getattr(getattr(model, "patch_embed", None), "img_size", None)
    sizes = tuple(sizes or (config.get("input_size") or ())[1:])
    if len(sizes) != 2 or sizes[0] != sizes[1]:
        written = " x ".join(map(str, sizes)) or "no fixed size"
        raise UserError(
            f"{SETTING}: {name}: takes images of {written}: squares of one size can be made for "
            "it: set phase_a.teacher_args={img_size: 224}"
        )
    interpolation = "bilinear" if config.get("interpolation") == "bilinear" else "bicubic"
    channels = len(data.mean)
    mean = by_channel(config.get("mean") or data.mean, channels, f"{SETTING}: {name}: mean")
    std = by_channel(config.get("std") or data.std, channels, f"{SETTING}: {name}: std")
    return Input(int(sizes[0]), interpolation, mean, std)


def as_taken(split: Split, data: ImageData, takes: Input) -> tuple[Split, ImageData]:
    """A split of a data set, and the data set itself, as a model ``takes`` their images."""
    taken = replace(data, image_size=takes.size, mean=takes.mean, std=takes.std)
    return Split(split.source.at(takes.size, takes.interpolation), split.positions), taken


def spread_of(vit: VisionTransformer, data: ImageData, takes: Input) -> Tensor | None:
    """:func:`~gaupipe.vit.slicing.spread_of_stream` of a model in eval mode on some of the training
    images of a data set, as it ``takes`` them."""
    split, taken = as_taken(data.train, data, takes)
    device = next(vit.parameters()).device
    batches = Batches(split, taken, device, 32).in_order(split.evenly_spaced(IMAGES_OF_SPREAD))
    return spread_of_stream(vit, (batch.images for batch in batches))
