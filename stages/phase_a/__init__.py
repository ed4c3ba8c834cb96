"""Phase A: the training of the teacher, a ViT with GauAttention or an ordinary one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gaupipe.data.splits import ImageData
from gaupipe.distillation.gaussian_teacher import build, build_teacher, train, training_state
from gaupipe.distillation.student import check_student
from gaupipe.distillation.teacher import TeacherJob
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.progress import EpochMetrics
from gaupipe.teachers.gaussian import Teacher
from gaupipe.teachers.vit import VitTeacher
from gaupipe.training.job import Training
from stages.phase_a import local, trained_vit
from stages.runs import ranks
from stages.runs.directory import RunDirectory
from stages.runs.opening import opened_teacher, read_data
from stages.runs.resources import check_resources, make_plan


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

    def resolve() -> TeacherJob[Any] | Training | local.LocalJob:
        request = directory.settled(settings)
        directory.check_free(request, resume)
        images = read_data(request, directory, data)
        if request.phase_a.is_local:
            return local.check(request, images, students)
        if not request.phase_a.learns_gaussians:
            return trained_vit.check(request, images, students)
        return check(request, images, directory, students, force)

    job = ranks.resolve(resolve, directory.path)
    match job:
        case local.LocalJob():
            return local.run(job, directory, resume)
        case Training():
            return trained_vit.run(job, directory, resume)
        case TeacherJob(teacher=VitTeacher()):
            return trained_vit.adopt(job, directory, resume)
    state = training_state(job)
    with opened_teacher(directory, job.settings, job.data, resume, state) as finished:
        train(job, state, directory.phase_a)
        if not finished:
            sha256 = replace(job, teacher=state.kept).sha256  # of the images of all ranks
            if distributed.is_main():
                directory.write_teacher_digest(sha256)
    return state.metrics


def check(
    settings: Settings, data: ImageData, directory: RunDirectory, students: bool, force: bool
) -> TeacherJob[Teacher]:
    """The teacher before its training. Raises UserError for settings that do not fit, and, unless
    ``force``, for what the machine cannot hold."""
    with torch.device("meta"):  # what does not fit is said before it is allocated
        teacher = build_teacher(settings, data)
    if students:
        check_student(settings, data, teacher, teacher.weights())
    if not force:  # before any per-image parameter is made
        plan = make_plan(settings, teacher, data, world_size=distributed.world_size())
        check_resources(plan, directory.path)
    return build(settings, directory.phase_a, data)


def load(
    directory: RunDirectory,
    data: ImageData | None = None,
    *,
    download: bool = False,
    with_images: bool = True,
) -> TeacherJob[Any]:
    """The finished teacher of a run, in eval mode. ``download`` fetches published weights,
    ``with_images`` False leaves out the per-image parameters. Raises UserError if phase A has not
    finished."""
    settings = directory.settings()
    if download:
        settings = settings.model_copy(update={"download": True})
    data = data or directory.load_data(settings)
    if not settings.phase_a.learns_gaussians:
        return trained_vit.load(directory, settings, data)
    job = build(settings, directory.phase_a, data, to_read=True, with_images=with_images)
    state = training_state(job)
    if not state.load(directory.phase_a / "checkpoint") or not state.finished:
        raise trained_vit.unfinished(directory)
    job.teacher = state.kept.eval()
    return job
