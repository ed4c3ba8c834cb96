"""Finished runs, and how soon they reach an accuracy next to a reference. Arithmetic, no files.

A curve is the validation accuracy after each epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from gaupipe.system.progress import epochs_in

COSTS = ("multiply_adds", "processor_seconds")
"""What a training costs, by the names that :mod:`stages.compare.costs` gives them."""


@dataclass(frozen=True)
class Run:
    """One finished training: the metrics entries of its epochs and of the phase A before it.

    costs            ``parameters`` and the :data:`COSTS` of its epochs
    phase_a          empty for a baseline
    phase_a_costs    the :data:`COSTS` of phase A, the export included; empty for a baseline
    test_acc         None where the test split was not used
    """

    seed: int
    metrics: list[dict[str, Any]]
    costs: dict[str, Any]
    phase_a: list[dict[str, Any]]
    phase_a_costs: dict[str, Any]
    test_acc: float | None = None

    @property
    def curve(self) -> list[float]:
        return [entry["val_acc"] for entry in self.metrics]

    def cost(self, name: str) -> float:
        """One of the :data:`COSTS`, phase A counted."""
        return self.costs[name] + self.phase_a_costs.get(name, 0)

    def passage(self, accuracy: float, phase_a: bool = False) -> int | None:
        """Epochs until the run first reaches an accuracy, those of phase A counted or not; None if
        it never does."""
        epochs = epochs_to(self.curve, accuracy)
        return epochs if epochs is None or not phase_a else epochs + epochs_in(self.phase_a)


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds. Both are None where a seed has no value."""

    mean: float | None
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        """A single value has no spread: its std is None."""
        numbers = [value for value in values if value is not None]
        if not numbers or len(numbers) < len(values):
            return cls(None, None)
        return cls(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None)


def epochs_to(curve: Sequence[float], accuracy: float) -> int | None:
    """The first epoch, counted from 1, after which a curve is at least as high; None if there is
    no such epoch."""
    epochs = (epoch for epoch, reached in enumerate(curve, 1) if reached >= accuracy)
    return next(epochs, None)


def compare_at(
    runs: Sequence[Run],
    reference: Sequence[Run],
    target: float | None = None,
    share: float = 1.0,
) -> dict[str, Any]:
    """First passages of the runs of a cell, next to those of the reference.

    The accuracy to pass is ``target``, or the ``share`` of the final accuracy of the reference's
    run with the same seed. The reference may pass its own final accuracy before its last epoch.

    Returns, a mean being given only where every seed has a value:
        reached                   number of seeds that reached the accuracy
        epochs                    Spread of the epochs until then
        epochs_with_phase_a       the same, those of phase A counted
        speedup                   Spread of the reference's epochs over the cell's, seed by seed
        speedup_with_phase_a      the same, those of phase A counted
    """
    by_seed = {run.seed: run for run in reference}
    others = [by_seed[run.seed] for run in runs]
    goals = [share * other.curve[-1] if target is None else target for other in others]
    result: dict[str, Any] = {}
    for suffix, phase_a in (("", False), ("_with_phase_a", True)):
        epochs = [run.passage(goal, phase_a) for run, goal in zip(runs, goals, strict=True)]
        before = [other.passage(goal) for other, goal in zip(others, goals, strict=True)]
        ratios = [one and own and one / own for one, own in zip(before, epochs, strict=True)]
        result["reached"] = sum(number is not None for number in epochs)
        result |= {f"epochs{suffix}": Spread.of(epochs), f"speedup{suffix}": Spread.of(ratios)}
    return result
