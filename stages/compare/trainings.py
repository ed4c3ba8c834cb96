"""The trainings of a comparison: the settings of each, where it lies, and what is known so far."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaupipe import settings as config
from gaupipe.data.splits import ImageData, load_data
from gaupipe.settings import (
    IRRELEVANT,
    BaselineSettings,
    DataSettings,
    ExportSettings,
    PhaseASettings,
    PhaseBSettings,
    Settings,
    older_names,
)
from gaupipe.system.progress import read_metrics
from stages import export_maps
from stages.compare.cells import Cell, apply, of_baseline, resolve
from stages.compare.speed import Run
from stages.runs import kept_epochs
from stages.runs.directory import RunDirectory

DISTILLATION = (
    "alpha",
    "beta",
    "gamma",
    "gamma_schedule",
    "gamma_epochs",
    "layer_map",
    "layer_weights",
    "mean_heads",
    "shuffle_maps",
    "average_maps",
    "match_grid",
    "warm_start",
    "temperature",
    "direction",
    "preload_gb",
    "head_map",
    "copy_epochs",
    "feature_queries",
)
"""Settings of phase B that mean nothing without a teacher."""


def as_run(settings: Settings, seed: int, *, baseline: bool) -> Settings:
    """The settings of one run. Settings that mean nothing to it go back to their defaults."""
    if baseline:
        settings = of_baseline(settings)
    phase_b = settings.phase_b.model_copy(update={"keep": "last"})  # the epoch of the tables
    phase_a = settings.phase_a
    if phase_a.learns_gaussians and phase_a.per_image == "none":  # all images have the same maps
        phase_b = phase_b.model_copy(update={"shuffle_maps": False})
    if baseline:
        defaults = PhaseBSettings()
        unused = {name: getattr(defaults, name) for name in DISTILLATION}
        phase_b = phase_b.model_copy(update=unused)
        phase_a = PhaseASettings()
    return settings.model_copy(
        update={
            "seed": seed,
            "export": ExportSettings(),
            "phase_a": phase_a,
            "phase_b": phase_b,
            "baseline": BaselineSettings(),
        }
    )


def as_teacher(settings: Settings) -> Settings:
    """The settings of the phase A of a run."""
    others = {
        "augment": settings.phase_a_augment,
        "export": ExportSettings(),
        "phase_b": PhaseBSettings(),
        "baseline": BaselineSettings(),
    }
    return settings.model_copy(update=others)


def digest(settings: Settings, *more: Any) -> str:
    """A run's name: the same for the same settings, whatever settings a later version adds.

    ``more`` is what counts besides: the sha256 of the data set first of all.
    """
    defaults = config.flatten(Settings())
    changed = {
        name: value
        for name, value in config.flatten(settings).items()
        if name not in IRRELEVANT and (name not in defaults or value != defaults[name])
    }
    text = json.dumps([older_names.as_recorded(changed), *more], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training of a cell: all that a worker process needs to know.

    The names of its folders are made from the settings that matter to it, so that the same
    training is found again, whichever comparison in the folder ``root`` asks for it.
    """

    label: str
    settings: Settings
    baseline: bool
    export: ExportSettings
    root: Path
    data_sha256: str
    test: bool = False

    @property
    def teacher(self) -> RunDirectory:
        name = digest(as_teacher(self.settings), self.data_sha256)
        return RunDirectory(self.root / "teachers" / name)

    @property
    def maps(self) -> Path:
        """The teacher's store. Another kind or encoding than the default lies beside it."""
        usual = export_maps.chosen(as_teacher(self.settings))
        if self.export == usual:
            return self.teacher.maps
        return self.teacher.path / f"maps-{'-'.join(map(str, self.store))}.zarr"

    @property
    def store(self) -> list[Any]:
        """What the store holds: kind and encoding, and what goes beyond version 0.1."""
        export = self.export
        more = {"k": export.k, "views": export.views}
        named = [f"{name}{value}" for name, value in more.items() if value is not None]
        if export.views is not None:  # other students draw other views
            drawn = json.dumps(export_maps.drawing(self.settings), sort_keys=True)
            named.append(hashlib.sha256(drawn.encode()).hexdigest()[:12])
        return [export.kind, export.encoding, *named]

    @property
    def folder(self) -> Path:
        store = [] if self.baseline else self.store
        name = digest(self.settings, self.data_sha256, self.baseline, *store)
        return self.root / "students" / name

    @property
    def finished(self) -> bool:
        tested = not self.test or (self.folder / "test.json").is_file()
        return tested and kept_epochs.finished(self.folder)

    def read(self) -> Run:
        """The finished run from its files. Raises UserError where they are not of one training."""
        metrics = read_metrics(self.folder / "metrics.jsonl")
        kept_epochs.check(self.folder, len(metrics))
        phase_a = [] if self.baseline else read_metrics(self.folder / "phase_a.jsonl")
        scores = json.loads((self.folder / "test.json").read_text()) if self.test else {}
        return Run(
            seed=self.settings.seed,
            metrics=metrics,
            phase_a=phase_a,
            test_acc=scores.get("top1"),
        )


def export_of(cell: Cell, settings: Settings) -> ExportSettings:
    """What the store of a cell with these settings holds."""
    names_k = any("export.k" in changes for changes in (cell.settings, *cell.trials))
    k = settings.export.k if names_k else None
    given = {"kind": cell.kind, "encoding": cell.encoding, "k": k}
    return export_maps.chosen(settings, given=given)


@dataclass(kw_only=True)
class Comparison:
    """What is compared, and what is known of it so far.

    data          the data sets that cells name, as they are read
    trials        for each tuned cell [(changes, final validation accuracy or None if it failed)]
    best_trials   for each tuned cell the changes of its best trial
    trainings     for each cell its training with each seed
    runs          for each cell the runs of its trainings, without those that failed
    failures      by folder of a training, why it failed
    """

    settings: Settings
    cells: list[Cell]
    seeds: list[int]
    run_dir: Path
    test: bool
    data: dict[DataSettings, ImageData] = field(default_factory=dict)
    trials: dict[str, list[tuple[dict[str, Any], float | None]]] = field(default_factory=dict)
    best_trials: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainings: dict[str, list[Training]] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    failures: dict[Path, str] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, Cell]:
        return {cell.name: cell for cell in self.cells}

    def failures_of(self, name: str) -> list[str]:
        """Why trainings of a cell failed, in the order of the seeds; empty if none did."""
        folders = [training.folder for training in self.trainings[name]]
        return [self.failures[folder] for folder in folders if folder in self.failures]

    def load(self, data: DataSettings) -> ImageData:
        """A data set, read once."""
        if data not in self.data:
            self.data[data] = load_data(data)
        return self.data[data]

    def resolve(self, cell: Cell, changes: dict[str, Any]) -> Settings:
        """The settings of a cell with the ``changes`` of one of its trials."""
        settings = resolve(cell, self.by_name, self.best_trials, self.settings)
        return apply(settings, changes, cell.name)

    def training(
        self,
        cell: Cell,
        changes: dict[str, Any],
        seed: int,
        *,
        label: str,
        test: bool = False,
    ) -> Training:
        """The training of a cell with a seed and the ``changes`` of one of its trials."""
        settings = self.resolve(cell, changes)
        return Training(
            label=f"{cell.name}, {label}",
            settings=as_run(settings, seed, baseline=cell.plain),
            baseline=cell.plain,
            export=export_of(cell, settings),
            root=self.run_dir,
            data_sha256=self.load(settings.data).both_sha256,
            test=test,
        )
