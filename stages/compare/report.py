"""Results of a comparison: each row beside the plain ViT, its controls and the other rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gaupipe.settings.load import ByName
from gaupipe.system.errors import UserError
from stages.compare.measures import (
    Family,
    Passages,
    Spread,
    Verdict,
    differences,
    first_passages,
    front,
    gains_of_images,
    spread,
    tested_passages,
)
from stages.compare.rows import BASELINE, CONTROLS, DISTILLED
from stages.compare.trainings import FinishedTraining, RowTraining

SHARES = (0.95, 0.98, 1.0)
"""Shares of what the reference reaches over its last five epochs, on the same seed, at which rows
are compared."""


@dataclass(frozen=True)
class Final:
    """How the runs of a row ended, and what they cost, phase A counted: spreads over seeds."""

    val_acc: Spread
    val_loss: Spread
    test_acc: Spread
    """Without values where ``--test`` was not given."""
    epochs: Spread
    phase_a_epochs: Spread
    parameters: Spread
    multiply_adds: Spread
    processor_seconds: Spread


@dataclass(frozen=True)
class RowResult:
    """A row of a comparison. One with a training that failed has no values."""

    row: str
    """Its name."""
    plain: bool
    """Whether it was trained on the labels alone."""
    attention: str
    settings: ByName
    """In which it differs from the configuration."""
    failed: list[str]
    """Why trainings of the row failed."""
    final: Final
    at: list[Passages]
    """The epochs to each of the :data:`SHARES`."""
    runs: list[FinishedTraining]
    """One for each seed."""
    difference: Verdict | None = None
    """Final accuracy minus that of the reference; None for the reference itself. A row that failed
    is not decided."""
    test_difference: Verdict | None = None
    """Test accuracy minus that of the reference, by seeds and test images; None for the reference
    and without ``--test``."""
    above_front: Verdict | None = None
    """Final accuracy minus what plain ViTs of standard attention reach for as many multiply-adds,
    or where the row is dearer than all of them the best of them; None for one of these, and where
    the row is cheaper than all of them."""


@dataclass(frozen=True)
class Comparison:
    """All results of a comparison, whose JSON scripts read."""

    data: str
    """The name of the data set."""
    seeds: list[int]
    reference: str
    """The name of the row that the others are compared with: the plain ViT."""
    rows: list[RowResult]
    over_controls: dict[str, Verdict]
    """By control the final accuracy of the first student minus the control's: what a map teaches
    beyond what the control has too."""


def report(
    data: str,
    trainings: Sequence[Sequence[RowTraining]],
    outcomes: Mapping[Path, FinishedTraining | str],
) -> Comparison:
    """All results of a comparison on the data set of this name.

    trainings   for each row its training with each seed
    outcomes    by the folder of a training its run, or why it failed

    The reference is the plain ViT. Raises UserError where one of its trainings failed.
    """
    students = Counter(
        training.phase_a_costs for row in trainings for training in row if training.needs_phase_a
    )
    rows = [_row(row, outcomes, students) for row in trainings]
    reference = next(row for row in rows if row.row == BASELINE)
    if reference.failed:
        reason = reference.failed[0]
        raise UserError(f"{BASELINE}, which the others are compared with, failed: {reason}")
    finished = [row for row in rows if not row.failed]
    baselines = [row for row in finished if row.plain and row.attention == "standard"]
    over_reference: Family = {}
    above_front: Family = {}
    for row in rows:
        if row is not reference:
            over_reference[row.row] = _seed_by_seed(row, reference)
        if not (row.plain and row.attention == "standard"):
            above = _above(row, baselines)
            if above is not None:
                above_front[row.row] = above
    tested_differences = differences(over_reference)
    tested_on_test: dict[str, Verdict] = {}
    if reference.final.test_acc.mean is not None:
        tested_on_test = test_differences(rows, reference)
    tested_above = differences(above_front)
    passages = [_passages(rows, reference, share) for share in SHARES]
    compared = [
        replace(
            row,
            at=[of_share[row.row] for of_share in passages if row.row in of_share],
            difference=tested_differences.get(row.row),
            test_difference=tested_on_test.get(row.row),
            above_front=tested_above.get(row.row),
        )
        for row in rows
    ]
    seeds = [training.settings.seed for training in trainings[0]]
    return Comparison(data, seeds, BASELINE, compared, differences(over_controls(rows)))


def test_differences(rows: Sequence[RowResult], reference: RowResult) -> dict[str, Verdict]:
    """By row the test accuracy minus that of the reference, by seeds and test images."""
    by_seed: Family = {}
    of_images = {}
    right = [run.right_images for run in reference.runs]
    for row in rows:
        if row is not reference:
            by_seed[row.row] = _seed_by_seed(row, reference, "test_acc")
            if not row.failed:
                mine = [run.right_images for run in row.runs]
                of_images[row.row] = gains_of_images(mine, right)
    return differences(by_seed, of_images)


def _passages(rows: Sequence[RowResult], reference: RowResult, share: float) -> dict[str, Passages]:
    """By row that did not fail its first passages to a goal, with the epochs saved tested among all
    rows."""
    passages = {
        row.row: first_passages(row.runs, reference.runs, share) for row in rows if not row.failed
    }
    undecided: Family = {row.row: [None] * len(reference.runs) for row in rows if row.failed}
    return tested_passages(passages, reference.row, undecided)


def _row(
    trainings: Sequence[RowTraining],
    outcomes: Mapping[Path, FinishedTraining | str],
    students: Mapping[Path, int],
) -> RowResult:
    """A row before it is compared with others; ``students`` has by the file of its costs how many
    trainings need a phase A and its export."""
    row = trainings[0].row
    runs = []
    failures = set()
    for training in trainings:
        outcome = outcomes[training.folder]
        if isinstance(outcome, str):
            failures.add(outcome)
        else:
            runs.append(replace(outcome, sharing=students.get(training.phase_a_costs, 1)))
    if failures:
        runs = []
    attention = trainings[0].settings.model.attention
    return RowResult(
        row.name, row.plain, attention, row.settings, sorted(failures), final_values(runs), [], runs
    )


def final_values(runs: Sequence[FinishedTraining]) -> Final:
    """How these runs of a row ended."""
    return Final(
        val_acc=spread([run.final_acc for run in runs]),
        val_loss=spread([run.val_loss[-1] for run in runs]),
        test_acc=spread([run.test_acc for run in runs]),
        epochs=spread([len(run.val_acc) for run in runs]),
        phase_a_epochs=spread([run.phase_a_epochs for run in runs]),
        parameters=spread([run.costs["parameters"] for run in runs]),
        multiply_adds=spread([run.cost("multiply_adds") for run in runs]),
        processor_seconds=spread([run.cost("processor_seconds") for run in runs]),
    )


def over_controls(rows: Sequence[RowResult]) -> Family:
    """For each control, seed by seed, the final accuracy of the student with the same attention
    minus the control's. Where ``--row`` left that student out there is no difference."""
    by_name = {row.row: row for row in rows}
    controls = [by_name[name] for name in CONTROLS if name in by_name]
    students: dict[str, RowResult] = {}
    for row in rows:
        if row.row.startswith(DISTILLED):
            students.setdefault(row.attention, row)
    return {
        control.row: _seed_by_seed(students[control.attention], control)
        for control in controls
        if control.attention in students
    }


def _seed_by_seed(
    row: RowResult, other: RowResult, accuracy: str = "final_acc"
) -> list[float | None]:
    """Seed by seed, the accuracy of one row minus that of another; None for all seeds where one of
    the rows failed."""
    if row.failed or other.failed:
        return [None] * max(len(row.runs), len(other.runs), 1)
    pairs = zip(row.runs, other.runs, strict=True)
    return [getattr(mine, accuracy) - getattr(others, accuracy) for mine, others in pairs]


def _above(row: RowResult, baselines: Sequence[RowResult]) -> list[float | None] | None:
    """For each seed the final accuracy of a row minus what the baselines reach for as many
    multiply-adds, or None if the row failed; None where the row is cheaper than all of them with
    some seed."""
    if row.failed:
        return [None] * len(baselines[0].runs)
    values: list[float | None] = []
    for number, run in enumerate(row.runs):
        others = [baseline.runs[number] for baseline in baselines]
        points = [(other.cost("multiply_adds"), other.final_acc) for other in others]
        reached = front(points, run.cost("multiply_adds"))
        if reached is None:
            return None
        values.append(run.final_acc - reached)
    return values
