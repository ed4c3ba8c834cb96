"""Images a second of two processes against one, for phase A, phase B and the export.

    python benchmarks/distributed.py                       atto on 32-pixel images, batches of 64
    python benchmarks/distributed.py --rounds 20 --batch 128
    python benchmarks/distributed.py --only export         one of the three

Every process has one thread. A round runs some steps in one process on the whole batch, then in two
processes on half of it each, while nothing else of the benchmark runs; the ratio of their speeds is
taken within the round, in wall-clock time. "exchange" is the share of a shared step that goes to
gradients: what the same step takes less without them. Random pixels stand in for images, so that
nothing is decoded. The export makes one sampled pass for an image, where a run makes eight.

On a machine with GPUs the processes take one each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from timing import record, spread
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from gaupipe.data.batches import Batch
from gaupipe.distillation.export import make_schema, outputs
from gaupipe.distillation.store_choice import choose_store
from gaupipe.settings.load import load
from gaupipe.system import distributed
from gaupipe.teachers.gaussian import GaussianTeacher, TeacherLoss
from gaupipe.training.job import LabelLosses, StepLosses
from gaupipe.training.student import build_student
from stages.plan import random_data

STEPS = 2
"""Steps that are timed together."""
Ways = tuple[Callable[[], None], Callable[[], None], Callable[[], None] | None]
"""Work in one process, in both, and in both without an exchange of gradients."""
STAGES = ("phase A", "phase B", "export")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=STAGES)
    arguments = parser.parse_args()
    stages = STAGES if arguments.only is None else [arguments.only]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    spawn(rank, (port, arguments.batch, arguments.rounds, stages), nprocs=2)


def rank(number: int, port: int, batch: int, rounds: int, stages: Sequence[str]) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with distributed.process_group(), tempfile.TemporaryDirectory() as folder:
        job = teacher(batch, Path(folder))
        trainings: dict[str, Callable[[], Ways]] = {
            "phase A": lambda: training(*phase_a_step(job), batch),
            "phase B": lambda: training(*phase_b_step(job), batch),
            "export": lambda: exporting(job, batch),
        }
        for name in stages:
            alone, shared, unsynchronised = trainings[name]()
            ratios, exchanges = [], []
            for round_ in range(rounds + 1):  # the first one warms up
                one = clock(alone if distributed.is_main() else (lambda: None))
                both = clock(shared)
                without = clock(unsynchronised) if unsynchronised else 0.0
                if round_:
                    ratios.append(one / both)
                    exchanges.append(1 - without / both)
            if distributed.is_main():
                record(f"{name}, two processes against one", ratios)
                exchange = spread(exchanges) if unsynchronised else "-"
                print(f"{name:<8} x {spread(ratios)}, exchange {exchange}", flush=True)


def teacher(batch: int, folder: Path) -> GaussianTeacher:
    """A fresh teacher on random images."""
    settings = load(
        "cifar10_atto",
        [f"data.batch_size={batch}", "data.image_size=32", "threads=1"],
    )
    data = random_data(settings, 8 * batch, 10)
    job = GaussianTeacher.build(settings, data, folder, to_read=True)
    job.network.passes = 1
    return job


def phase_a_step(job: GaussianTeacher) -> tuple[torch.nn.Module, Callable[[Batch], tuple]]:
    """The loss of phase A, and what it takes beside a batch."""

    def more(batch: Batch) -> tuple:
        rows = None if job.per_image is None else job.per_image.gather(batch.ids, job.device)
        return rows, None

    return TeacherLoss(job), more


def phase_b_step(job: GaussianTeacher) -> tuple[torch.nn.Module, Callable[[Batch], tuple]]:
    """The loss of a plain student, and what it takes beside a batch."""
    train = job.settings.train
    student = build_student(job.settings, job.data, train).to(job.device)
    return LabelLosses(student, train), lambda _batch: (0.0,)


def training(losses: torch.nn.Module, more: Callable[[Batch], tuple], size: int) -> Ways:
    """Steps in one process, in both, and in both without an exchange of gradients."""
    device = next(losses.parameters()).device
    optimizer = torch.optim.AdamW(losses.parameters(), lr=1e-4)
    devices = None if device.type == "cpu" else [device]
    replica = DistributedDataParallel(losses, device_ids=devices)

    def steps(forward: torch.nn.Module, count: int) -> None:
        for _ in range(STEPS):
            found = forward(*arguments(count))
            loss = found.loss if isinstance(found, StepLosses) else found
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def arguments(count: int) -> tuple:
        images = torch.randn(count, 3, 32, 32, device=device)
        labels = torch.zeros(count, dtype=torch.int64, device=device)
        batch = Batch(images, labels, torch.arange(count))
        return batch, *more(batch)

    def unsynchronised() -> None:
        with replica.no_sync():
            steps(replica, size // 2)

    return lambda: steps(losses, size), lambda: steps(replica, size // 2), unsynchronised


def exporting(job: GaussianTeacher, size: int) -> Ways:
    """The export of a batch in one process, and of half of it in each of two."""
    job.network.eval()
    schema = make_schema(job, choose_store(job), sha256="0" * 64)
    batches = job.batches(job.data.train, size)

    def export(count: int) -> None:
        for _ in outputs(job, schema, batches, np.arange(STEPS * count)):
            pass

    def shared() -> None:
        export(size // 2)

    return lambda: export(size), shared, None


def clock(work: Callable[[], None]) -> float:
    """Seconds until every rank has finished."""
    with together():
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        distributed.all_gather_object(None)
        return time.perf_counter() - started


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Begins on all ranks at once."""
    distributed.all_gather_object(None)
    yield


if __name__ == "__main__":
    main()
