"""A map over its image, as a picture in a file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from PIL.Image import Resampling

from gaupipe.system.files import whole_file
from stages.look.colours import colours
from stages.look.image_maps import WHOLE, Crop

SIDE = 256
"""Pixels of the shorter side of a picture, at least."""
MARK = "#ff2d6f"
"""The frame of the query's patch, as on the page (static/draw.js)."""


def draw(
    weights: np.ndarray, query: int | None, photo: tuple[Image.Image, Crop] | None, path: Path
) -> None:
    """Writes a PNG of a map [h, w] over the part of a ``photo`` that the model sees. The colours
    go from 0 to the largest weight; a frame marks the patch of the ``query``. Without a photo the
    map is opaque."""
    height, width = weights.shape
    painted = colours()[np.round(255 * weights / (weights.max() or 1)).astype(int)]
    picture, crop = photo or (Image.new("RGB", (width, height)), WHOLE)
    if photo is None:
        painted[..., 3] = 255

    times = math.ceil(SIDE / min(picture.size))
    size = (times * picture.width, times * picture.height)
    picture = picture.convert("RGB").resize(size, Resampling.NEAREST)
    left, top, right, bottom = np.round(np.array(crop) * (*size, *size)).astype(int).tolist()
    seen = (right - left, bottom - top)
    overlay = Image.fromarray(painted).resize(seen, Resampling.NEAREST)
    picture.paste(overlay, (left, top), overlay)

    if query is not None:
        row, column = divmod(query, width)
        x, next_x = (left + round(seen[0] * edge / width) for edge in (column, column + 1))
        y, next_y = (top + round(seen[1] * edge / height) for edge in (row, row + 1))
        frame = ImageDraw.Draw(picture)
        frame.rectangle((x, y, next_x - 1, next_y - 1), outline=MARK, width=min(size) // 100)
    with whole_file(path) as partial:
        picture.save(partial, format="PNG")
