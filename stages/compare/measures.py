"""Arithmetic of a comparison, without files: means over seeds, epochs to an accuracy, which
differences the seeds decide, and fronts of accuracy over cost.

A run is a finished training as :meth:`stages.compare.trainings.RowTraining.read` returns it. A
curve is the validation accuracy after each epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from scipy.stats import ttest_1samp

from stages.compare.trainings import FinishedTraining

Name = TypeVar("Name", bound=Any)
"""Of a row of a table; names can be sorted."""

LEVEL = 0.05
RESAMPLES = 10_000
SMOOTHED_EPOCHS = 5


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds."""

    mean: float | None = None
    std: float | None = None


def spread(values: Sequence[float | None]) -> Spread:
    """The spread of one value a seed. Both are None where a seed has
    no value; a single value has no standard deviation."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return Spread()
    std = None
    if len(numbers) > 1:
        std = stdev(numbers)
    return Spread(fmean(numbers), std)


def smoothed(curve: Sequence[float]) -> list[float]:
    """A curve's mean over the last five epochs, fewer at its beginning. A single epoch of a noisy
    curve passes an accuracy long before the curve does."""
    return [
        fmean(curve[max(0, epoch - SMOOTHED_EPOCHS) : epoch]) for epoch in range(1, len(curve) + 1)
    ]


def epochs_to(curve: Sequence[float], accuracy: float) -> int | None:
    """Counts from 1 the first epoch after which a curve is at least as high; None if there is
    no such epoch."""
    epochs = (epoch for epoch, reached in enumerate(curve, 1) if reached >= accuracy)
    return next(epochs, None)


@dataclass(frozen=True)
class Passages:
    """First passages of the runs of a row, whose curves are :func:`smoothed`. A mean is given only
    where every seed has a value."""

    share: float
    """The accuracy to pass is this share of what the reference with the same seed has over its last
    five epochs."""
    reached: int
    """Seeds that reached the accuracy."""
    epochs: Spread
    """Epochs until then."""
    epochs_with_phase_a: Spread
    """The same, the epochs of a teacher that was trained counted."""
    core_seconds: Spread
    """Seconds of the processor until then, those of phase A and of the export counted."""
    core_seconds_shared: Spread
    """The same, if all students of the comparison that need them share phase A and the export."""
    speedup: Spread
    """The reference's epochs over ``epochs_with_phase_a``, seed by seed."""
    saved_by_seed: list[int | None]
    """The reference's epochs minus ``epochs_with_phase_a``."""
    saved: Verdict | None = None
    """These among those of the other rows; None for the reference, and until they are tested."""


def first_passages(
    runs: Sequence[FinishedTraining],
    reference: Sequence[FinishedTraining],
    share: float,
) -> Passages:
    """First passages of the runs of a row to a share of what the reference reaches in the end, next
    to those of the reference with the same seeds. The reference may pass it before its last
    epoch."""
    epochs: list[int | None] = []
    epochs_with_phase_a: list[int | None] = []
    core_seconds: list[float | None] = []
    core_seconds_shared: list[float | None] = []
    speedups: list[float | None] = []
    saved: list[int | None] = []
    for run, other in zip(runs, reference, strict=True):
        curve_of_reference = smoothed(other.val_acc)
        accuracy = share * curve_of_reference[-1]
        of_reference = epochs_to(curve_of_reference, accuracy)
        assert of_reference is not None  # its last epoch at the latest
        taken = epochs_to(smoothed(run.val_acc), accuracy)
        epochs.append(taken)
        if taken is None:
            for values in (epochs_with_phase_a, core_seconds, core_seconds_shared, speedups, saved):
                values.append(None)
            continue
        with_phase_a = taken + run.phase_a_epochs
        epochs_with_phase_a.append(with_phase_a)
        of_student = sum(run.processor_seconds[:taken])
        of_phase_a = run.phase_a_costs.get("processor_seconds", 0.0)
        core_seconds.append(of_student + of_phase_a)
        core_seconds_shared.append(of_student + of_phase_a / run.sharing)
        speedups.append(of_reference / with_phase_a)
        saved.append(of_reference - with_phase_a)
    return Passages(
        share,
        reached=sum(taken is not None for taken in epochs),
        epochs=spread(epochs),
        epochs_with_phase_a=spread(epochs_with_phase_a),
        core_seconds=spread(core_seconds),
        core_seconds_shared=spread(core_seconds_shared),
        speedup=spread(speedups),
        saved_by_seed=saved,
    )


Family = dict[Any, Sequence[float | None]]
"""By row of a table one number a seed, None where there is none: what :func:`differences` tests."""


def tested_passages(
    passages: Mapping[Name, Passages], reference: Name, undecided: Family
) -> dict[Name, Passages]:
    """The passages of the rows of a table to one goal, with the epochs that they save over the
    reference tested as a family, to which the ``undecided`` rows belong too."""
    saved: Family = {
        name: row.saved_by_seed
        for name, row in passages.items()
        if name != reference and row.saved_by_seed
    }
    tested = differences(saved | undecided)
    return {name: replace(row, saved=tested.get(name)) for name, row in passages.items()}


@dataclass(frozen=True)
class Difference:
    """The difference of two rows, by a paired t-test over seeds; where it is known which test
    images each row got right, by a paired bootstrap over these images too."""

    mean: float | None
    """None where a seed has no difference, because one of the rows did not reach the goal."""
    low: float | None = None
    high: float | None = None
    """The ends of the 95 % interval of Student's t, or of the bootstrap where that reaches
    farther."""
    p: float | None = None
    """Two-sided, of a mean of zero: the larger of both."""
    seeds_only: bool = True
    """Whether it is unknown which test images each row got right."""


@dataclass(frozen=True)
class Verdict(Difference):
    """A difference among those of a table."""

    holm: float | None = None
    """``p`` after Holm's correction within the table."""
    verdict: str = "not decided"
    """``confirmed`` where Holm's test excludes zero, ``supported`` where the interval does, else
    ``not decided``."""


def difference(values: Sequence[float | None], of_images: np.ndarray | None = None) -> Difference:
    """The difference of two rows from one difference a seed and, where it is known, one for each
    test image (:func:`gains_of_images`). Other seeds and other images are two sources of error; a
    difference has the larger error.

    All but the mean are None with a single seed, and where the difference is the same with every
    seed. Accuracies come in whole images and passages in whole epochs, so that a spread of zero is
    one that was rounded away: the p of 0 to which the formula tends would be certainty from two
    seeds.
    """
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return Difference(None)
    if max(numbers) - min(numbers) < 1e-9:
        return Difference(fmean(numbers))
    test = ttest_1samp(numbers, 0)
    low, high = map(float, test.confidence_interval(1 - LEVEL))
    p = float(test.pvalue)
    if of_images is not None:
        other_low, other_high, other_p = bootstrap(of_images)
        low, high, p = min(low, other_low), max(high, other_high), max(p, other_p)
    return Difference(fmean(numbers), low, high, p, seeds_only=of_images is None)


def gains_of_images(
    mine: Sequence[np.ndarray | None], others: Sequence[np.ndarray | None]
) -> np.ndarray | None:
    """For each test image [N] how much more often one row got it right than another, mean over
    seeds: from -1 to 1. Both are [N], one a seed; None where one of them is unknown."""
    gains = []
    for one, other in zip(mine, others, strict=True):
        if one is None or other is None:
            return None
        gains.append(one.astype(float) - other)
    return np.mean(gains, axis=0)


def bootstrap(of_images: np.ndarray) -> tuple[float, float, float]:
    """The 95 % interval of a mean over images [N] and its two-sided p, had other images been
    drawn: the same for the same numbers."""
    count = len(of_images)
    values, times = np.unique(of_images, return_counts=True)  # few: so draw how often each occurs
    drawn = np.random.default_rng(0).multinomial(count, times / count, size=RESAMPLES)
    means = drawn @ values / count
    low, high = np.quantile(means, [LEVEL / 2, 1 - LEVEL / 2])
    beyond = min(np.sum(means <= 0), np.sum(means >= 0))
    return float(low), float(high), min(1.0, 2 * (beyond + 1) / (RESAMPLES + 1))


def differences(
    table: Mapping[Name, Sequence[float | None]],
    of_images: Mapping[Name, np.ndarray | None] = MappingProxyType({}),
) -> dict[Name, Verdict]:
    """:func:`difference` of each row of a table, and what the table as a whole says of it.

    Holm's family is every row with two seeds or more. One without a p is not decided and counts
    as if its p were 1, because a row that left the family for what came out would make the p of all
    others smaller. A single seed decides nothing whatever comes out, so it is no test.
    """
    result = {
        name: Verdict(**vars(difference(values, of_images.get(name))))
        for name, values in table.items()
    }
    family = sum(len(values) > 1 for values in table.values())
    tested = sorted((row.p, name) for name, row in result.items() if row.p is not None)
    corrected = 0.0
    for rank, (p, name) in enumerate(tested):  # rows whose p counts as 1 would come last
        # Holm: the smallest p counts as often as there are tests, and none may fall below it
        corrected = min(1.0, max(corrected, (family - rank) * p))
        verdict = "not decided"
        if corrected < LEVEL:
            verdict = "confirmed"
        elif p < LEVEL:
            verdict = "supported"
        result[name] = replace(result[name], holm=corrected, verdict=verdict)
    return result


def front(trainings: Sequence[tuple[float, float]], cost: float) -> float | None:
    """The best accuracy that trainings of these (cost, accuracy) reach for ``cost``: the highest so
    far, and between two costs on the line between them, over the logarithm of cost. None below the
    lowest cost; above the highest, the highest of all."""
    cheapest_first = sorted(trainings, key=lambda point: (point[0], -point[1]))
    costs, accuracies = zip(*cheapest_first, strict=True)
    if cost < costs[0]:
        return None
    highest_so_far = np.maximum.accumulate(accuracies)
    return float(np.interp(np.log(cost), np.log(costs), highest_so_far))
