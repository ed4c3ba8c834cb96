"""Plan: what a run will need and take, from its settings and a few real training steps, before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from timm.models import get_pretrained_cfg, is_model, list_models

import store
from gaupipe.config import Settings
from gaupipe.data import ArrayImages, Batches, ImageData, Split, load_data
from gaupipe.errors import UserError
from gaupipe.planning import (
    Plan,
    available_memory,
    check_resources,
    free_disk,
    gigabytes,
    make_plan,
    sizes_of,
)
from gaupipe.teacher import Teacher
from gaupipe.building import select_device
from gaupipe.student import build_student
from gaupipe.training import score_model
from stages import export_maps, phase_a, phase_b


def run(
    settings: Settings,
    run_dir: Path,
    *,
    steps: int = 4,
    images: int | None = None,
    classes: int | None = None,
) -> dict[str, Any]:
    """Counts, bytes and seconds of a run, as plain JSON values; leaves nothing on disk.

    ``steps`` training steps of each phase are measured; 0 leaves the times out (null). ``images`` and ``classes``
    describe a data set that is not at hand: random pixels stand in for it, so that decoding is not in the times.
    """
    if (images is None) != (classes is None):
        raise UserError("--images and --classes describe a data set together: give both or neither")
    device = select_device(settings)
    data = load_or_say_how(settings) if images is None else random_data(settings, images, classes)
    teacher = phase_a.build_teacher(settings, data)
    sizes = sizes_of(teacher, data)
    if images is not None:
        sizes = dataclasses.replace(sizes, images=images, image_bytes=0)
    plan = make_plan(settings, sizes)
    held_out = len(data.val) if images is None else round(images * settings.data.val_fraction)
    seconds = measure(settings, data, teacher, device, plan, steps, held_out) if steps else None
    try:
        check_resources(plan, run_dir)
        check_resources(plan, run_dir, export_maps.default_kind(settings))
        problem = None
    except UserError as error:
        problem = str(error)
    return {**dataclasses.asdict(plan), "phase_a_disk_bytes": plan.phase_a_disk_bytes,
            "free_disk_bytes": free_disk(run_dir), "available_memory_bytes": available_memory(),
            "device": str(device), "seconds": seconds, "problem": problem}


def load_or_say_how(settings: Settings) -> ImageData:
    """The data set. Raises UserError where it is not there, saying how to plan without it."""
    try:
        return load_data(settings.data)
    except UserError as error:
        raise UserError(f"{error}; or plan without it: --images N --classes C") from None


def model_image_size(name: str) -> int:
    """The image size, in pixels, that a model is made for. Raises UserError for an unknown model."""
    config = get_pretrained_cfg(name, allow_unregistered=False) if is_model(name) else None
    if config is None:
        raise UserError(f"model.name: unknown model {name!r}: set data.image_size, or name one of "
                        f"{', '.join(list_models('gauvit_*'))}")
    return config.input_size[-1]


def random_data(settings: Settings, images: int, classes: int) -> ImageData:
    """Stands in for a data set of ``classes``: as many random images as measuring takes, and one more for validation."""
    size = settings.data.image_size or model_image_size(settings.model.name)
    count = min(images, 8 * settings.data.batch_size) + 1
    generator = np.random.default_rng(0)
    source = ArrayImages(generator.integers(0, 256, (count, 3, size, size), dtype=np.uint8),
                         generator.integers(0, classes, count))
    return ImageData(settings.data.name, Split(source, np.arange(count - 1)), Split(source, np.arange(count - 1, count)),
                     None, classes, 3, size, (0.5,) * 3, (0.25,) * 3, sha256="")


def measure(settings: Settings, data: ImageData, teacher: Teacher, device: torch.device, plan: Plan, steps: int,
            held_out: int) -> dict[str, float]:
    """Seconds of each stage, scaled up from a run on the first ``steps`` batches of images (a first epoch warms up, the
    second counts). Training stops earlier than after ``max_epochs`` where it reaches ``stop_accuracy``."""
    count = min(steps * settings.data.batch_size, len(data.train))
    small = dataclasses.replace(data, train=Split(data.train.source, data.train.positions[:count]), test=None,
                                val=Split(data.val.source, data.val.positions[:1]))
    where = settings.phase_a.rows.model_copy(update={"memory_budget_gb": 0 if plan.rows_in == "files" else math.inf})
    short = settings.model_copy(update={
        "phase_a": settings.phase_a.model_copy(update={"max_epochs": 2, "stop_accuracy": 1.0, "rows": where}),
        "phase_b": settings.phase_b.model_copy(update={"epochs": 2})})
    sizes = settings.data
    evaluation = Batches(small.train, small, device, sizes.eval_batch_size, sizes.workers)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        rows = phase_a.build_per_image(short, teacher, count, Path(folder) / "rows") if plan.row_parameters else None
        first = phase_a.PhaseA(short, small, device, teacher.to(device), rows)
        state = phase_a.training_state(first)
        phase_a.train(first, state, Path(folder) / "phase_a")
        train_a = state.metrics[-1]["seconds"] / count
        score_a = clock(lambda: phase_a.score_teacher(first, evaluation, seen=True)) / count

        url = str(Path(folder) / "maps.zarr")
        kind = export_maps.default_kind(settings)
        writer = store.create(url, export_maps.make_schema(first, kind), decoder=export_maps.decoder(first, kind))
        export = clock(lambda: export_maps.write(first, writer)) / count

        student = build_student(short, small).to(device)
        second = phase_b.PhaseB(short, small, device, student, short.phase_b.optim, store.open(url))
        state = phase_b.training_state(second)
        phase_b.train(second, state, Path(folder) / "phase_b")
        train_b = state.metrics[-1]["seconds"] / count
        score_b = clock(lambda: score_model(student, evaluation)) / count
    epoch_a = plan.images * (train_a + score_a) + held_out * score_a
    epoch_b = plan.images * train_b + held_out * score_b
    return {"phase_a_epoch": epoch_a, "phase_a": epoch_a * settings.phase_a.max_epochs, "export": export * plan.images,
            "phase_b_epoch": epoch_b, "phase_b": epoch_b * settings.phase_b.epochs}


def clock(work: Any) -> float:
    """Seconds that a call takes."""
    started = time.monotonic()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


def table(plan: dict[str, Any]) -> Table:
    """The plan for people."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    shown.add_column()
    shown.add_column(justify="right")
    shown.add_column()

    def row(name: str, value: str, remark: str = "") -> None:
        shown.add_row(name, value, remark)

    row("training images", f"{plan['images']:,}")
    row("network", f"{plan['network_parameters']:,}", "parameters")
    row("shared prior", f"{plan['prior_parameters']:,}", "parameters")
    row("per-image rows", f"{plan['row_parameters']:,}", f"numbers, kept in {plan['rows_in']}" if plan["row_parameters"]
        else "")
    free = plan["available_memory_bytes"]
    row("memory", gigabytes(plan["memory_bytes"]), f"{gigabytes(free)} available" if free is not None else "")
    row("disk, phase A", gigabytes(plan["phase_a_disk_bytes"]),
        f"rows {gigabytes(plan['rows_disk_bytes'])}, a checkpoint {gigabytes(plan['checkpoint_bytes'])}; "
        f"{gigabytes(plan['free_disk_bytes'])} free")
    for kind, size in plan["store_bytes"].items():
        row(f"store, {kind}", gigabytes(size), "before compression")
    for name, remark in (("phase_a_epoch", ""), ("phase_a", "all epochs, if it is not accurate enough sooner"),
                         ("export", "of the usual kind"), ("phase_b_epoch", ""), ("phase_b", "all epochs")):
        if plan["seconds"]:
            row(f"time, {name.replace('_', ' ')}", duration(plan["seconds"][name]), remark)
    if plan["seconds"]:
        row("measured on", plan["device"])
    return shown


def duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
