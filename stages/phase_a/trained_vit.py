"""Phase A with an ordinary ViT as the teacher: one that is trained here as ``gaupipe train`` does,
or one that was trained before."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from gaupipe.data.folder import say_once
from gaupipe.data.splits import ImageData
from gaupipe.distillation.probe import check_probe, fit_probe, load_probe, source_of_probe
from gaupipe.distillation.student import check_student
from gaupipe.distillation.teacher import TeacherJob, ending
from gaupipe.distillation.vit_teacher import (
    VitJob,
    build,
    build_model,
    build_training,
    measure,
)
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.system.progress import EpochMetrics, read_metrics, say
from gaupipe.teachers.vit import VitTeacher, parts_of_teachers, weights_of_patches
from gaupipe.training.job import Training, train, training_state
from gaupipe.training.optimizer import build_optimizer
from gaupipe.vit.saving import save_student
from stages.runs import ranks
from stages.runs.directory import RunDirectory
from stages.runs.opening import opened_teacher


def check(settings: Settings, data: ImageData, students: bool = True) -> VitJob | Training:
    """The teacher that the settings name, or the training of a new one. Raises UserError for what
    neither phase could do with it, or, without ``students``, phase A."""
    if settings.phase_a.teacher == "vit":
        vit = build_model(settings, data, "meta")
        if students:
            check_student(settings, data, vit, weights_of_patches(vit))
        build_optimizer(vit, settings.phase_a.optim, settings.phase_a.max_epochs, 100)
        return build_training(settings, data)
    job = build(settings, data)
    if students:
        warm = settings.phase_b.warm_start != "none"
        weights = job.teacher.weights() if warm else {}
        check_student(settings, data, job.teacher, weights)
        if settings.phase_b.alpha and not job.teacher.predicts:
            check_probe(data)
    return job


def run(job: Training, directory: RunDirectory, resume: bool) -> list[EpochMetrics]:
    """Trains the teacher ``vit`` in a run directory. Returns its metrics, one dict per epoch."""
    state = training_state(job)
    with opened_teacher(directory, job.settings, job.data, resume, state):
        train(job, state, directory.phase_a, "phase A")
        say(f"phase A: {ending(job.settings.phase_a, state.metrics)}")
        folder = directory.phase_a / "teacher"
        if distributed.is_main():
            save_student(state.kept, folder, **job.data.data_config)
            directory.write_teacher_digest(build(job.settings, job.data, folder).sha256)
    return state.metrics


def adopt(job: VitJob, directory: RunDirectory, resume: bool) -> list[EpochMetrics]:
    """Takes a teacher that was trained before into a run directory and scores it once. Returns the
    metrics: one entry, of epoch 0; without a head for the classes its validation accuracy is that
    of a linear probe."""
    ranks.check_same(job.settings, job.data, job.named_sha256())
    say_what_students_lack(job)
    if directory.teacher_digest() is not None:
        check_unchanged(job, directory)
    path = directory.phase_a / "metrics.jsonl"
    with opened_teacher(directory, job.settings, job.data, resume) as finished:
        if not finished:
            started = time.monotonic()
            probe_where_others_are_predicted(job)
            metrics = measure(job, started)
            accuracy = metrics["val_acc"]
            if job.teacher.predicts and accuracy is not None:
                say_own_head(job, accuracy)
            if distributed.is_main():
                path.parent.mkdir(exist_ok=True)
                if job.probe is not None:
                    job.probe.save(directory.probe, source_of_probe(job))
                write_whole(path, json.dumps(metrics) + "\n")
                directory.write_teacher_digest(job.sha256)
    return read_metrics(path)


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


def say_own_head(job: VitJob, accuracy: float) -> None:
    """Says how good the teacher's own predictions are, and how its classes were matched."""
    config = getattr(job.teacher.model, "pretrained_cfg", None) or {}
    names = config.get("label_names")
    how = "by name" if names and job.data.class_names else "by number"
    if distributed.is_main():
        print(
            f"gaupipe: {job.teacher.name}: its own head predicts the classes, matched {how}: "
            f"{100 * accuracy:.1f} % of the validation images",
            file=sys.stderr,
        )


def load(directory: RunDirectory, settings: Settings, data: ImageData) -> VitJob:
    """The finished teacher of a run, with its probe if it has one. Raises UserError where phase A
    has not finished, and for a teacher that has changed since."""
    if directory.teacher_digest() is None:
        raise unfinished(directory)
    job = build(settings, data, directory.phase_a / "teacher")
    check_unchanged(job, directory)
    if not job.teacher.predicts:
        job.probe = load_probe(directory.probe, source_of_probe(job))
    return job


def unfinished(directory: RunDirectory) -> UserError:
    """The error for a run whose phase A has not finished."""
    return UserError(
        f"{directory.path}: phase A has not finished; 'gaupipe phase-a {directory.config} "
        f"--run-dir {directory.path} --resume' does that"
    )


def check_unchanged(job: VitJob, directory: RunDirectory) -> None:
    """Raises UserError for another teacher than the run's."""
    if job.sha256 != directory.teacher_digest():
        raise UserError(
            f"phase_a.teacher: {job.settings.phase_a.teacher} is not the teacher that "
            f"{directory.path} was started with: its weights have changed; restore them, or start "
            "another run"
        )
