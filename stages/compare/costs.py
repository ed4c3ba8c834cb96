"""How large and how fast the models of a comparison are, measured on this machine in turns with
the plain ViT.

On a GPU a time is that of the clock. On a CPU it is the processor's, of one thread, so that what
else runs on the machine counts less.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import store
from gaupipe.attention.options import count_parameters
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.splits import ImageData
from gaupipe.distillation.student import build_student
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.training.optimizer import select_device
from gaupipe.training.state import Update
from stages import phase_b
from stages.compare.cells import BASELINE
from stages.compare.trainings import Comparison, Training

ROUNDS = 15
"""Turns that count, after one to warm up."""
LIMIT, FEWEST_ROUNDS = 60.0, 3
"""No further turn is started after this many seconds, once there were a few."""
FILE = "costs.json"


@dataclass(frozen=True)
class Costs:
    """Medians over the turns. ``step_ratio`` and ``inference_ratio`` are the times over those of
    the plain ViT in the same turn."""

    step_seconds: float
    step_ratio: float
    images_per_s: float
    inference_ratio: float


def measure(comparison: Comparison) -> dict[str, Any]:
    """``machine``, what was measured on, ``batch``, the images of a step of the plain ViT, and
    under ``cells``, by name, ``parameters`` and the fields of :class:`Costs`, which are None for a
    cell that cannot be trained here, such as one whose store is gone.

    What an earlier call measured on the same machine is read from ``costs.json``.
    """
    reference = comparison.trainings[BASELINE][0]
    select_device(reference.settings)
    machine, path = machine_name(reference), comparison.run_dir / FILE
    key = f"{machine}; next to {reference.folder.name}"
    measured = read_costs(path, key)
    results = {}
    for cell in comparison.cells:
        training = comparison.trainings[cell.name][0]
        name, data = training.folder.name, comparison.load(training.settings.data)
        if name not in measured and not comparison.failures_of(cell.name):
            found = _costs(training, reference, comparison)
            if found is not None:
                measured[name] = found
                written = {name: asdict(costs) for name, costs in measured.items()}
                write_whole(path, json.dumps({key: written}, indent=1) + "\n")
        costs = measured.get(name)
        values = dict.fromkeys(Costs.__dataclass_fields__) if costs is None else asdict(costs)
        model = build_student(training.settings, data, "meta")
        results[cell.name] = {"parameters": count_parameters(model), **values}
    batch = reference.settings.data.batch_size
    return {"machine": machine, "batch": batch, "cells": results}


def read_costs(path: Path, key: str) -> dict[str, Costs]:
    """What was measured before, by name of a training's folder; nothing where the file is damaged
    or of another machine."""
    try:
        known = json.loads(path.read_bytes())[key]
        return {name: Costs(**values) for name, values in known.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def machine_name(training: Training) -> str:
    """What is measured on, and how."""
    device = select_device(training.settings)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, processor time of one thread"


def processor_name() -> str:
    """The model of the processor where Linux says it, else its architecture."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    return platform.machine()


def _costs(training: Training, reference: Training, comparison: Comparison) -> Costs | None:
    pair = [reference] if training.folder == reference.folder else [reference, training]
    try:
        contenders = [Contender(of, comparison.load(of.settings.data)) for of in pair]
        device = contenders[0].job.device
        with one_thread():
            steps = in_turns([contender.step for contender in contenders], device)
            inferences = in_turns([contender.infer for contender in contenders], device)
    except (UserError, store.StoreError, torch.OutOfMemoryError):
        return None
    batch = len(contenders[-1].batch)
    return Costs(
        step_seconds=median(steps[-1]),
        step_ratio=median(ratios(steps[-1], steps[0])),
        images_per_s=batch / median(inferences[-1]),
        inference_ratio=median(ratios(inferences[-1], inferences[0])),
    )


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    return [time / other for time, other in zip(times, others, strict=True)]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_turns(works: Sequence[Callable[[], Any]], device: torch.device) -> list[list[float]]:
    """Seconds of each call of each of ``works``. They are called in turns, in this order and the
    reverse, so that a machine that slows down slows all of them."""
    for work in works:
        work()  # warms up
    seconds: list[list[float]] = [[] for _ in works]
    started = time.monotonic()
    for turn in range(ROUNDS):
        if turn >= FEWEST_ROUNDS and time.monotonic() - started > LIMIT:
            break
        order = range(len(works))
        for number in order if turn % 2 else reversed(order):
            seconds[number].append(seconds_of(works[number], device))
    return seconds


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


class Contender:
    """A freshly started student with its first batch, which is read and augmented once."""

    def __init__(self, training: Training, data: ImageData) -> None:
        settings, teacher = training.settings, training.teacher
        if training.baseline:
            job = phase_b.build(settings, data, None)
        else:
            maps = None if training.maps == teacher.maps else str(training.maps)
            job = phase_b.build(settings, data, teacher, maps)
        self.job, self.losses_of = job, phase_b.StudentLosses(job)
        sizes = settings.data
        batches = Batches(data.train, data, job.device, sizes.batch_size, 0, sizes.num_buckets)
        augment = Augment(settings.augment, settings.seed)
        stored = None if job.maps is None else phase_b.MapsOfEpoch(job.maps)
        self.batch = next(iter(batches.epoch(0, augment, stored)))
        self.update = Update(phase_b.training_state(job), batches.steps)

    def step(self) -> None:
        """A training step on the batch, as :func:`stages.phase_b.train` makes it."""
        self.job.student.train()
        with self.update.forward():
            losses = self.losses_of(self.batch, self.job.gamma(0))
        self.update(losses["loss"], self.batch.weight)

    def infer(self) -> None:
        """The predictions for the batch."""
        self.job.student.eval()
        with torch.inference_mode():
            self.job.student(self.batch.images)
