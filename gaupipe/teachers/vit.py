"""A teacher that is an ordinary ViT: trained as plain training does, or trained before."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer

from gaupipe.data.folder import say_once
from gaupipe.data.splits import ImageData
from gaupipe.distillation.student import check_student
from gaupipe.settings import Settings, TrainSettings
from gaupipe.settings.load import parse
from gaupipe.settings.sections import LOCAL
from gaupipe.system import distributed
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.system.progress import EpochMetrics
from gaupipe.teachers.base import TeacherJob, identity
from gaupipe.teachers.probe import check_probe, fit_probe
from gaupipe.teachers.readable_vit import (
    PROBE_INSTEAD,
    VitTeacher,
    parts_of_teachers,
)
from gaupipe.training.job import EpochPlan, LabelLosses, Training
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import score_model
from gaupipe.vit.build import build_vit, created
from gaupipe.vit.inputs import SETTING
from gaupipe.vit.pretrained import HUB, REMEDY, cached_weights, pretrained, published

VitJob = TeacherJob[VitTeacher]

SAMPLE = 200
"""Training images by which it is seen whether a teacher's numbers of classes are those of the data
set."""

NEAR_CHANCE = 0.2
"""A smaller part of the way from chance to no mistake is near chance."""


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
    job = build(settings, data)
    check_matched(job)
    return job


def checked_job(settings: Settings, data: ImageData, students: bool = True) -> VitJob | Training:
    """The teacher that the settings name, or the training of a new one. Raises UserError for what
    neither phase could do with it, or, without ``students``, phase A."""
    if settings.phase_a.teacher == "vit":
        vit = build_model(settings, data, "meta")
        if students:
            check_student(settings, data, vit, vit.state_dict())
        build_optimizer(vit, settings.phase_a.optim, settings.phase_a.max_epochs, 100)
        return build_training(settings, data)
    job = build(settings, data)
    check_matched(job)
    if students:
        warm = settings.phase_b.warm_start != "none"
        weights = job.teacher.weights() if warm else {}
        check_student(settings, data, job.teacher, weights)
        if settings.phase_b.alpha and not job.teacher.predicts:
            check_probe(data)
    return job


def probe_where_others_are_predicted(job: TeacherJob[Any]) -> None:
    """Gives a teacher that does not predict the classes of the data set a linear probe, if it has
    none yet, and says how good it is; or why there is none, where phase B can do without.
    Collective. Raises UserError where phase B cannot."""
    vit = job.teacher
    data = job.data
    if not isinstance(vit, VitTeacher) or vit.predicts:
        return
    classes = vit.model.num_classes
    other = f"its {classes} classes are not the" if classes else "has no head for the"
    start = f"gaupipe: {vit.name}: {other} {vit.num_classes} of {data.name}"
    try:
        if job.probe is None:
            job.probe = fit_probe(job)
    except UserError as error:
        if job.settings.phase_b.alpha:
            raise
        line = f"{start}: its maps are taken without predictions ({error})"
    else:
        line = (
            f"{start}: a linear probe on its features predicts them: "
            f"{100 * job.probe.accuracy:.1f} % of the validation images"
        )
    if distributed.is_main():
        print(line, file=sys.stderr)


def say_what_students_lack(job: TeacherJob[Any]) -> None:
    """Says of a teacher with parts that its student has not that its maps may not help."""
    if isinstance(job.teacher, VitTeacher) and distributed.is_main():
        parts = parts_of_teachers(job.teacher.model)
        if parts:
            say_once(
                f"gaupipe: {job.teacher.name}: has {' and '.join(parts)}, which its student lacks: "
                "students of such teachers lost up to 5 points (arXiv 2605.07191); compare with "
                "the same ViT without a teacher"
            )


def check_matched(job: TeacherJob[Any]) -> None:
    """Raises UserError for a teacher whose classes were matched by number, and that is hardly
    better for some training images than to name always the same class: its numbers stand for other
    classes, or for the same ones in another order."""
    vit = job.teacher
    if not isinstance(vit, VitTeacher) or vit.matched_by != "number":
        return
    train = job.data.train
    sample = train.evenly_spaced(SAMPLE)
    right = 0
    with torch.inference_mode():
        for batch in job.batches(train).in_order(sample):
            right += int((vit(batch.images).argmax(-1) == batch.labels).sum())
    accuracy = right / len(sample)
    chance = np.bincount(train.labels).max() / len(train)
    if accuracy < chance + NEAR_CHANCE * (1 - chance):
        raise UserError(
            f"{SETTING}: {vit.name}: its classes are matched by number, for want of names, and it "
            f"is right for {right} of {len(sample)} training images, which is near chance: write "
            f"the names of its classes as label_names into its config.json, or {PROBE_INSTEAD}"
        )


def say_own_head(job: VitJob, accuracy: float) -> None:
    """Says how good the teacher's own predictions are, and how its classes were matched."""
    if distributed.is_main():
        print(
            f"gaupipe: {job.teacher.name}: its own head predicts the classes, matched by "
            f"{job.teacher.matched_by}: {100 * accuracy:.1f} % of the validation images",
            file=sys.stderr,
        )


def load_vit(
    teacher: str,
    data: ImageData,
    arguments: dict[str, Any],
    *,
    download: bool = False,
    remedy: str = f"gaussian, vit, {REMEDY}",
) -> VitTeacher:
    """The teacher that ``phase_a.teacher`` names, with its trained weights, on the CPU.

    teacher     ``local-dir:FOLDER``, as a student of ours is saved, or a timm model with weights,
                such as ``deit_small_patch16_224.fb_in1k``
    arguments   further keywords of ``timm.create_model``, such as ``{img_size: 32}``
    download    fetch weights that are not on this machine
    remedy      what to do where the folder is not whole

    Raises UserError for what cannot be loaded, and for a model that is no teacher for the data.
    """
    try:
        if (
            not teacher.startswith((LOCAL, HUB))
            and cached_weights(published(teacher, remedy)) is None
        ):
            VitTeacher(created(teacher, arguments), data, teacher)  # or it need not be fetched
        model = pretrained(teacher, arguments, download, remedy)
        return VitTeacher(model, data, teacher)
    except UserError as error:
        raise UserError(f"{SETTING}: {str(error).removeprefix(f'{SETTING}: ')}") from None
