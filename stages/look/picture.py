"""A map over its image, as a picture in a file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from PIL.Image import Resampling

from gaupipe.system.files import whole_file
from stages.look.colours import top_of
from stages.look.image_maps import Crop

SIDE = 256
"""Pixels of the shorter side of a picture, at least."""
MARK = "#ff2d6f"
"""The frame of the query's patch, as on the page (static/draw.js)."""
GAMMA = 0.7
"""Of the light; below 1 the middle weights are lighter. As on the page."""
BRIGHTNESS = 0.35
"""Of the grey photo round the light."""
LUMINANCE = (0.2126, 0.7152, 0.0722)
"""Of red, green and blue, as browsers make a photo grey."""


def draw(
    weights: np.ndarray, query: int | None, photo: tuple[Image.Image, Crop], path: Path
) -> None:
    """Writes a PNG of a ``photo`` that is in colour where a map [h, w] is high, and grey and dark
    elsewhere; the map lies over the part that the model sees. A frame marks the patch of the
    ``query``."""
    height, width = weights.shape
    shares = np.clip(weights / top_of(weights), 0, 1)
    picture, crop = photo
    times = math.ceil(SIDE / min(picture.size))
    size = (times * picture.width, times * picture.height)
    picture = picture.convert("RGB").resize(size, Resampling.NEAREST)
    left, top, right, bottom = np.round(np.array(crop) * (*size, *size)).astype(int).tolist()
    seen = (right - left, bottom - top)

    grey = BRIGHTNESS * np.asarray(picture) @ np.array(LUMINANCE)
    dark = Image.fromarray(np.round(grey).astype(np.uint8)).convert("RGB")
    dark.paste(picture.crop((left, top, right, bottom)), (left, top), light(shares, seen))

    if query is not None:
        row, column = divmod(query, width)
        x, next_x = (left + round(seen[0] * edge / width) for edge in (column, column + 1))
        y, next_y = (top + round(seen[1] * edge / height) for edge in (row, row + 1))
        frame = ImageDraw.Draw(dark)
        frame.rectangle((x, y, next_x - 1, next_y - 1), outline=MARK, width=min(size) // 100)
    with whole_file(path) as partial:
        dark.save(partial, format="PNG")


def light(shares: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """How clear each pixel is of a photo of a size, by the shares [h, w] of a map."""
    enlarged = Image.fromarray(shares.astype(np.float32)).resize(size, Resampling.BICUBIC)
    clear = np.clip(np.asarray(enlarged), 0, 1) ** GAMMA
    return Image.fromarray(np.round(255 * clear).astype(np.uint8))
