"""Phase A with an ordinary ViT as the teacher: one that is trained here as ``gaupipe train`` does,
or one that was trained before."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

from gaupipe.data.splits import ImageData
from gaupipe.distillation.student import check_student
from gaupipe.settings import PhaseASettings, Settings, TrainSettings
from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import LOCAL, Scope
from gaupipe.system import distributed
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.system.progress import read_metrics
from gaupipe.teachers.pretrained import load_vit
from gaupipe.teachers.vit import VitTeacher, weights_of_patches
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import score_model
from gaupipe.training.state import TrainingState
from gaupipe.vit.build import build_vit
from gaupipe.vit.saving import save_student
from stages.phase_a.job import TeacherJob, started, write_digest
from stages.runs.directory import RunDirectory
from stages.train import Training, train, training_state

UPPER_ACCURACY = 0.98
"""Upper bound of the window for the training accuracy (*GauTransformer, section 3.3.1*)."""

VitJob = TeacherJob[VitTeacher]


class TeacherTraining(Training):
    """The training of the teacher ``vit``: on the labels, until a training accuracy is reached."""

    @property
    def augment(self) -> AugmentSettings:
        return self.settings.phase_a_augment

    def label(self, folder: Path) -> str:
        return "phase A"

    def identity(self) -> dict[str, Any]:
        return identity(self.settings, self.data)

    def ending(self, state: TrainingState, folder: Path) -> str:
        return ending(self.settings.phase_a, state.metrics)

    def is_over(self, state: TrainingState, metrics: dict[str, Any]) -> bool:
        return metrics["train_acc"] >= self.settings.phase_a.stop_accuracy


def ending(phase: PhaseASettings, metrics: list[dict[str, Any]]) -> str:
    """A line about a teacher that is trained: why its training ended, and whether its accuracy on
    the training images lies in the window."""
    rate = "phase_a.rows.lr" if phase.learns_of_images else "phase_a.optim.lr"
    accuracy, epochs = metrics[-1]["train_acc"], len(metrics)
    if accuracy < phase.stop_accuracy:
        return (
            f"{epochs} epochs were not enough for a training accuracy of {phase.stop_accuracy}: "
            f"{accuracy:.4f}; raise phase_a.max_epochs or {rate}"
        )
    if accuracy > max(UPPER_ACCURACY, phase.stop_accuracy):
        return (
            f"the training accuracy {accuracy:.4f} is above the window's upper bound "
            f"{UPPER_ACCURACY}: the teacher has begun to memorise; lower {rate}"
        )
    return (
        f"ended after {epochs} of {phase.max_epochs} epochs: the training accuracy {accuracy:.4f} "
        f"has reached phase_a.stop_accuracy={phase.stop_accuracy}"
    )


def identity(settings: Settings, data: ImageData) -> dict[str, Any]:
    """Every setting that phase A reads, and the data set."""
    of_phase = flatten(settings.without_student(), Scope.ANYTIME)
    return of_phase | {"the data set": data.sha256}


def check(settings: Settings, data: ImageData, students: bool = True) -> VitJob | TeacherTraining:
    """The teacher that the settings name, or the training of a new one. Raises UserError for what
    neither phase could do with it, or, without ``students``, phase A."""
    if settings.phase_a.teacher == "vit":
        vit = build_model(settings, data, "meta")
        if students:
            check_student(settings, data, vit, weights_of_patches(vit))
        build_optimizer(vit, settings.phase_a.optim, settings.phase_a.max_epochs, 100)
        device = select_device(settings.device, settings.threads)
        vit = build_model(settings, data).to(device)
        # no label smoothing: maps of a teacher with smoothed labels teach less
        phase = settings.phase_a
        train = TrainSettings(epochs=phase.max_epochs, optim=phase.optim)
        return TeacherTraining(settings, data, device, vit, train)
    job = build(settings, data)
    if students:
        warm = settings.phase_b.warm_start != "none"
        check_student(settings, data, job.teacher, job.teacher.weights() if warm else {})
        if settings.phase_b.alpha and not job.teacher.predicts:
            raise UserError(
                f"phase_b.alpha: the teacher {settings.phase_a.teacher} predicts no classes: set "
                "phase_b.alpha=0, and phase_b.beta to what the labels are to weigh"
            )
    return job


def run(job: TeacherTraining, run: RunDirectory, resume: bool) -> list[dict[str, Any]]:
    """Trains the teacher ``vit`` in a run directory. Returns its metrics, one dict per epoch."""
    state = training_state(job)
    with started(run, job.settings, job.data, state, resume):
        train(job, state, run.phase_a)
        folder = run.phase_a / "teacher"
        distributed.on_main(partial(save_student, state.kept, folder, **job.data.data_config))
        teacher = distributed.main_first(lambda: build(job.settings, job.data, folder))
        write_digest(run, teacher)
    return state.metrics


def adopt(job: VitJob, run: RunDirectory, resume: bool) -> list[dict[str, Any]]:
    """Takes a teacher that was trained before into a run directory and scores it once. Returns the
    metrics: one entry, of epoch 0; without a head for the classes its accuracies are None."""
    job.common_sha256()
    if run.teacher_digest() is not None:
        check_unchanged(job, run)
    with run.locked():
        distributed.on_main(partial(run.start, job.settings, job.data, resume))
        path = run.phase_a / "metrics.jsonl"
        if not distributed.broadcast(path.is_file()):
            metrics = measure(job)
            path.parent.mkdir(exist_ok=True)
            distributed.on_main(partial(write_whole, path, json.dumps(metrics) + "\n"))
        write_digest(run, job)
        return read_metrics(path)


def measure(job: VitJob) -> dict[str, Any]:
    """The line of metrics.jsonl for a teacher that was trained before."""
    started = time.monotonic()
    metrics: dict[str, Any] = {"epoch": 0, "train_loss": None, "train_acc": None, "val_acc": None}
    if job.teacher.predicts:
        splits = job.data.train, job.data.val
        train, val = (score_model(job.teacher, job.batches(split)) for split in splits)
        metrics |= {"train_loss": train["loss"], "train_acc": train["acc"], "val_acc": val["acc"]}
    rate = len(job.data.train) / (time.monotonic() - started)
    return metrics | {"seconds": 0.0, "images_per_s": round(rate, 1)}


def build(settings: Settings, data: ImageData, folder: Path | None = None) -> VitJob:
    """The teacher that the settings name; for ``vit`` the one that was trained into ``folder``.

    Raises UserError for a teacher that cannot be loaded or read, or does not fit the data.
    """
    phase, device = settings.phase_a, select_device(settings.device, settings.threads)
    if phase.teacher == "vit":
        remedy = "'gaupipe phase-a --resume' writes it again"
        vit = load_vit(f"{LOCAL}{folder}", data, {}, remedy=remedy)
    else:
        vit = load_vit(phase.teacher, data, phase.teacher_args, download=settings.download)
    return TeacherJob(settings, data, device, vit.to(device))


def load(run: RunDirectory, settings: Settings, data: ImageData) -> VitJob:
    """The finished teacher of a run. Raises UserError where phase A has not finished, and for a
    teacher that has changed since."""
    if run.teacher_digest() is None:
        raise unfinished(run)
    job = build(settings, data, run.phase_a / "teacher")
    check_unchanged(job, run)
    return job


def unfinished(run: RunDirectory) -> UserError:
    """The error for a run whose phase A has not finished."""
    return UserError(
        f"{run.path}: phase A has not finished; 'gaupipe phase-a {run.config} --run-dir "
        f"{run.path} --resume' does that"
    )


def check_unchanged(job: VitJob, run: RunDirectory) -> None:
    """Raises UserError for another teacher than the run's."""
    if job.sha256 != run.teacher_digest():
        raise UserError(
            f"phase_a.teacher: {job.settings.phase_a.teacher} is not the teacher that {run.path} "
            "was started with: its weights have changed; restore them, or start another run"
        )


def build_model(
    settings: Settings, data: ImageData, device: str | None = None
) -> VisionTransformer:
    """A freshly started teacher ``vit``: the ViT of the settings with standard attention."""
    torch.manual_seed(settings.seed)
    changes = ("phase_a.teacher_args", settings.phase_a.teacher_args)
    return build_vit(settings.model, data, "standard", device, changes)
