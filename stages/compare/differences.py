"""Which differences between cells the seeds decide, and fronts of accuracy over cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np
from scipy.stats import t as student_t

LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """Values of a cell minus those of another with the same seeds.

    mean        over the seeds
    low, high   ends of the 95 % interval of Student's t
    p           two-sided, of a mean of zero (paired t-test)
    holm        p after Holm's correction within its table

    All but the mean are None with a single seed, and where the difference is the same with every
    seed, by so many images: its spread is then not known.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    holm: float | None = None

    @classmethod
    def of(cls, differences: Sequence[float]) -> Difference:
        """Of one difference a seed."""
        mean, count = fmean(differences), len(differences)
        if max(differences) - min(differences) < 1e-9:
            return cls(mean)
        error = stdev(differences) / count**0.5
        margin = float(student_t.ppf(1 - LEVEL / 2, count - 1)) * error
        p = 2 * float(student_t.sf(abs(mean) / error, count - 1))
        return cls(mean, mean - margin, mean + margin, p)

    @property
    def verdict(self) -> str:
        """ "confirmed" where Holm's test excludes zero, "supported" where the interval does, else
        "not decided"."""
        if self.p is None or self.holm is None or self.p >= LEVEL:
            return "not decided"
        return "confirmed" if self.holm < LEVEL else "supported"


def corrected(differences: Mapping[str, Difference]) -> dict[str, Difference]:
    """The differences of a table, with Holm's correction of their p."""
    tested = sorted(
        (difference.p, name) for name, difference in differences.items() if difference.p is not None
    )
    result, highest = dict(differences), 0.0
    for rank, (p, name) in enumerate(tested):
        highest = min(1.0, max(highest, (len(tested) - rank) * p))
        result[name] = replace(differences[name], holm=highest)
    return result


def front(costs: Sequence[float], accuracies: Sequence[float], cost: float) -> float | None:
    """The best accuracy that trainings with these costs reach for ``cost``: the highest so far, and
    between two costs on the line between them, over the logarithm of cost. None below the lowest
    cost."""
    if not costs or cost < min(costs):
        return None
    best, highest = {}, 0.0
    for one, accuracy in sorted(zip(costs, accuracies, strict=True)):
        best[one] = highest = max(highest, accuracy)
    return float(np.interp(np.log(cost), np.log([*best]), [*best.values()]))
