"""The results of a comparison as JSON values, and as lines of a CSV file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gaupipe.system.files import write_whole
from gaupipe.system.progress import epochs_in, total_seconds
from stages.compare.cells import BASELINE, Cell
from stages.compare.differences import Difference, corrected, front
from stages.compare.passages import COSTS, Run, Spread, compare_at
from stages.compare.trainings import Comparison, Training

SHARES = (0.95, 0.98, 1.0)
"""Shares of the reference's final accuracy, on the same seed, at which cells are compared by
default."""


def report(comparison: Comparison, targets: Sequence[float] = ()) -> dict[str, Any]:
    """All results of a comparison, as JSON values. Scripts read the keys.

    The reference is the plain ViT. ``targets`` are accuracies to compare at, by default the
    :data:`SHARES`.
    """
    goals = [{"target": target} for target in targets] or [{"share": share} for share in SHARES]
    differences = corrected(against_reference(comparison))
    fronts = corrected(against_front(comparison))
    return {
        "data": comparison.settings.data.name,
        "seeds": comparison.seeds,
        "reference": BASELINE,
        "cells": [
            _cell_results(comparison, cell, goals)
            | {
                "difference": _as_json(differences.get(cell.name)),
                "above_front": _as_json(fronts.get(cell.name)),
            }
            for cell in comparison.cells
        ],
    }


def against_reference(comparison: Comparison) -> dict[str, Difference]:
    """By cell its final accuracy minus that of the plain ViT with the same seed."""
    reference = {run.seed: run.curve[-1] for run in comparison.runs[BASELINE]}
    return {
        name: Difference.of([run.curve[-1] - reference[run.seed] for run in runs])
        for name, runs in comparison.runs.items()
        if name != BASELINE and not comparison.failures_of(name)
    }


def against_front(comparison: Comparison) -> dict[str, Difference]:
    """By cell its final accuracy minus what the baselines reach for as many multiply-adds with the
    same seed. Baselines are the plain cells of standard attention; they themselves and cells
    cheaper than all of them are left out."""
    baselines = {
        cell.name
        for cell in comparison.cells
        if cell.plain and comparison.trainings[cell.name][0].settings.phase_b.student == "standard"
    }
    of_seed: dict[int, list[Run]] = {seed: [] for seed in comparison.seeds}
    for name in baselines:
        for run in comparison.runs[name]:
            of_seed[run.seed].append(run)
    result = {}
    for name, runs in comparison.runs.items():
        if name in baselines or comparison.failures_of(name):
            continue
        fronts = [
            front(
                [other.cost("multiply_adds") for other in of_seed[run.seed]],
                [other.curve[-1] for other in of_seed[run.seed]],
                run.cost("multiply_adds"),
            )
            for run in runs
        ]
        above = [
            run.curve[-1] - accuracy
            for run, accuracy in zip(runs, fronts, strict=True)
            if accuracy is not None
        ]
        if len(above) == len(runs):
            result[name] = Difference.of(above)
    return result


def _as_json(difference: Difference | None) -> dict[str, Any] | None:
    return {**asdict(difference), "verdict": difference.verdict} if difference else None


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
        "trials": trials,
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
    """How the runs of a cell ended, and what they cost, phase A counted. The test split's accuracy
    is there only with ``--test``."""
    values = {
        "val_acc": [run.curve[-1] for run in runs],
        "best_val_acc": [max(run.curve) for run in runs],
        "val_loss": [run.metrics[-1]["val_loss"] for run in runs],
        "test_acc": [run.test_acc for run in runs],
        "epochs": [len(run.metrics) for run in runs],
        "phase_a_epochs": [epochs_in(run.phase_a) for run in runs],
        "parameters": [run.costs["parameters"] for run in runs],
        **{name: [run.cost(name) for run in runs] for name in COSTS},
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
        "seconds": total_seconds(run.metrics),
        "phase_a_seconds": total_seconds(run.phase_a),
        "costs": run.costs,
        "phase_a_costs": run.phase_a_costs,
    }


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
    """One line a cell; values are None where something never happened."""
    lines = []
    for cell in results["cells"]:
        line = {"cell": cell["cell"], "plain": cell["plain"], "seeds": len(results["seeds"])}
        for name, spread in cell["final"].items():
            line |= {f"{name}_{part}": value for part, value in spread.items()}
        for name in ("difference", "above_front"):
            values = cell[name] or dict.fromkeys(("mean", "low", "high", "p", "holm", "verdict"))
            line |= {f"{name}_{part}": value for part, value in values.items()}
        lines.append(line)
    return lines
