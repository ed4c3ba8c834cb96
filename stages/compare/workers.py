"""Trains what a comparison needs, in this process or in several at once."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.progress import Progress

import store
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData
from gaupipe.system import machine
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.system.messages import show_messages
from gaupipe.system.progress import EpochMetrics, epochs_in, read_metrics, total_seconds
from gaupipe.system.signals import end_with_parent
from gaupipe.training.scores import packed, predictions
from gaupipe.training.state import val_acc
from stages import export, phase_a, phase_b
from stages.begin import import_file
from stages.compare import costs
from stages.compare.trainings import (
    FILE,
    FinishedTraining,
    RowTraining,
    as_teacher,
)
from stages.runs.students import StudentRequest

Job = Callable[[list[RowTraining]], str]
"""Work for some trainings; returns a line on the result, which may be empty."""
Groups = list[list[RowTraining]]
Results = Iterator[tuple[list[RowTraining], Callable[[], str]]]


def train(
    trainings: Iterable[RowTraining], jobs: int, imports: Sequence[Path] = ()
) -> dict[Path, FinishedTraining | str]:
    """By the folder of each training its run, or why it failed. Finished trainings are read, not
    trained again. Others are trained in this process, or in ``jobs`` processes at once, which
    import the user's files ``imports``. Shows a bar, and a line for each training that ends."""
    by_folder = {training.folder: training for training in trainings}
    finished = {folder: training.read() for folder, training in by_folder.items()}
    unfinished = [by_folder[folder] for folder, training in finished.items() if training is None]
    failures: dict[Path, str] = {}

    console = Console(file=sys.stderr, highlight=False, markup=False)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with _pool(jobs, imports) as results, bar:
        for what, job in ("teachers", _teach), ("students", _train):
            left = [training for training in unfinished if training.folder not in failures]
            groups = [[training] for training in left]
            if job is _teach:  # a teacher is trained once for all who learn from it
                groups = _by_teacher(left)

            task = bar.add_task(what, total=len(groups))
            for number, (group, result) in enumerate(results(job, groups), 1):
                try:
                    line = result()
                except (UserError, store.StoreError) as error:
                    line = " ".join(str(error).split())
                    failures |= {training.folder: line for training in group}

                if line:
                    first = group[0]
                    name = f"{first.row.name}, seed {first.settings.seed}"
                    console.print(f"{number}/{len(groups)} {name}: {line}", soft_wrap=True)
                bar.advance(task)

    for training in unfinished:
        finished[training.folder] = training.read()
    return failures | {folder: run for folder, run in finished.items() if run is not None}


@contextlib.contextmanager
def _pool(jobs: int, imports: Sequence[Path]) -> Iterator[Callable[[Job, Groups], Results]]:
    """A function of (job, groups) that yields each group, as its job ends, with a function that
    returns the job's result or raises its error."""
    if jobs == 1:

        def one_by_one(job: Job, groups: Groups) -> Results:
            for group in groups:
                yield group, partial(job, group)

        yield one_by_one
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _start_worker, (jobs, imports)) as pool:

        def results(job: Job, groups: Groups) -> Results:
            futures = {pool.submit(job, group): group for group in groups}
            for future in as_completed(futures):
                yield futures[future], future.result

        try:
            yield results
        except BaseException:  # such as Ctrl-C, which a terminal sends to all processes
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.kill()
            raise


def _by_teacher(trainings: list[RowTraining]) -> list[list[RowTraining]]:
    """Groups the trainings that learn from a teacher by their teacher."""
    groups: dict[Path, list[RowTraining]] = {}
    for training in trainings:
        if not training.row.plain:
            groups.setdefault(training.teacher_run.path, []).append(training)
    return list(groups.values())


def _start_worker(jobs: int, imports: Sequence[Path]) -> None:
    """Prepares a worker process. It leaves Ctrl-C to the first process, which kills its workers,
    and ends when that process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show_messages()  # into the logs of trainings
    machine.jobs = jobs
    torch.set_num_threads(max(1, machine.share_of_cores()))
    threading.Thread(target=end_with_parent, daemon=True).start()
    for file in imports:  # attentions of the user's own, which this process does not know yet
        import_file(file)


def _teach(group: list[RowTraining]) -> str:
    """Phase A of the teacher that the whole group learns from, and every store the group reads."""
    stores = {training.maps: training for training in group if not training.exported}
    if not stores:
        return ""
    settings = as_teacher(group[0].settings)
    run = group[0].teacher_run
    with _logged(run.path.with_suffix(".log")):
        data = load_data(settings.data, unlabelled=True)
        resume = run.phase_a.exists()
        metrics = phase_a.run(settings, run.path, resume=resume, data=data, students=False)
        for training in stores.values():
            _export(training, data, metrics)
    line = f"teacher, {epochs_in(metrics)} epochs, {total_seconds(metrics):.0f} s"
    accuracy = metrics[-1]["train_acc"]
    if accuracy is not None:  # a teacher without a head has none
        line += f", training accuracy {accuracy:.4f}"
    return line


def _export(training: RowTraining, data: ImageData, metrics: list[EpochMetrics]) -> None:
    """Writes the store of a training, and beside it the costs of phase A with this export."""
    began = time.process_time()
    settings = training.settings
    out = str(training.maps)
    augment = settings.augment
    export.ensure(
        training.teacher_run.path, out=out, export=settings.export, augment=augment, data=data
    )
    spent = costs.phase_a_costs(training, data, metrics, time.process_time() - began)
    write_whole(training.phase_a_costs, json.dumps(spent) + "\n")


def _train(group: list[RowTraining]) -> str:
    """One training, into its folder."""
    (training,) = group
    folder = training.folder
    settings = training.settings
    teacher_run = None
    phase_a_epochs = 0
    phase_a_costs: Mapping[str, Any] = {}
    test: Mapping[str, Any] = {}
    with _logged(folder / "log.txt"):
        if not training.row.plain:
            teacher_run = training.teacher_run
            phase_a_epochs = epochs_in(read_metrics(teacher_run.phase_a / "metrics.jsonl"))
        if training.needs_phase_a:
            written = json.loads(training.phase_a_costs.read_text())
            phase_a_costs = costs.with_probe(written, settings.phase_b.alpha > 0)

        url = training.maps_url
        request = StudentRequest(settings, folder, teacher_run=teacher_run, maps_url=url)
        data = load_data(settings.data, unlabelled=teacher_run is not None)
        metrics = phase_b.run_request(request, data)
        if not math.isfinite(metrics[-1]["val_loss"]):  # no step follows the last update
            raise UserError(f"the validation loss is not finite after epoch {len(metrics)}")
        if training.test_sha256 is not None:
            test = {"test_sha256": training.test_sha256, **score_test_split(training, data)}
        finished = FinishedTraining(
            seed=settings.seed,
            folder=str(folder.relative_to(training.root)),
            phase_a_epochs=phase_a_epochs,
            val_acc=[val_acc(entry) for entry in metrics],
            val_loss=[entry["val_loss"] for entry in metrics],
            loss_hard=[entry["loss_hard"] for entry in metrics],
            seconds=[entry["seconds"] for entry in metrics],
            processor_seconds=[entry.get("processor_seconds", 0.0) for entry in metrics],
            costs=costs.student_costs(training, data, metrics),
            phase_a_costs=phase_a_costs,
            **test,
        )
        # last: a training counts as finished once this file is there
        write_whole(folder / FILE, json.dumps(asdict(finished)) + "\n")

    seconds = total_seconds(metrics)
    accuracy = finished.final_acc
    return f"validation accuracy {accuracy:.4f} after {len(metrics)} epochs, {seconds:.0f} s"


@contextlib.contextmanager
def _logged(log: Path) -> Iterator[None]:
    """Sends the progress of a training to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", buffering=1) as file, contextlib.redirect_stderr(file):
        yield


def score_test_split(training: RowTraining, data: ImageData) -> dict[str, Any]:
    """What a :class:`FinishedTraining` says of the test images."""
    student = timm.create_model(f"local-dir:{training.folder / 'student'}", pretrained=True).eval()
    assert data.test is not None  # a comparison asks for it before it trains
    logits, labels = predictions(student, data.test, data, training.settings)
    right = (logits.argmax(-1) == labels).numpy()
    return {"test_acc": float(right.mean()), "test_images": len(right), "right": packed(right)}
