"""What a training costs: multiply-adds, which are counted, and processor seconds, which were
measured while it trained. Phase A and the export count too.

Counted are the products of linear layers, convolutions and attention, as torch's FlopCounterMode
finds them; a flop of torch's is half a multiply-add. A training step counts as three forward
passes, an exported map and an image of a linear probe as one. Left out are the evaluation after
each epoch, a warm start, and every operation but products of matrices, such as norms and the
softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import store
from gaupipe.attention.options import count_parameters
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.splits import ImageData
from gaupipe.distillation.export import outputs
from gaupipe.settings import Settings
from gaupipe.system.progress import EpochMetrics, epochs_in, processor_seconds
from gaupipe.teachers.base import outline
from gaupipe.training.job import drop_patches
from stages import phase_b
from stages.compare.trainings import RowTraining, as_teacher
from stages.runs.trained import load_teacher

FORWARDS = 3
"""Forward passes that a training step counts as: backward there are two products for each one."""


class Costs(TypedDict):
    parameters: NotRequired[int]
    """Of a student."""
    multiply_adds: int
    processor_seconds: float


class PhaseACosts(Costs):
    """What phase A and the export cost together."""

    probe: NotRequired[Costs]
    """Of the linear probe of a teacher, which only those students need that learn predictions."""


def multiply_adds(work: Callable[[], Any]) -> int:
    """Multiply-adds of the matrix products, convolutions and attentions in a call."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        work()
    flops: int = counter.get_total_flops()
    return flops // 2


def student_costs(training: RowTraining, data: ImageData, metrics: list[EpochMetrics]) -> Costs:
    """``parameters`` of a trained student, and ``multiply_adds`` and ``processor_seconds`` of its
    epochs, which have the entries ``metrics``."""
    settings = training.settings.model_copy(update={"compile": False})
    teacher_run = None
    if not training.row.plain:
        teacher_run = training.teacher_run
    job = phase_b.build_training(settings, data, teacher_run, training.maps_url, afresh=False)
    buckets = settings.data.num_buckets
    batches = Batches(job.images, data, job.device, settings.data.batch_size, 0, buckets)
    augment = Augment(settings.augment, settings.seed)
    first = job.epochs[0]
    batch = next(batches.epoch(0, augment, first.stored))
    losses = job.losses.train()
    forward_costs: dict[tuple[float, float], float] = {}  # multiply-adds for one image
    forward_cost = 0.0
    for plan in job.epochs[: len(metrics)]:
        kind = plan.gamma, plan.dropped
        # an epoch costs more while maps are compared, and less while patches are dropped
        if kind not in forward_costs:
            drop_patches(job.student, plan.dropped)
            cost = multiply_adds(partial(losses, batch, plan.gamma, plan.alpha))
            forward_costs[kind] = cost / len(batch)
        forward_cost += forward_costs[kind]
    return {
        "parameters": count_parameters(job.student),
        "multiply_adds": round(FORWARDS * len(job.images) * forward_cost),
        "processor_seconds": processor_seconds(metrics),
    }


def phase_a_costs(
    training: RowTraining, data: ImageData, metrics: list[EpochMetrics], export_seconds: float
) -> PhaseACosts:
    """``multiply_adds`` and ``processor_seconds`` of the teacher's epochs, which have the entries
    ``metrics``, and of the export of its maps for this training; those of a ``probe`` beside
    them."""
    settings = as_teacher(training.settings)
    if not settings.phase_a.kind.stored:
        return {"multiply_adds": 0, "processor_seconds": 0.0}
    teacher = load_teacher(training.teacher_run, data)
    schema = store.open(str(training.maps)).schema
    exported = outputs(teacher, schema, teacher.batches(data.train), np.arange(1))
    forward = multiply_adds(lambda: next(exported))
    export = forward * schema.views * len(data.with_unlabelled())
    if not teacher.kind.trained and metrics[-1].get("processor_seconds"):  # of a probe
        probe: Costs = {
            "multiply_adds": forward * (len(data.train) + len(data.val)),
            "processor_seconds": processor_seconds(metrics),
        }
        return {"multiply_adds": export, "processor_seconds": export_seconds, "probe": probe}
    forwards = FORWARDS * len(data.train) * epochs_in(metrics)
    return {
        "multiply_adds": forwards * teacher_forward_cost(settings, data) + export,
        "processor_seconds": processor_seconds(metrics) + export_seconds,
    }


def with_probe(phase_a: PhaseACosts, learns_predictions: bool) -> Costs:
    """What phase A cost a student, its probe counted if it ``learns_predictions``."""
    parts: list[Costs] = [phase_a]
    if learns_predictions and "probe" in phase_a:
        parts.append(phase_a["probe"])
    return {
        "multiply_adds": sum(part["multiply_adds"] for part in parts),
        "processor_seconds": sum(part["processor_seconds"] for part in parts),
    }


def teacher_forward_cost(settings: Settings, data: ImageData) -> int:
    """Multiply-adds of a forward pass of a teacher in training, over one image; 0 for a teacher
    that phase A does not train."""
    if not settings.phase_a.kind.trained:
        return 0
    teacher = outline(settings, data).begin(Path())
    taken = teacher.images_for_training
    image = torch.zeros(1, taken.channels, taken.image_size, taken.image_size)
    return multiply_adds(partial(teacher.training_forward, image.to(teacher.device)))
