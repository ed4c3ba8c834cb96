"""Phase A: the training of the teacher; one that needs none begins the run."""

from __future__ import annotations

from pathlib import Path

from gaupipe.data.splits import ImageData
from gaupipe.distillation.student import check_student, check_unlabelled
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.files import write_whole
from gaupipe.system.progress import EpochMetrics, read_metrics
from gaupipe.teachers.base import outline
from gaupipe.training.settle import settle
from stages.runs import ranks
from stages.runs.directory import RunDirectory
from stages.runs.opening import open_teacher, read_data
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
    run = RunDirectory(run_dir)
    with distributed.rank_zero_first():
        before = run.begun()
        settings = settle(settings, before)
        run.check(settings, before)
        run.check_free(resume)
        data = read_data(settings, run, data, unlabelled=True)
        if data.unlabelled is not None:
            check_unlabelled(settings)
        teacher = outline(settings, data)
        if students:
            check_student(teacher)
        if teacher.kind.trained and not force:  # before any per-image parameter is made
            check_resources(make_plan(teacher, world_size=distributed.world_size()), run.path)
        teacher = teacher.begin(run.phase_a)
    given = teacher.given_sha256()
    ranks.check_same(settings, data, {"run": run.path, **given})

    teacher.say_before()
    if given and run.teacher_digest() is not None:
        check_unchanged(teacher, run)
    state = teacher.training_state()
    with open_teacher(run, settings, data, resume, state) as finished:
        if state is not None:
            teacher = teacher.train(state, run.phase_a)
        elif not finished:
            teacher.prepare(run.phase_a)
        if not finished:
            sha256 = teacher.sha256  # of the images of all ranks
            if distributed.is_main():
                # last: with the metrics it says that phase A has finished
                write_whole(run.teacher_sha256, sha256 + "\n")
    if state is not None:
        return state.metrics  # other machines of a world have no file
    return read_metrics(run.phase_a / "metrics.jsonl")
