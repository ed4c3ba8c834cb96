"""What a run needs before it starts: numbers to learn, memory, disk. Arithmetic only, nothing is trained.

Axis letters: N images, L blocks, H heads, T tokens, P raw numbers per Gaussian, E embedding width.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gaupipe.config import RowSettings, Settings
from gaupipe.errors import UserError
from gaupipe.image_state import record_words

PROCESS_BYTES = 11 * 10**8
"""Resident memory of a process that has imported torch and timm (0.72 GB were measured) and trains small batches."""


def gaussian_count(images: int, tokens: int, heads: int, numbers: int) -> int:
    """Numbers of one block when every image has its own Gaussians (*GauTransformer, section 3.3.2*: 24.5 G)."""
    return images * tokens * heads * numbers


def compressed_count(images: int, tokens: int, heads: int, numbers: int, embedding: int, hidden: int) -> int:
    """Numbers of one block with a compression network: the images' embeddings, and a decoder ``embedding`` ->
    ``hidden`` -> ``tokens * heads * numbers`` with biases (*GauTransformer, section 3.3.2*: 347 M)."""
    outputs = tokens * heads * numbers
    return images * embedding + (embedding + 1) * hidden + (hidden + 1) * outputs


def records_bytes(rows: RowSettings, num_images: int, row_size: int) -> int:
    """Bytes of one copy of all rows and their moments."""
    return num_images * record_words(row_size, getattr(torch, rows.moments)) * 4


def rows_in_files(rows: RowSettings, num_images: int, row_size: int) -> bool:
    """Whether rows of ``row_size`` numbers exceed ``memory_budget_gb``."""
    return records_bytes(rows, num_images, row_size) > rows.memory_budget_gb * 1e9


@dataclass(frozen=True)
class Sizes:
    """What the counts depend on, beside the settings."""

    images: int
    """Training images."""
    classes: int
    layers: int
    heads: int
    tokens: int
    row_size: int
    """Numbers of one image: L * H * T * P, or L * E with a compression."""
    network_parameters: int
    """The ViT's and the decoder's."""
    prior_parameters: int
    image_bytes: int = 0
    """The data set as it is held in memory, twice: it is copied while it is read."""


def sizes_of(teacher: Any, data: Any) -> Sizes:
    """Sizes of a :class:`~gaupipe.teacher.Teacher` on an :class:`~gaupipe.data.ImageData`."""
    sources = {id(split.source): split.source for split in (data.train, data.val, data.test) if split}
    prior = teacher.prior.numel()
    return Sizes(
        images=len(data.train), classes=data.num_classes, layers=teacher.layers, heads=teacher.heads,
        tokens=teacher.grid[0] * teacher.grid[1], row_size=math.prod(teacher.per_image_shape), prior_parameters=prior,
        network_parameters=sum(parameter.numel() for parameter in teacher.parameters()) - prior,
        image_bytes=2 * sum(source.images.nbytes for source in sources.values() if hasattr(source, "images")))


@dataclass(frozen=True)
class Plan:
    """Counts and bytes of a run. Stores are before compression (zstd takes little off float16 Gaussians)."""

    images: int
    network_parameters: int
    prior_parameters: int
    row_parameters: int
    rows_in: str
    """``memory``, ``files`` or ``none``."""
    memory_bytes: int
    """What phase A keeps resident on the CPU; the page cache of files comes on top and gives way."""
    rows_disk_bytes: int
    """Both copies of every record, for rows in files."""
    checkpoint_bytes: int
    """One checkpoint of phase A; the old one stays until the new one is complete."""
    store_bytes: dict[str, int]
    """The attention-map store, by kind; ``embedding`` only with a compression, ``prior`` only without Gaussians of single
    images."""

    @property
    def phase_a_disk_bytes(self) -> int:
        return self.rows_disk_bytes + 2 * self.checkpoint_bytes


def make_plan(settings: Settings, sizes: Sizes) -> Plan:
    """The plan of a run with these settings. Pure arithmetic."""
    phase = settings.phase_a
    rows = sizes.images * sizes.row_size if phase.residual else 0
    records = records_bytes(phase.rows, sizes.images, sizes.row_size) if rows else 0
    in_files = bool(rows) and rows_in_files(phase.rows, sizes.images, sizes.row_size)
    trained = sizes.network_parameters + sizes.prior_parameters
    copies = 4 if phase.optim.ema is not None else 3  # weights and two moments, and their average
    per_image = {"gaussian": sizes.layers * sizes.heads * sizes.tokens * 4,
                 "dense": sizes.layers * sizes.heads * sizes.tokens ** 2}
    if phase.compression and phase.residual:
        per_image["embedding"] = sizes.layers * phase.compression.embedding
    if not phase.residual:
        per_image["prior"] = 0
    # labels are int64, everything else float16; what all images share comes once, as float32
    store = {kind: sizes.images * (2 * (numbers + sizes.classes) + 8) for kind, numbers in per_image.items()}
    if "embedding" in store:
        store["embedding"] += 4 * trained
    if "prior" in store:
        store["prior"] += 4 * sizes.prior_parameters
    small = sizes.images * 5 + sizes.row_size * 4 if in_files else records + sizes.images * 4
    return Plan(
        images=sizes.images, network_parameters=sizes.network_parameters, prior_parameters=sizes.prior_parameters,
        row_parameters=rows, rows_in=("files" if in_files else "memory") if rows else "none",
        memory_bytes=PROCESS_BYTES + sizes.image_bytes + (copies + 1) * 4 * trained + (0 if in_files else records),
        rows_disk_bytes=2 * records if in_files else 0,
        checkpoint_bytes=copies * 4 * trained + (small if rows else 0), store_bytes=store)


def check_resources(plan: Plan, run_dir: Path, store_kind: str | None = None) -> None:
    """Raises UserError, in one line, when the disk of ``run_dir`` or the memory cannot hold phase A or, with a
    ``store_kind``, the export of that store. What the run has written already counts as free."""
    job, needed, own = ("export", plan.store_bytes[store_kind], run_dir / "maps.zarr") if store_kind else \
                       ("phase A", plan.phase_a_disk_bytes, run_dir / "phase_a")
    free = free_disk(run_dir) + size_on_disk(own)
    if needed > free:
        raise UserError(f"{run_dir}: {job} needs {gigabytes(needed)} of disk, {gigabytes(free)} are free: "
                        f"{'choose another --out or --kind' if store_kind else 'choose another --run-dir'}, fewer "
                        "data.train_images or phase_a.compression, or --force")
    available = available_memory()
    if available is not None and plan.memory_bytes > available:
        raise UserError(f"{job} needs {gigabytes(plan.memory_bytes)} of memory, {gigabytes(available)} are available: "
                        "lower phase_a.rows.memory_budget_gb (rows then go to files) or data.train_images, or --force")


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def free_disk(folder: Path) -> int:
    """Bytes free where ``folder`` is or will be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def size_on_disk(folder: Path) -> int:
    """Bytes that the files below ``folder`` take; sparse files only what is written."""
    return sum(os.lstat(Path(root) / name).st_blocks * 512 for root, _, names in os.walk(folder) for name in names)


def available_memory() -> int | None:
    """Bytes that a new process can use without pushing out others, within the container's limit; None if unknown."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(counters["active_file"]) + int(counters["inactive_file"]))
    except (OSError, KeyError, ValueError):
        return free
