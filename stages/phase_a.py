"""Phase A: the training of the teacher, a ViT with GauAttention or an ordinary one; a teacher that
was trained before, and the fixed maps of ``local``, begin the run."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.files import write_whole
from gaupipe.system.progress import EpochMetrics, read_metrics, say
from gaupipe.teachers import gaussian as gaussian_teacher
from gaupipe.teachers import local
from gaupipe.teachers import vit as vit_teacher
from gaupipe.teachers.base import TeacherJob, ending
from gaupipe.teachers.gaussian_vit import Teacher
from gaupipe.teachers.local import LocalJob, described
from gaupipe.teachers.probe import source_of_probe
from gaupipe.teachers.readable_vit import VitTeacher
from gaupipe.teachers.vit import (
    VitJob,
    measure,
    probe_where_others_are_predicted,
    say_own_head,
    say_what_students_lack,
)
from gaupipe.training.job import Training, train, training_state
from gaupipe.vit.saving import save_student
from stages.runs import ranks
from stages.runs.directory import RunDirectory
from stages.runs.opening import opened_teacher, read_data
from stages.runs.resources import check_resources, make_plan
from stages.runs.trained import check_unchanged


def run(
    settings: Settings,
    run_dir: Path,
    *,
    resume: bool = False,
    force: bool = False,
    data: ImageData | None = None,
    students: bool = True,
) -> list[EpochMetrics]:
    """Trains the teacher in ``run_dir`` and returns its metrics, one dict per epoch.

    resume   continues from the last checkpoint, or starts where there is none; without it a folder
             that holds a phase A is refused
    force    starts a job that memory or disk do not seem to hold
    data     the data set of the settings, where it has been read already
    students
             False does not check that a student of these settings can learn from the teacher: a
             comparison's students have settings of their own

    Raises UserError before anything is written.
    """
    directory = RunDirectory(run_dir)

    def resolve() -> TeacherJob[Any] | Training | LocalJob:
        request = directory.settled(settings)
        directory.check_free(request, resume)
        images = read_data(request, directory, data, unlabelled=True)
        if request.phase_a.is_local:
            return local.checked_job(request, images, students)
        if not request.phase_a.learns_gaussians:
            return vit_teacher.checked_job(request, images, students)
        teacher = gaussian_teacher.checked_teacher(request, images, students)
        if not force:  # before any per-image parameter is made
            plan = make_plan(request, teacher, images, world_size=distributed.world_size())
            check_resources(plan, directory.path)
        return gaussian_teacher.build(request, directory.phase_a, images)

    job = ranks.resolve(resolve, directory.path)
    match job:
        case LocalJob():
            return record_local(job, directory, resume)
        case Training():
            return train_vit(job, directory, resume)
        case TeacherJob(teacher=VitTeacher()):
            return adopt(job, directory, resume)
    return train_gaussians(job, directory, resume)


def train_gaussians(
    job: TeacherJob[Teacher], directory: RunDirectory, resume: bool
) -> list[EpochMetrics]:
    """Trains a teacher with GauAttention in a run directory. Returns its metrics."""
    state = gaussian_teacher.training_state(job)
    with opened_teacher(directory, job.settings, job.data, resume, state) as finished:
        gaussian_teacher.train(job, state, directory.phase_a)
        if not finished:
            sha256 = replace(job, teacher=state.kept).sha256  # of the images of all ranks
            if distributed.is_main():
                directory.write_teacher_digest(sha256)
    return state.metrics


def train_vit(job: Training, directory: RunDirectory, resume: bool) -> list[EpochMetrics]:
    """Trains the teacher ``vit`` in a run directory. Returns its metrics, one dict per epoch."""
    state = training_state(job)
    with opened_teacher(directory, job.settings, job.data, resume, state):
        train(job, state, directory.phase_a, "phase A")
        say(f"phase A: {ending(job.settings.phase_a, state.metrics)}")
        folder = directory.phase_a / "teacher"
        if distributed.is_main():
            save_student(state.kept, folder, **job.data.data_config)
            directory.write_teacher_digest(vit_teacher.build(job.settings, job.data, folder).sha256)
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
            began = time.process_time()
            probe_where_others_are_predicted(job)
            probe_seconds = time.process_time() - began
            metrics = measure(job, started)
            if job.probe is not None:
                metrics["processor_seconds"] = round(probe_seconds, 3)
            accuracy = metrics["val_acc"]
            if job.teacher.predicts and accuracy is not None:
                say_own_head(job, accuracy)

            if distributed.is_main():
                path.parent.mkdir(exist_ok=True)
                if job.probe is not None:
                    job.probe.save(directory.probe, source_of_probe(job))
                write_whole(path, json.dumps(metrics) + "\n")
                # last: with the metrics it says that phase A has finished
                directory.write_teacher_digest(job.sha256)
    return read_metrics(path)


def record_local(job: LocalJob, directory: RunDirectory, resume: bool) -> list[EpochMetrics]:
    """Begins the run of a teacher that is not trained. Returns the metrics: one entry, of epoch 0,
    without accuracies."""
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
        f"gaupipe: phase A: nothing to train: local has {described(job.settings.phase_a)}; "
        "it predicts nothing, so alpha will be 0",
        file=sys.stderr,
    )
