"""Colours of weights, in the terminal and on the page, and which weights get the last of them."""

from __future__ import annotations

import functools

import numpy as np

OPAQUE = 0.9
"""Of the largest weight; smaller ones let the photo through."""
PERCENTILE = 0.98
"""Of a map's weights: from here on all are drawn alike, since a single patch may have more than all
others. The page has the same (static/dom.js)."""


@functools.cache
def colours() -> np.ndarray:
    """Red, green, blue and opacity of 256 weights from the least to the most, uint8 [256, 4]:
    matplotlib's viridis, which is perceptually uniform, also for the colour-blind."""
    from matplotlib import colormaps

    table = colormaps["viridis"](range(256), bytes=True)
    table[:, 3] = np.round(255 * OPAQUE * np.linspace(0, 1, 256) ** 0.75)
    return table


def top_of(weights: np.ndarray) -> float:
    """The weight from which on all are drawn alike; the largest where hardly any is above 0."""
    return float(np.quantile(weights, PERCENTILE)) or float(weights.max()) or 1.0
