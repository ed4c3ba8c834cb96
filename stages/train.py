"""Train: a ViT learns from the labels, as a student without a teacher."""

from __future__ import annotations

from pathlib import Path

from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.progress import EpochMetrics
from gaupipe.training.job import build_plain
from gaupipe.training.settle import settle
from stages.runs.directory import RunDirectory
from stages.runs.opening import read_data, starts_afresh, train_in_folder
from stages.runs.students import StudentRequest

ELSEWHERE = "another --run-dir starts afresh"


def run(settings: Settings, run_dir: Path, *, resume: bool = False) -> list[EpochMetrics]:
    """Trains a ViT into ``run_dir``/plain/ATTENTION and returns its metrics.

    The training is the baseline's of the other stages: the same loop, and with the same settings
    the same numbers. Several attentions may be trained in one run, at the same time too. ``resume``
    continues from the last checkpoint.

    Raises UserError before anything is written.
    """
    directory = RunDirectory(run_dir)
    before = directory.begun()
    settings = settle(settings, before)
    asked = settings
    if before is not None:  # another epoch to keep does not make another run
        asked = settings.with_section("train", keep=before.train.keep)
    directory.check(asked, before)
    folder = directory.student(settings.model.attention, distilled=False)
    request = StudentRequest(
        settings, folder, directory, resume=resume, begins_run=True, instead=ELSEWHERE
    )
    if not resume:
        request.check_free()

    with distributed.rank_zero_first():  # whatever can be refused is, before there are files
        data = read_data(settings, directory)
        job = build_plain(settings, data, starts_afresh(request))
    return train_in_folder(request, job)
