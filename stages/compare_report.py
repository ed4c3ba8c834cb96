"""What a comparison found: tables for the terminal, CSV, JSON, and the figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.table import Table

from gaupipe.comparison import COSTS, PLAIN, Run, Spread, compare_at, total_seconds
from stages import key_attention
from stages.compare import Comparison
from stages.run_directory import write_whole

SHARES = (0.95, 0.98, 1.0)
"""Shares of the reference's final accuracy, on the same seed, at which cells are compared by default."""


def report(done: Comparison, targets: Sequence[float] = ()) -> dict[str, Any]:
    """Everything a comparison found, as JSON values. The reference is the plain ViT; ``targets`` are accuracies to compare
    at, by default the :data:`SHARES`."""
    reference = done.runs[PLAIN]
    goals = [{"target": target} for target in targets] or [{"share": share} for share in SHARES]
    cells = []
    for cell in done.cells:
        runs, trainings = done.runs[cell.name], done.trainings[cell.name]
        failed = sorted({done.failures[entry.folder] for entry in trainings if entry.folder in done.failures})
        cells.append({
            "cell": cell.name, "plain": cell.plain, "like": cell.like, "settings": cell.settings, "failed": failed,
            "tries": [{"settings": changes, "val_acc": score, "taken": changes is done.chosen[cell.name]}
                      for changes, score in done.tries.get(cell.name, [])],
            "final": {name: asdict(spread) for name, spread in finals(runs).items()},
            "at": [{**goal, **{name: asdict(value) if isinstance(value, Spread) else value
                               for name, value in compare_at(runs, reference, **goal).items()}}
                   for goal in goals] if not failed else [],
            "runs": [{"seed": run.seed, "folder": str(entry.folder.relative_to(entry.root)),
                      "phase_a_epochs": len(run.phase_a), "test_acc": run.test_acc, "val_acc": run.curve,
                      "val_loss": [row["val_loss"] for row in run.metrics],
                      "seconds": [row["seconds"] for row in run.metrics],
                      "phase_a_seconds": total_seconds(run.phase_a)}
                     for run, entry in zip(runs, trainings, strict=False)] if not failed else []})
    return {"data": done.settings.data.name, "seeds": done.seeds, "reference": PLAIN, "cells": cells}


def finals(runs: list[Run]) -> dict[str, Spread]:
    """What the last epochs say: accuracy, loss, the test split's accuracy where it was asked for, epochs, seconds."""
    return {"val_acc": Spread.of([run.curve[-1] for run in runs]),
            "best_val_acc": Spread.of([max(run.curve) for run in runs]),
            "val_loss": Spread.of([run.metrics[-1]["val_loss"] for run in runs]),
            "test_acc": Spread.of([run.test_acc for run in runs]),
            "epochs": Spread.of([len(run.metrics) for run in runs]),
            "phase_a_epochs": Spread.of([len(run.phase_a) for run in runs]),
            "seconds": Spread.of([total_seconds(run.metrics) for run in runs]),
            "phase_a_seconds": Spread.of([total_seconds(run.phase_a) for run in runs])}


def tables(found: dict[str, Any]) -> list[Table]:
    """What the papers print: for each accuracy, epochs and time to it with and without phase A, and the speed-up; then
    how the runs ended, and the tries."""
    seeds = len(found["seeds"])
    made = []
    for number, goal in enumerate(next(cell["at"] for cell in found["cells"] if cell["at"])):
        what = (f"{100 * goal['target']:.1f} % accuracy" if "target" in goal
                else f"{100 * goal['share']:.0f} % of the final accuracy of the {found['reference']}")
        table = Table(title=f"To {what}, {_seeds(seeds)}", caption="with A: phase A counted too", title_justify="left",
                      caption_justify="left")
        for column in ("", "epochs", "with A", "speed-up", "with A", "s", "with A"):
            table.add_column(column, justify="left" if not column else "right", no_wrap=bool(column))
        for cell in found["cells"]:
            if cell["failed"]:
                table.add_row(cell["cell"], "failed", *["-"] * 5)
                continue
            at = cell["at"][number]
            reached = at["reached"]
            if reached < seeds:
                table.add_row(cell["cell"], "never" if not reached else f"{reached} of {seeds}", *["-"] * 5)
                continue
            table.add_row(cell["cell"], _pm(at["epochs"], "{:.1f}"), _pm(at["epochs_with_phase_a"], "{:.1f}", False),
                          _pm(at["speedup_epochs"], "{:.2f}"), _pm(at["speedup_epochs_with_phase_a"], "{:.2f}", False),
                          _pm(at["seconds"], "{:.0f}", False), _pm(at["seconds_with_phase_a"], "{:.0f}", False))
        made.append(table)
    table = Table(title=f"At the end, {_seeds(seeds)}", title_justify="left")
    tested = any(cell["final"]["test_acc"]["mean"] is not None for cell in found["cells"])
    columns = ["", "validation acc.", "loss", *(["test acc."] if tested else []), "epochs", "phase A", "s"]
    for column in columns:
        table.add_column(column, justify="left" if not column else "right", no_wrap=bool(column))
    for cell in found["cells"]:
        final = cell["final"]
        test = [_pm(final["test_acc"], "{:.2f}", scale=100)] if tested else []
        table.add_row(cell["cell"], *(["failed"] + ["-"] * (len(columns) - 2) if cell["failed"] else [
            _pm(final["val_acc"], "{:.2f}", scale=100), _pm(final["val_loss"], "{:.3f}", False), *test,
            _pm(final["epochs"], "{:.0f}", False), _pm(final["phase_a_epochs"], "{:.1f}", False),
            _pm(final["seconds"], "{:.0f}", False)]))
    made.append(table)
    return made + [_tries(cell) for cell in found["cells"] if cell["tries"]]


def _tries(cell: dict[str, Any]) -> Table:
    """The grid that a cell was tuned over, one setting a column."""
    names = list(dict.fromkeys(name for entry in cell["tries"] for name in entry["settings"]))
    table = Table(title=f"Tries of {cell['cell']}, on the first seed", title_justify="left")
    for name in names:
        table.add_column(name.split(".")[-1])
    table.add_column("validation acc.", justify="right", no_wrap=True)
    for entry in cell["tries"]:
        score = "failed" if entry["val_acc"] is None else f"{100 * entry['val_acc']:.2f}"
        table.add_row(*["default" if entry["settings"].get(name) is None else str(entry["settings"][name]) for name in names],
                      score + (" *" if entry["taken"] else "  "))
    return table


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"mean ± std of {count} seeds"


def _pm(spread: dict[str, float | None], form: str, with_std: bool = True, scale: float = 1) -> str:
    if spread["mean"] is None:
        return "-"
    text = form.format(scale * spread["mean"])
    return f"{text} ±{form.format(scale * spread['std'])}" if with_std and spread["std"] is not None else text


def write(done: Comparison, found: dict[str, Any], name: str) -> None:
    """Writes ``name``.json, .csv, .png and .svg, and key_selection.png and .svg, into the folder of the comparison."""
    run_dir = done.run_dir
    write_whole(run_dir / f"{name}.json", json.dumps(found, indent=1) + "\n")
    partial = run_dir / f"{name}.partial"
    with partial.open("w", newline="") as file:
        rows = list(csv_rows(found))
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(run_dir / f"{name}.csv")
    for file_name, figure in ((name, curves(found)), ("key_selection", key_selection(done))):
        if figure:
            figure.savefig(run_dir / f"{file_name}.png", dpi=150)
            figure.savefig(run_dir / f"{file_name}.svg", metadata={"Date": None})


def csv_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a cell and accuracy, empty where something never happened."""
    rows = []
    for cell in found["cells"]:
        for at in cell["at"] or [{}]:
            row = {"cell": cell["cell"], "plain": cell["plain"], "seeds": len(found["seeds"]),
                   "target": at.get("target"), "share": at.get("share"), "reached": at.get("reached")}
            for name in (*COSTS, "accuracy", *(f"speedup_{cost}" for cost in COSTS)):
                row[f"{name}_mean"], row[f"{name}_std"] = _parts(at.get(name))
            for name, spread in cell["final"].items():
                row[f"final_{name}_mean"], row[f"final_{name}_std"] = _parts(spread)
            rows.append(row)
    return rows


def _parts(spread: dict[str, float | None] | None) -> tuple[float | None, float | None]:
    return (spread["mean"], spread["std"]) if spread else (None, None)


def curves(found: dict[str, Any]) -> Any:
    """Validation loss and accuracy per epoch, the mean over seeds with a band from the lowest to the highest."""
    from matplotlib import colormaps, rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "gaupipe"}):
        shown = distinct(found["cells"])
        figure = Figure(figsize=(10, max(4, 1.6 + 0.22 * len(shown))), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2)
        colours = colormaps["tab10" if len(shown) <= 10 else "tab20"].colors
        for panel, (name, title) in zip(panels, (("val_loss", "validation loss"), ("val_acc", "validation accuracy")),
                                        strict=True):
            for number, cell in enumerate(shown):
                length = min(len(run[name]) for run in cell["runs"])
                values = np.array([run[name][:length] for run in cell["runs"]])
                epochs = np.arange(1, length + 1)
                is_reference = found["reference"] in cell["cell"].split(" = ")
                colour = "black" if is_reference else colours[number % len(colours)]
                panel.plot(epochs, values.mean(0), color=colour, linestyle="--" if cell["plain"] else "-", linewidth=1.4,
                           label=cell["cell"])
                panel.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.12, linewidth=0)
            panel.set(xlabel="epoch (phase A not counted)", ylabel=title)
            panel.grid(alpha=0.3)
            finals = [run[name][-1] for cell in shown for run in cell["runs"]]
            everything = np.concatenate([run[name] for cell in shown for run in cell["runs"]])
            if name == "val_loss":
                panel.set_ylim(0.95 * everything.min(), np.quantile(everything, 0.97))
            else:
                low = max(np.quantile(everything, 0.03), 0)
                panel.set_ylim(low, min(max(finals) + 0.1 * (max(finals) - low), 1.0))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
        seeds = len(found["seeds"])
        figure.suptitle(f"{found['data']}, " + ("one seed" if seeds == 1 else f"{seeds} seeds: mean, lowest to highest"),
                        fontsize=10)
        return figure


def distinct(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells that have runs, those with the very same runs as one."""
    by_runs: dict[tuple[str, ...], dict[str, Any]] = {}
    for cell in cells:
        if cell["runs"]:
            folders = tuple(run["folder"] for run in cell["runs"])
            known = by_runs.get(folders)
            by_runs[folders] = {**known, "cell": f"{known['cell']} = {cell['cell']}"} if known else cell
    return list(by_runs.values())


def key_selection(done: Comparison) -> Any:
    """How attention settles on keys over the epochs (*GauTransformer, figure 4*): for each kept image, the mean over
    heads and queries of the first block, in the plain ViT, in phase A and in the distilled student, on the first seed. None
    where one of them has none, or not of the same images."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    distilled = next((cell.name for cell in done.cells if not cell.plain), None)
    if distilled is None:
        return None
    plain, student = done.trainings[PLAIN][0], done.trainings[distilled][0]
    columns = {PLAIN: key_attention.read(plain.folder), "phase A": key_attention.read(student.teacher.phase_a),
               distilled: key_attention.read(student.folder)}
    images = len(columns[PLAIN][0]) if len(columns[PLAIN]) else 0
    if not images or any(not len(kept) or kept.shape[1:] != columns[PLAIN].shape[1:] for kept in columns.values()):
        return None
    figure = Figure(figsize=(10, 0.9 + 2.1 * images), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(images, len(columns), squeeze=False)
    for column, (title, kept) in enumerate(columns.items()):
        for image in range(images):
            panel, attention = panels[image, column], kept[:, image, 0].T             # [T, epochs]
            edges = (0.5, attention.shape[1] + 0.5, -0.5, len(attention) - 0.5)
            drawn = panel.imshow(attention, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest",
                                 extent=edges, vmin=0, vmax=kept[:, :, 0].max())
            panel.set_title(title if image == 0 else "", fontsize=10)
            panel.set(xlabel="epoch" if image == images - 1 else "",
                      ylabel=f"image {image + 1}: key" if column == 0 else "")
            for axis in (panel.xaxis, panel.yaxis):
                axis.get_major_locator().set_params(integer=True)
        figure.colorbar(drawn, ax=panels[:, column], location="bottom", fraction=0.03, label="attention")
    return figure
