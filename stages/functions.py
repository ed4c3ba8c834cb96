"""Commands as functions: ``gaupipe.train``, ``gaupipe.run`` and ``gaupipe.export``. Commands parse
their options and call these, so both do the same. Mistakes raise UserError, and results have
types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaupipe.settings import Settings
from gaupipe.settings.load import ByName, Overrides, check_plain, leaves, read_overrides
from gaupipe.settings.places import check_images, check_model
from gaupipe.system.errors import UserError
from gaupipe.system.progress import EpochMetrics
from stages.begin import begins, starts
from stages.request import (
    check_with_images,
    find_run,
    read_settings,
    refuse_with_model,
    with_model,
    with_unlabelled,
)
from stages.runs.directory import RunDirectory

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

    from stages.open_run import Run
    from stages.run import Line

SHORT = {
    "epochs": "train.epochs",
    "lr": "train.optim.lr",
    "batch_size": "data.batch_size",
}
"""Keywords for the settings that change most often."""


@dataclass(frozen=True)
class Trained:
    """A ViT that was trained.

    folder    of the training, with ``student/`` for timm
    metrics   a line for each epoch
    settings  that it was trained with
    """

    folder: Path
    metrics: list[EpochMetrics]
    settings: Settings

    @property
    def accuracy(self) -> float | None:
        """On the validation images, of the epoch that is kept."""
        from stages.runs import kept_epochs

        return self.metrics[kept_epochs.entry(self.folder)["epoch"] - 1]["val_acc"]

    @cached_property
    def student(self) -> VisionTransformer:
        """The ViT in eval mode, on the CPU."""
        from gaupipe.vit.pretrained import load_model

        model: Any = load_model(str(self.folder))
        return model


@dataclass(frozen=True)
class Ran:
    """A run of all stages.

    folder    of the run
    lines     of the table that the command prints: teacher, student and plain ViT
    student   the ViT that learned from the teacher
    plain     the same ViT, trained on the labels alone; None without a ``baseline``
    """

    folder: Path
    lines: list[Line]
    student: Trained
    plain: Trained | None

    @property
    def run(self) -> Run:
        """Its images, maps and metrics."""
        from stages.open_run import Run

        return Run(self.folder)


def train(
    config: str | None = None,
    *,
    data: str | Path | None = None,
    model: str | None = None,
    student: str | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    download: bool = False,
    overrides: Overrides = (),
    **settings: Any,
) -> Trained:
    """Trains a ViT on the labels alone, as ``gaupipe train`` does.

    config      a YAML file, or the name of a shipped configuration
    data        a folder of images in place of it; the settings are chosen from the images
    model       weights to fine-tune: a timm name, or ``local-dir:FOLDER``
    student     its attention
    run_dir     the run's folder
    resume      continues from the last checkpoint
    download    fetches published weights that are not on this machine
    overrides   settings as ``--set`` takes them
    settings    others, by their names, such as ``seed=1`` and ``**{"train.optim.lr": 1e-3}``, or
                :data:`SHORT` ones

    Raises UserError before anything is written.
    """
    changes = with_keywords(overrides, settings)
    asked = with_model(changes, "model.name", model, download)
    check_plain(asked)
    chosen, folder = read_settings(
        config, asked, as_path(run_dir), as_path(data), student, plain=True
    )
    directory = RunDirectory(folder)
    directory.check_place()
    trained = directory.student(chosen.model.attention, distilled=False)
    with starts("training", chosen, trained):
        from stages import train as stage
    return Trained(trained, stage.run(chosen, folder, resume=resume), chosen)


def run(
    config: str | None = None,
    *,
    data: str | Path | None = None,
    unlabelled: str | None = None,
    teacher: str | None = None,
    student: str | None = None,
    run_dir: str | Path | None = None,
    download: bool = False,
    baseline: bool = True,
    overrides: Overrides = (),
    **settings: Any,
) -> Ran:
    """Trains teacher, student and plain ViT, as ``gaupipe run`` does; stages that have finished are
    not run again. ``unlabelled``, ``teacher`` and ``baseline`` are the options of these names, the
    rest is as in :func:`train`. Raises UserError."""
    changes = with_keywords(overrides, settings)
    asked = with_model(changes, "phase_a.teacher", teacher, download)
    asked = with_unlabelled(asked, unlabelled)
    chosen, folder = read_settings(config, asked, as_path(run_dir), as_path(data), student, teacher)
    directory = RunDirectory(folder)
    directory.check_place()
    with starts("all stages", chosen, folder):
        from stages import run as stage
        from stages.open_run import Run
    lines = stage.run_all(chosen, folder, baseline=baseline)
    attention = chosen.model.attention
    opened = Run(folder)

    def trained(distilled: bool) -> Trained:
        metrics = opened.metrics(attention, plain=not distilled)
        return Trained(directory.student(attention, distilled), metrics, chosen)

    plain = trained(distilled=False) if baseline else None
    return Ran(folder, lines, trained(distilled=True), plain)


def export(
    run_dir: str | Path | None = None,
    *,
    model: str | None = None,
    images: str | Path | Sequence[str | Path] = (),
    out: str | Path | None = None,
    kind: str | None = None,
    encoding: str | None = None,
    k: int | None = None,
    views: int | None = None,
    teacher: str | None = None,
    overrides: Overrides = (),
    image_size: int | None = None,
    download: bool = False,
    **how: Any,
) -> str | None:
    """Writes the maps and predictions of a run's teacher, or those of a ``model`` for ``images``,
    as ``gaupipe export-maps`` does, and returns the path or URL of the store, for ``store.open``;
    None for a teacher without one. ``how`` are fields of :class:`stages.export.Place`, such as
    ``overwrite``; the others are options of the command. Raises UserError and StoreError."""
    if isinstance(images, str | Path):
        images = [images]
    files = [Path(path) for path in images]
    asked = {"kind": kind, "encoding": encoding, "k": k}
    check_with_images(model, files, image_size)
    if model is None:
        run = RunDirectory(find_run(as_path(run_dir)))
        settings = run.settings()
        if out:
            check_model(teacher)
        with begins(f"export: the teacher of {run.path}"):
            from stages import export as stage

        place = stage.Place(str(run.maps if out is None else out), **how)
        asked |= {"views": views}
        request = stage.ExportRequest(run, settings, place, asked, teacher, overrides, download)
        return stage.export_run(request)

    of_runs: dict[str, object] = {"--run-dir": run_dir, "--views": views, "--teacher": teacher}
    of_runs |= dict.fromkeys(read_overrides(overrides), True)
    refuse_with_model(model, of_runs)
    if out is None:
        raise UserError(f"--model {model}: name the store with --out PATH-OR-URL")
    check_images(files)
    check_model(model)
    with begins(f"export: {model}, into {out}"):
        from stages import export as stage

    place = stage.Place(str(out), **how)
    return stage.export_model(model, files, place, asked, image_size=image_size, download=download)


def as_path(place: str | Path | None) -> Path | None:
    return None if place is None else Path(place)


def with_keywords(overrides: Overrides, settings: dict[str, Any]) -> ByName:
    """Overrides, and keywords as settings. Raises UserError for a setting that is named twice, and
    for a keyword with a section that would replace one named before."""
    changes = read_overrides(overrides)
    given = [setting for name, value in changes.items() for setting, _ in leaves(value, name)]
    for keyword, value in settings.items():
        name = SHORT.get(keyword, keyword)
        for other in given:
            if f"{other}.".startswith(f"{name}."):
                raise UserError(f"{keyword}: replaces {other}, which is given too: give one")
        given += [setting for setting, _ in leaves(value, name)]
        changes[name] = str(value) if isinstance(value, Path) else value
    return changes
