"""Train: a ViT with any of the student attentions learns from the labels alone, without a first
phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gaupipe.data.buckets import check_buckets
from gaupipe.data.splits import ImageData, load_data
from gaupipe.distillation.student import check_baseline
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.training import loggers
from gaupipe.training.optimizer import select_device
from stages import phase_b
from stages.runs import ranks
from stages.runs.directory import RunDirectory, lock_of_process


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

    attention   None is the settings' ``phase_b.student``
    resume      continues from the last checkpoint, or starts where there is none; without it a
                student that is there is refused
    data        the data set of the settings, where it has been read already

    Raises UserError before anything is written.
    """
    attention = attention or settings.phase_b.student
    of_student = settings.phase_b.model_copy(update={"student": attention})
    settings = settings.model_copy(update={"phase_b": of_student})
    run = RunDirectory(run_dir)
    folder = run.student(attention, distilled=False)

    def prepare() -> tuple[Settings, ImageData]:
        asked = run.settled(settings)
        run.check(with_keep(asked, run.settings() if run.config.is_file() else asked))
        loggers.check(asked.log.to)
        if not resume and folder.exists():
            raise UserError(
                f"{folder} already exists: --resume continues it, another --run-dir starts afresh"
            )
        images = data or load_data(asked.data)
        images.check_split(run.split)
        check_buckets(len(images.train), asked.data.num_buckets, asked.data.batch_size)
        select_device(asked)
        check_baseline(asked, images)
        return asked, images

    def start() -> None:
        if not run.split.is_file():  # which is written last
            with lock_of_process(run.path, "run"):
                run.start(settings, images, resume=True)
        run.follow(settings)

    ranks.check_shared(run_dir)
    settings, images = distributed.main_first(prepare)
    ranks.check_same(settings, images)
    distributed.on_main(start)
    with run.locked(shared=True):
        overrides = [f"phase_b.student={attention}"]
        if settings.phase_b.keep != run.settings().phase_b.keep:
            overrides.append(f"phase_b.keep={settings.phase_b.keep}")
        return phase_b.train_student(
            settings, folder, teacher=None, overrides=overrides, data=images
        )


def with_keep(settings: Settings, of: Settings) -> Settings:
    """The settings with the epoch to keep of other ones: which is kept does not make another
    run."""
    phase = settings.phase_b.model_copy(update={"keep": of.phase_b.keep})
    return settings.model_copy(update={"phase_b": phase})
