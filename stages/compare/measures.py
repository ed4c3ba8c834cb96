"""The arithmetic of a comparison, without files: means over seeds, epochs to an accuracy, which
differences the seeds decide, and fronts of accuracy over cost.

A run is a finished training as :meth:`stages.compare.trainings.Training.read` returns it. A curve
is the validation accuracy after each epoch.
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
    return {"mean": fmean(numbers), "std": stdev(numbers) if len(numbers) > 1 else None}


def epochs_to(curve: Sequence[float], accuracy: float) -> int | None:
    """The first epoch, counted from 1, after which a curve is at least as high; None if there is
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
        goal = share * other["val_acc"][-1] if target is None else target
        epochs, before = (epochs_to(curve, goal) for curve in (run["val_acc"], other["val_acc"]))
        for suffix, more in (("", 0), ("_with_phase_a", run["phase_a_epochs"])):
            total = epochs and epochs + more
            values.setdefault(f"epochs{suffix}", []).append(total)
            values.setdefault(f"speedup{suffix}", []).append(total and before and before / total)
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
    highest = 0.0
    for rank, (p, name) in enumerate(tested):
        highest = min(1.0, max(highest, (len(tested) - rank) * p))
        result[name]["holm"] = highest
        if p < LEVEL:
            result[name]["verdict"] = "confirmed" if highest < LEVEL else "supported"
    return result


def front(trainings: Sequence[tuple[float, float]], cost: float) -> float | None:
    """The best accuracy that trainings of these (cost, accuracy) reach for ``cost``: the highest so
    far, and between two costs on the line between them, over the logarithm of cost. None below the
    lowest cost."""
    costs, accuracies = zip(*sorted(trainings, key=lambda one: (one[0], -one[1])), strict=True)
    if cost < costs[0]:
        return None
    return float(np.interp(np.log(cost), np.log(costs), np.maximum.accumulate(accuracies)))
