"""Plan: parameters, memory, disk and time of a run, from its settings and a few training steps."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Column, Table
from timm.models import get_pretrained_cfg, is_model

from gaupipe.attention.options import count_parameters
from gaupipe.data.buckets import check_buckets
from gaupipe.data.images import ArrayImages
from gaupipe.data.splits import ImageData, Split, load_data
from gaupipe.distillation import gaussian_teacher, vit_teacher
from gaupipe.distillation.export import make_schema
from gaupipe.distillation.job import PRELOAD_BYTES
from gaupipe.distillation.store_choice import planned_export
from gaupipe.distillation.student import MapShape
from gaupipe.distillation.vit_teacher import build_model
from gaupipe.settings import LogSettings, Settings, TrainSettings
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.system.machine import available_memory, free_disk
from gaupipe.training.student import build_student, check_baseline
from stages import export as exporting
from stages import phase_a, phase_b, train
from stages.phase_a import local
from stages.runs.directory import RunDirectory, settled
from stages.runs.resources import (
    SMALLER,
    check_disk,
    check_memory,
    copies,
    gigabytes,
    make_plan,
    store_bytes,
    training_memory,
)


def run(
    settings: Settings,
    run_dir: Path,
    *,
    plain: bool = False,
    steps: int = 4,
    images: int | None = None,
    classes: int | None = None,
    world_size: int = 1,
) -> dict[str, Any]:
    """Counts, bytes and seconds of a run, as plain JSON values. Leaves nothing on disk.

    plain             plans a training on the labels alone
    steps             training steps of an epoch to measure; 0 leaves the times out (null), and so
                      does a model that the memory cannot hold
    images, classes   describe a data set that is not at hand. Random pixels stand in for it, so
                      that decoding is not in the times
    world_size        number of processes: ``memory_bytes`` is that of each, and ``seconds`` are
                      those of one process divided by it, without the exchange of gradients

    ``stages`` has epochs, parameters, bytes and seconds of phase_a (at most), export, phase_b and
    plain (the baseline), ``total`` the largest memory and the sums of disk and time. ``problem``
    says what does not fit. Raises UserError for settings that cannot be run.
    """
    settings = settled(settings)
    data, held_out = data_of(settings, images, classes)
    images = images or len(data.train)
    stages, facts = ({}, {}) if plain else plan_phases(settings, data, images, world_size)
    if plain or settings.baseline.epochs != 0:
        check_baseline(settings, data)
        train = settings.baseline_training
        if not plain:
            train = train.model_copy(update={"epochs": settings.baseline_epochs})
        stages["plain"] = of_student(settings, data, "plain", train, world_size)
    memory = max(stage["memory_bytes"] for stage in stages.values())
    disk = sum(stage["disk_bytes"] for stage in stages.values())
    too_large = mistake_in(lambda: check_memory("the run", memory))
    seconds: dict[str, float] = {}
    if steps and not too_large:
        count = steps * settings.data.batch_size
        small = replace(data, train=data.train.trial(count), val=data.val.trial(1), test=None)
        seconds = measure(settings, small, stages, images, held_out)
    for name, stage in stages.items():
        stage["seconds"] = seconds[name] / world_size if seconds else None
    whole = sum(seconds.values()) / world_size if seconds else None
    return {
        "images": images,
        "stages": stages,
        "total": {"memory_bytes": memory, "disk_bytes": disk, "seconds": whole},
        **facts,
        "world_size": world_size,
        "free_disk_bytes": free_disk(run_dir),
        "available_memory_bytes": available_memory(),
        "device": str(select_device(settings.device, settings.threads)),
        "problem": too_large or mistake_in(lambda: check_disk("the run", disk, run_dir, SMALLER)),
    }


Stages = dict[str, dict[str, Any]]
"""Epochs, parameters, bytes and later seconds of each stage by its name."""


def plan_phases(
    settings: Settings, data: ImageData, images: int, world_size: int
) -> tuple[Stages, dict[str, Any]]:
    """Both phases and the export, and the number of per-image parameters."""
    buckets = settings.data.buckets or world_size
    check_buckets(images, buckets, settings.data.batch_size, world_size)
    train = settings.student_training
    student = of_student(settings, data, "distilled", train, world_size)
    if settings.phase_a.is_local:
        local.check(settings, data)
        return {"phase_b": student}, {"per_image_parameters": 0}
    teacher = build_teacher(settings, data)
    grid = MapShape.of(teacher).grid
    export = planned_export(settings, teacher, grid)
    needs = make_plan(settings, teacher, data, images, world_size)
    stored = store_bytes(settings, teacher, export, images, data.num_classes)
    memory = {"memory_bytes": needs.memory_bytes}
    student["memory_bytes"] += stored if stored <= PRELOAD_BYTES else 0
    stages = {
        "phase_a": {
            "model": "teacher (phase A)",
            "epochs": settings.phase_a.most_epochs,
            "parameters": needs.parameters,
            **memory,
            "disk_bytes": needs.disk_bytes,
        },
        "export": {"model": f"store ({export.kind})", **memory, "disk_bytes": stored},
        "phase_b": student,
    }
    return stages, {"per_image_parameters": needs.per_image_parameters}


def of_student(
    settings: Settings,
    data: ImageData,
    how: str,
    train: TrainSettings,
    world_size: int,
) -> dict[str, Any]:
    """The training of a student."""
    ema = train.optim.ema
    student = build_student(settings, data, train, "meta")
    parameters = count_parameters(student)
    return {
        "model": f"{settings.model.attention}, {how}",
        "epochs": train.epochs,
        "parameters": parameters,
        "memory_bytes": training_memory(settings, student, data, ema, world_size),
        # two checkpoints, each with the weights of the best epoch, and two students for timm
        "disk_bytes": 4 * parameters * (2 * (copies(ema) + 1) + 2),
    }


def build_teacher(settings: Settings, data: ImageData) -> Any:
    """The teacher as phase A starts with it: one that phase A trains on torch's meta device, where
    it takes no memory."""
    phase = settings.phase_a
    if phase.teacher == "vit":
        return build_model(settings, data, "meta")
    if not phase.learns_gaussians:
        return vit_teacher.build(settings, data).teacher
    with torch.device("meta"):
        return gaussian_teacher.build_teacher(settings, data)


def mistake_in(check: Callable[[], None]) -> str | None:
    """The message of the UserError that a check raises; None where it raises none."""
    try:
        check()
    except UserError as error:
        return str(error)
    return None


def data_of(settings: Settings, images: int | None, classes: int | None) -> tuple[ImageData, int]:
    """The data set, or what stands in for one of so many images and classes; and how many images
    are held out for validation. Raises UserError where one of the two numbers is missing."""
    if (images is None) != (classes is None):
        raise UserError("--images and --classes describe a data set together: give both or neither")
    if images is not None and classes is not None:
        return random_data(settings, images, classes), round(images * settings.data.val_fraction)
    try:
        data = load_data(settings.data, settings.download)
    except UserError as error:
        raise UserError(f"{error}; or plan without it: --images N --classes C") from None
    return data, len(data.val)


def random_data(settings: Settings, images: int, classes: int) -> ImageData:
    """Stands in for a data set of ``classes``: as many random images as measuring takes, and one
    more for validation."""
    model = get_pretrained_cfg(settings.model.name) if is_model(settings.model.name) else None
    size = settings.data.image_size or (model.input_size[-1] if model else 224)
    count = min(images, 8 * settings.data.batch_size) + 1
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    source = ArrayImages(pixels, generator.integers(0, classes, count))
    return ImageData(
        name=settings.data.name,
        train=Split(source, np.arange(count - 1)),
        val=Split(source, np.arange(count - 1, count)),
        num_classes=classes,
        channels=3,
        image_size=size,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
    )


# ---- time ----------------------------------------------------------------------------------------

SCORED = 1 / 3
"""Time of an image that is scored after an epoch, of the time of an image in a training step, which
has two products of matrices backward for each one forward."""


def measure(
    settings: Settings, small: ImageData, stages: Stages, images: int, held_out: int
) -> dict[str, float]:
    """Seconds of each of the ``stages`` with so many training and validation images, scaled up from
    a run on a ``small`` part of them, of which nothing is printed.

    The first epoch of a training warms up. Phase A may stop earlier than after ``max_epochs``,
    where it reaches ``stop_accuracy``.
    """
    short, phase = shortened(settings), settings.phase_b
    seconds = {}

    def epoch(metrics: list[dict[str, Any]], number: int = -1, scored: int = held_out) -> float:
        entry = metrics[number]  # of a teacher that was trained before: it is scored once
        images_per_s = len(small.train) / (entry["seconds"] or math.inf) or entry["images_per_s"]
        return (images + SCORED * scored) / images_per_s

    nowhere = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        folder = Path(name) / "run"
        if "phase_b" in stages:
            taught = phase_a.run(short, folder, force=True, data=small)
            if "phase_a" in stages:  # the teacher local has nothing to train or to export
                scored = held_out + images * settings.phase_a.learns_gaussians
                of_epoch = epoch(taught, -1, scored)
                seconds["phase_a"] = max(1, settings.phase_a.most_epochs) * of_epoch
                seconds["export"] = measure_export(settings, folder, small, images)
            metrics = phase_b.run(folder, data=small)
            epochs = settings.student_training.epochs
            ends = epochs if phase.gamma_schedule == "constant" else phase.gamma_ends(epochs)
            # without maps the first half: patches may be dropped in it
            with_maps = min(ends, epochs) if phase.gamma else epochs // 2
            without = epochs - with_maps
            seconds["phase_b"] = with_maps * epoch(metrics, 1) + without * epoch(metrics)
        if "plain" in stages:
            metrics = train.run(short, folder, data=small)
            half, odd = divmod(stages["plain"]["epochs"], 2)
            seconds["plain"] = half * epoch(metrics, 1) + (half + odd) * epoch(metrics)
    return seconds


def measure_export(settings: Settings, folder: Path, small: ImageData, images: int) -> float:
    """Seconds of the export of so many images, from that of the run in ``folder``."""
    job = phase_a.load(RunDirectory(folder), small)
    export = planned_export(job.settings, job.teacher, job.shape.grid)
    place = exporting.Place(str(folder / "maps.zarr"))
    writer = place.create(job, make_schema(job, export))
    started = time.monotonic()
    exporting.write(job, writer)
    views = (settings.export.views or 1) / (job.settings.export.views or 1)
    return images / len(small.train) * views * (time.monotonic() - started)


def shortened(settings: Settings) -> Settings:
    """The settings of a run with few epochs, whatever accuracy they reach, which no logger sees. A
    student learns from maps in two epochs, and in two others without. At most two views of an image
    are stored."""
    changes: dict[str, dict[str, Any]] = {
        "phase_a": {"max_epochs": 2, "stop_accuracy": 1.0},
        "export": {"views": settings.export.views and 2},
        "train": {"epochs": 4, "patience": None},
        "phase_b": {"epochs": None, "gamma_epochs": 2, "patience": None},
        "baseline": {"epochs": 4, "patience": None},
        "data": {"buckets": None},
    }
    few = {name: getattr(settings, name).model_copy(update=of) for name, of in changes.items()}
    return settings.model_copy(update=few | {"log": LogSettings(every=0)})


# ---- for people ----------------------------------------------------------------------------------

LABELS = {
    "images": "training images",
    "per_image_parameters": "per-image parameters, in all",
    "available_memory_bytes": "available memory",
    "free_disk_bytes": "free disk",
}


def tables(plan: dict[str, Any]) -> Iterator[Table | str]:
    """The plan that :func:`run` returned: a line for each stage and their total; then the rest."""
    columns = ("epochs", "parameters", "an epoch", "time", "memory", "disk")
    numbers = (Column(name, justify="right", no_wrap=True) for name in columns)
    stages = Table("", *numbers, box=None, pad_edge=False)
    for stage in (*plan["stages"].values(), plan["total"]):
        epochs, seconds, parameters = map(stage.get, ("epochs", "seconds", "parameters"))
        stages.add_row(
            stage.get("model", "total"),
            f"{epochs:,}" if epochs else "",
            f"{parameters:,}" if parameters else "",
            duration(seconds / epochs) if epochs and seconds else "",
            duration(seconds) if seconds else "",
            gigabytes(stage["memory_bytes"]),
            gigabytes(stage["disk_bytes"]),
        )
    rows = Table.grid("", Column(justify="right"), padding=(0, 2))
    for name, label in LABELS.items():
        if value := plan.get(name):
            rows.add_row(label, gigabytes(value) if name.endswith("bytes") else f"{value:,}")
    rows.add_row("device", plan["device"])
    yield from (stages, "", rows)


def duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
