"""Plan: what a run will take, from its settings and a few real training steps, before it starts."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gaupipe.data.splits import ImageData, Split, load_data
from rich.table import Table
from timm.models import get_pretrained_cfg, is_model, list_models
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import store
from gaupipe.data.batches import Batches
from gaupipe.data.files import FileImages
from gaupipe.data.sources import ArrayImages
from gaupipe.distillation.kinds import check_export, chosen
from gaupipe.distillation.student import build_student
from gaupipe.settings import LogSettings, Settings
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.system.machine import available_memory, free_disk
from gaupipe.teachers.gaussian import Teacher
from gaupipe.teachers.vit import VitTeacher
from gaupipe.training.scores import score_model
from stages import export_maps, phase_b, plan_world
from stages import train as student_training
from stages.phase_a import gaussian as phase_a
from stages.phase_a import trained_vit as trained_teacher
from stages.phase_a.job import TeacherJob
from stages.runs.resources import (
    Plan,
    check_resources,
    gigabytes,
    make_plan,
    sizes_of,
)

StartedTeacher = Teacher | VisionTransformer | VitTeacher

JSON_NAMES = {
    "per_image_parameters": "row_parameters",
    "per_image_in": "rows_in",
    "per_image_disk_bytes": "rows_disk_bytes",
}
"""Fields of :class:`~stages.runs.resources.Plan`, and their older names in the JSON: scripts read
it."""


def run(
    settings: Settings,
    run_dir: Path,
    *,
    steps: int = 4,
    images: int | None = None,
    classes: int | None = None,
    world_size: int | None = None,
    bandwidth: float | None = None,
) -> dict[str, Any]:
    """Counts, bytes and seconds of a run, as plain JSON values. Leaves nothing on disk.

    steps             training steps of each phase to measure; 0 leaves the times out (null)
    images, classes   describe a data set that is not at hand. Random pixels stand in for it, so
                      that decoding is not in the times
    world_size, bandwidth
                      also plan for this many processes (:func:`stages.plan_world.share`, under
                      ``world``), which exchange gradients at ``bandwidth`` Gbit/s

    Raises UserError for settings that cannot be run. What does not fit is in ``problem``.
    """
    if bandwidth is not None and (world_size is None or not 0 < bandwidth < math.inf):
        raise UserError(
            f"--bandwidth {bandwidth}: should be a positive number of Gbit/s beside --world-size"
        )
    device = select_device(settings.device, settings.threads)
    data, held_out = data_of(settings, images, classes)
    teacher = build_teacher(settings, data)
    sizes = sizes_of(teacher, data)
    export = chosen(settings, tokens=sizes.grid[0] * sizes.grid[1])
    augment, of_images = settings.augment, settings.phase_a.learns_of_images
    check_export(export, augment, teacher, sizes.grid, of_images, prefix="export.")
    if images is not None:
        sizes = dataclasses.replace(sizes, images=images, image_bytes=0)
    plan = make_plan(settings, sizes)
    seconds = measure(settings, data, teacher, device, plan, steps, held_out) if steps else None
    counts = {JSON_NAMES.get(name, name): value for name, value in dataclasses.asdict(plan).items()}
    if world_size is not None:
        share = plan_world.share(settings, data, sizes, plan, seconds, world_size, bandwidth)
        counts["world"] = share
    return {
        **counts,
        "kept_images_bytes": kept_image_bytes(settings, data),
        "phase_a_disk_bytes": plan.phase_a_disk_bytes,
        "free_disk_bytes": free_disk(run_dir),
        "available_memory_bytes": available_memory(),
        "device": str(device),
        "seconds": seconds,
        "problem": find_problem(plan, run_dir, str(export.kind)),
    }


def kept_image_bytes(settings: Settings, data: ImageData) -> int:
    """Bytes that the decoded images of image files take in the user's cache
    (:attr:`DataSettings.cache`)."""
    crops = [augment.resized_crop for augment in (settings.phase_a_augment, settings.augment)]
    of_training = [data.train.source] * any(crop is None or not crop.full_size for crop in crops)
    sources = {id(source): source for source in (*of_training, data.val.source)}
    if not of_training:
        sources.pop(id(data.train.source), None)
    return sum(source.kept_bytes() for source in sources.values() if isinstance(source, FileImages))


def build_teacher(settings: Settings, data: ImageData) -> StartedTeacher:
    """The teacher as phase A starts with it."""
    phase = settings.phase_a
    if phase.learns_gaussians:
        return phase_a.build_teacher(settings, data)
    if phase.teacher == "vit":
        return trained_teacher.build_model(settings, data)
    return trained_teacher.build(settings, data).teacher


def find_problem(plan: Plan, run_dir: Path, store_kind: str) -> str | None:
    """Why phase A or the export would not fit, in one line; None if they do."""
    try:
        check_resources(plan, run_dir)
        check_resources(plan, run_dir, store_kind=store_kind)
    except UserError as error:
        return str(error)
    return None


def data_of(settings: Settings, images: int | None, classes: int | None) -> tuple[ImageData, int]:
    """The data set, or what stands in for one of so many images and classes; and how many images
    are held out for validation. Raises UserError where one of the two numbers is missing."""
    if (images is None) != (classes is None):
        raise UserError("--images and --classes describe a data set together: give both or neither")
    if images is None or classes is None:
        data = load_or_say_how(settings)
        return data, len(data.val)
    held_out = round(images * settings.data.val_fraction)
    return random_data(settings, images, classes), held_out


def load_or_say_how(settings: Settings) -> ImageData:
    """The data set. Raises UserError, saying how to plan without it, where it is not there."""
    try:
        return load_data(settings.data, settings.download)
    except UserError as error:
        raise UserError(f"{error}; or plan without it: --images N --classes C") from None


def model_image_size(name: str) -> int:
    """The image size, in pixels, that a model is made for.

    Raises UserError for an unknown model.
    """
    config = get_pretrained_cfg(name, allow_unregistered=False) if is_model(name) else None
    if config is None:
        known = ", ".join(list_models("gauvit_*"))
        raise UserError(
            f"model.name: unknown model {name!r}: set data.image_size, or name one of {known}"
        )
    return config.input_size[-1]


def random_data(settings: Settings, images: int, classes: int) -> ImageData:
    """Stands in for a data set of ``classes``: as many random images as measuring takes, and one
    more for validation."""
    size = settings.data.image_size or model_image_size(settings.model.name)
    count = min(images, 8 * settings.data.batch_size) + 1
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    source = ArrayImages(pixels, generator.integers(0, classes, count))
    return ImageData(
        name=settings.data.name,
        train=Split(source, np.arange(count - 1)),
        val=Split(source, np.arange(count - 1, count)),
        test=None,
        num_classes=classes,
        channels=3,
        image_size=size,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        sha256="",
    )


def measure(
    settings: Settings,
    data: ImageData,
    teacher: StartedTeacher,
    device: torch.device,
    plan: Plan,
    steps: int,
    held_out: int,
) -> dict[str, float]:
    """Seconds of each stage, scaled up from a run on the first ``steps`` batches of images.

    A first epoch warms up, the second counts. ``held_out`` is the number of validation images.
    Training stops earlier than after ``max_epochs`` where it reaches ``stop_accuracy``.
    """
    count = min(steps * settings.data.batch_size, len(data.train))
    small = first_images(data, count)
    short = two_epochs(settings, per_image_in_files=plan.per_image_in == "files")
    sizes = settings.data
    evaluation = Batches(small.train, small, device, sizes.eval_batch_size, sizes.workers)
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        folder = Path(name)
        job, train_a = measure_phase_a(short, small, teacher, device, folder)
        score_a = measure_scores(job, evaluation) / count
        export = measure_export(job, folder / "maps.zarr") / count
        student, train_b = measure_phase_b(short, small, device, folder)
        score_b = clock(lambda: score_model(student, evaluation)) / count
    epoch_a = plan.images * (train_a + score_a) + held_out * score_a
    epoch_b = plan.images * train_b + held_out * score_b
    return {
        "phase_a_epoch": epoch_a,
        "phase_a": epoch_a * settings.phase_a.max_epochs,
        "export": export * plan.images,
        "phase_b_epoch": epoch_b,
        "phase_b": epoch_b * settings.phase_b.epochs,
    }


def first_images(data: ImageData, count: int) -> ImageData:
    """The first ``count`` training images and one validation image."""
    train, val = data.train, data.val
    return dataclasses.replace(
        data,
        train=train.trial(count),
        val=val.trial(1),
        test=None,
    )


def two_epochs(settings: Settings, *, per_image_in_files: bool) -> Settings:
    """The settings with two epochs a phase, whatever accuracy they reach, which no logger sees."""
    phase_a = settings.phase_a
    budget = 0 if per_image_in_files else math.inf
    rows = phase_a.rows.model_copy(update={"memory_budget_gb": budget})
    changes = {"max_epochs": 2, "stop_accuracy": 1.0, "rows": rows}
    return settings.model_copy(
        update={
            "phase_a": phase_a.model_copy(update=changes),
            "phase_b": settings.phase_b.model_copy(update={"epochs": 2}),
            "log": LogSettings(every=0),
        }
    )


def measure_phase_a(
    settings: Settings, data: ImageData, teacher: StartedTeacher, device: torch.device, folder: Path
) -> tuple[TeacherJob, float]:
    """The trained teacher, and the seconds an image took in the last epoch: none where the teacher
    was trained before."""
    count = len(data.train)
    if isinstance(teacher, VitTeacher):
        return TeacherJob(settings, data, device, teacher.to(device)), 0.0
    if isinstance(teacher, VisionTransformer):
        training = trained_teacher.training(settings, data)
        state = trained_teacher.training_state(training)
        trained_teacher.train(training, state, folder / "phase_a")
        vit = VitTeacher(state.kept, data, "vit").to(device)
        trained = TeacherJob(settings, data, device, vit)
        return trained, state.metrics[-1]["seconds"] / count
    job = phase_a.build(settings, folder, data)
    started = phase_a.training_state(job)
    phase_a.train(job, started, folder / "phase_a")
    return job, started.metrics[-1]["seconds"] / count


def measure_scores(job: TeacherJob, evaluation: Batches) -> float:
    """Seconds that the teacher takes to classify the images."""
    if job.settings.phase_a.learns_gaussians:
        gaussian = job
        return clock(lambda: phase_a.score_teacher(gaussian, evaluation, seen=True))
    vit = job.teacher
    assert isinstance(vit, VitTeacher)
    return clock(lambda: [vit.predict(batch.images) for batch in evaluation.in_order()])


def measure_export(job: TeacherJob, path: Path) -> float:
    """Seconds of an export of the kind that the settings say, without views."""
    tokens = job.shape.grid[0] * job.shape.grid[1]
    export = chosen(job.settings, tokens=tokens).model_copy(update={"views": None})
    schema = export_maps.make_schema(job, export)
    writer = store.create(str(path), schema, decoder=export_maps.decoder(job, schema.kind))
    return clock(lambda: export_maps.write(job, writer))


def measure_phase_b(
    settings: Settings, data: ImageData, device: torch.device, folder: Path
) -> tuple[nn.Module, float]:
    """The trained student, and the seconds an image took in the last epoch."""
    student = build_student(settings, data).to(device)
    maps = store.open(str(folder / "maps.zarr"))
    job = phase_b.PhaseB(settings, data, device, student, settings.phase_b.optim, maps)
    state = student_training.training_state(job)
    student_training.train(job, state, folder / "phase_b")
    return student, state.metrics[-1]["seconds"] / len(data.train)


def clock(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    started = time.monotonic()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


def table(plan: dict[str, Any]) -> Table:
    """The plan that :func:`run` returned, for people."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    shown.add_column()
    shown.add_column(justify="right")
    shown.add_column()
    world = plan_world.lines(plan["world"], duration) if "world" in plan else ()
    for name, value, *remark in [*_counts(plan), *_bytes(plan), *_times(plan), *world]:
        shown.add_row(name, value, *remark)
    return shown


def _counts(plan: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    yield "training images", f"{plan['images']:,}"
    yield "network", f"{plan['network_parameters']:,}", "parameters"
    yield "shared prior", f"{plan['prior_parameters']:,}", "parameters"
    place = f"kept in {plan['rows_in']}" if plan["row_parameters"] else ""
    yield "per image", f"{plan['row_parameters']:,}", f"parameters in all, {place}".rstrip(", ")


def _bytes(plan: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    free = plan["available_memory_bytes"]
    available = f"{gigabytes(free)} available" if free is not None else ""
    yield "memory", gigabytes(plan["memory_bytes"]), available
    per_image, checkpoint, free = (
        gigabytes(plan[name]) for name in ("rows_disk_bytes", "checkpoint_bytes", "free_disk_bytes")
    )
    remark = f"per-image parameters {per_image}, a checkpoint {checkpoint}; {free} free"
    yield "disk, phase A", gigabytes(plan["phase_a_disk_bytes"]), remark
    if plan["kept_images_bytes"]:
        size = gigabytes(plan["kept_images_bytes"])
        yield "decoded images", size, "kept in the user's cache: data.cache"
    for kind, size in plan["store_bytes"].items():
        yield f"store, {kind}", gigabytes(size), "before compression"


def _times(plan: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    if not plan["seconds"]:
        return
    remarks = {
        "phase_a_epoch": "",
        "phase_a": "all epochs; phase_a.stop_accuracy may end phase A",
        "export": "of the kind that the settings say",
        "phase_b_epoch": "",
        "phase_b": "all epochs",
    }
    for name, remark in remarks.items():
        yield f"time, {name.replace('_', ' ')}", duration(plan["seconds"][name]), remark
    yield "measured on", plan["device"]


def duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
