"""Compare: train a plain ViT, distilled students and controls over several seeds, and say who got where when."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gaupipe import config
from gaupipe import data as datasets
from gaupipe.comparison import Cell, Run, apply, as_run, as_teacher, default_cells, digest, resolved, sweep_cells
from gaupipe.config import Settings
from gaupipe.errors import UserError
from gaupipe.training import select_device
from stages import evaluate, export_maps, phase_a, phase_b
from stages import run as whole_run
from stages.run_directory import RunDirectory, write_whole

SNAPSHOTS = 3
"""Training images whose key selection is kept, unless the settings say another number."""


@dataclass(frozen=True)
class Training:
    """One run to be made, all of what a worker process needs."""

    label: str
    settings: Settings
    plain: bool
    kind: str
    encoding: str
    root: Path
    test: bool = False

    @property
    def teacher(self) -> RunDirectory:
        return RunDirectory(self.root / "teachers" / digest(as_teacher(self.settings)))

    @property
    def maps(self) -> Path:
        """The teacher's store; another kind or encoding than the usual lies beside the usual one."""
        usual = (self.kind, self.encoding) == ("gaussian", "float16")
        return self.teacher.maps if usual else self.teacher.path / f"maps-{self.kind}-{self.encoding}.zarr"

    @property
    def folder(self) -> Path:
        more = [] if self.plain else [self.kind, self.encoding]
        return self.root / "students" / digest(self.settings, self.plain, *more)

    @property
    def finished(self) -> bool:
        return (self.folder / "student").is_dir() and (not self.test or (self.folder / "test.json").is_file())


@dataclass
class Comparison:
    """What was run: for each cell its tries [(changes, final validation accuracy or None)] and its runs."""

    settings: Settings
    cells: list[Cell]
    seeds: list[int]
    tries: dict[str, list[tuple[dict[str, Any], float | None]]]
    runs: dict[str, list[Run]]
    trainings: dict[str, list[Training]]
    failures: dict[str, str]


def read_sweep(source: str) -> Any:
    """The YAML of a sweep: a file, or the name of one shipped with gaupipe."""
    shipped = resources.files("gaupipe.configs") / "sweeps"
    path = Path(source)
    if not path.is_file():
        names = sorted(entry.name.removesuffix(".yaml") for entry in shipped.iterdir() if entry.name.endswith(".yaml"))
        if source not in names:
            raise UserError(f"--sweep {source!r}: no such file; shipped with gaupipe: {', '.join(names)}")
        path = shipped / f"{source}.yaml"
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--sweep {source}: not readable as YAML: {' '.join(str(error).split())}") from None


def run(settings: Settings, run_dir: Path, students: Sequence[str], seeds: Sequence[int], sweep: str | None = None,
        tune: bool = True, jobs: int = 1, test: bool = False) -> Comparison:
    """Runs what has not finished yet of every cell, ``jobs`` at once. Raises UserError before anything is written for
    settings of a cell that cannot be run; one whose loss diverges is reported as failed."""
    if not settings.key_snapshots:
        settings = settings.model_copy(update={"key_snapshots": SNAPSHOTS})
    cells = default_cells(settings, list(students), tune)
    if sweep:
        like = next(cell.name for cell in cells if not cell.plain)
        cells += sweep_cells(read_sweep(sweep), sweep, settings, like)
    by_name = {cell.name: cell for cell in cells}
    if len(by_name) < len(cells):
        double = next(cell.name for cell in cells if by_name[cell.name] is not cell)
        raise UserError(f"two cells are called {double!r}: give one of them another name")
    for cell in cells:
        check(cell, resolved(cell, by_name, {}, settings))
    if test and datasets.load(settings.data).test is None:
        raise UserError(f"--test: data set {settings.data.name} has no test split")
    with locked(run_dir), Workers(jobs) as workers:
        return execute(Comparison(settings, cells, list(seeds), {}, {}, {}, {}), by_name, run_dir, workers, test)


def check(cell: Cell, settings: Settings) -> None:
    """Raises UserError, naming the cell, for what its training could not do."""
    try:
        whole_run.check(as_run(settings, settings.seed, cell.plain), settings.phase_b.student)
        if cell.kind == "embedding" and not settings.phase_a.compression:
            raise UserError("kind embedding needs phase_a.compression")
    except UserError as error:
        raise UserError(f"{cell.name}: {error}") from None


def execute(done: Comparison, by_name: dict[str, Cell], run_dir: Path, workers: Workers, test: bool) -> Comparison:
    """Tries first, in the order in which cells build on each other; then every cell with every seed."""
    chosen: dict[str, dict[str, Any]] = {}

    def training(cell: Cell, changes: dict[str, Any], seed: int, label: str, test: bool = False) -> Training:
        own = apply(resolved(cell, by_name, chosen, done.settings), changes, cell.name)
        return Training(f"{cell.name.strip()}, {label}", as_run(own, seed, cell.plain), cell.plain, cell.kind,
                        cell.encoding, run_dir, test)

    waiting = [cell for cell in done.cells if cell.tries]
    while waiting:
        ready = [cell for cell in waiting if not any(name in {other.name for other in waiting}
                                                     for name in ancestors(cell, by_name))]
        tries = {cell.name: [training(cell, changes, done.seeds[0], f"try {number}")
                             for number, changes in enumerate(cell.tries, 1)] for cell in ready}
        results = workers.train([entry for entries in tries.values() for entry in entries], done.failures)
        for cell in ready:
            scores = [results[entry.folder].curve[-1] if entry.folder in results else None for entry in tries[cell.name]]
            if not any(score is not None for score in scores):
                raise UserError(f"{cell.name}: every try failed: {done.failures[str(tries[cell.name][0].folder)]}")
            done.tries[cell.name] = list(zip(cell.tries, scores, strict=True))
            chosen[cell.name] = max(done.tries[cell.name], key=lambda entry: -1 if entry[1] is None else entry[1])[0]
        waiting = [cell for cell in waiting if cell.name not in chosen]
    done.trainings = {cell.name: [training(cell, chosen.get(cell.name, {}), seed, f"seed {seed}", test)
                                  for seed in done.seeds] for cell in done.cells}
    results = workers.train([entry for entries in done.trainings.values() for entry in entries], done.failures)
    done.runs = {name: [results[entry.folder] for entry in entries if entry.folder in results]
                 for name, entries in done.trainings.items()}
    return done


def ancestors(cell: Cell, by_name: dict[str, Cell]) -> list[str]:
    """The names of the cells whose settings a cell starts with, nearest first."""
    names = []
    while cell.like:
        names.append(cell.like)
        cell = by_name[cell.like]
    return names


class Workers:
    """Trains in this process, or in several at once; shows a bar over the runs and a line for each that ends."""

    def __init__(self, jobs: int) -> None:
        self.console = Console(stderr=True, highlight=False)
        threads = max(1, (os.cpu_count() or 1) // jobs)
        self.pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_worker, (threads,)) \
            if jobs > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_exception: Any) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def train(self, trainings: Sequence[Training], failures: dict[str, str]) -> dict[Path, Run]:
        """The finished runs by folder; a run that failed is missing and said in ``failures``."""
        unique: dict[Path, Training] = {}
        for entry in trainings:
            unique.setdefault(entry.folder, entry)
        todo = [entry for entry in unique.values() if not entry.finished]
        teachers: dict[Path, Training] = {}
        for entry in todo:
            if not entry.plain:
                teachers.setdefault(entry.maps, entry)
        with Progress(TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
                      console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            for work, entries in ((_teach, list(teachers.values())), (_train, todo)):
                entries = [entry for entry in entries if str(entry.folder) not in failures]
                task = bar.add_task("teachers" if work is _teach else "students", total=len(entries))
                for number, (entry, (line, failed)) in enumerate(self._each(work, entries), 1):
                    if failed:
                        affected = [entry] if work is _train else [other for other in todo if other.maps == entry.maps]
                        failures.update({str(other.folder): failed for other in affected})
                    if line or failed:
                        bar.console.print(f"{number}/{len(entries)} {entry.label}: {failed or line}", soft_wrap=True)
                    bar.advance(task)
        return {folder: read_run(entry) for folder, entry in unique.items() if entry.finished}

    def _each(self, work: Any, entries: Sequence[Training]) -> Iterator[tuple[Training, tuple[str, str]]]:
        if self.pool is None:
            for entry in entries:
                yield entry, work(entry)
            return
        waiting: dict[Future, Training] = {self.pool.submit(work, entry): entry for entry in entries}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def _start_worker(threads: int) -> None:
    torch.set_num_threads(threads)

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)  # nobody is left to take the result

    threading.Thread(target=watch, daemon=True).start()


def _teach(training: Training) -> tuple[str, str]:
    """Phase A and the export of a training's teacher: (what to say of it, what went wrong)."""
    teacher = training.teacher
    if export_maps.is_complete(str(training.maps)):
        return "", ""
    with _quietly(teacher.path.with_suffix(".log")) as failed:
        metrics = phase_a.run(as_teacher(training.settings), teacher.path, resume=True)
        export_maps.ensure(teacher.path, str(training.maps), training.kind, training.encoding)
        last = metrics[-1]
        return (f"teacher, {last['epoch']} epochs, training accuracy {last['train_acc']:.4f}, "
                f"{sum(row['seconds'] for row in metrics):.0f} s"), ""
    return "", failed[0]


def _train(training: Training) -> tuple[str, str]:
    """One run: (what to say of it, what went wrong)."""
    folder, settings = training.folder, training.settings
    with _quietly(folder / "log.txt") as failed:
        write_whole(folder / "config.yaml", config.dump(settings))
        teacher = None if training.plain else training.teacher
        maps = None if training.plain or training.maps == teacher.maps else str(training.maps)
        metrics = phase_b.train_student(settings, settings.phase_b.student, folder, teacher, maps)
        if training.test:
            write_whole(folder / "test.json", json.dumps(test_scores(training)) + "\n")
        return (f"validation accuracy {metrics[-1]['val_acc']:.4f} after {len(metrics)} epochs, "
                f"{sum(row['seconds'] for row in metrics):.0f} s"), ""
    return "", failed[0]


@contextlib.contextmanager
def _quietly(log: Path) -> Iterator[list[str]]:
    """Sends what a job says of its progress to a file and keeps a mistake's message in the list."""
    log.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    with log.open("a", buffering=1) as file, contextlib.redirect_stderr(file):
        try:
            yield failed
        except UserError as error:
            failed.append(str(error))


def test_scores(training: Training) -> dict[str, float]:
    """How good a finished student is on the test split."""
    settings = training.settings
    data, device = datasets.load(settings.data), select_device(settings)
    student = timm.create_model(f"local-dir:{training.folder / 'student'}", pretrained=True).eval().to(device)
    return evaluate.metrics(*evaluate.predictions(student, data.test, data, settings, device))


def read_run(training: Training) -> Run:
    """A finished run from its files."""
    folder = training.folder
    scores = json.loads((folder / "test.json").read_text()) if training.test else {}
    return Run(training.settings.seed, read_metrics(folder),
               [] if training.plain else read_metrics(training.teacher.phase_a), scores.get("top1"))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
