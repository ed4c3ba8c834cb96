"""Learning curves, and accuracy over cost: the figure of a comparison."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.compare.report import Comparison, RowResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = {
    "val_loss": "validation loss",
    "val_acc": "validation accuracy",
    "loss_hard": "training loss (labels)",
}


def curves(results: Comparison) -> Figure:
    """Validation loss, validation accuracy and training loss per epoch, and the final validation
    accuracy over the multiply-adds of the whole training, phase A and export counted.

    The training loss is that of the labels (L_hard), which all rows have. A line is the mean over
    seeds, its band goes from the lowest seed to the highest. Beside distilled students
    baselines are dashed. The reference is black.
    """
    from matplotlib import color_sequences
    from matplotlib.figure import Figure

    rows = [row for row in results.rows if row.runs]
    palette = color_sequences["tab10"]
    if len(rows) > len(palette):
        palette = color_sequences["tab20"]
    names = [row.row for row in rows]
    colours = dict(zip(names, cycle(palette)))
    colours[results.reference] = (0, 0, 0)
    height = max(7, 1.6 + 0.22 * len(rows))  # in inches
    figure = Figure(figsize=(10, height), layout="constrained")
    *panels, costs = figure.subplots(2, 2).flat
    for panel, (name, label) in zip(panels, CURVES.items(), strict=True):
        panel.set_ylabel(label)
        draw_curves(panel, rows, name, colours)
    for row in rows:
        draw_final(costs, row, colours[row.row])
    costs.set_xscale("log")
    costs.set_xlabel("multiply-adds of the training, all counted")
    costs.set_ylabel("final validation accuracy")
    for panel in figure.axes:
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    seeds = len(results.seeds)
    spread = "one seed"
    if seeds > 1:
        spread = f"{seeds} seeds: mean, lowest to highest"
    figure.suptitle(f"{results.data}, {spread}", fontsize=10)
    return figure


def draw_final(panel: Axes, row: RowResult, colour: Any) -> None:
    """Marks the final accuracy of a row over what its training cost: mean, lowest, highest seed."""
    final = [run.final_acc for run in row.runs]
    mean = np.mean(final)
    below = mean - min(final)
    above = max(final) - mean
    cost = row.final.multiply_adds.mean
    assert cost is not None  # it has runs
    marker = "o" if row.plain else "D"
    panel.errorbar([cost], [mean], [[below], [above]], fmt=marker, color=colour)


def draw_curves(panel: Axes, rows: list[RowResult], name: str, colours: dict[str, Any]) -> None:
    """Draws the metric ``name`` of every row after each epoch."""
    distilled = not all(row.plain for row in rows)
    drawn = []
    for row in rows:
        metrics: list[list[float]] = [getattr(run, name) for run in row.runs]
        epochs = min(map(len, metrics))  # a training may have stopped early
        values = np.array([metric[:epochs] for metric in metrics])  # [seeds, epochs]
        epoch = np.arange(1, epochs + 1)
        style = "--" if row.plain and distilled else "-"
        colour = colours[row.row]
        panel.plot(epoch, values.mean(0), style, color=colour, linewidth=1.4, label=row.row)
        panel.fill_between(epoch, values.min(0), values.max(0), color=colour, alpha=0.12)
        drawn.append(values[np.isfinite(values)])  # the loss of a training that diverged is not
    panel.set_xlabel("epoch (phase A not counted)" if distilled else "epoch")
    shown = np.concatenate(drawn)
    if not shown.size:
        return
    # the first epochs, whose accuracy is low and whose loss is high, would squeeze all others
    if name == "val_acc":
        low, high = np.quantile(shown, [0.03, 1.0])
    else:
        low, high = np.quantile(shown, [0.0, 0.97])
    margin = 0.05 * (high - low) or 0.05
    panel.set_ylim(low - margin, high + margin)
