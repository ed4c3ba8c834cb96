"""Plan: parameters, memory, disk and time of a run, from its settings and a few training steps."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from timm.models import get_pretrained_cfg, is_model

import store
from gaupipe.data.batches import Batches
from gaupipe.data.buckets import check_buckets
from gaupipe.data.files import FileImages
from gaupipe.data.sources import ArrayImages
from gaupipe.data.splits import ImageData, Split, load_data
from gaupipe.distillation.kinds import check_export, chosen
from gaupipe.distillation.student import MapShape, build_student, check_baseline
from gaupipe.settings import LogSettings, Settings
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.system.machine import available_memory, free_disk
from gaupipe.teachers.vit import VitTeacher
from gaupipe.training.scores import score_model
from stages import export_maps, phase_b, train
from stages.phase_a import gaussian as phase_a
from stages.phase_a import trained_vit as trained_teacher
from stages.phase_a.job import TeacherJob
from stages.runs.resources import (
    Plan,
    check_disk,
    check_memory,
    check_resources,
    copies,
    gigabytes,
    make_plan,
    training_memory,
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run to be planned, with its data set or what stands in for it."""

    settings: Settings
    run_dir: Path
    data: ImageData
    device: torch.device
    images: int
    """Training images of the run, of which ``data`` may hold a part."""
    validation_images: int
    steps: int
    """Training steps of each phase to measure."""
    world_size: int


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
    steps             training steps of each phase to measure; 0 leaves the times out (null), and so
                      does a model that the memory cannot hold
    images, classes   describe a data set that is not at hand. Random pixels stand in for it, so
                      that decoding is not in the times
    world_size        number of processes: ``memory_bytes`` is that of each, and ``seconds`` are
                      those of one process divided by it, without the exchange of gradients

    Raises UserError for settings that cannot be run. ``problem`` says what does not fit.
    """
    device = select_device(settings.device, settings.threads)
    data, held_out = data_of(settings, images, classes)
    request = Request(
        settings=settings,
        run_dir=run_dir,
        data=data,
        device=device,
        images=len(data.train) if images is None else images,
        validation_images=held_out,
        steps=steps,
        world_size=world_size,
    )
    plan = plan_training(request) if plain else plan_run(request)
    if plan["seconds"] is not None:
        plan["seconds"] = {name: value / world_size for name, value in plan["seconds"].items()}
    return {
        **plan,
        "world_size": world_size,
        "free_disk_bytes": free_disk(run_dir),
        "available_memory_bytes": available_memory(),
        "device": str(device),
    }


def plan_run(request: Request) -> dict[str, Any]:
    """Both phases and the export."""
    settings, data = request.settings, request.data
    buckets = settings.data.buckets or request.world_size
    check_buckets(request.images, buckets, settings.data.batch_size, request.world_size)
    teacher = build_teacher(settings, data)
    grid = MapShape.of(teacher).grid
    export = chosen(settings, tokens=math.prod(grid))
    of_images = settings.phase_a.learns_of_images
    check_export(export, settings.augment, teacher, grid, of_images, prefix="export.")
    plan = make_plan(settings, teacher, data, request.images, request.world_size)
    fits = mistake_in(lambda: check_memory("a step", plan.memory_bytes)) is None
    store_bytes, maps = plan.store_bytes[str(export.kind)], request.run_dir / "maps.zarr"
    return {
        **dataclasses.asdict(plan),
        "kept_images_bytes": kept_image_bytes(settings, data),
        "seconds": measure(request, plan) if request.steps and fits else None,
        "problem": mistake_in(lambda: check_resources(plan, request.run_dir))
        or mistake_in(lambda: check_disk("export", store_bytes, maps, "choose another --kind")),
    }


def plan_training(request: Request) -> dict[str, Any]:
    """A training on the labels alone."""
    settings, data = request.settings, request.data
    check_baseline(settings, data)
    student = build_student(settings, data, "meta")
    parameters = sum(parameter.numel() for parameter in student.parameters())
    epochs, ema = settings.baseline.epochs or settings.phase_b.epochs, settings.baseline_optim.ema
    memory = training_memory(settings, student, data, ema, request.world_size)
    problem = mistake_in(lambda: check_memory("the training", memory))
    seconds = None
    if request.steps and problem is None:
        training, scoring = measure_training(request)
        epoch = request.images * training + request.validation_images * scoring
        seconds = {"epoch": epoch, "training": epoch * epochs}
    return {
        "images": request.images,
        "attention": settings.phase_b.student,
        "network_parameters": parameters,
        "epochs": epochs,
        "memory_bytes": memory,
        "checkpoint_bytes": 4 * (copies(ema) + 1) * parameters,  # and the weights of the best epoch
        "seconds": seconds,
        "problem": problem,
    }


def kept_image_bytes(settings: Settings, data: ImageData) -> int:
    """Bytes that the decoded images of image files take in the user's cache
    (:attr:`DataSettings.cache`)."""
    crops = [augment.resized_crop for augment in (settings.phase_a_augment, settings.augment)]
    squares = any(crop is None or not crop.full_size for crop in crops)
    splits = [data.val, *([data.train] if squares else [])]
    sources = {id(split.source): split.source for split in splits}
    return sum(source.kept_bytes() for source in sources.values() if isinstance(source, FileImages))


def build_teacher(settings: Settings, data: ImageData) -> Any:
    """The teacher as phase A starts with it: one that phase A trains on torch's meta device, where
    it takes no memory."""
    phase = settings.phase_a
    if phase.teacher == "vit":
        return trained_teacher.build_model(settings, data, "meta")
    if not phase.learns_gaussians:
        return trained_teacher.build(settings, data).teacher
    with torch.device("meta"):
        return phase_a.build_teacher(settings, data)


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
        held_out = round(images * settings.data.val_fraction)
        return random_data(settings, images, classes), held_out
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
        test=None,
        num_classes=classes,
        channels=3,
        image_size=size,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        sha256="",
    )


# ---- time ----------------------------------------------------------------------------------------


def measure(request: Request, plan: Plan) -> dict[str, float]:
    """Seconds of each stage, scaled up from a run on the first batches of images.

    A first epoch warms up, the second counts. Training stops earlier than after ``max_epochs``
    where it reaches ``stop_accuracy``.
    """
    settings, small = request.settings, first_images(request)
    short, count = two_epochs(settings), len(small.train)
    with scratch_folder() as folder:
        job, train_a = measure_phase_a(short, small, folder)
        score_a = measure_scores(job, evaluation(request, small)) / count
        export = measure_export(job, folder / "maps.zarr") / count
        student = build_student(short, small).to(request.device)
        maps = store.open(str(folder / "maps.zarr"))
        distilled = phase_b.PhaseB(short, small, request.device, student, short.phase_b.optim, maps)
        train_b, score_b = measure_student(request, distilled, folder)
    held_out = request.validation_images
    epoch_a = request.images * (train_a + score_a) + held_out * score_a
    epoch_b = request.images * train_b + held_out * score_b
    return {
        "phase_a_epoch": epoch_a,
        "phase_a": epoch_a * settings.phase_a.max_epochs,
        "export": export * request.images,
        "phase_b_epoch": epoch_b,
        "phase_b": epoch_b * settings.phase_b.epochs,
    }


def measure_training(request: Request) -> tuple[float, float]:
    """Seconds of an image in a plain training and in validation."""
    job = phase_b.build(two_epochs(request.settings), first_images(request), teacher=None)
    with scratch_folder() as folder:
        return measure_student(request, job, folder)


def measure_student(request: Request, job: train.Training, folder: Path) -> tuple[float, float]:
    """Seconds of an image in the training of a student and in validation."""
    state, count = train.training_state(job), len(job.data.train)
    train.train(job, state, folder / "student")
    batches = evaluation(request, job.data)
    scoring = clock(lambda: score_model(job.student, batches)) / count
    return state.metrics[-1]["seconds"] / count, scoring


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is removed, while nothing is printed to stderr."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        yield Path(name)


def first_images(request: Request) -> ImageData:
    """The training images of the first ``steps`` batches, and one validation image."""
    data = request.data
    count = min(request.steps * request.settings.data.batch_size, len(data.train))
    return dataclasses.replace(
        data, train=data.train.trial(count), val=data.val.trial(1), test=None
    )


def evaluation(request: Request, data: ImageData) -> Batches:
    """Batches of the training images, of the size for evaluation."""
    sizes = request.settings.data
    return Batches(data.train, data, request.device, sizes.eval_batch_size, sizes.workers)


def two_epochs(settings: Settings) -> Settings:
    """The settings with two epochs a phase, whatever accuracy they reach, which no logger sees, and
    one bucket."""
    phase_a = settings.phase_a
    changes = {"max_epochs": 2, "stop_accuracy": 1.0}
    return settings.model_copy(
        update={
            "phase_a": phase_a.model_copy(update=changes),
            "phase_b": settings.phase_b.model_copy(update={"epochs": 2}),
            "data": settings.data.model_copy(update={"buckets": None}),
            "log": LogSettings(every=0),
        }
    )


def measure_phase_a(settings: Settings, data: ImageData, folder: Path) -> tuple[TeacherJob, float]:
    """The trained teacher, and the seconds an image took in the last epoch: none where the teacher
    was trained before."""
    phase, count = settings.phase_a, len(data.train)
    if phase.learns_gaussians:
        job = phase_a.build(settings, folder, data)
        state = phase_a.training_state(job)
        phase_a.train(job, state, folder / "phase_a")
        return job, state.metrics[-1]["seconds"] / count
    if phase.teacher != "vit":
        return trained_teacher.build(settings, data), 0.0
    training = trained_teacher.training(settings, data)
    started = trained_teacher.training_state(training)
    trained_teacher.train(training, started, folder / "phase_a")
    vit = VitTeacher(started.kept, data, "vit").to(training.device)
    trained = TeacherJob(settings, data, training.device, vit)
    return trained, started.metrics[-1]["seconds"] / count


def measure_scores(job: TeacherJob, evaluation: Batches) -> float:
    """Seconds that the teacher takes to classify the images."""
    if job.settings.phase_a.learns_gaussians:
        return clock(lambda: phase_a.score_teacher(job, evaluation, seen=True))
    vit = job.teacher
    assert isinstance(vit, VitTeacher)
    return clock(lambda: [vit(batch.images) for batch in evaluation.in_order()])


def measure_export(job: TeacherJob, path: Path) -> float:
    """Seconds of an export of the kind that the settings say, without views."""
    export = chosen(job.settings, tokens=math.prod(job.shape.grid))
    schema = export_maps.make_schema(job, export.model_copy(update={"views": None}))
    writer = store.create(str(path), schema, decoder=export_maps.decoder(job, schema.kind))
    return clock(lambda: export_maps.write(job, writer))


def clock(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    started = time.monotonic()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


# ---- for people ----------------------------------------------------------------------------------

LABELS = {
    "images": "training images",
    "network_parameters": "parameters of the network",
    "prior_parameters": "parameters of the shared prior",
    "per_image_parameters": "per-image parameters, in all",
    "memory_bytes": "memory of each process",
    "available_memory_bytes": "available memory",
    "checkpoint_bytes": "disk, one of two checkpoints",
    "per_image_disk_bytes": "disk, per-image parameters",
    "phase_a_disk_bytes": "disk, phase A",
    "free_disk_bytes": "free disk",
    "kept_images_bytes": "decoded images (data.cache)",
}


def table(plan: dict[str, Any]) -> Table:
    """The plan that :func:`run` returned, in two columns."""
    rows = Table(show_header=False, box=None, pad_edge=False)
    rows.add_column()
    rows.add_column(justify="right")
    for name, label in LABELS.items():
        if value := plan.get(name):
            rows.add_row(label, gigabytes(value) if name.endswith("bytes") else f"{value:,}")
    for kind, size in plan.get("store_bytes", {}).items():
        rows.add_row(f"store of kind {kind}, before compression", gigabytes(size))
    for name, seconds in (plan["seconds"] or {}).items():
        rows.add_row(f"time, {name.replace('_', ' ')}", duration(seconds))
    rows.add_row("device", plan["device"])
    return rows


def duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
