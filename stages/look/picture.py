"""A map over its photo: the colours, which the page of view has too, and the picture that inspect
writes."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from PIL import Image

from gaupipe.system.files import whole_file
from stages.look.image_maps import Crop

OPAQUE = 0.9
"""Of the largest weight; smaller ones let the photo through."""
MARK = "#ff2d6f"


@functools.cache
def colours() -> np.ndarray:
    """Red, green, blue and opacity of 256 weights from the least to the most, uint8 [256, 4]:
    matplotlib's viridis, which is perceptually uniform, also for the colour-blind."""
    from matplotlib import colormaps

    table = colormaps["viridis"](range(256), bytes=True)
    table[:, 3] = np.round(255 * OPAQUE * np.linspace(0, 1, 256) ** 0.75)
    return table


def draw(
    photo: Image.Image,
    crop: Crop,
    maps: dict[str, np.ndarray],
    query: int | None,
    title: str,
    path: Path,
) -> None:
    """Writes a PNG of the photo under each of ``maps`` [h, w], by their names, on one scale from 0.
    The map lies on the part that the model sees; outlined is the patch of the ``query``."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    palette = ListedColormap(colours() / 255)
    scale = ScalarMappable(cmap=palette)
    scale.set_clim(0, max(weights.max() for weights in maps.values()) or 1)
    figure = Figure(figsize=(5 * len(maps) + 1, 5), layout="constrained")
    panes = figure.subplots(1, len(maps), squeeze=False)[0]
    left, top, right, bottom = np.array(crop) * [*photo.size, *photo.size]
    for axes, (name, weights) in zip(panes, maps.items(), strict=True):
        height, width = weights.shape
        axes.set_title(name, parse_math=False)
        axes.set_axis_off()
        axes.imshow(photo.convert("RGB"), extent=(0, photo.width, photo.height, 0))
        axes.imshow(scale.to_rgba(weights), extent=(left, right, bottom, top))
        axes.set(xlim=(0, photo.width), ylim=(photo.height, 0))
        if query is not None:
            across = (right - left) / width
            down = (bottom - top) / height
            corner = left + query % width * across, top + query // width * down
            axes.add_patch(Rectangle(corner, across, down, fill=False, edgecolor=MARK, lw=2))
    figure.colorbar(scale, ax=panes, shrink=0.6)
    figure.suptitle(title)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=150)
