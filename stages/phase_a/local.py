"""Phase A with the teacher ``local``: nothing is trained, the run begins."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from gaupipe.data.splits import ImageData
from gaupipe.distillation.local import described, local_maps, without_predictions
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.files import write_whole
from gaupipe.system.progress import EpochMetrics, read_metrics
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.student import build_student
from stages.runs.directory import RunDirectory
from stages.runs.opening import opened_teacher


@dataclass(frozen=True)
class LocalJob:
    """The teacher on the data of a run."""

    settings: Settings
    data: ImageData


def check(settings: Settings, data: ImageData, students: bool = True) -> LocalJob:
    """The teacher of the settings. Raises UserError for what phase B could not do with it, unless
    ``students`` is False."""
    if students:
        train = without_predictions(settings).student_training
        student = build_student(settings, data, train, "meta")
        local_maps(settings, student)
        build_optimizer(student, train.optim, train.epochs, steps_per_epoch=100)
    return LocalJob(settings, data)


def run(job: LocalJob, directory: RunDirectory, resume: bool) -> list[EpochMetrics]:
    """Begins the run in its directory. Returns the metrics: one entry, of epoch 0, without
    accuracies."""
    path = directory.phase_a / "metrics.jsonl"
    with opened_teacher(directory, job.settings, job.data, resume):
        if distributed.is_main():
            write_metrics(job, directory)
    return read_metrics(path)


def write_metrics(job: LocalJob, directory: RunDirectory) -> None:
    """Writes the line of metrics.jsonl, and says what the teacher is."""
    path = directory.phase_a / "metrics.jsonl"
    path.parent.mkdir(exist_ok=True)
    numbers = dict.fromkeys(("train_loss", "train_acc", "val_acc"))
    write_whole(path, json.dumps({"epoch": 0, **numbers, "seconds": 0.0}) + "\n")
    print(
        f"gaupipe: phase A: nothing to train: the teacher local has "
        f"{described(job.settings.phase_a)}; it predicts nothing, so alpha will be 0",
        file=sys.stderr,
    )
