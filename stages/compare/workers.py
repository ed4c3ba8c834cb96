"""Trains what a comparison needs, in this process or in several at once."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import store
from gaupipe.data.splits import load_data
from gaupipe.settings import load as config
from gaupipe.system import machine
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.system.progress import epochs_in, total_seconds
from stages import evaluate, export_maps, phase_b
from stages.compare import costs
from stages.compare.passages import Run
from stages.compare.trainings import COSTS_FILE, TEST_FILE, Training, as_teacher
from stages.phase_a import gaussian as phase_a

Job = Callable[[list[Training]], tuple[str, str]]
"""Work for some trainings: returns (a line on the result, why it failed), either may be empty."""


class Workers:
    """Trains in this process, or in ``jobs`` processes at once. Shows a bar over the trainings, and
    a line for each that ends."""

    def __init__(self, jobs: int) -> None:
        self.console = Console(file=sys.stderr, highlight=False)
        self.pool = None
        if jobs > 1:
            context = multiprocessing.get_context("spawn")
            end, self.alive = context.Pipe(duplex=False)
            threads = max(1, (os.cpu_count() or 1) // jobs)
            self.pool = ProcessPoolExecutor(jobs, context, _start_worker, (jobs, threads, end))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, exception: Any, *_details: Any) -> None:
        if self.pool:
            if exception:
                self.alive.close()
            self.pool.shutdown(cancel_futures=True)

    def train(self, trainings: Iterable[Training], failures: dict[Path, str]) -> dict[Path, Run]:
        """The finished runs by folder. Finished trainings are read, not trained again. A training
        that failed is missing; the reason goes into ``failures``."""
        by_folder = {training.folder: training for training in trainings}
        runs = {folder: one.read() for folder, one in by_folder.items() if one.finished}
        unfinished = [one for folder, one in by_folder.items() if folder not in runs]
        columns = TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn()
        progress = Progress(
            *columns,
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with progress as bar:
            self._work(bar, "teachers", _teach, _by_teacher(unfinished), failures)
            students = [[training] for training in unfinished if training.folder not in failures]
            self._work(bar, "students", _train, students, failures)
        return runs | {one.folder: one.read() for one in unfinished if one.finished}

    def _work(
        self,
        bar: Progress,
        what: str,
        job: Job,
        groups: list[list[Training]],
        failures: dict[Path, str],
    ) -> None:
        """One job for every group of trainings, and a line for each job that ends."""
        task = bar.add_task(what, total=len(groups))
        for number, (group, (line, failure)) in enumerate(self._results(job, groups), 1):
            if failure:
                failures.update({training.folder: failure for training in group})
            if line or failure:
                text = f"{number}/{len(groups)} {group[0].label}: {failure or line}"
                bar.console.print(text, soft_wrap=True)
            bar.advance(task)

    def _results(
        self, job: Job, groups: list[list[Training]]
    ) -> Iterator[tuple[list[Training], tuple[str, str]]]:
        """Each group with what its job returned, as the jobs end."""
        if self.pool is None:
            yield from ((group, job(group)) for group in groups)
            return
        futures = {self.pool.submit(job, group): group for group in groups}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _by_teacher(trainings: list[Training]) -> list[list[Training]]:
    """The trainings that learn from a teacher, those of one teacher together."""
    groups: dict[Path, list[Training]] = {}
    for training in trainings:
        if not training.baseline:
            groups.setdefault(training.teacher.path, []).append(training)
    return list(groups.values())


def _start_worker(jobs: int, threads: int, end: Connection) -> None:
    """Prepares a worker process, which ends when the first process is gone or has closed its side
    of the pipe. A terminal sends Ctrl-C to all processes; the first one answers it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    machine.jobs = jobs

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            end.recv()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _teach(group: list[Training]) -> tuple[str, str]:
    """Phase A of the teacher that the whole group learns from, and every store the group reads."""
    stores = {training.maps: training for training in group if not training.exported}
    settings, teacher = as_teacher(group[0].settings), group[0].teacher

    def work() -> str:
        resume = teacher.phase_a.exists()
        metrics = phase_a.run(settings, teacher.path, resume=resume, students=False)
        for training in stores.values():
            _export(training, metrics)
        line = f"teacher, {epochs_in(metrics)} epochs, {total_seconds(metrics):.0f} s"
        accuracy = metrics[-1]["train_acc"]  # None of a teacher without a head
        return line if accuracy is None else f"{line}, training accuracy {accuracy:.4f}"

    return _logged(teacher.path.with_suffix(".log"), work) if stores else ("", "")


def _export(training: Training, metrics: list[dict[str, Any]]) -> None:
    """Writes the store of a training, and beside it the costs of phase A with this export."""
    began = time.process_time()
    export, augment = training.settings.export, training.settings.augment
    out = str(training.maps)
    export_maps.ensure(training.teacher.path, out=out, export=export, augment=augment)
    spent = costs.of_phase_a(training, metrics, time.process_time() - began)
    write_whole(training.phase_a_costs, json.dumps(spent) + "\n")


def _train(group: list[Training]) -> tuple[str, str]:
    """One training, into its folder, beside a copy of its teacher's metrics."""
    (training,) = group
    folder, settings = training.folder, training.settings

    def work() -> str:
        write_whole(folder / "config.yaml", config.dump(settings))
        teacher, maps, phase_a_costs = None, None, {}
        if not training.baseline:
            teacher, maps = training.teacher, str(training.maps)
            phase_a_metrics = (teacher.phase_a / "metrics.jsonl").read_text()
            write_whole(folder / "phase_a.jsonl", phase_a_metrics)
            phase_a_costs = json.loads(training.phase_a_costs.read_text())
        metrics = phase_b.train_student(settings, folder, teacher=teacher, maps_url=maps)
        if training.test:
            write_whole(folder / TEST_FILE, json.dumps(score_test_split(training)) + "\n")
        spent = {"student": costs.of_student(training, metrics), "phase_a": phase_a_costs}
        write_whole(folder / COSTS_FILE, json.dumps(spent) + "\n")
        epochs, seconds = len(metrics), total_seconds(metrics)
        accuracy = metrics[-1]["val_acc"]
        return f"validation accuracy {accuracy:.4f} after {epochs} epochs, {seconds:.0f} s"

    return _logged(folder / "log.txt", work)


def _logged(log: Path, work: Callable[[], str]) -> tuple[str, str]:
    """Work with its progress sent to a file: (the line it returns, the user's mistake)."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", buffering=1) as file, contextlib.redirect_stderr(file):
        try:
            return work(), ""
        except (UserError, store.StoreError) as error:
            return "", " ".join(str(error).split())


def score_test_split(training: Training) -> dict[str, float]:
    """The metrics of a finished student on the test split."""
    data = load_data(training.settings.data)
    student = timm.create_model(f"local-dir:{training.folder / 'student'}", pretrained=True).eval()
    assert data.test is not None  # a comparison asks for it before it trains
    return evaluate.metrics(*evaluate.predictions(student, data.test, data, training.settings))
