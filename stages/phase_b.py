"""Phase B: an ordinary ViT learns from the labels, the teacher's predictions and the stored
attention maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import store
from gaupipe.data.splits import ImageData
from gaupipe.distillation.job import build_distilled, build_without_store
from gaupipe.distillation.reading import PRELOAD_BYTES, StoresOfSplit
from gaupipe.distillation.warm_start import start_from_teacher
from gaupipe.settings import Settings
from gaupipe.settings.load import with_anytime
from gaupipe.system import distributed
from gaupipe.system.device import prepare_device
from gaupipe.system.errors import UserError
from gaupipe.system.messages import LOG
from gaupipe.system.progress import EpochMetrics
from gaupipe.teachers.base import outline
from gaupipe.training.job import Training, build_plain
from gaupipe.training.student import build_student
from stages.runs import students
from stages.runs.directory import RunDirectory, store_of_unlabelled
from stages.runs.opening import read_data, starts_afresh, train_in_folder
from stages.runs.students import StudentRequest
from stages.runs.trained import load_teacher


def run(
    run_dir: Path, student: str | None = None, *, data: ImageData | None = None, **options: Any
) -> list[EpochMetrics]:
    """Trains a student in ``run_dir`` and returns its metrics. ``options`` are those of ``resolve``
    in ``stages/runs/students.py``; ``data`` is the data set of the settings, where it has been read
    already. Raises UserError before anything is written."""
    return run_request(students.resolve(run_dir, student, **options), data)


def run_request(request: StudentRequest, data: ImageData | None = None) -> list[EpochMetrics]:
    """Trains the student of a request and returns its metrics. Raises UserError before anything is
    written."""
    settings = request.settings
    teacher_run = request.teacher_run
    with distributed.rank_zero_first():  # whatever can be refused is, before there are files
        data = read_data(settings, request.run, data, unlabelled=teacher_run is not None)
        afresh = starts_afresh(request)
        urls = request.maps_url, request.predictions_url
        job = build_training(settings, data, teacher_run, *urls, afresh=afresh)
        if teacher_run is not None and afresh and settings.phase_b.warm_start != "none":
            warm_start(job, teacher_run)
    return train_in_folder(request, job)


def build_training(
    settings: Settings,
    data: ImageData,
    teacher_run: RunDirectory | None,
    maps_url: str | None = None,
    predictions_url: str | None = None,
    afresh: bool = True,
) -> Training:
    """A student, freshly started; the baseline without a ``teacher_run``. Writes nothing.
    ``afresh`` False leaves trained weights out. Raises UserError for settings that do not fit,
    StoreError for maps of another data set or teacher."""
    if teacher_run is None:
        return build_plain(settings, data, afresh)
    device = prepare_device(settings.device, settings.threads)
    train = settings.student_training
    student = build_student(settings, data, train, from_weights=afresh).to(device)
    if not settings.phase_a.kind.stored and maps_url is None:
        return build_without_store(outline(settings, data), student, train)
    urls = [maps_url or str(teacher_run.maps)]
    if predictions_url is not None:
        urls.append(predictions_url)
    teacher_sha256 = teacher_run.teacher_digest() if maps_url is None else None
    stored = open_stores(urls, data.sha256, teacher_sha256)
    unlabelled = None
    if data.unlabelled is not None:
        others = [store_of_unlabelled(url) for url in urls]
        for url, beside in zip(urls, others, strict=True):
            check_beside(url, beside)
        unlabelled = open_stores(others, data.unlabelled_sha256)
    return build_distilled(settings, data, device, student, train, stored, unlabelled)


def check_beside(url: str, unlabelled: str) -> None:
    """Raises UserError where a store has none of images without labels beside it."""
    try:
        store.check_exists(unlabelled)
    except store.UnfinishedStore:
        raise UserError(
            f"{url}: has no store {unlabelled} of images without labels beside it: "
            "'gaupipe export-maps' writes both"
        ) from None


def open_stores(
    urls: Sequence[str], dataset_sha256: str | None, teacher_sha256: str | None = None
) -> StoresOfSplit:
    """The store of the maps and, if there is a second url, that of the predictions, both of these
    images; ``teacher_sha256`` says whose the maps are. Raises StoreError."""
    stores = []
    for url, sha256 in zip(urls, [teacher_sha256, None], strict=False):
        opened = store.open(
            url,
            dataset_sha256=dataset_sha256,
            teacher_sha256=sha256,
            preload_bytes=PRELOAD_BYTES,
        )
        LOG.debug(f"store {url}: {opened.schema.kind}, {len(opened)} entries")
        stores.append(opened)
    return StoresOfSplit(stores[0], stores[-1])


def warm_start(job: Training, teacher_run: RunDirectory) -> None:
    """Has the student of a training begin with weights of the run's teacher."""
    how = job.settings.phase_b.warm_start
    settings = with_anytime(teacher_run.settings(), job.settings)
    teacher = load_teacher(teacher_run, job.data, with_images=False, settings=settings)
    spread = None
    if how == "slice":
        spread = teacher.spread()
    shape = teacher.shape
    start_from_teacher(job.student, how, teacher.weights(), shape.heads, shape.grid, spread)
    job.remarks = [*job.remarks, *teacher.remarks()]
