"""What a run takes: numbers to learn, memory, disk. Arithmetic only, nothing is trained.

Axis letters: N images, L blocks, H heads, T tokens, P raw numbers per Gaussian, E embedding width.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer

import store
from gaupipe.distillation.kinds import default_kind
from gaupipe.distillation.student import MapShape
from gaupipe.settings import RowSettings, Settings
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.machine import available_memory, free_disk
from gaupipe.teachers.image_state import record_words
from gaupipe.teachers.vit import VitTeacher

PROCESS_BYTES = 11 * 10**8
"""Resident memory of a process that has imported torch and timm (0.72 GB were measured) and
trains small batches."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the counts depend on, beside the settings."""

    images: int
    """Training images."""
    classes: int
    layers: int
    heads: int
    grid: tuple[int, int]
    """Height and width in tokens."""
    network_parameters: int
    """The ViT's and the decoder's."""
    per_image_size: int = 0
    """Per-image parameters of one image: L * H * T * P, or L * E with a compression network; not
    counted where the settings keep none."""
    prior_parameters: int = 0
    decoder_parameters: int = 0
    """The decoder's alone, without the shared prior, which is its last bias."""
    image_bytes: int = 0
    """The data set as it is held in memory, twice: it is copied while it is read."""


def sizes_of(teacher: Any, data: Any) -> Sizes:
    """Sizes of a :class:`~gaupipe.teachers.gaussian.Teacher`, or of a ViT as a teacher, on an
    :class:`~gaupipe.data.splits.ImageData`."""
    splits = [split for split in (data.train, data.val, data.test) if split]
    sources = {id(split.source): split.source for split in splits}
    held = [source.images.nbytes for source in sources.values() if hasattr(source, "images")]
    sizes = {"images": len(data.train), "classes": data.num_classes, "image_bytes": 2 * sum(held)}
    if isinstance(teacher, VisionTransformer | VitTeacher):
        shape = vars(MapShape.of(teacher))
        return Sizes(**sizes, **shape, network_parameters=count(teacher))
    prior = teacher.prior.numel()
    return Sizes(
        **sizes,
        **vars(MapShape.of(teacher)),
        per_image_size=math.prod(teacher.per_image_shape),
        network_parameters=count(teacher) - prior,
        prior_parameters=prior,
        decoder_parameters=count(teacher.decoder) if teacher.decoder else 0,
    )


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Counts and bytes of a run. Stores are before compression, and zstd takes little off float16
    Gaussians."""

    images: int
    network_parameters: int
    prior_parameters: int
    per_image_parameters: int
    """Those of all images together."""
    per_image_in: str
    """Where the per-image parameters are kept: ``memory``, ``files`` or ``none``."""
    fixed_memory_bytes: int
    """Of ``memory_bytes`` what every process of a world needs: all but per-image parameters."""
    memory_bytes: int
    """What phase A keeps resident on the CPU. The page cache of files comes on top, and gives way
    to other needs."""
    per_image_disk_bytes: int
    """Both copies of every record, for per-image parameters in files."""
    checkpoint_bytes: int
    """One checkpoint of phase A. The old one stays until the new one is complete."""
    fixed_checkpoint_bytes: int
    """Of ``checkpoint_bytes`` what rank 0 of a world writes: all but per-image parameters."""
    store_bytes: dict[str, int]
    """The attention-map store, for each kind that this run can have."""

    @property
    def phase_a_disk_bytes(self) -> int:
        return self.per_image_disk_bytes + 2 * self.checkpoint_bytes


def make_plan(settings: Settings, sizes: Sizes) -> Plan:
    """The plan of a run with these settings. Pure arithmetic."""
    phase = settings.phase_a
    records, place = 0, "none"
    if phase.learns_of_images:
        records = per_image_bytes(phase.rows, sizes.images, sizes.per_image_size)
        in_files = per_image_in_files(phase.rows, sizes.images, sizes.per_image_size)
        place = "files" if in_files else "memory"
    in_checkpoint = {
        "none": 0,
        "memory": records + 4 * sizes.images,  # and the step counts
        "files": 9 * sizes.images + 4 * sizes.per_image_size,  # and the start of an image
    }
    weights = 4 * (sizes.network_parameters + sizes.prior_parameters)
    copies = 4 if phase.optim.ema is not None else 3  # weights and two moments, and their average
    gradients = 1
    in_memory = records if place == "memory" else 0
    fixed = PROCESS_BYTES + sizes.image_bytes + (copies + gradients) * weights
    return Plan(
        images=sizes.images,
        network_parameters=sizes.network_parameters,
        prior_parameters=sizes.prior_parameters,
        per_image_parameters=sizes.images * sizes.per_image_size if phase.learns_of_images else 0,
        per_image_in=place,
        fixed_memory_bytes=fixed,
        memory_bytes=fixed + in_memory,
        per_image_disk_bytes=2 * records if place == "files" else 0,
        checkpoint_bytes=copies * weights + in_checkpoint[place],
        fixed_checkpoint_bytes=copies * weights,
        store_bytes=store_bytes(settings, sizes),
    )


def per_image_bytes(rows: RowSettings, images: int, size: int) -> int:
    """Bytes of one copy of the per-image parameters, ``size`` numbers each, and their moments."""
    return images * record_words(size) * 4


def per_image_in_files(rows: RowSettings, images: int, size: int) -> bool:
    """Whether per-image parameters of ``size`` numbers exceed ``memory_budget_gb``."""
    return per_image_bytes(rows, images, size) > rows.memory_budget_gb * 1e9


def store_bytes(settings: Settings, sizes: Sizes) -> dict[str, int]:
    """Bytes of the attention-map store before compression, for each kind that the teacher fits.

    What all images share is in the store once, as float32: the prior and the decoder.
    """
    phase = settings.phase_a
    shared = {"gaussian": 0, "dense": 0, "topk": 0}
    if phase.learns_gaussians and phase.per_image == "none":
        shared["prior"] = sizes.prior_parameters
    elif phase.learns_gaussians and phase.per_image == "embedding":
        shared["embedding"] = sizes.prior_parameters + sizes.decoder_parameters
    views = settings.export.views or 1

    def schema(kind: str) -> store.Schema:
        export = settings.export
        usual = kind == (export.kind or default_kind(settings, export.encoding))
        k = store.KINDS[kind].default_k
        if k is not None:
            asked = export.k if usual else None
            k = min(asked or k, sizes.grid[0] * sizes.grid[1])
        return store.Schema(
            kind=kind,
            num_images=sizes.images * views,
            grid=sizes.grid,
            layers=sizes.layers,
            heads=sizes.heads,
            num_classes=sizes.classes,
            dataset=settings.data.name,
            dataset_sha256="",
            teacher_sha256="",
            embedding_dim=(phase.compression.embedding if kind == "embedding" else None),
            encoding=(export.encoding if usual else None) or store.KINDS[kind].default_encoding,
            k=k,
            views=views,
        )

    return {kind: schema(kind).total_bytes + 4 * numbers for kind, numbers in shared.items()}


def check_resources(plan: Plan, folder: Path, *, store_kind: str | None = None) -> None:
    """Raises UserError, in one line, if the disk or the memory cannot hold a job.

    The job is phase A in the run directory ``folder`` or, with a ``store_kind``, the export of
    such a store into ``folder``. What the job has written already counts as free.
    """
    if store_kind:
        job, needed, written = "export", plan.store_bytes[store_kind], folder / "maps.zarr"
        elsewhere = "choose another --out or --kind"
    else:
        job, needed, written = "phase A", plan.phase_a_disk_bytes, folder / "phase_a"
        elsewhere = "choose another --run-dir"
    check_disk(job, needed, written, elsewhere)
    check_memory(job, plan)


def check_disk(job: str, needed: int, written: Path, elsewhere: str) -> None:
    """Raises UserError if the disk cannot hold what a job is to write. What lies in the folder
    ``written`` already counts as free; ``elsewhere`` says how to choose another place."""
    folder = written.parent
    free = free_disk(folder) + size_on_disk(written)
    if needed > free:
        raise UserError(
            f"{folder}: {job} needs {gigabytes(needed)} of disk, {gigabytes(free)} are free: "
            f"{elsewhere}, fewer data.train_images or another phase_a.per_image, or --force"
        )


def check_memory(job: str, plan: Plan) -> None:
    """Raises UserError if the memory cannot hold a job: what all processes of this machine need."""
    available = available_memory()
    here = distributed.launch() if distributed.world_size() > 1 else distributed.Launch()
    per_image = plan.memory_bytes - plan.fixed_memory_bytes
    needed = here.local_world_size * (plan.fixed_memory_bytes + per_image // here.world_size)
    if available is not None and needed > available:
        raise UserError(
            f"{job} needs {gigabytes(needed)} of memory, {gigabytes(available)} are "
            "available: lower phase_a.rows.memory_budget_gb (per-image parameters then go to "
            "files) or data.train_images, or --force"
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
