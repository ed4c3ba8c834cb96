"""How soon runs reach an accuracy, next to a reference. Arithmetic of learning curves, no files.

A curve is the validation accuracy after each epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from gaupipe.system.progress import epochs_in, total_seconds

COSTS = ("epochs", "epochs_with_phase_a", "seconds", "seconds_with_phase_a")
"""What reaching an accuracy costs; names of fields of :class:`Reach`."""


@dataclass(frozen=True)
class Run:
    """One finished training: the metrics entries of its epochs and of the phase A before it.

    ``phase_a`` is empty for a baseline, ``test_acc`` None where the test split was not used.
    """

    seed: int
    metrics: list[dict[str, Any]]
    phase_a: list[dict[str, Any]]
    test_acc: float | None = None

    @property
    def curve(self) -> list[float]:
        return [entry["val_acc"] for entry in self.metrics]

    def reach(self, target: float) -> Reach:
        """What it took the run to reach an accuracy."""
        epochs = epochs_to(self.curve, target)
        if epochs is None:
            return Reach()
        seconds = total_seconds(self.metrics[:epochs])
        return Reach(
            epochs=epochs,
            epochs_with_phase_a=epochs + epochs_in(self.phase_a),
            seconds=seconds,
            seconds_with_phase_a=seconds + total_seconds(self.phase_a),
            accuracy=self.curve[epochs - 1],
        )


@dataclass(frozen=True)
class Reach:
    """Epochs and seconds of training to an accuracy, and the accuracy then. None means never."""

    epochs: int | None = None
    epochs_with_phase_a: int | None = None
    seconds: float | None = None
    seconds_with_phase_a: float | None = None
    accuracy: float | None = None


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


def epochs_to(curve: Sequence[float], target: float) -> int | None:
    """The first epoch, counted from 1, after which the accuracy is at least ``target``.

    None if there is no such epoch.
    """
    epochs = (epoch for epoch, accuracy in enumerate(curve, 1) if accuracy >= target)
    return next(epochs, None)


def compare_at(
    runs: Sequence[Run],
    reference: Sequence[Run],
    *,
    target: float | None = None,
    share: float | None = None,
) -> dict[str, Any]:
    """The runs of a cell next to those of the reference, at one accuracy.

    The accuracy is ``target``. With a ``share`` it is that share of the final accuracy of the
    reference's run with the same seed.

    Returns, a mean being given only where every seed has a value:
        reached           number of seeds that reached the accuracy
        COST              Spread, for each of :data:`COSTS`
        speedup_COST      Spread of the reference's cost over the cell's, taken seed by seed
        accuracy          Spread of the accuracy when it was reached
    """
    by_seed = {run.seed: run for run in reference}
    pairs = []
    for run in runs:
        other = by_seed[run.seed]
        if share is not None:
            accuracy = share * other.curve[-1]
        elif target is not None:
            accuracy = target
        else:
            raise TypeError("compare_at: an accuracy is missing: target or share")
        pairs.append((run.reach(accuracy), other.reach(accuracy)))
    result: dict[str, Any] = {"reached": sum(cell.epochs is not None for cell, _ in pairs)}
    for name in (*COSTS, "accuracy"):
        result[name] = Spread.of([getattr(cell, name) for cell, _ in pairs])
    for name in COSTS:
        ratios = [_ratio(getattr(other, name), getattr(cell, name)) for cell, other in pairs]
        result[f"speedup_{name}"] = Spread.of(ratios)
    return result


def _ratio(reference: float | None, cell: float | None) -> float | None:
    """None where one of them never got there, or was measured to take no time."""
    return reference / cell if reference is not None and cell else None
