"""The runs of a comparison: where each lives, how it is trained, several at once if asked for."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import store
from gaupipe import config
from gaupipe import data as datasets
from gaupipe.comparison import Run, as_teacher, digest, total_seconds
from gaupipe.config import Settings
from gaupipe.errors import UserError
from gaupipe.training import select_device
from stages import evaluate, export_maps, phase_a, phase_b
from stages.run_directory import RunDirectory, write_whole


@dataclass(frozen=True)
class Training:
    """One run to be made: all that a worker process needs."""

    label: str
    settings: Settings
    plain: bool
    kind: str
    encoding: str
    root: Path
    data_sha256: str
    test: bool = False

    @property
    def teacher(self) -> RunDirectory:
        return RunDirectory(self.root / "teachers" / digest(as_teacher(self.settings), self.data_sha256))

    @property
    def maps(self) -> Path:
        """The teacher's store; another kind or encoding than the usual lies beside the usual one."""
        usual = (self.kind, self.encoding) == (export_maps.default_kind(self.settings), "float16")
        return self.teacher.maps if usual else self.teacher.path / f"maps-{self.kind}-{self.encoding}.zarr"

    @property
    def folder(self) -> Path:
        more = [] if self.plain else [self.kind, self.encoding]
        return self.root / "students" / digest(self.settings, self.data_sha256, self.plain, *more)

    @property
    def finished(self) -> bool:
        return (self.folder / "student").is_dir() and (not self.test or (self.folder / "test.json").is_file())

    def read(self) -> Run:
        """The finished run from its files."""
        scores = json.loads((self.folder / "test.json").read_text()) if self.test else {}
        return Run(self.settings.seed, read_metrics(self.folder / "metrics.jsonl"),
                   [] if self.plain else read_metrics(self.folder / "phase_a.jsonl"), scores.get("top1"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Workers:
    """Trains in this process, or in several at once; shows a bar over the runs and a line for each that ends."""

    def __init__(self, jobs: int) -> None:
        self.console = Console(file=sys.stderr, highlight=False)
        self.pool = None
        if jobs > 1:
            context = multiprocessing.get_context("spawn")
            ended, self.alive = context.Pipe(duplex=False)
            threads = max(1, (os.cpu_count() or 1) // jobs)
            self.pool = ProcessPoolExecutor(jobs, context, _start_worker, (threads, ended))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, exception: Any, *_details: Any) -> None:
        if self.pool:
            if exception:
                self.alive.close()
            self.pool.shutdown(cancel_futures=True)

    def train(self, trainings: Sequence[Training], failures: dict[Path, str]) -> dict[Path, Run]:
        """The finished runs by folder; a run that failed is missing and said in ``failures``."""
        unique: dict[Path, Training] = {}
        for entry in trainings:
            unique.setdefault(entry.folder, entry)
        todo = [entry for entry in unique.values() if not entry.finished]
        teachers: dict[Path, list[Training]] = {}
        for entry in todo:
            if not entry.plain:
                teachers.setdefault(entry.teacher.path, []).append(entry)
        with Progress(TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
                      console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            self._work(bar, "teachers", _teach, list(teachers.values()), failures)
            self._work(bar, "students", _train, [[entry] for entry in todo if entry.folder not in failures], failures)
        return {folder: entry.read() for folder, entry in unique.items() if entry.finished}

    def _work(self, bar: Progress, what: str, job: Callable, groups: list[list[Training]], failures: dict[Path, str]) -> None:
        task = bar.add_task(what, total=len(groups))
        for number, (group, (line, failed)) in enumerate(self._each(job, groups), 1):
            failures.update({entry.folder: failed for entry in group if failed})
            if line or failed:
                bar.console.print(f"{number}/{len(groups)} {group[0].label}: {failed or line}", soft_wrap=True)
            bar.advance(task)

    def _each(self, job: Callable, groups: list[list[Training]]) -> Iterator[tuple[list[Training], tuple[str, str]]]:
        if self.pool is None:
            for group in groups:
                yield group, job(group)
            return
        waiting: dict[Future, list[Training]] = {self.pool.submit(job, group): group for group in groups}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def _start_worker(threads: int, ended: Connection) -> None:
    """What a worker process does first. It ends at once when the first process is gone or has closed its end; Ctrl-C, which
    a terminal sends to all processes, is the first one's to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            ended.recv()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _teach(group: list[Training]) -> tuple[str, str]:
    """Phase A of the teacher that all of the group learn from, and every store they read: (what to say of it, what went
    wrong)."""
    teacher, said = group[0].teacher, ""
    stores = {entry.maps: entry for entry in group if not export_maps.is_complete(str(entry.maps))}
    with _quietly(teacher.path.with_suffix(".log")) as failed:
        if stores:
            metrics = phase_a.run(as_teacher(group[0].settings), teacher.path, resume=True)
            for maps, entry in stores.items():
                export_maps.ensure(teacher.path, str(maps), entry.kind, entry.encoding)
            said = (f"teacher, {len(metrics)} epochs, training accuracy {metrics[-1]['train_acc']:.4f}, "
                    f"{total_seconds(metrics):.0f} s")
    return said, "".join(failed)


def _train(group: list[Training]) -> tuple[str, str]:
    """One run: (what to say of it, what went wrong)."""
    entry, = group
    folder, settings, said = entry.folder, entry.settings, ""
    with _quietly(folder / "log.txt") as failed:
        write_whole(folder / "config.yaml", config.dump(settings))
        if entry.plain:
            metrics = phase_b.train_student(settings, folder, None)
        else:
            teacher = entry.teacher
            write_whole(folder / "phase_a.jsonl", (teacher.phase_a / "metrics.jsonl").read_text())
            maps = None if entry.maps == teacher.maps else str(entry.maps)
            metrics = phase_b.train_student(settings, folder, teacher, maps)
        if entry.test:
            write_whole(folder / "test.json", json.dumps(test_scores(entry)) + "\n")
        said = (f"validation accuracy {metrics[-1]['val_acc']:.4f} after {len(metrics)} epochs, "
                f"{total_seconds(metrics):.0f} s")
    return said, "".join(failed)


@contextlib.contextmanager
def _quietly(log: Path) -> Iterator[list[str]]:
    """Sends what a job says of its progress to a file and keeps a mistake's message in the list."""
    log.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    with log.open("a", buffering=1) as file, contextlib.redirect_stderr(file):
        try:
            yield failed
        except (UserError, store.StoreError) as error:
            failed.append(" ".join(str(error).split()))


def test_scores(entry: Training) -> dict[str, float]:
    """How good a finished student is on the test split."""
    settings = entry.settings
    data, device = datasets.load(settings.data), select_device(settings)
    student = timm.create_model(f"local-dir:{entry.folder / 'student'}", pretrained=True).eval().to(device)
    return evaluate.metrics(*evaluate.predictions(student, data.test, data, settings, device))
