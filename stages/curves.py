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
        count = len(trainings)
        for place in (".", "*", "*/*"):
            for path in sorted(folder.glob(f"{place}/metrics.jsonl")):
                metrics = [entry for entry in read_metrics(path) if entry["epoch"] > 0]
                if metrics:
                    trainings[str(path.parent)] = metrics
        if len(trainings) == count:
            raise UserError(f"{folder}: nothing was trained there (there is no metrics.jsonl)")
    draw(trainings, out.with_suffix(""))
    return [out, out.with_suffix(".svg")]
