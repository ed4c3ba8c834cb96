"""The loop of a comparison: trials first, then every cell with every seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import store
from gaupipe.data.splits import ImageData
from gaupipe.distillation.student import MapShape, check_baseline, check_student
from gaupipe.settings import Settings
from gaupipe.settings.load import read_yaml
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.training import loggers
from stages import export_maps
from stages.compare.cells import BASELINE, Cell, ancestors, default_cells, select_cells, sweep_cells
from stages.compare.figures import draw
from stages.compare.report import report
from stages.compare.trainings import Comparison, as_run
from stages.compare.workers import Workers
from stages.phase_a import gaussian as phase_a
from stages.phase_a import trained_vit as trained_teacher
from stages.phase_a.job import TeacherJob
from stages.runs.directory import locked


def run(
    settings: Settings,
    run_dir: Path,
    *,
    students: Sequence[str],
    seeds: Sequence[int],
    targets: Sequence[float] = (),
    sweep: str | None = None,
    only: Sequence[str] = (),
    tune: bool = True,
    jobs: int = 1,
    test: bool = False,
) -> dict[str, Any]:
    """Runs what has not finished yet of every cell. Returns the results and writes them.

    students   attentions of the students
    seeds      every row is run with each
    targets    accuracies to compare at; none are shares of the baseline's final accuracy
    sweep      a file of further cells, or the name of a shipped one
    only       names of the cells to run, with the plain ViT and the cells whose settings they
               start with; none are all cells
    tune       run the trials of the default cells
    jobs       trainings at once
    test       also score the finished runs on the test split

    A run whose loss diverges is reported as failed. Raises UserError, before anything is written,
    for a cell that cannot be run and for a folder that holds something else.
    """
    name = Path(sweep).stem if sweep else "compare"
    cells = default_cells(settings, students, tune=tune)
    if sweep is not None:
        cells = sweep_cells(read_yaml(sweep, "sweeps"), sweep, cells)
    if only:
        cells = select_cells(cells, only)
    comparison = Comparison(settings, cells, list(seeds), run_dir, test)
    check_all(comparison)
    check_folder(run_dir)
    with locked(run_dir, "comparison"):
        with Workers(jobs) as workers:
            run_trials(comparison, workers)
            run_cells(comparison, workers)
        results = report(comparison, targets)
        write_whole(run_dir / f"{name}.json", json.dumps(results, indent=1) + "\n")
        draw(results, run_dir / name)
    return results


def check_all(comparison: Comparison) -> None:
    """Raises UserError for a cell, with any of its trials, that cannot be run."""
    loggers.check(comparison.settings.log.to)
    for cell in comparison.cells:
        for changes in ({}, *cell.trials):
            settings = comparison.resolve(cell, changes)
            data = comparison.load(settings.data)
            if comparison.test and data.test is None:
                raise UserError(f"--test: data set {data.name} has no test split")
            check(cell, settings, data)


def check(cell: Cell, settings: Settings, data: ImageData) -> None:
    """Raises UserError, naming the cell, for what its training could not do."""
    try:
        settings = as_run(settings, settings.seed, baseline=cell.plain)
        select_device(settings.device, settings.threads)
        if cell.plain:
            check_baseline(settings, data)
        else:
            check_distilled(settings, data)
    except (UserError, store.StoreError) as error:
        raise UserError(f"{cell.name}: {error}") from None


def check_distilled(settings: Settings, data: ImageData) -> None:
    """Raises UserError for what neither phase could do, StoreError for a kind and an encoding of
    stores that do not go together."""
    if settings.phase_a.learns_gaussians:
        teacher = phase_a.build_teacher(settings, data)
        job = TeacherJob(settings, data, torch.device("cpu"), teacher)
        phase_a.training_state(job)
        export_maps.make_schema(job, settings.export, sha256="0" * 64)
        check_student(settings, data, MapShape.of(teacher), teacher.weights())
    else:
        trained_teacher.check(settings, data)


def check_folder(run_dir: Path) -> None:
    """Raises UserError for a folder that holds something else than a comparison."""
    names = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    has_runs = not names.isdisjoint({"students", "teachers"})
    is_comparison = names == {"lock"} or ("lock" in names and has_runs)
    if run_dir.is_file() or (names and not is_comparison):
        raise UserError(f"{run_dir} exists and holds no comparison: choose another --run-dir")


def run_trials(comparison: Comparison, workers: Workers) -> None:
    """Finds the best trial of every cell that has some, with the first seed.

    A cell waits for the cells whose settings it starts with: it takes their best trials.
    """
    seed = comparison.seeds[0]
    waiting = [cell for cell in comparison.cells if cell.trials]
    while waiting:
        names = {cell.name for cell in waiting}
        ready = [cell for cell in waiting if names.isdisjoint(ancestors(cell, comparison.by_name))]
        trainings = {
            cell.name: [
                comparison.training(cell, changes, seed, label=f"trial {number}")
                for number, changes in enumerate(cell.trials, 1)
            ]
            for cell in ready
        }
        runs = workers.train(chain(*trainings.values()), comparison.failures)
        for cell in ready:
            scores = [
                runs[training.folder].curve[-1] if training.folder in runs else None
                for training in trainings[cell.name]
            ]
            trials = list(zip(cell.trials, scores, strict=True))
            comparison.trials[cell.name] = trials
            # a trial that failed is worse than any
            best, _ = max(trials, key=lambda trial: -1 if trial[1] is None else trial[1])
            comparison.best_trials[cell.name] = best
        waiting = [cell for cell in waiting if cell not in ready]


def run_cells(comparison: Comparison, workers: Workers) -> None:
    """Trains every cell with every seed. Raises UserError where the baseline failed."""
    for cell in comparison.cells:
        changes = comparison.best_trials.get(cell.name, {})
        comparison.trainings[cell.name] = [
            comparison.training(cell, changes, seed, label=f"seed {seed}", test=comparison.test)
            for seed in comparison.seeds
        ]
    runs = workers.train(chain(*comparison.trainings.values()), comparison.failures)
    for name, trainings in comparison.trainings.items():
        comparison.runs[name] = [
            runs[training.folder] for training in trainings if training.folder in runs
        ]
    failures = comparison.failures_of(BASELINE)
    if failures:
        raise UserError(f"{BASELINE}, which the others are compared with, failed: {failures[0]}")
