"""Results of a comparison as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaupipe.system.errors import UserError
from stages.compare.measures import Spread, differences, first_passages, front, spread
from stages.compare.rows import BASELINE, CONTROLS, DISTILLED
from stages.compare.trainings import FinishedTraining, RowTraining

SHARES = (0.95, 0.98, 1.0)
"""Shares of the reference's final accuracy, on the same seed, at which rows are compared by
default."""


def report(
    trainings: Sequence[Sequence[RowTraining]],
    outcomes: Mapping[Path, FinishedTraining | str],
    targets: Sequence[float] = (),
) -> dict[str, Any]:
    """All results of a comparison. Scripts read the keys.

    trainings   for each row its training with each seed
    outcomes    by the folder of a training its run, or why it failed
    targets     accuracies to compare at; by default the :data:`SHARES` of the reference's

    The reference is the plain ViT. Of a row with a training that failed there are no values.
    Raises UserError where that is the reference.
    """
    rows = [_row(seeds, outcomes) for seeds in trainings]
    reference = next(row for row in rows if row["row"] == BASELINE)
    if reference["failed"]:
        reason = reference["failed"][0]
        raise UserError(f"{BASELINE}, which the others are compared with, failed: {reason}")
    goals = [{"target": target} for target in targets]
    if not goals:
        goals = [{"share": share} for share in SHARES]
    finished = [row for row in rows if not row["failed"]]
    baselines = [row for row in finished if row["plain"] and row["attention"] == "standard"]
    over_reference = {}
    above_front = {}
    for row in finished:
        runs = row["runs"]
        row["at"] = [goal | first_passages(runs, reference["runs"], **goal) for goal in goals]
        if row is not reference:
            over_reference[row["row"]] = _seed_by_seed(runs, reference["runs"])
        if row not in baselines:
            values = _above(row, baselines)
            if None not in values:
                above_front[row["row"]] = values
    for key, table in ("difference", over_reference), ("above_front", above_front):
        tested = differences(table)
        for row in rows:
            row[key] = tested.get(row["row"])
    over_controls = differences(_over_controls(finished))
    return {"reference": BASELINE, "rows": rows, "over_controls": over_controls}


def _row(trainings: Sequence[RowTraining], outcomes: Mapping[Path, Any]) -> dict[str, Any]:
    """A row before it is compared with others."""
    row = trainings[0].row
    runs = [outcomes[training.folder] for training in trainings]
    failures = sorted({run for run in runs if isinstance(run, str)})
    if failures:
        runs = []
    return {
        "row": row.name,
        "plain": row.plain,
        "attention": trainings[0].settings.model.attention,
        "settings": row.settings,
        "failed": failures,
        "final": final_values(runs),
        "at": [],
        "runs": runs,
    }


def final_values(runs: Sequence[Mapping[str, Any]]) -> dict[str, Spread]:
    """How the runs of a row ended, and what they cost, phase A counted, as :func:`spread`. The test
    split's accuracy is there only with ``--test``."""
    values = {
        "val_acc": [_accuracy(run) for run in runs],
        "val_loss": [run["val_loss"][-1] for run in runs],
        "test_acc": [run["test_acc"] for run in runs],
        "epochs": [len(run["val_acc"]) for run in runs],
        "phase_a_epochs": [run["phase_a_epochs"] for run in runs],
        "parameters": [run["costs"]["parameters"] for run in runs],
        "multiply_adds": [_cost(run, "multiply_adds") for run in runs],
        "processor_seconds": [_cost(run, "processor_seconds") for run in runs],
    }
    return {name: spread(numbers) for name, numbers in values.items()}


def _over_controls(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """For each control, seed by seed, the final accuracy of the first student minus the control's:
    what a map teaches beyond what the control has too."""
    runs = {row["row"]: row["runs"] for row in rows}
    student = next((name for name in runs if name.startswith(DISTILLED)), None)
    if student is None:
        return {}
    return {
        control: _seed_by_seed(runs[student], runs[control])
        for control in CONTROLS
        if control in runs
    }


def _seed_by_seed(
    runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Seed by seed, the final accuracy of one row minus that of another."""
    pairs = zip(runs, others, strict=True)
    return [_accuracy(run) - _accuracy(other) for run, other in pairs]


def _above(row: dict[str, Any], baselines: Sequence[dict[str, Any]]) -> list[Any]:
    """For each seed the final accuracy of a row minus what the baselines reach for as many
    multiply-adds; None where the row is cheaper than all of them."""
    values: list[float | None] = []
    for number, run in enumerate(row["runs"]):
        others = [other["runs"][number] for other in baselines]
        points = [(_cost(other, "multiply_adds"), _accuracy(other)) for other in others]
        reached = front(points, _cost(run, "multiply_adds"))
        if reached is None:
            values.append(None)
        else:
            values.append(_accuracy(run) - reached)
    return values


def _accuracy(run: Mapping[str, Any]) -> float:
    return run["val_acc"][-1]


def _cost(run: Mapping[str, Any], name: str) -> float:
    return run["costs"][name] + run["phase_a_costs"].get(name, 0)
