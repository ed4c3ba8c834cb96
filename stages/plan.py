"""Plan: parameters, steps, memory and disk of a run, before anything is made, and its time, from a
few steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from rich.table import Column, Table
from timm.models import get_pretrained_cfg, is_model
from timm.models.vision_transformer import VisionTransformer

from gaupipe.attention.options import count_parameters
from gaupipe.data.buckets import check_buckets
from gaupipe.data.images import ArrayImages
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData, Split
from gaupipe.distillation.export import UNKNOWN, Exported, make_schema
from gaupipe.distillation.reading import PRELOAD_BYTES
from gaupipe.distillation.store_choice import choose_store, plan_export
from gaupipe.distillation.student import check_student, check_unlabelled
from gaupipe.settings import Settings, TrainSettings
from gaupipe.settings.sections import LOCAL
from gaupipe.system.device import prepare_device
from gaupipe.system.errors import UserError
from gaupipe.system.machine import available_memory, free_disk
from gaupipe.system.progress import duration
from gaupipe.teachers.base import outline
from gaupipe.teachers.files import initialise, teacher_of_files
from gaupipe.training.settle import settle
from gaupipe.training.student import outline_student
from gaupipe.vit.pretrained import load_model
from stages.runs.resources import (
    LIGHTER,
    SMALLER,
    check_disk,
    check_memory,
    copies,
    export_memory,
    gigabytes,
    make_plan,
    store_size,
    training_memory,
)
from stages.runs.timing import pass_seconds, student_seconds, teacher_seconds

LESS_STORED = "another --out, or fewer --images"
"""What to do where the disk is too small for the store of a model's maps."""


class Needs(TypedDict):
    memory_bytes: int
    """Of one process."""
    disk_bytes: int


class Stage(Needs):
    """What a stage takes; the numbers that it does not have are left out."""

    model: str
    """What it trains or writes."""
    epochs: NotRequired[int]
    steps: NotRequired[int]
    parameters: NotRequired[int]
    files: NotRequired[int]
    seconds: NotRequired[float]
    """Of training steps and exports; none where nothing was measured."""


class Total(Needs):
    """The largest memory, and the sums of the others."""

    steps: int
    seconds: NotRequired[float]


class Plan(TypedDict):
    """Counts and bytes of a run. Values are JSON's."""

    images: int
    unlabelled: int
    """Images without labels."""
    stages: dict[str, Stage]
    """By name: phase_a (at most), export, export_unlabelled (where there are such images), phase_b
    and plain (the baseline)."""
    total: Total
    per_image_parameters: NotRequired[int]
    """None of a training on the labels alone."""
    world_size: int
    free_disk_bytes: int
    available_memory_bytes: int | None
    device: str
    problem: str | None
    """What does not fit."""


def plan_run(
    settings: Settings,
    run_dir: Path,
    *,
    plain: bool = False,
    images: int | None = None,
    classes: int | None = None,
    world_size: int = 1,
    timed: bool = False,
) -> Plan:
    """Counts and bytes of a run. Nothing is written.

    plain             plans a training on the labels alone
    images, classes   describe a data set that is not at hand
    world_size        number of processes: ``memory_bytes`` is that of each
    timed             measures some steps of each training, unless the run does not fit

    Raises UserError for settings that cannot be run.
    """
    settings = settle(settings)
    data = data_of(settings, images, classes, unlabelled=not plain)
    images = images or len(data.train)
    stages: dict[str, Stage] = {}
    per_image_parameters = None
    if not plain:
        stages, per_image_parameters = plan_phases(settings, data, images, world_size)
    built = outline_student(settings, data, settings.train)
    stages["plain"] = plan_student(settings, built, data, "plain", settings.train, world_size)
    unlabelled = 0 if data.unlabelled is None else len(data.unlabelled)
    for name, stage in stages.items():
        if "epochs" in stage:
            seen = images
            if name == "phase_b":
                seen += unlabelled
            stage["steps"] = stage["epochs"] * -(-seen // settings.data.batch_size)
    device = prepare_device(settings.device, settings.threads)
    planned = plan_of("the run", stages, images, run_dir, device, LIGHTER, SMALLER)
    planned["unlabelled"] = unlabelled
    planned["world_size"] = world_size
    if timed and planned["problem"] is None:
        seconds = seconds_of(settings, data, images, unlabelled, stages)
        for name, taken in seconds.items():
            stages[name]["seconds"] = taken / world_size
        planned["total"] = total_of(stages)
    if per_image_parameters is not None:
        planned["per_image_parameters"] = per_image_parameters
    return planned


def plan_model(model: str, images: int) -> Plan:
    """The plan of an export of the maps of a ``model``, a timm name or a folder, of so many images,
    with the seconds that it takes on this machine. Of a timm name no weights are needed. Raises
    UserError for a model whose attention cannot be seen."""
    here = Path(model.removeprefix(LOCAL)).expanduser().is_dir()
    vit = load_model(model) if here else initialise(model, download=False)
    files = [Path("image")]  # which is not read
    looked_at = teacher_of_files(vit, model, files, files, named=False)
    device = prepare_device("auto")
    teacher = replace(looked_at, device=device, network=looked_at.network.to(device))
    export = choose_store(teacher)
    schema = make_schema(teacher, export, sha256=UNKNOWN)
    schema = replace(schema, num_images=images, name_bytes=None)
    stored, file_count = store_size(teacher, schema)
    stage: Stage = {
        "model": f"store ({export.kind})",
        "memory_bytes": export_memory(teacher, schema),
        "disk_bytes": stored,
        "files": file_count,
        "seconds": images * pass_seconds(teacher, schema),
    }
    place = Path("maps.zarr")
    remedies = (looked_at.lighter, LESS_STORED)
    return plan_of("the store", {"export": stage}, images, place, device, *remedies)


def plan_of(
    job: str,
    stages: dict[str, Stage],
    images: int,
    place: Path,
    device: torch.device,
    lighter: str,
    smaller: str,
) -> Plan:
    """The plan of a ``job`` of these stages in one process, which writes to a ``place``;
    ``lighter`` says what to do where the memory is too small, ``smaller`` where the disk is."""
    total = total_of(stages)
    problem = None
    try:
        check_memory(job, total["memory_bytes"], lighter)
        check_disk(job, total["disk_bytes"], place, smaller)
    except UserError as error:
        problem = str(error)
    return {
        "images": images,
        "unlabelled": 0,
        "stages": stages,
        "total": total,
        "world_size": 1,
        "free_disk_bytes": free_disk(place),
        "available_memory_bytes": available_memory(),
        "device": str(device),
        "problem": problem,
    }


def total_of(stages: Mapping[str, Stage]) -> Total:
    total: Total = {
        "steps": sum(stage.get("steps", 0) for stage in stages.values()),
        "memory_bytes": max(stage["memory_bytes"] for stage in stages.values()),
        "disk_bytes": sum(stage["disk_bytes"] for stage in stages.values()),
    }
    seconds = [stage["seconds"] for stage in stages.values() if "seconds" in stage]
    if seconds:
        total["seconds"] = sum(seconds)
    return total


def plan_phases(
    settings: Settings, data: ImageData, images: int, world_size: int
) -> tuple[dict[str, Stage], int]:
    """Both phases and the exports, and the number of per-image parameters."""
    buckets = settings.data.buckets or world_size
    check_buckets(images, buckets, settings.data.batch_size, world_size)
    if data.unlabelled is not None:
        check_unlabelled(settings)
    train = settings.student_training
    built = outline_student(settings, data, train)
    student = plan_student(settings, built, data, "distilled", train, world_size)
    teacher = outline(settings, data)
    check_student(teacher)
    if not teacher.kind.stored:
        return {"phase_b": student}, 0
    export = plan_export(teacher)
    needs = make_plan(teacher, images, world_size)
    schema = make_schema(teacher, export, sha256=UNKNOWN)
    schemas = {"export": replace(schema, num_images=images * schema.views)}
    if data.unlabelled is not None:
        others = Exported.unlabelled(data)
        schemas["export_unlabelled"] = make_schema(teacher, export, others, UNKNOWN)
    stages: dict[str, Stage] = {
        "phase_a": {
            "model": "teacher (phase A)",
            "epochs": settings.phase_a.most_epochs,
            "parameters": needs.parameters,
            "memory_bytes": needs.memory_bytes,
            "disk_bytes": needs.disk_bytes,
        }
    }
    for name, schema in schemas.items():
        stored, files = store_size(teacher, schema)
        if stored <= PRELOAD_BYTES:  # which phase B reads into memory
            student["memory_bytes"] += stored
        what = export.kind
        if not schema.labelled:
            what = "unlabelled"
        stages[name] = {
            "model": f"store ({what})",
            "memory_bytes": export_memory(teacher, schema),
            "disk_bytes": stored,
            "files": files,
        }
    stages["phase_b"] = student
    return stages, needs.per_image_parameters


def seconds_of(
    settings: Settings, data: ImageData, images: int, unlabelled: int, stages: Mapping[str, Stage]
) -> dict[str, float]:
    """Seconds of each of the ``stages`` of a run in one process."""
    seconds = {}
    if "phase_a" in stages:
        seconds["phase_a"], each = teacher_seconds(outline(settings, data), images)
        each *= settings.export.views or 1
        seconds["export"] = images * each
        if "export_unlabelled" in stages:
            seconds["export_unlabelled"] = unlabelled * each
    if "phase_b" in stages:
        train = settings.student_training
        seen = images + unlabelled
        gammas = settings.phase_b.gammas(train.epochs)
        seconds["phase_b"] = student_seconds(settings, data, train, seen, gammas)
    if "plain" in stages:
        seconds["plain"] = student_seconds(settings, data, settings.train, images)
    return seconds


def plan_student(
    settings: Settings,
    student: VisionTransformer,
    data: ImageData,
    how: str,
    train: TrainSettings,
    world_size: int,
) -> Stage:
    """The training of a student."""
    ema = train.optim.ema
    parameters = count_parameters(student)
    memory = training_memory(settings, student, data, ema, world_size, student.forward)
    return {
        "model": f"{settings.model.attention}, {how}",
        "epochs": train.epochs,
        "parameters": parameters,
        "memory_bytes": memory,
        # two checkpoints, each with the weights of the best epoch, and two students for timm
        "disk_bytes": 4 * parameters * (2 * (copies(ema) + 1) + 2),
    }


def data_of(
    settings: Settings, images: int | None, classes: int | None, unlabelled: bool
) -> ImageData:
    """The data set, ``unlabelled`` with its images without labels, or what stands in for one of so
    many images and classes. Raises UserError where one of the two numbers is missing."""
    if (images is None) != (classes is None):
        raise UserError("--images and --classes describe a data set together: give both or neither")
    if images is not None and classes is not None:
        return random_data(settings, images, classes)
    try:
        return load_data(settings.data, settings.download, unlabelled)
    except UserError as error:
        raise UserError(f"{error}; or plan without it: --images N --classes C") from None


def random_data(settings: Settings, images: int, classes: int) -> ImageData:
    """Stands in for a data set of ``classes``: random images for a few steps, and one more for
    validation."""
    model = get_pretrained_cfg(settings.model.name) if is_model(settings.model.name) else None
    size = settings.data.image_size
    if size is None:
        size = model.input_size[-1] if model else 224
    count = min(images, 8 * settings.data.batch_size) + 1
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    source = ArrayImages(pixels, generator.integers(0, classes, count))
    return ImageData(
        name=settings.data.title,
        train=Split(source, np.arange(count - 1)),
        val=Split(source, np.arange(count - 1, count)),
        num_classes=classes,
        channels=3,
        image_size=size,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
    )


# ---- for people ----------------------------------------------------------------------------------

LABELS = {
    "images": "images",
    "unlabelled": "images without labels",
    "per_image_parameters": "per-image parameters, in all",
    "available_memory_bytes": "available memory",
    "free_disk_bytes": "free disk",
}


def tables(plan: Plan) -> Iterator[Table | str]:
    """What :func:`plan_run` returned: a line for each stage and their total; then the rest."""
    columns = ("epochs", "steps", "parameters", "files", "memory", "disk", "time")
    numbers = (Column(name, justify="right", no_wrap=True) for name in columns)
    stages = Table("", *numbers, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    if "seconds" in plan["total"]:
        stages.caption = "time: of training steps and exports, measured here in some steps"
        stages.caption_justify = "left"
    lines: list[tuple[str, Mapping[str, Any]]] = [
        (stage["model"], stage) for stage in plan["stages"].values()
    ]
    for name, needs in [*lines, ("total", plan["total"])]:
        counts = [needs.get(count) for count in ("epochs", "steps", "parameters", "files")]
        stages.add_row(
            name,
            *(f"{count:,}" if count else "" for count in counts),
            gigabytes(needs["memory_bytes"]),
            gigabytes(needs["disk_bytes"]),
            duration(needs["seconds"]) if "seconds" in needs else "",
        )
    rows = Table.grid("", Column(justify="right"), padding=(0, 2))
    values: dict[str, Any] = dict(plan)
    for name, label in LABELS.items():
        value = values.get(name)
        if value and name.endswith("bytes"):
            rows.add_row(label, gigabytes(value))
        elif value:
            rows.add_row(label, f"{value:,}")
    rows.add_row("device", plan["device"])
    yield from (stages, "", rows)
