"""A teacher that is an ordinary ViT: trained as plain training does, or trained before."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

from gaupipe.data.splits import ImageData
from gaupipe.distillation.teacher import TeacherJob, identity
from gaupipe.settings import Settings, TrainSettings
from gaupipe.settings.load import parse
from gaupipe.settings.sections import LOCAL
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.system.progress import EpochMetrics
from gaupipe.teachers.pretrained import load_vit
from gaupipe.teachers.vit import VitTeacher
from gaupipe.training.job import EpochPlan, LabelLosses, Training
from gaupipe.training.scores import score_model
from gaupipe.vit.build import build_vit

VitJob = TeacherJob[VitTeacher]


def build_training(settings: Settings, data: ImageData) -> Training:
    """The training of a fresh teacher ``vit``: on the labels, until a training accuracy is
    reached."""
    phase = settings.phase_a
    device = select_device(settings.device, settings.threads)
    vit = build_model(settings, data).to(device)
    # no label smoothing: maps of a teacher with smoothed labels teach less
    train = TrainSettings(epochs=phase.max_epochs, optim=phase.optim)
    return Training(
        settings,
        data,
        device,
        vit,
        train,
        settings.phase_a_augment,
        LabelLosses(vit, train, settings.compile),
        [EpochPlan()] * phase.max_epochs,
        identity(settings, data),
        stop_accuracy=phase.stop_accuracy,
    )


def measure(job: VitJob, started: float) -> EpochMetrics:
    """The line of metrics.jsonl for a teacher that was trained before; without a head for the
    classes its loss and training accuracy are None, and its validation accuracy is that of the
    probe, if there is one. ``started`` is the monotonic time when the probe began."""
    train_loss = train_acc = val_acc = None
    if job.teacher.predicts:
        train = score_model(job.teacher, job.batches(job.data.train))
        train_loss = train.loss
        train_acc = train.acc
        val_acc = score_model(job.teacher, job.batches(job.data.val)).acc
    elif job.probe is not None:
        val_acc = job.probe.accuracy
    seconds = time.monotonic() - started
    return {
        "epoch": 0,
        "train_loss": train_loss,
        "train_acc": train_acc,
        "val_acc": val_acc,
        "seconds": round(seconds, 3),
        "images_per_s": round(len(job.data.train) / seconds, 1),
    }


def build(settings: Settings, data: ImageData, folder: Path | None = None) -> VitJob:
    """The teacher that the settings name; for ``vit`` the one that was trained into ``folder``.

    Raises UserError for a teacher that cannot be loaded or read, or does not fit the data.
    """
    phase = settings.phase_a
    device = select_device(settings.device, settings.threads)
    if phase.teacher == "vit":
        remedy = "'gaupipe phase-a --resume' writes it again"
        vit = load_vit(f"{LOCAL}{folder}", data, {}, remedy=remedy)
    else:
        vit = load_vit(phase.teacher, data, phase.teacher_args, download=settings.download)
    return TeacherJob(settings, data, device, vit.to(device))


def build_model(
    settings: Settings, data: ImageData, device: str | None = None
) -> VisionTransformer:
    """A freshly started teacher ``vit``: the ViT of the settings with standard attention."""
    torch.manual_seed(settings.seed)
    changes = ("phase_a.teacher_args", settings.phase_a.teacher_args)
    return build_vit(settings.model, data, "standard", device, changes)


def other_teacher(
    settings: Settings,
    data: ImageData,
    teacher: str,
    teacher_args: dict[str, Any] | None = None,
    download: bool = False,
) -> VitJob:
    """A trained ViT in place of a run's own teacher."""
    if teacher == "local":
        raise UserError(
            "--teacher local: its maps are stored nowhere: 'gaupipe phase-a --set "
            "phase_a.teacher=local' begins a run with it, and phase B makes the maps"
        )
    if teacher in ("gaussian", "vit"):
        raise UserError(
            f"--teacher {teacher}: is trained by phase A: 'gaupipe phase-a --set "
            f"phase_a.teacher={teacher}'; here local-dir:FOLDER or a timm name is right"
        )
    changes = {"teacher": teacher, "teacher_args": teacher_args or {}}
    parsed = parse({"phase_a": changes}, f"--teacher {teacher}").phase_a
    changes["teacher"] = parsed.teacher
    settings = settings.with_section("phase_a", **changes, per_image="table")
    settings = settings.model_copy(update={"download": download})
    return build(settings, data)
