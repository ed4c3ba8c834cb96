"""How long trainings take, from a few measured steps. Evaluation, reading and checkpoints come on
top."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import store
from gaupipe.data.batches import Batch
from gaupipe.data.splits import ImageData
from gaupipe.distillation.export import UNKNOWN, make_schema
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.distillation.losses import ConstantMaps, FeatureLoss, drawn_queries
from gaupipe.distillation.store_choice import plan_export
from gaupipe.settings import Settings, TrainSettings
from gaupipe.system.device import choose_precision, prepare_device
from gaupipe.teachers.base import MapShape, Teacher, Wanted
from gaupipe.teachers.local import LocalMaps
from gaupipe.training.job import EpochPlan, drop_patches, with_dropped_patches
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.student import build_student

MEASURED = 1.0
"""Seconds of steps that are measured, after the first, which allocates memory."""


def seconds_per_image(step: Callable[[int], object], images: int) -> float:
    """Seconds that ``step`` of a number of images takes for each. A step has at most ``images``,
    and fewer where they would take longer than is measured."""
    step(2)  # one would be too few for the batch normalisation of a ResNet
    began = time.perf_counter()
    step(2)
    images = max(2, min(images, int(2 * MEASURED / (time.perf_counter() - began))))
    return mean_seconds(partial(step, images)) / images


def mean_seconds(call: Callable[[], object]) -> float:
    """Seconds of a ``call``, the mean of as many as are measured."""
    calls = 0
    began = time.perf_counter()
    while calls == 0 or time.perf_counter() - began < MEASURED:
        call()
        calls += 1
    return (time.perf_counter() - began) / calls


def student_seconds(
    settings: Settings,
    data: ImageData,
    train: TrainSettings,
    images: int,
    gammas: Sequence[float] = (),
) -> float:
    """Seconds of a student's training on so many ``images`` an epoch. ``gammas`` has the weight of
    the maps in each epoch of a student with a teacher."""
    device = prepare_device(settings.device, settings.threads)
    student = build_student(settings, data, train, from_weights=False).to(device).train()
    student.set_grad_checkpointing(settings.grad_checkpointing)
    optimizer, _ = build_optimizer(student, train.optim, train.epochs, steps_per_epoch=100)
    precision = choose_precision(settings.precision, device, student.num_features)
    dtype = getattr(torch, precision)

    batch = settings.data.batch_size
    plans = [EpochPlan(gamma) for gamma in gammas] or [EpochPlan()] * train.epochs
    plans = with_dropped_patches(plans, train.patch_drop_rate)
    epochs = Counter((plan.gamma > 0, plan.dropped) for plan in plans)
    if any(gammas):
        phase = settings.phase_b
        shape = MapShape.of(student)
        local = LocalMaps(shape, [1.0] * shape.heads).to(device)
        queries = drawn_queries(phase.queries, (0, 0, 0), math.prod(shape.grid), device)
        maps = ConstantMaps(local, [*range(shape.layers)], shape.grid, queries=queries)
        with_loss = FeatureLoss(student, phase.temperature, phase.divergence)

    def step(count: int, with_maps: bool) -> None:
        optimizer.zero_grad()
        pixels = torch.randn(count, data.channels, data.image_size, data.image_size, device=device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            if with_maps:
                logits, loss_feat = with_loss(pixels, maps)
                loss = logits.sum() + loss_feat
            else:
                loss = student(pixels).sum()
        loss.backward()
        loss.item()  # waits for a GPU

    def update() -> None:
        optimizer.step()
        next(student.parameters()).sum().item()  # waits for a GPU

    seconds = 0.0
    for (with_maps, dropped), count in epochs.items():
        drop_patches(student, dropped)
        seconds += count * images * seconds_per_image(partial(step, with_maps=with_maps), batch)
    # apart, because an update takes as long after a few images as after a whole batch
    update()
    updates = epochs.total() * math.ceil(images / (batch * train.optim.accumulate))
    return seconds + updates * mean_seconds(update)


def teacher_seconds(teacher: Teacher, images: int) -> tuple[float, float]:
    """Seconds of phase A on so many ``images`` an epoch, at most, and of each image that an export
    passes through the teacher; zeros for one whose maps are not stored."""
    if not teacher.kind.stored:
        return 0.0, 0.0
    if not teacher.kind.trained:
        schema = make_schema(teacher, plan_export(teacher), sha256=UNKNOWN)
        each = pass_seconds(teacher, schema)
        return images * each, each  # it looks at each image for its probe, or its accuracy
    made = teacher.begin(Path())
    made.network.train()
    data = made.images_for_training

    def step(count: int) -> None:
        size = (data.channels, data.image_size, data.image_size)
        loss = made.training_forward(torch.zeros(count, *size, device=made.device)).sum()
        loss.backward()
        loss.item()

    each = seconds_per_image(step, teacher.settings.data.batch_size)
    return teacher.settings.phase_a.most_epochs * images * each, each / 3  # without its gradients


def pass_seconds(teacher: Teacher, schema: store.Schema) -> float:
    """Seconds that a finished teacher takes for what a store of this schema has of an image."""
    _, data = teacher.as_taken(teacher.data.train)
    size = (data.channels, data.image_size, data.image_size)
    layers = range(schema.maps.layers) if schema.has_maps else ()
    wanted = Wanted(torch.Generator(teacher.device), layers)

    def step(count: int) -> None:
        images = torch.randn(count, *size, device=teacher.device)
        batch = Batch(images, torch.zeros(count, dtype=torch.long), torch.arange(count))
        made = teacher.outputs(batch, wanted)
        stored = MAP_KINDS[schema.kind].arrays(made.attention, schema.k, torch.float32)
        for array in stored.values():
            array.cpu()
        if made.features is not None:
            made.features.cpu()  # waits for a GPU

    batch_size = teacher.settings.data.eval_batch_size
    return seconds_per_image(step, teacher.images_at_once(batch_size, schema.has_maps))
