"""The results of a comparison as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gaupipe.system.progress import epochs_in
from stages.compare.cells import BASELINE, Cell
from stages.compare.differences import Difference, corrected, front
from stages.compare.passages import COSTS, Run, Spread, compare_at
from stages.compare.trainings import Comparison, Training

SHARES = (0.95, 0.98, 1.0)
"""Shares of the reference's final accuracy, on the same seed, at which cells are compared by
default."""

CURVES = ("val_acc", "val_loss", "loss_hard", "seconds")
"""Metrics of which the results have the value after each epoch."""


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
        "rows": [
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
    runs = {
        name: runs for name, runs in comparison.runs.items() if not comparison.failures_of(name)
    }
    baselines = {
        cell.name
        for cell in comparison.cells
        if cell.plain and comparison.trainings[cell.name][0].settings.phase_b.student == "standard"
    }

    def above(run: Run) -> float | None:
        same_seed = [of[comparison.seeds.index(run.seed)] for of in map(runs.get, baselines) if of]
        costs = [other.cost("multiply_adds") for other in same_seed]
        reached = front(costs, [other.curve[-1] for other in same_seed], run.cost("multiply_adds"))
        return None if reached is None else run.curve[-1] - reached

    result = {}
    for name in runs.keys() - baselines:
        differences = [value for value in map(above, runs[name]) if value is not None]
        if len(differences) == len(runs[name]):
            result[name] = Difference.of(differences)
    return result


def _as_json(difference: Difference | None) -> dict[str, Any] | None:
    return {**asdict(difference), "verdict": difference.verdict} if difference else None


def _in_json(values: dict[str, Any]) -> dict[str, Any]:
    return {name: asdict(it) if isinstance(it, Spread) else it for name, it in values.items()}


def _cell_results(
    comparison: Comparison, cell: Cell, goals: Sequence[dict[str, float]]
) -> dict[str, Any]:
    runs, trainings = comparison.runs[cell.name], comparison.trainings[cell.name]
    failures = sorted(set(comparison.failures_of(cell.name)))
    best = comparison.best_trials.get(cell.name)
    trials = [
        {"settings": changes, "val_acc": score, "taken": changes is best}
        for changes, score in comparison.trials.get(cell.name, [])
    ]
    compared = [(goal, compare_at(runs, comparison.runs[BASELINE], **goal)) for goal in goals]
    return {
        "row": cell.name,
        "plain": cell.plain,
        "like": cell.like,
        "settings": cell.settings,
        "failed": failures,
        "trials": trials,
        "final": _in_json(final_values(runs)),
        "at": [] if failures else [goal | _in_json(passages) for goal, passages in compared],
        "runs": [] if failures else [*map(_run_results, runs, trainings)],
    }


def final_values(runs: Sequence[Run]) -> dict[str, Spread]:
    """How the runs of a cell ended, and what they cost, phase A counted. The test split's accuracy
    is there only with ``--test``."""
    values = {
        "val_acc": [run.curve[-1] for run in runs],
        "val_loss": [run.metrics[-1]["val_loss"] for run in runs],
        "test_acc": [run.test_acc for run in runs],
        "epochs": [len(run.metrics) for run in runs],
        "phase_a_epochs": [epochs_in(run.phase_a) for run in runs],
        "parameters": [run.costs["parameters"] for run in runs],
        **{name: [run.cost(name) for run in runs] for name in COSTS},
    }
    return {name: Spread.of(numbers) for name, numbers in values.items()}


def _run_results(run: Run, training: Training) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "folder": str(training.folder.relative_to(training.root)),
        "phase_a_epochs": epochs_in(run.phase_a),
        "test_acc": run.test_acc,
        **{name: [entry[name] for entry in run.metrics] for name in CURVES},
        "costs": run.costs,
        "phase_a_costs": run.phase_a_costs,
    }
