"""The trainings of a comparison: the settings of each, where it lies, and what is known so far."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaupipe.data.splits import ImageData, load_data
from gaupipe.settings import (
    BaselineSettings,
    DataSettings,
    ExportSettings,
    PhaseASettings,
    PhaseBSettings,
    Settings,
    scope,
)
from gaupipe.settings import load as config
from gaupipe.settings.sections import Scope
from gaupipe.system.progress import read_metrics
from stages import export_maps
from stages.compare.cells import Cell, apply, of_baseline, resolve
from stages.compare.passages import Run
from stages.runs import kept_epochs
from stages.runs.directory import RunDirectory, settled

COSTS_FILE, TEST_FILE = "costs.json", "test.json"
"""Files beside a student: the costs of its training, and its score on the test split."""


def as_run(settings: Settings, seed: int, *, baseline: bool) -> Settings:
    """The settings of one run. Settings that mean nothing to it go back to their defaults."""
    if baseline:
        settings = of_baseline(settings)
    phase_a, changes = settings.phase_a, dict[str, Any](keep="last")  # the epoch of the tables
    if phase_a.learns_gaussians and phase_a.per_image == "none":  # all images have the same maps
        changes["shuffle_maps"] = False
    if baseline:
        defaults = PhaseBSettings()
        unused = (name for name, _ in defaults if scope(f"phase_b.{name}") & Scope.TEACHER)
        changes |= {name: getattr(defaults, name) for name in unused}
    sections = {
        "export": ExportSettings() if baseline else export_maps.chosen(settings),
        "phase_a": PhaseASettings() if baseline else phase_a,
        "phase_b": settings.phase_b.model_copy(update=changes),
        "baseline": BaselineSettings(),
    }
    return settings.model_copy(update={"seed": seed, **sections})


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
    """A run's name, made of all settings that change its result, also of those that have their
    default, and of what counts besides: the sha256 of the data set first of all."""
    described = config.flatten(settings, without=Scope.ANYTIME)
    text = json.dumps([described, *more], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training of a cell. The names of its folders in ``root`` are made of its settings, so
    that the same training is found again, whichever comparison asks for it."""

    label: str
    settings: Settings
    baseline: bool
    root: Path
    data_sha256: str
    test: bool = False

    @property
    def teacher(self) -> RunDirectory:
        name = digest(as_teacher(self.settings), self.data_sha256)
        return RunDirectory(self.root / "teachers" / name)

    @property
    def maps(self) -> Path:
        """The teacher's store for this training; stores of other kinds lie beside it."""
        export = self.settings.export
        held: list[Any] = [export.model_dump()]
        if export.views is not None:  # other students draw other views
            held.append(export_maps.drawing(self.settings))
        name = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:12]
        return self.teacher.path / f"{export.kind}-{name}.zarr"

    @property
    def exported(self) -> bool:
        """Whether the store and the costs beside it are there."""
        return self.phase_a_costs.is_file() and export_maps.is_complete(str(self.maps))

    @property
    def phase_a_costs(self) -> Path:
        return self.maps.with_suffix(".json")

    @property
    def folder(self) -> Path:
        name = digest(self.settings, self.data_sha256, self.baseline)
        return self.root / "students" / name

    @property
    def finished(self) -> bool:
        files = [COSTS_FILE, *([TEST_FILE] if self.test else [])]
        written = all((self.folder / name).is_file() for name in files)
        return written and kept_epochs.finished(self.folder)

    def read(self) -> Run:
        """The finished run from its files. Raises UserError where they are not of one training."""
        metrics = read_metrics(self.folder / "metrics.jsonl")
        kept_epochs.entry(self.folder, len(metrics))
        costs = json.loads((self.folder / COSTS_FILE).read_text())
        scores = json.loads((self.folder / TEST_FILE).read_text()) if self.test else {}
        return Run(
            seed=self.settings.seed,
            metrics=metrics,
            costs=costs["student"],
            phase_a=[] if self.baseline else read_metrics(self.folder / "phase_a.jsonl"),
            phase_a_costs=costs["phase_a"],
            test_acc=scores.get("top1"),
        )


@dataclass
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
    data: dict[str, ImageData] = field(default_factory=dict)
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
        name = data.model_dump_json()
        if name not in self.data:
            self.data[name] = load_data(data, self.settings.download)
        return self.data[name]

    def resolve(self, cell: Cell, changes: dict[str, Any]) -> Settings:
        """The settings of a cell with the ``changes`` of one of its trials."""
        settings = resolve(cell, self.by_name, self.best_trials, self.settings)
        return settled(apply(settings, changes, cell.name))

    def training(
        self, cell: Cell, changes: dict[str, Any], seed: int, label: str, test: bool = False
    ) -> Training:
        """The training of a cell with a seed and the ``changes`` of one of its trials."""
        settings = self.resolve(cell, changes)
        return Training(
            label=f"{cell.name}, {label}",
            settings=as_run(settings, seed, baseline=cell.plain),
            baseline=cell.plain,
            root=self.run_dir,
            data_sha256=self.load(settings.data).both_sha256,
            test=test,
        )
