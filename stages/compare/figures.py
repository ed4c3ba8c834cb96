"""The figure of a comparison: learning curves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes ``path``.png and ``path``.svg, the same bytes for the same results."""
    from matplotlib import rc_context

    figure = curves(results)
    figure.savefig(f"{path}.png", dpi=150)
    with rc_context({"svg.hashsalt": "gaupipe"}):
        figure.savefig(f"{path}.svg", metadata={"Date": None})


def curves(results: dict[str, Any]) -> Figure:
    """Validation loss, validation accuracy and training loss per epoch, and the final validation
    accuracy over the multiply-adds of the whole training, phase A and export counted.

    The training loss is that of the labels (L_hard), which all rows have. A line is the mean over
    seeds, its band goes from the lowest seed to the highest. Beside distilled students
    baselines are dashed. The reference is black.
    """
    from matplotlib.figure import Figure

    rows = [row for row in results["rows"] if row["runs"]]
    height = max(7, 1.6 + 0.22 * len(rows))  # in inches
    figure = Figure(figsize=(10, height), layout="constrained")
    (loss, accuracy), (training, costs) = figure.subplots(2, 2)
    for panel, name, label in (
        (loss, "val_loss", "validation loss"),
        (accuracy, "val_acc", "validation accuracy"),
        (training, "loss_hard", "training loss (labels)"),
    ):
        panel.set_ylabel(label)
        draw_curves(panel, rows, name, results["reference"])
        values = np.concatenate([run[name] for row in rows for run in row["runs"]])
        values = values[np.isfinite(values)]  # the loss of a training that diverged is not
        if len(values):  # the first epochs' extremes are left out
            low, high = np.quantile(values, [0.03, 1.0] if name == "val_acc" else [0.0, 0.97])
            if high > low:
                panel.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    draw_costs(costs, rows, results["reference"])
    handles, labels = loss.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    seeds = len(results["seeds"])
    spread = "one seed" if seeds == 1 else f"{seeds} seeds: mean, lowest to highest"
    figure.suptitle(f"{results['data']}, {spread}", fontsize=10)
    return figure


def draw_curves(panel: Axes, rows: list[dict[str, Any]], name: str, reference: str) -> None:
    """The metric ``name`` of every row after each epoch."""
    distilled = not all(row["plain"] for row in rows)
    for row, colour in zip(rows, colours(rows, reference), strict=True):
        length = min(len(run[name]) for run in row["runs"])
        values = np.array([run[name][:length] for run in row["runs"]])  # [seeds, epochs]
        epochs, style = np.arange(1, length + 1), "--" if row["plain"] and distilled else "-"
        panel.plot(epochs, values.mean(0), style, color=colour, linewidth=1.4, label=row["row"])
        panel.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.12)
    panel.set_xlabel("epoch (phase A not counted)" if distilled else "epoch")
    panel.grid(alpha=0.3)


def draw_costs(panel: Axes, rows: list[dict[str, Any]], reference: str) -> None:
    """A point for every row, from the lowest seed to the highest."""
    for row, colour in zip(rows, colours(rows, reference), strict=True):
        final = [run["val_acc"][-1] for run in row["runs"]]
        cost, mean = row["final"]["multiply_adds"]["mean"], np.mean(final)
        spread = [[mean - min(final)], [max(final) - mean]]
        panel.errorbar([cost], [mean], spread, fmt="o" if row["plain"] else "D", color=colour)
    panel.set_xscale("log")
    panel.set_ylabel("final validation accuracy")
    panel.grid(alpha=0.3)
    panel.set_xlabel("multiply-adds of the training, all counted")


def colours(rows: list[dict[str, Any]], reference: str) -> list[Any]:
    """One for each row. The reference is black."""
    from matplotlib import color_sequences

    drawn = color_sequences["tab10" if len(rows) <= 10 else "tab20"]
    return [
        "black" if row["row"] == reference else drawn[number % len(drawn)]
        for number, row in enumerate(rows)
    ]
