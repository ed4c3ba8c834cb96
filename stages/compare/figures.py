"""The figures of a comparison: learning curves, and how attention settles on keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.compare.cells import BASELINE
from stages.compare.trainings import Comparison
from stages.figures import key_attention

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(comparison: Comparison, results: dict[str, Any], name: str) -> None:
    """Writes ``name``.png and .svg, and key_selection.png and .svg where there are snapshots."""
    save(curves(results), comparison.run_dir / name)
    if figure := key_selection(comparison):
        save(figure, comparison.run_dir / "key_selection")


def save(figure: Figure, path: Path) -> None:
    """Writes ``path``.png and ``path``.svg, the same bytes for the same figure."""
    from matplotlib import rc_context

    figure.savefig(f"{path}.png", dpi=150)
    with rc_context({"svg.hashsalt": "gaupipe"}):
        figure.savefig(f"{path}.svg", metadata={"Date": None})


def new_figure(height: float) -> Figure:
    """An empty figure that needs no display; height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(10, height), layout="constrained")


def curves(results: dict[str, Any]) -> Figure:
    """Validation loss, validation accuracy and training loss per epoch, and the final validation
    accuracy over the multiply-adds of the whole training, phase A and export counted.

    The training loss is that of the labels (L_hard), which all cells have. A line is the mean over
    seeds, its band goes from the lowest seed to the highest. Beside distilled students
    baselines are dashed. The reference is black.
    """
    cells = [cell for cell in results["cells"] if cell["runs"]]
    figure = new_figure(max(7, 1.6 + 0.22 * len(cells)))
    (loss, accuracy), (training, costs) = figure.subplots(2, 2)
    for panel, name, label in (
        (loss, "val_loss", "validation loss"),
        (accuracy, "val_acc", "validation accuracy"),
        (training, "loss_hard", "training loss (labels)"),
    ):
        panel.set_ylabel(label)
        draw_curves(panel, cells, name, results["reference"])
        values = np.concatenate([run[name] for cell in cells for run in cell["runs"]])
        values = values[np.isfinite(values)]  # the loss of a training that diverged is not
        if len(values):  # the first epochs' extremes are left out
            low, high = np.quantile(values, [0.03, 1.0] if name == "val_acc" else [0.0, 0.97])
            if high > low:
                panel.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    draw_costs(costs, cells, results["reference"])
    handles, labels = loss.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    seeds = len(results["seeds"])
    spread = "one seed" if seeds == 1 else f"{seeds} seeds: mean, lowest to highest"
    figure.suptitle(f"{results['data']}, {spread}", fontsize=10)
    return figure


def draw_curves(panel: Axes, cells: list[dict[str, Any]], name: str, reference: str) -> None:
    """The metric ``name`` of every cell after each epoch."""
    distilled = not all(cell["plain"] for cell in cells)
    for cell, colour in zip(cells, colours(cells, reference), strict=True):
        length = min(len(run[name]) for run in cell["runs"])
        values = np.array([run[name][:length] for run in cell["runs"]])  # [seeds, epochs]
        epochs, style = np.arange(1, length + 1), "--" if cell["plain"] and distilled else "-"
        panel.plot(epochs, values.mean(0), style, color=colour, linewidth=1.4, label=cell["cell"])
        panel.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.12)
    panel.set_xlabel("epoch (phase A not counted)" if distilled else "epoch")
    panel.grid(alpha=0.3)


def draw_costs(panel: Axes, cells: list[dict[str, Any]], reference: str) -> None:
    """A point for every cell, from the lowest seed to the highest."""
    for cell, colour in zip(cells, colours(cells, reference), strict=True):
        final = [run["val_acc"][-1] for run in cell["runs"]]
        cost, mean = cell["final"]["multiply_adds"]["mean"], np.mean(final)
        spread = [[mean - min(final)], [max(final) - mean]]
        panel.errorbar([cost], [mean], spread, fmt="o" if cell["plain"] else "D", color=colour)
    panel.set_xscale("log")
    panel.set_ylabel("final validation accuracy")
    panel.grid(alpha=0.3)
    panel.set_xlabel("multiply-adds of the training, all counted")


def colours(cells: list[dict[str, Any]], reference: str) -> list[Any]:
    """One for each cell. The reference is black."""
    from matplotlib import color_sequences

    drawn = color_sequences["tab10" if len(cells) <= 10 else "tab20"]
    return [
        "black" if cell["cell"] == reference else drawn[number % len(drawn)]
        for number, cell in enumerate(cells)
    ]


def key_selection(comparison: Comparison) -> Figure | None:
    """How attention settles on keys over the epochs (*GauTransformer, figure 4*).

    For each image with snapshots: the mean over heads and queries of the first block, in the
    plain ViT, in phase A and in the first distilled student, with the first seed. None where one
    of them has no snapshots, or has them of other images.
    """
    from matplotlib.ticker import MaxNLocator

    distilled = next((cell.name for cell in comparison.cells if not cell.plain), None)
    if distilled is None:
        return None
    student = comparison.trainings[distilled][0]
    folders = {
        BASELINE: comparison.trainings[BASELINE][0].folder,
        "phase A": student.teacher.phase_a,
        distilled: student.folder,
    }
    snapshots = {title: key_attention.read(folder) for title, folder in folders.items()}
    shapes = {attention.shape[1:] for attention in snapshots.values()}  # [images, L, T]
    if len(shapes) != 1 or not all(attention.size for attention in snapshots.values()):
        return None
    ((images, _, tokens),) = shapes
    figure = new_figure(0.9 + 2.1 * images)
    panels = figure.subplots(images, len(snapshots), squeeze=False)
    for column, (title, attention) in zip(panels.T, snapshots.items(), strict=True):
        column[0].set_title(title, fontsize=10)
        column[-1].set_xlabel("epoch")
        first_block = attention[:, :, 0]  # [epochs, images, T]
        extent = (0.5, len(attention) + 0.5, -0.5, tokens - 0.5)
        scale = dict(vmin=0, vmax=first_block.max(), extent=extent, interpolation="nearest")
        drawn = []
        for image, panel in enumerate(column):
            keys = first_block[:, image].T  # [T, epochs]
            drawn.append(panel.imshow(keys, aspect="auto", origin="lower", **scale))
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
        figure.colorbar(drawn[-1], ax=column, location="bottom", label="attention")
    for image, panel in enumerate(panels[:, 0], 1):
        panel.set_ylabel(f"image {image}: key")
    return figure
