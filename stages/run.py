"""The whole method: phase A, export, phase B, and the same ViT trained plainly beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn

from gaupipe.attention.options import count_parameters
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.load import with_anytime
from gaupipe.system import distributed
from gaupipe.system.progress import EpochMetrics, processor_seconds
from gaupipe.training.scores import percent
from gaupipe.training.settle import settle
from gaupipe.training.student import outline_student
from stages import export, phase_a, phase_b
from stages.runs import kept_epochs
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_student, load_teacher


@dataclass(frozen=True)
class Line:
    """A training in the summary table."""

    model: str
    epochs: int
    val_acc: float | None
    """None for a teacher that predicts nothing."""
    val_images: int
    core_seconds: float = field(compare=False)
    """Of the processor, those of the teacher's export counted."""
    parameters: int | None = None
    images_per_s: float | None = field(default=None, compare=False)
    """Of predictions. Both are None beside a teacher with Gaussians and where there is none."""


def run_all(settings: Settings, run_dir: Path, *, baseline: bool = True) -> list[Line]:
    """Runs every stage that has not finished in ``run_dir`` and returns the lines of the summary
    table. ``baseline`` False leaves the same ViT without a teacher out."""
    attention = settings.model.attention
    run_directory = RunDirectory(run_dir)
    students = {True: how_distilled(settings)}
    if baseline:
        students[False] = "plain"

    with distributed.rank_zero_first():
        images = settle(settings, run_directory.begun()).data
        data = load_data(images, settings.download, unlabelled=True)
        if False in students:  # refused now, not after the teacher has been trained
            outline_student(settings, data, settings.train)
        for distilled in (True, False):
            # a damaged student is refused before anything runs
            if run_directory.student(attention, distilled).exists():
                run_directory.student_settings(attention, distilled)
    begun = run_directory.phase_a.exists()
    teacher = phase_a.run(settings, run_dir, resume=begun, data=data)
    began = time.process_time()
    export.ensure(run_dir, export=settings.export, data=data, now=settings)
    exported = time.process_time() - began
    lines = []
    if settings.phase_a.kind.stored:
        lines.append(line_of_teacher(teacher, len(data.val), exported))
    for distilled, how in students.items():
        folder = run_directory.student(attention, distilled)
        begun = folder.exists()
        metrics = phase_b.run(
            run_dir, attention, data=data, now=settings, resume=begun, distilled=distilled
        )
        lines.append(line(f"{attention}, {how}", metrics, folder, len(data.val)))
    kind = settings.phase_a.kind
    # a teacher with Gaussians is as large as its student
    if kind.stored and not kind.learns_images and distributed.is_main():  # which shows the table
        lines = with_sizes(lines, run_directory, settings, data)
    return lines


def how_distilled(settings: Settings) -> str:
    """How the student of phase B is made, in words."""
    phase = settings.phase_b
    if not settings.phase_a.kind.stored:
        return settings.phase_a.teacher
    if phase.alpha == phase.gamma == 0 and phase.warm_start != "none":
        return "from the teacher"
    return "distilled"


def line_of_teacher(metrics: list[EpochMetrics], val_images: int, exported: float) -> Line:
    """The teacher's line of the table; its export took ``exported`` core seconds. One that was
    trained before, and predicts other classes, has the accuracy of a linear head."""
    last = metrics[-1]
    model = "teacher (phase A)"
    if last["epoch"] == 0 and last["train_acc"] is None and last["val_acc"] is not None:
        model = "teacher, linear head"
    spent = processor_seconds(metrics) + exported
    return Line(model, last["epoch"], last["val_acc"], val_images, spent)


def with_sizes(
    lines: list[Line], run: RunDirectory, settings: Settings, data: ImageData
) -> list[Line]:
    """The lines of a teacher, its student and the baseline, if there is one, with their parameters
    and speeds."""
    teacher = load_teacher(run, data, settings=with_anytime(run.settings(), settings))
    models = [teacher.timed()]
    for distilled in (True, False)[: len(lines) - 1]:
        student = load_student(run.path, settings.model.attention, plain=not distilled)
        models += [(student.model, data.image_size)]
    sized = []
    for line, (model, size) in zip(lines, models, strict=True):
        parameters = count_parameters(model)
        if parameters:  # a teacher need not be a network
            images = torch.zeros(8, data.channels, size, size)
            speed = speed_of(model.to(teacher.device), images)
            line = replace(line, parameters=parameters, images_per_s=speed)
        sized.append(line)
    return sized


@torch.inference_mode()
def speed_of(model: nn.Module, images: Tensor) -> float:
    """Predictions a second of a ViT: the best of some batches of these images, as other programs
    may run beside it."""
    device = next(model.parameters()).device
    images = images.to(device)
    best = math.inf
    for _ in range(6):
        started = time.perf_counter()
        model(images).cpu()
        best = min(best, time.perf_counter() - started)
    return len(images) / best


def line(model: str, metrics: list[EpochMetrics], folder: Path, val_images: int) -> Line:
    """A student's line of the table: the accuracy is that of the epoch that was kept."""
    epoch = kept_epochs.entry(folder)["epoch"]
    if epoch != len(metrics):
        model += f" (epoch {epoch})"
    accuracy = metrics[epoch - 1]["val_acc"]
    return Line(model, len(metrics), accuracy, val_images, processor_seconds(metrics))


def table(lines: Sequence[Line], title: str) -> Table:
    """The summary of :func:`run_all` for the terminal."""
    caption = (
        f"validation acc. with its 95 % interval of {lines[0].val_images:,} images\n"
        "core s: of the processor, with an export that ran now"
    )
    # one space between columns, for a table with sizes to fit a terminal of 80 columns
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, title=title, caption=caption)
    shown.title_justify = shown.caption_justify = "left"
    sized = lines[0].parameters is not None
    columns = ["", "epochs", "validation acc.", "core s"]
    if sized:
        columns += ["parameters", "images/s"]
        shown.caption = f"{caption}; images/s: predictions"
    for column in columns:
        # a narrow terminal breaks names, never numbers
        shown.add_column(column, justify="right" if column else "left", no_wrap=bool(column))
    for line in lines:
        accuracy = "-" if line.val_acc is None else percent(line.val_acc, line.val_images)
        digits = 1 if line.core_seconds < 10 else 0
        cells = [line.model, str(line.epochs), accuracy, f"{line.core_seconds:,.{digits}f}"]
        if sized:
            cells += [f"{line.parameters:,}", f"{line.images_per_s:,.0f}"]
        shown.add_row(*cells)
    return shown
