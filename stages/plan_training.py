"""Plan of a plain training: what ``gaupipe train`` will take, from a few real steps."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

from gaupipe.data.splits import ImageData
from rich.table import Table

from gaupipe.attention.options import count_parameters
from gaupipe.data.batches import Batches
from gaupipe.distillation.student import build_student, check_baseline
from gaupipe.settings import Settings
from gaupipe.system.device import select_device
from gaupipe.system.machine import free_disk
from gaupipe.training.scores import score_model
from stages import phase_b
from stages import train as student_training
from stages.plan import clock, data_of, duration, first_images, two_epochs
from stages.runs.resources import gigabytes


def run(
    settings: Settings,
    run_dir: Path,
    *,
    steps: int = 4,
    images: int | None = None,
    classes: int | None = None,
) -> dict[str, Any]:
    """Counts, bytes and seconds of a plain training, as plain JSON values. Leaves nothing on disk.

    The arguments are those of :func:`stages.plan.run`. Raises UserError for settings that cannot
    be trained.
    """
    select_device(settings.device, settings.threads)
    data, held_out = data_of(settings, images, classes)
    check_baseline(settings, data)
    optim = settings.baseline_optim
    parameters = count_parameters(build_student(settings, data, "meta"))
    # weights, two moments of Adam, the weights of the best epoch
    copies = 4 + (optim.ema is not None)
    count = len(data.train) if images is None else images
    epochs = settings.baseline.epochs or settings.phase_b.epochs
    seconds = None
    if steps:
        training, scoring = measure(settings, data, steps)
        epoch = count * training + held_out * scoring
        seconds = {"epoch": epoch, "training": epoch * epochs}
    return {
        "images": count,
        "attention": settings.phase_b.student,
        "network_parameters": parameters,
        "epochs": epochs,
        "checkpoint_bytes": 4 * copies * parameters,
        "free_disk_bytes": free_disk(run_dir),
        "device": str(select_device(settings.device, settings.threads)),
        "seconds": seconds,
    }


def measure(settings: Settings, data: ImageData, steps: int) -> tuple[float, float]:
    """Seconds of an image in training and in validation, from the first ``steps`` batches. A first
    epoch warms up, the second counts."""
    small = first_images(data, min(steps * settings.data.batch_size, len(data.train)))
    job = phase_b.build(two_epochs(settings, per_image_in_files=False), small, teacher=None)
    state, sizes = student_training.training_state(job), settings.data
    batches = Batches(small.train, small, job.device, sizes.eval_batch_size, sizes.workers)
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        student_training.train(job, state, Path(name))
    count = len(small.train)
    scoring = clock(lambda: score_model(job.student, batches)) / count
    return state.metrics[-1]["seconds"] / count, scoring


def table(plan: dict[str, Any]) -> Table:
    """The plan that :func:`run` returned, for people."""
    shown = Table(show_header=False, box=None, pad_edge=False)
    shown.add_column()
    shown.add_column(justify="right")
    shown.add_column()
    shown.add_row("training images", f"{plan['images']:,}")
    shown.add_row("network", f"{plan['network_parameters']:,}", f"parameters, {plan['attention']}")
    free = f"two at a time; {gigabytes(plan['free_disk_bytes'])} free"
    shown.add_row("a checkpoint", gigabytes(plan["checkpoint_bytes"]), free)
    if plan["seconds"]:
        shown.add_row("time, an epoch", duration(plan["seconds"]["epoch"]))
        shown.add_row("time", duration(plan["seconds"]["training"]), f"{plan['epochs']} epochs")
        shown.add_row("measured on", plan["device"])
    return shown
