"""The results of a comparison as JSON values, tables for the terminal, and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from gaupipe.system.files import write_whole
from gaupipe.system.progress import epochs_in, total_seconds
from stages.compare.cells import BASELINE, Cell
from stages.compare.speed import COSTS, Run, Spread, compare_at
from stages.compare.trainings import Comparison, Training

SHARES = (0.95, 0.98, 1.0)
"""Shares of the reference's final accuracy, on the same seed, at which cells are compared by
default."""


def report(
    comparison: Comparison, costs: dict[str, Any], targets: Sequence[float] = ()
) -> dict[str, Any]:
    """All results of a comparison, as JSON values.

    The reference is the plain ViT. ``costs`` are those of :func:`stages.compare.costs.measure`.
    ``targets`` are accuracies to compare at, by default the :data:`SHARES`. Scripts read the keys:
    a cell's trials are under ``tries``.
    """
    goals = [{"target": target} for target in targets] or [{"share": share} for share in SHARES]
    return {
        "data": comparison.settings.data.name,
        "seeds": comparison.seeds,
        "reference": BASELINE,
        "costs_measured": {name: costs[name] for name in ("machine", "batch")},
        "cells": [
            _cell_results(comparison, cell, goals) | {"costs": costs["cells"][cell.name]}
            for cell in comparison.cells
        ],
    }


def _cell_results(
    comparison: Comparison, cell: Cell, goals: Sequence[dict[str, float]]
) -> dict[str, Any]:
    runs, trainings = comparison.runs[cell.name], comparison.trainings[cell.name]
    failures = sorted(set(comparison.failures_of(cell.name)))
    trials = [
        {
            "settings": changes,
            "val_acc": score,
            "taken": changes is comparison.best_trials[cell.name],
        }
        for changes, score in comparison.trials.get(cell.name, [])
    ]
    results = {
        "cell": cell.name,
        "plain": cell.plain,
        "like": cell.like,
        "settings": cell.settings,
        "failed": failures,
        "tries": trials,
        "final": {name: asdict(spread) for name, spread in final_values(runs).items()},
        "at": [],
        "runs": [],
    }
    if not failures:
        reference = comparison.runs[BASELINE]
        results["at"] = [_at_results(runs, reference, goal) for goal in goals]
        results["runs"] = [
            _run_results(run, training) for run, training in zip(runs, trainings, strict=True)
        ]
    return results


def final_values(runs: Sequence[Run]) -> dict[str, Spread]:
    """How the runs of a cell ended. The test split's accuracy is there only with ``--test``."""
    values = {
        "val_acc": [run.curve[-1] for run in runs],
        "best_val_acc": [max(run.curve) for run in runs],
        "val_loss": [run.metrics[-1]["val_loss"] for run in runs],
        "test_acc": [run.test_acc for run in runs],
        "epochs": [len(run.metrics) for run in runs],
        "phase_a_epochs": [epochs_in(run.phase_a) for run in runs],
        "seconds": [total_seconds(run.metrics) for run in runs],
        "phase_a_seconds": [total_seconds(run.phase_a) for run in runs],
    }
    return {name: Spread.of(numbers) for name, numbers in values.items()}


def _at_results(
    runs: Sequence[Run], reference: Sequence[Run], goal: dict[str, float]
) -> dict[str, Any]:
    values = compare_at(runs, reference, **goal)
    as_json = {
        name: asdict(value) if isinstance(value, Spread) else value
        for name, value in values.items()
    }
    return {**goal, **as_json}


def _run_results(run: Run, training: Training) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "folder": str(training.folder.relative_to(training.root)),
        "phase_a_epochs": epochs_in(run.phase_a),
        "test_acc": run.test_acc,
        "val_acc": run.curve,
        "val_loss": [entry["val_loss"] for entry in run.metrics],
        "loss_hard": [entry["loss_hard"] for entry in run.metrics],
        "seconds": [entry["seconds"] for entry in run.metrics],
        "phase_a_seconds": total_seconds(run.phase_a),
    }


def tables(results: dict[str, Any]) -> list[Table]:
    """What the papers print.

    For each accuracy the epochs and the time to it, with and without phase A, and the speed-up;
    then how the runs ended, how large and how fast the models are, and the trials of the tuned
    cells.
    """
    goals = next(cell["at"] for cell in results["cells"] if cell["at"])
    return [
        *(_speed_table(results, number, goal) for number, goal in enumerate(goals)),
        _final_table(results),
        _costs_table(results),
        *(_trials_table(cell) for cell in results["cells"] if cell["tries"]),
    ]


def _speed_table(results: dict[str, Any], number: int, goal: dict[str, Any]) -> Table:
    """How soon each cell reached the accuracy ``number`` of those that are compared at."""
    if "target" in goal:
        accuracy = f"{100 * goal['target']:.1f} % accuracy"
    else:
        share = f"{100 * goal['share']:.0f} %"
        accuracy = f"{share} of the final accuracy of the {results['reference']}"
    seeds = len(results["seeds"])
    distilled = not all(cell["plain"] for cell in results["cells"])
    table = Table(
        title=f"To {accuracy}, {_seeds(seeds)}",
        caption="with A: phase A counted too" if distilled else None,
        title_justify="left",
        caption_justify="left",
    )
    every = slice(None, None, 1 if distilled else 2)
    _add_columns(table, ["epochs", "with A", "speed-up", "with A", "s", "with A"][every])
    for cell in results["cells"]:
        table.add_row(cell["cell"], *_speed_values(cell, number, seeds)[every])
    return table


def _speed_values(cell: dict[str, Any], number: int, seeds: int) -> list[str]:
    """The values of one line of a speed table, or why there are none."""
    none = ["-"] * 5
    if cell["failed"]:
        return ["failed", *none]
    at = cell["at"][number]
    if at["reached"] == 0:
        return ["never", *none]
    if at["reached"] < seeds:
        return [f"{at['reached']} of {seeds}", *none]
    return [
        _with_std(at["epochs"], "{:.1f}"),
        _mean(at["epochs_with_phase_a"], "{:.1f}"),
        _with_std(at["speedup_epochs"], "{:.2f}"),
        _mean(at["speedup_epochs_with_phase_a"], "{:.2f}"),
        _mean(at["seconds"], "{:.0f}"),
        _mean(at["seconds_with_phase_a"], "{:.0f}"),
    ]


def _final_table(results: dict[str, Any]) -> Table:
    """How the runs of every cell ended."""
    tested = any(cell["final"]["test_acc"]["mean"] is not None for cell in results["cells"])
    distilled = not all(cell["plain"] for cell in results["cells"])
    columns = ["validation acc.", "loss", "epochs", "s"]
    if distilled:
        columns.insert(3, "phase A")
    if tested:
        columns.insert(2, "test acc.")
    table = Table(title=f"At the end, {_seeds(len(results['seeds']))}", title_justify="left")
    _add_columns(table, columns)
    for cell in results["cells"]:
        final = cell["final"]
        values = [
            _with_std(final["val_acc"], "{:.2f}", scale=100),
            _mean(final["val_loss"], "{:.3f}"),
            _mean(final["epochs"], "{:.0f}"),
            _mean(final["seconds"], "{:.0f}"),
        ]
        if distilled:
            values.insert(3, _mean(final["phase_a_epochs"], "{:.1f}"))
        if tested:
            values.insert(2, _with_std(final["test_acc"], "{:.2f}", scale=100))
        if cell["failed"]:
            values = ["failed", *["-"] * (len(columns) - 1)]
        table.add_row(cell["cell"], *values)
    return table


def _costs_table(results: dict[str, Any]) -> Table:
    """How large the models are, and how fast on this machine."""
    measured = results["costs_measured"]
    table = Table(
        title=f"Size and speed, on {measured['machine']}",
        caption=f"step: of {measured['batch']} images, in turns with the {results['reference']}; "
        "ratio: of the times",
        title_justify="left",
        caption_justify="left",
    )
    _add_columns(table, ["parameters", "s / step", "ratio", "images / s", "ratio"])
    for cell in results["cells"]:
        costs = cell["costs"]
        forms = {
            "step_seconds": ".4f",
            "step_ratio": ".2f",
            "images_per_s": ",.0f",
            "inference_ratio": ".2f",
        }
        values = [
            "-" if costs[name] is None else format(costs[name], form)
            for name, form in forms.items()
        ]
        table.add_row(cell["cell"], f"{costs['parameters']:,}", *values)
    return table


def _trials_table(cell: dict[str, Any]) -> Table:
    """The grid that a cell was tuned over, one setting a column; * marks the best trial."""
    trials = cell["tries"]
    names = list(dict.fromkeys(name for trial in trials for name in trial["settings"]))
    table = Table(title=f"Trials of {cell['cell']}, on the first seed", title_justify="left")
    for name in names:
        table.add_column(name.split(".")[-1])
    table.add_column("validation acc.", justify="right", no_wrap=True)
    for trial in trials:
        values = [trial["settings"].get(name) for name in names]
        score = "failed" if trial["val_acc"] is None else f"{100 * trial['val_acc']:.2f}"
        mark = " *" if trial["taken"] else "  "
        shown = ["default" if value is None else str(value) for value in values]
        table.add_row(*shown, score + mark)
    return table


def _add_columns(table: Table, names: Sequence[str]) -> None:
    """A column for the name of the cell, and those of its values."""
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"mean ± std of {count} seeds"


def _mean(spread: dict[str, float | None], form: str, *, scale: float = 1) -> str:
    return "-" if spread["mean"] is None else form.format(scale * spread["mean"])


def _with_std(spread: dict[str, float | None], form: str, *, scale: float = 1) -> str:
    mean = _mean(spread, form, scale=scale)
    return mean if spread["std"] is None else f"{mean} ±{form.format(scale * spread['std'])}"


def write(results: dict[str, Any], folder: Path, name: str) -> None:
    """Writes ``name``.json and ``name``.csv."""
    write_whole(folder / f"{name}.json", json.dumps(results, indent=1) + "\n")
    write_csv(folder / f"{name}.csv", csv_lines(results))


def write_csv(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    write_whole(path, text.getvalue())


def csv_lines(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One line a cell and accuracy; values are None where something never happened."""
    lines = []
    for cell in results["cells"]:
        for at in cell["at"] or [{}]:
            line = {
                "cell": cell["cell"],
                "plain": cell["plain"],
                "seeds": len(results["seeds"]),
                "target": at.get("target"),
                "share": at.get("share"),
                "reached": at.get("reached"),
            }
            for name in (*COSTS, "accuracy", *(f"speedup_{cost}" for cost in COSTS)):
                line |= _columns(name, at.get(name))
            for name, spread in cell["final"].items():
                line |= _columns(f"final_{name}", spread)
            lines.append(line | cell["costs"])
    return lines


def _columns(name: str, spread: dict[str, float | None] | None) -> dict[str, float | None]:
    spread = spread or {"mean": None, "std": None}
    return {f"{name}_mean": spread["mean"], f"{name}_std": spread["std"]}
