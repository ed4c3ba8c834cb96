"""The whole method: phase A, export, phase B, and the same ViT trained plainly beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from gaupipe.data.splits import ImageData, load_data
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.progress import EpochMetrics, total_seconds
from gaupipe.training.student import check_baseline
from stages import export, phase_a, phase_b
from stages.runs import kept_epochs
from stages.runs.directory import RunDirectory


@dataclass(frozen=True)
class Line:
    """A training in the summary table."""

    model: str
    epochs: int
    train_acc: float | None
    """Accuracies are None for a teacher that predicts nothing."""
    val_acc: float | None
    seconds: float


def run(settings: Settings, run_dir: Path, attention: str | None = None) -> list[Line]:
    """Runs every stage that has not finished in ``run_dir``, with a student of this attention, and
    returns the lines of the summary table."""
    attention = attention or settings.model.attention
    settings = settings.with_section("model", attention=attention)
    run_directory = RunDirectory(run_dir)

    def prepare() -> ImageData:
        data = load_data(run_directory.settled(settings).data, settings.download)
        if settings.baseline.epochs != 0:
            check_baseline(settings, data)
        for distilled in (True, False):
            # a damaged student is refused before anything runs
            if run_directory.student(attention, distilled).exists():
                run_directory.student_settings(attention, distilled)
        return data

    data = distributed.main_first(prepare)
    begun = run_directory.phase_a.exists()
    teacher = phase_a.run(settings, run_dir, resume=begun, data=data)
    export.ensure(run_dir, export=settings.export, data=data)
    folder = run_directory.student(attention)
    student = phase_b.run(run_dir, attention, resume=folder.exists(), data=data)
    last = teacher[-1]
    phase = settings.phase_b
    weights_alone = phase.alpha == phase.gamma == 0 and phase.warm_start != "none"
    made = "from the teacher" if weights_alone else "distilled"
    lines = [
        Line(
            "teacher (phase A)",
            last["epoch"],
            last["train_acc"],
            last["val_acc"],
            total_seconds(teacher),
        ),
        line(f"{attention}, {made}", student, folder),
    ]
    if settings.baseline.epochs != 0:
        folder = run_directory.student(attention, distilled=False)
        begun = folder.exists()
        plain = phase_b.run(run_dir, attention, resume=begun, distilled=False, data=data)
        lines.append(line(f"{attention}, plain", plain, folder))
        before = run_directory.student_settings(attention, distilled=False).baseline_training
        if before.epochs < settings.baseline_epochs and distributed.is_main():
            both = f"both phases have {settings.baseline_epochs} epochs"
            print(f"gaupipe: {folder} is from before phase A: {both}", file=sys.stderr)
    return lines


def line(model: str, metrics: list[EpochMetrics], folder: Path) -> Line:
    """A student's line of the table: the accuracies are those of the epoch that was kept."""
    epoch = kept_epochs.entry(folder, len(metrics))["epoch"]
    if epoch != len(metrics):
        model += f" (epoch {epoch})"
    kept = metrics[epoch - 1]
    return Line(model, len(metrics), kept["train_acc"], kept["val_acc"], total_seconds(metrics))


def table(lines: Sequence[Line], title: str) -> Table:
    """The summary of :func:`run` for the terminal."""
    shown = Table(title=title, title_justify="left")
    for column in ("", "epochs", "train acc.", "validation acc.", "seconds"):
        shown.add_column(column, justify="right" if column else "left")
    for line in lines:
        accuracies = [line.train_acc, line.val_acc]
        percents = ["-" if one is None else f"{100 * one:.2f} %" for one in accuracies]
        shown.add_row(line.model, str(line.epochs), *percents, f"{line.seconds:.1f}")
    return shown
