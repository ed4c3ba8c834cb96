"""Memory and disk that a run takes, before anything is allocated."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functional_call

import store
from gaupipe.attention.options import count_parameters
from gaupipe.data.splits import ImageData
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.device import prepare_device
from gaupipe.system.errors import UserError
from gaupipe.system.machine import available_memory, free_disk
from gaupipe.teachers.base import MapShape, Teacher
from gaupipe.teachers.image_state import record_size
from store.layout import Layout, images_fitting

PROCESS_BYTES = 11 * 10**8
"""Resident memory of a process that has imported torch and timm (0.72 GB were measured) and
trains small batches."""

WRITERS = min(4, os.cpu_count() or 1)
"""Shards that an export encodes and stores at once, each on a thread of its own."""

SHARD_MB = 32
"""Megabytes of a store's shard, before compression, unless an export says otherwise."""

BACKWARD = 1.3
"""How much more a training step takes than its forward pass keeps: 1.29 to 1.45 times as much was
measured on a CPU, with ViTs and a ResNet-18."""

SMALLER = "choose another --run-dir, fewer data.train_images or another phase_a.per_image"
LIGHTER = "lower data.batch_size or data.train_images, take a smaller model"
"""What to do where the disk or the memory is too small for a run."""


@dataclass(frozen=True, kw_only=True)
class PhaseAPlan:
    """Counts and bytes of phase A."""

    parameters: int
    """Of the ViT, the decoder and the shared prior."""
    per_image_parameters: int
    """Those of all images together."""
    memory_bytes: int
    """Memory of each process in phase A, on the CPU. The page cache of files comes on top, and
    gives way to other needs."""
    disk_bytes: int
    """Of phase A: both copies of every record of per-image parameters, and two checkpoints, for the
    old one stays until the new one is complete."""


def make_plan(teacher: Teacher, images: int | None = None, world_size: int = 1) -> PhaseAPlan:
    """The plan of phase A in ``world_size`` processes. The network of the ``teacher`` may lie on
    torch's meta device; ``images`` is the number of training images, where it is not that of its
    data."""
    settings = teacher.settings
    phase = settings.phase_a
    network = teacher.network
    images = len(teacher.data.train) if images is None else images
    parameters = count_parameters(network)
    checkpoint = 4 * copies(phase.optim.ema) * parameters if phase.most_epochs else 0
    size = math.prod(network.per_image_shape) if phase.learns_of_images else 0
    if size:
        checkpoint += 5 * images  # the place and the step count of each
    ema = phase.optim.ema
    data = teacher.images_for_training
    forward = teacher.training_forward if teacher.kind.trained else None
    memory = training_memory(settings, network, data, ema, world_size, forward)
    return PhaseAPlan(
        parameters=parameters,
        per_image_parameters=images * size,
        memory_bytes=memory,
        disk_bytes=2 * (images * record_size(size) * 4 + checkpoint),
    )


def copies(ema: float | None) -> int:
    """Copies of the weights in a checkpoint: themselves, two moments, perhaps their average."""
    return 3 if ema is None else 4


def training_memory(
    settings: Settings,
    model: Any,
    data: ImageData,
    ema: float | None,
    world_size: int = 1,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> int:
    """Bytes that a training without per-image parameters takes on the CPU in each process: torch,
    the data set, weights with moments and gradients, and what the ``forward`` pass of a batch
    keeps; None for a model that is not trained."""
    memory: int = PROCESS_BYTES + 4 * (copies(ema) + 1) * count_parameters(model)
    memory += bytes_of_images(data)
    device = prepare_device(settings.device, settings.threads)
    if device.type == "cpu" and forward is not None:
        batch = -(-settings.data.batch_size // world_size)
        kept = kept_bytes(model, forward, batch, data)
        vit = getattr(model, "vit", model)  # in a teacher with Gaussians
        if settings.grad_checkpointing and isinstance(vit, VisionTransformer):
            # the input of each block, and all of one
            tokens = vit.patch_embed.num_patches + vit.num_prefix_tokens
            kept = kept // len(vit.blocks) + 4 * len(vit.blocks) * batch * tokens * vit.embed_dim
        memory += round(BACKWARD * kept)
    return memory


def kept_bytes(
    network: nn.Module, forward: Callable[[Tensor], Tensor], images: int, data: ImageData
) -> int:
    """Bytes that a ``forward`` pass of a network over so many ``images`` keeps for the backward
    pass, beside the weights. Its tensors have no numbers, so nothing is allocated. 0 for a network
    that decides by its numbers what it does."""
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    step = nn.Module()  # whose weights functional_call replaces
    step.network = network
    step.forward = forward
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {}
        for name, tensor in chain(step.named_parameters(), step.named_buffers()):
            weights[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            weights[name].requires_grad_(isinstance(tensor, nn.Parameter))
        batch = torch.empty(images, data.channels, data.image_size, data.image_size)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        decides = contextlib.suppress(DataDependentOutputException)
        with hooks, decides, distributed.alone():  # rank 0 checks before the others
            functional_call(step, weights, batch)
    for weight in weights.values():
        kept.pop(weight.untyped_storage()._cdata, None)
    return sum(kept.values())


def bytes_of_images(data: ImageData) -> int:
    """Of a data set that is held in memory, which is copied while it is read."""
    splits = [split for split in (data.train, data.val, data.test) if split]
    sources = {id(split.source): split.source for split in splits}
    held = [source.images.nbytes for source in sources.values() if hasattr(source, "images")]
    return 2 * sum(held)


def store_size(teacher: Teacher, schema: store.Schema) -> tuple[int, int]:
    """Bytes before compression, and files, of a store."""
    shared = MAP_KINDS[schema.kind].decoder(teacher.network)
    numbers = sum(tensor.numel() for tensor in shared.values())
    layout = Layout(schema, images_fitting(schema, SHARD_MB * 10**6))
    return schema.total_bytes + 4 * numbers, layout.num_files(decoder=len(shared))


def export_memory(teacher: Teacher, schema: store.Schema, shard_mb: float = SHARD_MB) -> int:
    """Bytes that an export takes on the CPU in each process."""
    settings = teacher.settings
    memory = PROCESS_BYTES + 4 * count_parameters(teacher.network) + bytes_of_images(teacher.data)
    shard = max(int(shard_mb * 1e6), schema.bytes_per_image)
    # numbers that become codes are float32, and there once more while they are rounded
    in_memory = 0
    for name, spec in schema.arrays.items():
        size = 8 if schema.has_codes(name) else schema.stored_dtype(name).itemsize
        in_memory += math.prod(spec.shape[1:]) * size
    wider = in_memory / schema.bytes_per_image
    # beside those that are written one is made and one put together
    memory += round(wider * min((WRITERS + 2) * shard, 2 * schema.total_bytes))
    if teacher.forms and prepare_device(settings.device, settings.threads).type == "cpu":
        memory += memory_of_maps(teacher, schema)
    return memory


def memory_of_maps(teacher: Teacher, schema: store.Schema) -> int:
    """Bytes of the stored maps of a batch, as a teacher shows them and, where they are stored
    whole, once more. Gaussians are no maps; a network also has what a block makes of the batch."""
    batch = min(teacher.settings.data.eval_batch_size, schema.num_images)
    stored = MapShape.of_store(schema)
    batch = teacher.images_at_once(batch, with_maps=stored is not None)
    activations = 0
    if teacher.shows_rows:
        activations = 4 * batch * teacher.numbers_of_block
    if stored is None:
        return activations
    tokens = math.prod(stored.grid) + schema.prefix_tokens
    times = int(schema.kind == "dense")
    if teacher.shows_rows:
        tokens = teacher.tokens
        times += 1
    return times * 4 * batch * stored.layers * stored.heads * tokens**2 + activations


def check_resources(plan: PhaseAPlan, run_dir: Path) -> None:
    """Raises UserError, in one line, if the disk or the memory cannot hold phase A. What the run
    has written already counts as free."""
    written = run_dir / "phase_a"
    check_disk("phase A", plan.disk_bytes, written, f"{SMALLER}, or phase-a --force")
    check_memory("phase A", plan.memory_bytes, f"{LIGHTER}, or phase-a --force")


def check_disk(job: str, needed: int, written: Path, remedy: str) -> None:
    """Raises UserError, which says a ``remedy``, if the disk cannot hold the ``needed`` bytes of a
    job. The bytes in the folder ``written`` count as free."""
    folder = written.parent
    free = free_disk(folder) + size_on_disk(written)
    if needed > free:
        raise UserError(
            f"{folder}: {job} needs {gigabytes(needed)} of disk, {gigabytes(free)} are free: "
            f"{remedy}"
        )


def check_memory(job: str, needed: int, remedy: str) -> None:
    """Raises UserError, which says a ``remedy``, if the memory of this machine cannot hold the
    ``needed`` bytes of each of its processes, what they hold already included."""
    available = available_memory()
    needed = needed * distributed.launch().local_world_size
    if available is not None and needed > available:
        raise UserError(
            f"{job} needs {gigabytes(needed)} of memory, {gigabytes(available)} are available: "
            f"{remedy}"
        )


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def size_on_disk(folder: Path) -> int:
    """Bytes that the files below ``folder`` take; sparse files only what is written."""
    return sum(
        os.lstat(Path(root) / name).st_blocks * 512
        for root, _, names in os.walk(folder)
        for name in names
    )
