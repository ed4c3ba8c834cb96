"""Compare: train a plain ViT, distilled students and controls over several seeds, and say who got where when."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import store
from gaupipe import data as datasets
from gaupipe.comparison import (
    PLAIN,
    Cell,
    Run,
    ancestors,
    apply,
    as_run,
    chosen_rows,
    default_cells,
    resolved,
    sweep_cells,
)
from gaupipe.config import DataSettings, Settings, read_yaml
from gaupipe.data import ImageData
from gaupipe.errors import UserError
from stages import export_maps, phase_b
from stages.compare_runs import Training, Workers

SNAPSHOTS = 3
"""Training images whose key selection is kept, unless the settings say another number."""


@dataclass
class Comparison:
    """What was run. ``data``: the data sets that cells name; ``tries``: for each tuned cell [(changes, final validation
    accuracy or None)]; ``chosen``: the best of them; ``trainings`` and ``runs``: for each cell one for every seed, a run
    only where it did not fail."""

    settings: Settings
    cells: list[Cell]
    seeds: list[int]
    run_dir: Path
    test: bool
    data: dict[DataSettings, ImageData]
    tries: dict[str, list[tuple[dict[str, Any], float | None]]] = field(default_factory=dict)
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainings: dict[str, list[Training]] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    failures: dict[Path, str] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, Cell]:
        return {cell.name: cell for cell in self.cells}

    def load(self, data: DataSettings) -> ImageData:
        """A data set, read once."""
        if data not in self.data:
            self.data[data] = datasets.load(data)
        return self.data[data]

    def training(self, cell: Cell, changes: dict[str, Any], seed: int, label: str, test: bool = False) -> Training:
        """A cell's run with a seed and the changes of one of its tries."""
        own = apply(resolved(cell, self.by_name, self.chosen, self.settings), changes, cell.name)
        kind = cell.kind or export_maps.default_kind(own, cell.encoding)
        return Training(f"{cell.name}, {label}", as_run(own, seed, cell.plain), cell.plain, kind, cell.encoding,
                        self.run_dir, self.load(own.data).sha256, test)


def run(settings: Settings, run_dir: Path, students: Sequence[str], seeds: Sequence[int], targets: Sequence[float] = (),
        sweep: str | None = None, tune: bool = True, jobs: int = 1, test: bool = False, rows: Sequence[str] = ()
        ) -> dict[str, Any]:
    """Runs what has not finished yet of every cell, ``jobs`` at once, and returns and writes what was found. ``rows`` names
    the cells if it is not all of them: the plain ViT and the cells that they are like come along.

    Raises UserError before anything is written for settings of a cell that cannot be run; a run whose loss diverges is
    reported as failed.
    """
    from stages import compare_report
    if not settings.key_snapshots:
        settings = settings.model_copy(update={"key_snapshots": SNAPSHOTS})
    cells = default_cells(settings, list(students), tune)
    if sweep:
        cells = sweep_cells(read_yaml(sweep, "sweeps"), sweep, cells)
    if rows:
        cells = chosen_rows(cells, rows)
    data = datasets.load(settings.data)
    if test and data.test is None:
        raise UserError(f"--test: data set {settings.data.name} has no test split")
    done = Comparison(settings, cells, list(seeds), run_dir, test, {settings.data: data})
    for cell in cells:
        for changes in ({}, *cell.tries):
            own = apply(resolved(cell, done.by_name, {}, settings), changes, cell.name)
            check(cell, own, done.load(own.data))
    with locked(run_dir):
        with Workers(jobs) as workers:
            execute(done, workers)
        found = compare_report.report(done, targets)
        compare_report.write(done, found, Path(sweep).stem if sweep else "compare")
    return found


def check(cell: Cell, settings: Settings, data: ImageData) -> None:
    """Raises UserError, naming the cell, for what its training could not do."""
    try:
        settings = as_run(settings, settings.seed, cell.plain)
        if cell.plain:
            phase_b.check_plain(settings, data)
        else:
            phase_b.check(settings, data, cell.kind, cell.encoding)
    except (UserError, store.StoreError) as error:
        raise UserError(f"{cell.name}: {error}") from None


def execute(done: Comparison, workers: Workers) -> None:
    """Tries first, in the order in which cells build on each other; then every cell with every seed."""
    waiting = [cell for cell in done.cells if cell.tries]
    while waiting:
        ready = [cell for cell in waiting if not {other.name for other in waiting} & set(ancestors(cell, done.by_name))]
        tries = {cell.name: [done.training(cell, changes, done.seeds[0], f"try {number}")
                             for number, changes in enumerate(cell.tries, 1)] for cell in ready}
        results = workers.train([entry for entries in tries.values() for entry in entries], done.failures)
        for cell in ready:
            scores = [results[entry.folder].curve[-1] if entry.folder in results else None for entry in tries[cell.name]]
            done.tries[cell.name] = list(zip(cell.tries, scores, strict=True))
            done.chosen[cell.name] = max(done.tries[cell.name], key=lambda entry: -1 if entry[1] is None else entry[1])[0]
        waiting = [cell for cell in waiting if cell.name not in done.chosen]
    done.trainings = {cell.name: [done.training(cell, done.chosen.get(cell.name, {}), seed, f"seed {seed}", done.test)
                                  for seed in done.seeds] for cell in done.cells}
    results = workers.train([entry for entries in done.trainings.values() for entry in entries], done.failures)
    done.runs = {name: [results[entry.folder] for entry in entries if entry.folder in results]
                 for name, entries in done.trainings.items()}
    failed = [done.failures[entry.folder] for entry in done.trainings[PLAIN] if entry.folder in done.failures]
    if failed:
        raise UserError(f"{PLAIN}, which the others are compared with, failed: {failed[0]}")


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keeps a second comparison out of a folder. Raises UserError for one that holds something else."""
    marker = run_dir / "comparison.lock"
    if run_dir.is_file() or (run_dir.is_dir() and not marker.exists() and any(run_dir.iterdir())):
        raise UserError(f"{run_dir} exists and holds no comparison: choose another --run-dir")
    run_dir.mkdir(parents=True, exist_ok=True)
    with marker.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{run_dir}: another comparison is running there: wait for it, or choose another --run-dir"
                            ) from None
        yield
