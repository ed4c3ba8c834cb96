"""Train: a ViT learns from the labels, as a student without a teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gaupipe.data.splits import ImageData, load_data
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.training.job import Training, build, check_training, train, training_state
from gaupipe.training.state import has_checkpoint
from gaupipe.training.student import check_baseline
from stages.runs import kept_epochs, ranks
from stages.runs.directory import RunDirectory, lock_of_process, locked, say_if_afresh
from stages.runs.students import make_folder, removed_if_refused, write_request

ELSEWHERE = "another --run-dir starts afresh"


def train_into(
    folder: Path,
    settings: Settings,
    build: Callable[[ImageData, bool], Training],
    data: ImageData | None = None,
    resume: bool = False,
) -> list[dict[str, Any]]:
    """Trains the student that ``build`` makes of (data, True if it starts afresh) into ``folder``,
    or goes on with one, and returns its metrics.

    A training that is refused leaves the settings of an earlier one as they were.
    """
    run = RunDirectory(folder.parent.parent)
    distributed.on_main(lambda: say_if_afresh(folder, resume))

    def start() -> Training:
        images = data or load_data(settings.data, settings.download)
        images.check_split(run.split)
        check_training(settings, images)
        afresh = not has_checkpoint(folder / "checkpoint")
        if afresh:
            run.check_weights(settings)
        return build(images, afresh)

    with locked(folder, "student"):
        job = distributed.main_first(start)
        ranks.check_same(settings, job.data)
        state = training_state(job)
        distributed.main_first(lambda: state.load(folder / "checkpoint"))
        distributed.on_main(lambda: write_request(folder, settings, job.source_of_maps()))
        train(job, state, folder)
        distributed.on_main(lambda: kept_epochs.save(state, folder, job.train.keep, job.data))
    return state.metrics


def train_plain(
    settings: Settings, folder: Path, *, data: ImageData | None = None, resume: bool = False
) -> list[dict[str, Any]]:
    """Trains a student on the labels alone into ``folder``, as :func:`train_into` does."""
    return train_into(folder, settings, partial(build, settings), data, resume)


def run(
    settings: Settings,
    run_dir: Path,
    attention: str | None = None,
    *,
    resume: bool = False,
    data: ImageData | None = None,
) -> list[dict[str, Any]]:
    """Trains a ViT into ``run_dir``/plain/ATTENTION and returns its metrics, one dict per epoch.

    The training is the baseline's of the other stages: the same loop, and with the same settings
    the same numbers. Several attentions may be trained in one run, at the same time too.
    ``attention`` None is the settings' ``model.attention``; ``resume`` continues from the last
    checkpoint; ``data`` is the data set of the settings, where it has been read already.

    Raises UserError before anything is written.
    """
    attention = attention or settings.model.attention
    run = RunDirectory(run_dir)
    request = ranks.resolve(lambda: resolve(settings, run, attention, resume, data))
    created = distributed.broadcast(distributed.on_main(lambda: begin(run, request, resume)))
    with removed_if_refused(request.folder, created), run.locked(shared=True):
        return train_plain(request.settings, request.folder, data=request.data, resume=resume)


@dataclass(frozen=True)
class Request:
    """A student to be trained in a run: settings and data, checked."""

    settings: Settings
    data: ImageData
    folder: Path


def resolve(
    settings: Settings, run: RunDirectory, attention: str, resume: bool, data: ImageData | None
) -> Request:
    """The request for a student of this ``attention``. Raises UserError for a training that the
    run directory or the machine does not allow."""
    settings = run.settled(settings.with_section("model", attention=attention))
    before = run.settings() if run.config.is_file() else settings
    # another epoch to keep does not make another run
    asked = settings.with_section("train", keep=before.train.keep)
    run.check(asked.with_section("baseline", keep=before.baseline.keep))
    folder = run.student(attention, distilled=False)
    if not resume and folder.exists():
        raise UserError(f"{folder} already exists: --resume continues it, {ELSEWHERE}")
    images = data or load_data(settings.data, settings.download)
    images.check_split(run.split)
    check_training(settings, images)
    select_device(settings.device, settings.threads)
    check_baseline(settings, images, trained=not has_checkpoint(folder / "checkpoint"))
    return Request(run.with_baseline(settings, attention), images, folder)


def begin(run: RunDirectory, request: Request, resume: bool) -> bool:
    """Writes the run's settings and split, where it has none, and the settings of a new student,
    so that they are known after any interruption. Returns True if there was no student."""
    if not run.split.is_file():  # which is written last
        with lock_of_process(run.path, "run"):
            run.start(request.settings, request.data, resume=True)
    run.follow(request.settings)
    created = not request.folder.exists()
    if not resume:
        make_folder(request.folder, ELSEWHERE, request.settings)  # another may have been quicker
    return created
