"""A map over its photo: the colours that the page of view has too, and the picture that inspect
writes."""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from stages.look.image_maps import Crop

OPAQUE = 0.9
"""Of the largest weight; smaller ones let the photo through."""
MARK = (255, 45, 111)
SIDE = 480
MARGIN = 24


@functools.cache
def colours() -> np.ndarray:
    """Red, green, blue and opacity of 256 weights from the least to the most, uint8 [256, 4]:
    matplotlib's viridis, which is perceptually uniform, also for the colour-blind."""
    from matplotlib import colormaps

    table = colormaps["viridis"](range(256), bytes=True)
    table[:, 3] = np.round(255 * OPAQUE * np.linspace(0, 1, 256) ** 0.75)
    return table


def draw(
    picture: Image.Image, crop: Crop, maps: dict[str, np.ndarray], query: int | None, text: str
) -> Image.Image:
    """The photo, and beside it the photo under each of ``maps`` [h, w], by their names, on one
    scale from 0. Outlined are the part that the model sees, and the patch of the ``query``."""
    size = (SIDE, round(SIDE * picture.height / picture.width))
    if min(picture.size) >= 24:
        photo = picture.convert("RGB").resize(size)
    else:
        photo = picture.convert("RGB").resize(size, Image.Resampling.NEAREST)
    left, top, right, bottom = (
        round(share * length) for share, length in zip(crop, (*size, *size), strict=True)
    )
    most = max(weights.max() for weights in maps.values()) or 1
    sheet = Image.new("RGB", ((SIDE + MARGIN) * (len(maps) + 1) + MARGIN, size[1] + 96), "white")
    write = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(15)
    sheet.paste(photo, (MARGIN, 40))
    for place, (name, weights) in enumerate(maps.items(), 1):
        height, width = weights.shape
        heat = colours()[np.rint(255 * weights / most).astype(int)]
        over = Image.fromarray(heat).resize((right - left, bottom - top), Image.Resampling.NEAREST)
        pane = photo.copy()
        pane.paste(over, (left, top), over)
        mark = ImageDraw.Draw(pane)
        mark.rectangle((left, top, right - 1, bottom - 1), outline="white")
        if query is not None:
            across = (right - left) / width
            down = (bottom - top) / height
            x = left + query % width * across
            y = top + query // width * down
            mark.rectangle((x, y, x + across, y + down), outline=MARK, width=3)
        corner = MARGIN + place * (SIDE + MARGIN)
        sheet.paste(pane, (corner, 40))
        write.text((corner, 14), name, "black", font)
    bar = Image.fromarray(colours()[None]).convert("RGB").resize((200, 10))
    sheet.paste(bar, (MARGIN, size[1] + 52))
    write.text((MARGIN + 212, size[1] + 48), f"0 to {most:.3g}", "black", font)
    write.text((MARGIN, size[1] + 70), text, "black", font)
    return sheet
