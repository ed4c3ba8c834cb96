"""Draws the confusion matrix of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gaupipe.system.files import whole_file

NUMBERED = 20
"""Most classes of a picture whose cells have numbers."""

NAMED = 60
"""Most classes of a picture whose axes have names."""


def draw(matrix: Sequence[Sequence[int]], names: Sequence[str], path: Path) -> None:
    """Writes a PNG of a ``matrix`` [C, C] of counts: a row for each class, a column for each
    prediction, coloured by the share of the row's images."""
    from matplotlib.figure import Figure

    counts = np.asarray(matrix)
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    shown = [name if len(name) <= 24 else f"{name[:23]}…" for name in names]
    side = min(max(4.0, 0.45 * len(names)), 16.0)  # inches
    margin = 1 + 0.08 * max(map(len, shown))
    figure = Figure(figsize=(side + margin + 1, side + margin), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the label", shrink=0.8)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("label")
    if len(names) <= NAMED:
        axes.set_xticks(range(len(names)), shown, rotation=90, parse_math=False)
        axes.set_yticks(range(len(names)), shown, parse_math=False)
    if len(names) <= NUMBERED:
        for (row, column), count in np.ndenumerate(counts):
            colour = "white" if shares[row, column] > 0.5 else "black"
            if count:
                axes.text(column, row, str(count), ha="center", va="center", color=colour)
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=150)
