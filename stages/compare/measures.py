"""Arithmetic of a comparison, without files: means over seeds, epochs to an accuracy, which
differences the seeds decide, and fronts of accuracy over cost.

A run is a finished training as :meth:`stages.compare.trainings.RowTraining.read` returns it. A
curve is the validation accuracy after each epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, TypedDict

import numpy as np
from scipy.stats import ttest_1samp

LEVEL = 0.05


class Spread(TypedDict):
    """Mean and sample standard deviation over seeds."""

    mean: float | None
    std: float | None


def spread(values: Sequence[float | None]) -> Spread:
    """The spread of one value a seed. Both are None where a seed has
    no value; a single value has no standard deviation."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return {"mean": None, "std": None}
    std = None
    if len(numbers) > 1:
        std = stdev(numbers)
    return {"mean": fmean(numbers), "std": std}


def epochs_to(curve: Sequence[float], accuracy: float) -> int | None:
    """Counts from 1 the first epoch after which a curve is at least as high; None if there is
    no such epoch."""
    epochs = (epoch for epoch, reached in enumerate(curve, 1) if reached >= accuracy)
    return next(epochs, None)


def first_passages(
    runs: Sequence[Mapping[str, Any]],
    reference: Sequence[Mapping[str, Any]],
    target: float | None = None,
    share: float = 1.0,
) -> dict[str, int | Spread]:
    """First passages of the runs of a row, next to those of the reference with the same seeds.

    The accuracy to pass is ``target``, or the ``share`` of the final accuracy of the reference's
    run with the same seed. The reference may pass its own final accuracy before its last epoch.

    Returns, a mean being given only where every seed has a value:
        reached                   number of seeds that reached the accuracy
        epochs                    :func:`spread` of the epochs until then
        epochs_with_phase_a       the same, those of phase A counted
        speedup                   spread of the reference's epochs over the row's, seed by seed
        speedup_with_phase_a      the same, those of phase A counted
    """
    values: dict[str, list[float | None]] = {}
    for run, other in zip(runs, reference, strict=True):
        goal = target
        if goal is None:
            goal = share * other["val_acc"][-1]
        epochs = epochs_to(run["val_acc"], goal)
        reference_epochs = epochs_to(other["val_acc"], goal)
        for suffix, more in (("", 0), ("_with_phase_a", run["phase_a_epochs"])):
            total = None
            speedup = None
            if epochs is not None:
                total = epochs + more
                if reference_epochs is not None:
                    speedup = reference_epochs / total
            values.setdefault(f"epochs{suffix}", []).append(total)
            values.setdefault(f"speedup{suffix}", []).append(speedup)
    reached = sum(epochs is not None for epochs in values["epochs"])
    return {"reached": reached, **{name: spread(numbers) for name, numbers in values.items()}}


class Difference(TypedDict):
    """The ``mean`` of one difference a seed, the ends of its 95 % interval of Student's t, and
    ``p``, two-sided, of a mean of zero (paired t-test)."""

    mean: float
    low: float | None
    high: float | None
    p: float | None


class Verdict(Difference):
    holm: float | None
    """``p`` after Holm's correction within the table."""
    verdict: str
    """``confirmed`` where Holm's test excludes zero, ``supported`` where the interval does, else
    ``not decided``."""


def difference(values: Sequence[float]) -> Difference:
    """The difference of two rows from one difference a seed.

    All but the mean are None with a single seed, and where the difference is the same with every
    seed, by so many images: its spread is then not known.
    """
    if max(values) - min(values) < 1e-9:
        return {"mean": fmean(values), "low": None, "high": None, "p": None}
    test = ttest_1samp(values, 0)
    low, high = map(float, test.confidence_interval(1 - LEVEL))
    return {"mean": fmean(values), "low": low, "high": high, "p": float(test.pvalue)}


def differences(table: Mapping[str, Sequence[float]]) -> dict[str, Verdict]:
    """:func:`difference` of each row of a table, and what the table as a whole says of it."""
    result: dict[str, Verdict] = {
        name: {**difference(values), "holm": None, "verdict": "not decided"}
        for name, values in table.items()
    }
    tested = sorted((row["p"], name) for name, row in result.items() if row["p"] is not None)
    corrected = 0.0
    for rank, (p, name) in enumerate(tested):
        # Holm: the smallest p counts as often as there are tests, and none may fall below it
        corrected = min(1.0, max(corrected, (len(tested) - rank) * p))
        result[name]["holm"] = corrected
        if corrected < LEVEL:
            result[name]["verdict"] = "confirmed"
        elif p < LEVEL:
            result[name]["verdict"] = "supported"
    return result


def front(trainings: Sequence[tuple[float, float]], cost: float) -> float | None:
    """The best accuracy that trainings of these (cost, accuracy) reach for ``cost``: the highest so
    far, and between two costs on the line between them, over the logarithm of cost. None below the
    lowest cost."""
    cheapest_first = sorted(trainings, key=lambda point: (point[0], -point[1]))
    costs, accuracies = zip(*cheapest_first, strict=True)
    if cost < costs[0]:
        return None
    highest_so_far = np.maximum.accumulate(accuracies)
    return float(np.interp(np.log(cost), np.log(costs), highest_so_far))
