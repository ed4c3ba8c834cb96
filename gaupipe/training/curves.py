"""Learning curves of trainings, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gaupipe.system.progress import EpochMetrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "loss": {"val_loss": "validation", "train_loss": "training"},
    "accuracy": {"val_acc": "validation", "train_acc": "training"},
    "weight": {"gamma": "gamma, of the maps", "alpha": "alpha, of the predictions"},
}
"""By what a panel shows the metrics in it, the first drawn as a line, the second dotted."""


def draw(trainings: Mapping[str, Sequence[EpochMetrics]], path: Path) -> None:
    """Writes the curves of trainings, by their names, to ``path``.png and ``path``.svg."""
    save(curves(trainings), path)


def curves(trainings: Mapping[str, Sequence[EpochMetrics]]) -> Figure:
    """Losses and accuracies after each epoch; and gamma and alpha, where a training has them."""
    from matplotlib import color_sequences
    from matplotlib.figure import Figure

    entries = [entry for metrics in trainings.values() for entry in metrics]
    panels = [*PANELS]
    if not any(entry.get("gamma") or entry.get("alpha") for entry in entries):
        panels.remove("weight")
    figure = Figure(figsize=(4 * len(panels), 3.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for (name, label), style in zip(PANELS[panel].items(), ("-", ":"), strict=True):
            for metrics, colour in zip(trainings.values(), cycle(color_sequences["tab10"])):
                epochs = [entry["epoch"] for entry in metrics]
                values = np.array([entry.get(name) for entry in metrics], float)  # None is nan
                # a mark, because a line of one epoch is not seen
                axes.plot(epochs, values, color=colour, linestyle=style, marker=".", markersize=3)
            axes.plot([], [], color="black", linestyle=style, label=label)
        axes.set_xlabel("epoch")
        axes.set_ylabel(panel)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    lines = figure.axes[0].get_lines()[: len(trainings)]
    figure.legend(lines, [*trainings], loc="outside upper center", fontsize=8, frameon=False)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes ``path``.png and ``path``.svg, the same bytes for the same figure."""
    from matplotlib import rc_context

    figure.savefig(f"{path}.png", dpi=150)
    with rc_context({"svg.hashsalt": "gaupipe"}):
        figure.savefig(f"{path}.svg", metadata={"Date": None})
