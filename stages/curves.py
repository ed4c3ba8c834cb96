"""Learning curves of the trainings of some runs, in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gaupipe.system.errors import UserError
from gaupipe.system.progress import EpochMetrics, read_metrics
from gaupipe.training.curves import draw


def draw_runs(folders: Sequence[Path], out: Path) -> list[Path]:
    """Draws the trainings in runs and in folders of single trainings to ``out``, a PNG, and to the
    SVG beside it, and returns both. Raises UserError for a folder without a training."""
    trainings: dict[str, list[EpochMetrics]] = {}
    for folder in folders:
        found = trainings_in(folder)
        if not found:
            raise UserError(f"{folder}: nothing was trained there (there is no metrics.jsonl)")
        trainings |= found
    draw(trainings, out.with_suffix(""))
    return [out.with_suffix(".png"), out.with_suffix(".svg")]


def trainings_in(folder: Path) -> dict[str, list[EpochMetrics]]:
    """The metrics of the trainings in a folder, by their own folders."""
    trainings = {}
    for place in (".", "*", "*/*"):
        for path in sorted(folder.glob(f"{place}/metrics.jsonl")):
            metrics = [entry for entry in read_metrics(path) if entry["epoch"] > 0]
            if metrics:
                trainings[str(path.parent)] = metrics
    return trainings
