"""Shards of a store, written while the teacher makes the next, and the lines that say so."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from rich.filesize import decimal
from torch import Tensor

import store
from gaupipe.data.splits import Split
from gaupipe.distillation.export import outputs
from gaupipe.system import distributed
from gaupipe.system.progress import EpochProgress
from gaupipe.teachers.base import Teacher
from gaupipe.teachers.notes import StoreNotes
from stages.publish import store_card
from stages.runs.resources import WRITERS

Part = tuple[int, int] | None
"""(i, n): the i-th of n parts of a store, counted from 1; None is all of it."""


def write(
    teacher: Teacher,
    writer: store.Writer,
    pending: Sequence[store.Shard],
    split: Split,
    part: Part = None,
    license: str | None = None,
) -> None:
    """Runs the teacher over the images of a ``split`` in the shards that are ``pending``, or in a
    ``part`` of them; shards are encoded and stored while the next are made. Part i
    of n has the shards i - 1, i - 1 + n, and so on, and of W ranks rank r writes every W-th of the
    pending ones."""
    schema = writer.schema
    world_size = distributed.world_size()
    number, count = part or (1, 1)
    of_part = [shard for shard in pending if shard.index % count == number - 1]
    mine = of_part[distributed.rank() :: world_size]
    images = sum(shard.stop - shard.start for shard in of_part)

    losses: list[Tensor] = []
    started = time.monotonic()
    with (
        EpochProgress("export", images, 1) as progress,
        ThreadPoolExecutor(WRITERS, "export") as pool,
    ):
        progress.line(announcement(schema, images, part))
        batches = teacher.batches(split, with_maps=schema.has_maps)
        writes: deque[Future[Any]] = deque()
        for shard in mine:
            entries = np.arange(shard.start, shard.stop)
            parts = []
            for made in outputs(teacher, schema, batches, entries):
                parts.append(made.arrays)
                if made.lost is not None:
                    losses.append(made.lost)
                progress.advance(len(made.ids) * world_size)

            if len(writes) == WRITERS:  # so many shards at most wait in memory
                writes.popleft().result()
            whole = parts[0]
            if len(parts) > 1:
                whole = {name: np.concatenate([part[name] for part in parts]) for name in whole}
            writes.append(pool.submit(writer.write, shard, whole))
        for write in writes:
            write.result()

        all_losses = distributed.all_gather_object(losses)  # once all ranks' shards are stored
        missing = 0
        if distributed.is_main():
            missing = finish(writer, pending, part, license)

        seconds = time.monotonic() - started
        entry = entry_of(schema)
        speed = images / max(seconds, 1e-9)
        progress.line(f"export: {images:,} {entry}s in {seconds:.1f} s, {speed:,.0f} {entry}s/s")
        gathered = [loss for rank_losses in all_losses for loss in rank_losses]
        line = loss_line(schema, gathered, images)
        if line:
            progress.line(f"export: {line}")
        if missing:
            progress.line(f"export: {missing:,} of {len(writer.shards):,} shards are other parts'")


def finish(
    writer: store.Writer, pending: Sequence[store.Shard], part: Part, license: str | None
) -> int:
    """Adds the card and declares the store complete, unless shards are missing, of which it returns
    the number. What other processes may have written is read back first: by a part, on object
    storage, which knows no locks, and where nothing was ``pending``. Raises StoreError for files
    that are not what was written."""
    if writer.complete:
        writer.drop_entries()
        return 0
    missing = len(writer.pending())
    if missing and part is not None:
        return missing
    alone = part is None and store.local_folder(writer.url) is not None
    if not alone or not pending:
        shards = (problem.shard for problem in store.verify(writer.url))
        damaged = {shard for shard in shards if shard is not None}
        if damaged:
            writer.reopen(damaged)
            raise store.StoreError(
                f"{writer.url}: the files of {len(damaged)} shards are not what their processes "
                "wrote; they count as missing now: repeat gaupipe export-maps"
            )
    writer.add_card(store_card.text(writer.schema, license))
    writer.finish(alone)
    return 0


def entry_of(schema: store.Schema) -> str:
    return "image" if schema.views == 1 else "view"


def announcement(schema: store.Schema, images: int, part: Part = None) -> str:
    """The amount that is about to be written, in one line."""
    written = schema.num_images - images
    entry = entry_of(schema)
    size = schema.bytes_per_image
    kind = schema.kind if schema.k is None else f"{schema.kind} with k {schema.k}"
    notes = StoreNotes.of(schema)
    if notes.layers:
        kind += f" of blocks {', '.join(map(str, notes.layers))}"
    if notes.pooled_from is not None:
        kind += " on {} x {} tokens".format(*schema.maps.grid)
    each = f", {schema.views} of each image," if schema.views > 1 else ""
    already = ""
    if part is not None:
        already = ", part {} of {}".format(*part)
    elif written:
        already = f", {written:,} are there already"
    return (
        f"export: {images:,} {entry}s{each} as {kind}, {schema.encoding}{already}, "
        f"at most {decimal(images * size)} ({decimal(size)} each) before compression"
    )


def loss_line(schema: store.Schema, losses: Sequence[Tensor], images: int) -> str:
    """The mean of the :func:`lost` sums over the images; "" where nothing is lost."""
    if not losses:
        return ""
    means = torch.stack([*losses]).sum(0) / images
    if not means.any():
        return ""
    meaning = "attention on class and register tokens, which is left out, per block"
    if schema.kind == "gaussian":
        meaning = "share of Gaussians whose means the 8-bit codes clip, per block (heads)"
    spans = (f"{row.mean():.3f} ({row.min():.3f}-{row.max():.3f})" for row in means)
    return f"{meaning}: {', '.join(spans)}"
