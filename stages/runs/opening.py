"""A training in its folder: the data is read and checked, the folder is locked, what was asked for
is written, the last checkpoint is loaded, and in the end a student is saved."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timm.models.vision_transformer import VisionTransformer

from gaupipe.data.buckets import check_buckets
from gaupipe.data.load import load_data
from gaupipe.data.packed import PackedImages
from gaupipe.data.splits import ImageData
from gaupipe.settings import DataSettings, Settings
from gaupipe.settings.load import dump
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import partial_prefix, write_whole
from gaupipe.system.progress import EpochMetrics
from gaupipe.training import loggers
from gaupipe.training.job import Training, train, training_state
from gaupipe.training.state import TrainingState
from stages.runs import kept_epochs, ranks
from stages.runs.directory import RunDirectory, has_checkpoint, say_if_afresh
from stages.runs.locks import lock_of_process, locked
from stages.runs.students import StudentRequest


def read_data(
    settings: Settings,
    run: RunDirectory | None = None,
    data: ImageData | None = None,
    *,
    unlabelled: bool = False,
) -> ImageData:
    """The data set of the settings, ``unlabelled`` with its images without labels, unless it has
    been read already. Raises UserError where it is not what the ``run`` began with, for too few
    images, and for loggers that are not installed."""
    images = data or load_data(settings.data, settings.download, unlabelled)
    if run is not None:
        check_place(run, settings.data, images)
        images.check_split(run.split)
    loggers.check(settings.log.to)
    sizes = settings.data
    # a training sees the first, or both
    for count in {len(images.train), len(images.train) + len(images.unlabelled or ())}:
        check_buckets(count, sizes.num_buckets, sizes.batch_size)
    return images


def check_place(run: RunDirectory, settings: DataSettings, images: ImageData) -> None:
    """Raises UserError for a run in a folder of its images, whose next command would take the run
    for a class, and its curves for images. Beside a folder ``train`` it may lie."""
    if settings.name != "folder":
        return
    for split in filter(None, (images.train, images.unlabelled)):
        folder = getattr(split.source, "root", None)
        if split is images.train and isinstance(split.source, PackedImages):
            folder = settings.root  # which holds the archives of all splits
        if folder is not None and run.path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{run.path}: lies among the images in {folder}, and its curves would be taken for "
                "images: name a folder elsewhere with --run-dir, or put the images into train/"
            )


def starts_afresh(request: StudentRequest) -> bool:
    """True where there is no checkpoint to continue from. Raises UserError if the student would
    start from other weights than the run began with."""
    if has_checkpoint(request.folder):
        return False
    if request.run is not None:
        request.run.check_weights(request.settings)
    return True


def train_in_folder(request: StudentRequest, job: Training) -> list[EpochMetrics]:
    """Trains a student in its folder and saves it there. Returns the metrics."""
    folder = request.folder
    ranks.check_same(job.settings, job.data, {"run": folder})
    with open_student(request, job) as state:
        train(job, state, folder, request.label)
        if distributed.is_main():
            kept_epochs.save(job, state, folder, request.label)
    return state.metrics


@contextlib.contextmanager
def open_student(
    request: StudentRequest, job: Training
) -> Iterator[TrainingState[VisionTransformer]]:
    """Holds the folder of a student while it is trained. Gives the state of its training, freshly
    started or as the last checkpoint has it. A training that is refused leaves the settings of an
    earlier one as they were."""
    run = request.run
    folder = request.folder
    is_new = run is not None and not request.resume
    state = training_state(job)
    with contextlib.ExitStack() as held:
        if run is not None:
            if request.begins_run and distributed.is_main():
                begin_run(run, request.settings, job.data)
            # students of one teacher may be trained at once
            held.enter_context(locked(run.path, "run", shared=True))
            if distributed.is_main():
                if is_new:  # with what was asked for, which an interruption then leaves there
                    make_folder(request, job)
                else:
                    say_if_afresh(folder)
        held.enter_context(locked(folder, "student"))
        state.load(folder / "checkpoint", request.afresh)
        if distributed.is_main() and not is_new:
            write_request(folder, job)
        yield state


def make_folder(request: StudentRequest, job: Training) -> None:
    """Makes the folder of a new student with :func:`write_request`, in one step. Raises UserError
    as :meth:`StudentRequest.check_free`."""
    folder = request.folder
    request.check_free()
    fresh = folder.with_name(f"{partial_prefix(folder)}{secrets.token_hex(8)}")
    fresh.mkdir(parents=True)
    try:
        write_request(fresh, job)
        fresh.rename(folder)
    except OSError:
        request.check_free()  # another command may have been quicker
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_request(folder: Path, job: Training) -> None:
    """Writes what a student's training was asked for: config.yaml, and maps.json with the url of
    each store that it learns from and the sha256 of its teacher. The path of a store beside the
    student is relative, so that both may be moved."""
    write_whole(folder / "config.yaml", dump(job.settings))
    sources = []
    for url, teacher_sha256 in job.sources:
        if "://" not in url:
            inside = Path(os.path.abspath(url)).is_relative_to(folder.absolute().parents[1])
            url = os.path.relpath(url, folder) if inside else os.path.abspath(url)
        sources.append({"url": url, "teacher_sha256": teacher_sha256})
    if sources:
        write_whole(folder / "maps.json", json.dumps(sources) + "\n")


def begin_run(run: RunDirectory, settings: Settings, data: ImageData) -> None:
    """Writes the run's settings and split, or where its images are now."""
    if run.split.is_file():  # which is written last
        run.follow(settings, run.settings())
        return
    with lock_of_process(run.path, "run"):
        run.start(settings, data, resume=True)


@contextlib.contextmanager
def open_teacher(
    run: RunDirectory,
    settings: Settings,
    data: ImageData,
    resume: bool,
    state: TrainingState[Any] | None = None,
) -> Iterator[bool]:
    """Holds a run while its teacher is made: begins the run, and puts the training, if there is
    one, where its last checkpoint was. Gives True, on all ranks, where phase A has finished."""

    finished = False
    with locked(run.path, "run"):
        if distributed.is_main():  # alone: run.start refuses a folder in which another rank writes
            if state is not None and resume:
                say_if_afresh(run.phase_a)
            run.start(settings, data, resume)
            finished = run.teacher_sha256.is_file() and (run.phase_a / "metrics.jsonl").is_file()
        finished = distributed.from_main(finished)
        if state is not None:
            state.load(run.phase_a / "checkpoint")
        yield finished
