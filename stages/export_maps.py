"""Export: what the finished teacher knows about every training image goes to the attention-map
store."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import store
from gaupipe.config import Settings
from gaupipe.data import Batch, Batches, ImageData
from gaupipe.errors import UserError
from gaupipe.progress import EpochProgress
from gaupipe.stored_maps import KINDS
from gaupipe.teacher import predict
from stages import phase_a
from stages.phase_a import PhaseA, teacher_sha256
from stages.resources import check_resources, make_plan, sizes_of
from stages.run_directory import RunDirectory

WRITERS = min(4, os.cpu_count() or 1)
"""Shards that are encoded and stored at once, each on a thread of its own."""


def run(
    run_dir: Path,
    kind: str | None = None,
    *,
    out: str | None = None,
    overwrite: bool = False,
    repair: bool = False,
    shard_mb: float = 32,
    force: bool = False,
    encoding: str = "float16",
    data: ImageData | None = None,
) -> str:
    """Writes the store of a run whose phase A has finished and returns its path or URL.

    kind       what is stored; None is the kind of the store that is there, else :func:`default_kind`
    out        path or URL of the store; None is the run's own
    overwrite  replaces a complete store, which is refused otherwise
    repair     rewrites what :func:`store.verify` finds damaged, and nothing else; until that is finished no
               reader opens the store
    shard_mb   size of a file, in 10^6 bytes before compression
    force      writes a store that the disk does not seem to hold
    data       the data set of the settings, where it has been read already

    An unfinished store of the same teacher is continued: its finished shards stay.
    """
    run = RunDirectory(run_dir)
    if overwrite and repair:
        raise UserError(
            "--overwrite writes everything anew and --repair only what is damaged: choose one"
        )
    if out == "":
        raise UserError("--out '': should be the path or URL of a store")
    if not math.isfinite(shard_mb):
        raise UserError(f"--shard-mb {shard_mb}: should be a size in MB, such as 32")
    url = str(run.maps) if out is None else out
    run.settings()  # a folder that is no run is left alone
    with run.locked():
        job = phase_a.load(run, data)
        kind = (
            kind
            or (None if overwrite else stored_kind(url))
            or default_kind(job.settings, encoding)
        )
        schema = make_schema(job, kind, encoding)
        how = {"shard_bytes": int(shard_mb * 1e6), "decoder": decoder(job, kind)}
        if not force and "://" not in url:
            plan = make_plan(job.settings, sizes_of(job.teacher, job.data))
            check_resources(plan, Path(url).parent, store_kind=kind)
        if repair:
            writer = store.repair(url, schema, **how)
        elif not overwrite and is_complete(url):
            raise UserError(
                f"{url} already holds a complete store: --overwrite replaces it, --repair rewrites "
                "what is damaged"
            )
        else:
            writer = store.create(url, schema, overwrite=overwrite, resume=not overwrite, **how)
        write(job, writer)
    return url


def ensure(
    run_dir: Path,
    *,
    out: str | None = None,
    kind: str | None = None,
    encoding: str = "float16",
    data: ImageData | None = None,
) -> str:
    """The store of a run: as it is if it is complete, else written."""
    directory = RunDirectory(run_dir)
    url = out or str(directory.maps)
    if not is_complete(url, directory.teacher_digest()):
        run(run_dir, kind, out=out, encoding=encoding, data=data)
    return url


def is_complete(url: str, teacher_sha256: str | None = None) -> bool:
    """Whether a complete store (of this teacher) is there. Damaged metadata counts as none."""
    try:
        store.open(url, teacher_sha256=teacher_sha256)
    except store.StoreError:
        return False
    return True


def default_kind(settings: Settings, encoding: str = "float16") -> str:
    """``gaussian``, or ``prior`` for a teacher without Gaussians of single images. Only the
    first has 8-bit codes."""
    return "gaussian" if settings.phase_a.residual or encoding == "uint8" else "prior"


def stored_kind(url: str) -> str | None:
    """The kind of the store that is there, finished or not; None where there is none whose
    metadata can be read."""
    try:
        return store.open(url, allow_incomplete=True).schema.kind
    except store.StoreError:
        return None


def make_schema(
    job: PhaseA, kind: str, encoding: str = "float16", sha256: str | None = None
) -> store.Schema:
    """What the store of this teacher says about itself; ``sha256`` is the teacher's where it is
    known. Raises UserError for a kind that this teacher does not have, StoreError for an
    encoding that the kind does not have."""
    phase = job.settings.phase_a
    if (reason := KINDS[kind].refusal(job.teacher, phase.residual)) is not None:
        raise UserError(f"--kind {kind}: {reason}")
    return store.Schema(
        kind=kind,
        encoding=encoding,
        num_images=len(job.data.train),
        grid=job.teacher.grid,
        layers=job.teacher.layers,
        heads=job.teacher.heads,
        num_classes=job.data.num_classes,
        dataset=job.data.name,
        dataset_sha256=job.data.sha256,
        teacher_sha256=sha256 or teacher_sha256(job),
        parametrisation=phase.parametrisation,
        embedding_dim=job.teacher.decoder.embedding if kind == "embedding" else None,
        extra={
            "mode": phase.mode,
            "label_passes": label_passes(job),
            "data": job.settings.data.model_dump(mode="json"),
        },
    )


def label_passes(job: PhaseA) -> int:
    """Forward passes behind one stored prediction."""
    return job.settings.phase_a.label_passes if job.settings.phase_a.mode == "stochastic" else 1


def decoder(job: PhaseA, kind: str) -> dict[str, np.ndarray] | None:
    """What a store of this kind holds once for all images; None where that is nothing."""
    shared = KINDS[kind].decoder(job.teacher)
    return {name: tensor.float().cpu().numpy() for name, tensor in shared.items()} or None


def write(job: PhaseA, writer: store.Writer) -> None:
    """Runs the teacher over the images of every pending shard; shards are encoded and stored
    while the next are made."""
    schema, pending = writer.schema, writer.pending()
    images = sum(shard.stop - shard.start for shard in pending)
    started = time.monotonic()
    with (
        EpochProgress("export", images, 1) as progress,
        ThreadPoolExecutor(WRITERS, "export") as pool,
    ):
        kept = (
            f", {schema.num_images - images:,} are there already"
            if images < schema.num_images
            else ""
        )
        progress.line(
            f"export: {images:,} images as {schema.kind}{kept}, at most {images * schema.bytes_per_image / 1e6:,.1f}"
            f" MB ({schema.bytes_per_image / 1e3:,.1f} kB an image) before compression"
        )
        batches = job.batches(job.data.train)
        stored: deque[Future] = deque()
        for shard in pending:
            rows = []
            for ids, arrays in outputs(
                job, schema.kind, batches, np.arange(shard.start, shard.stop)
            ):
                rows.append(arrays)
                progress.advance(len(ids))
            if len(stored) == WRITERS:
                stored.popleft().result()
            whole = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            stored.append(pool.submit(writer.write, shard, whole))
        for write in stored:
            write.result()
        writer.finish()
        seconds = time.monotonic() - started
        progress.line(
            f"export: {images:,} images in {seconds:.1f} s, {images / max(seconds, 1e-9):,.0f} images/s"
        )


def outputs(
    job: PhaseA, kind: str, batches: Batches, image_ids: np.ndarray, seed: int | None = None
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """(image ids, {name: array}) of every batch of ``image_ids``: what a store of this kind holds
    for them.

    The draws of ``stochastic`` mode depend on ``seed`` (the run's) and the first image id of a
    batch alone, so that any batch can be made again.
    """
    seed = job.settings.seed if seed is None else seed
    generator = torch.Generator(job.device)
    for batch in batches.in_order(image_ids):
        generator.manual_seed(seed * 1_000_003 + int(batch.ids[0]))
        named = teacher_outputs(job, kind, batch, generator)
        arrays = {name: tensor.half().cpu().numpy() for name, tensor in named.items()}
        yield batch.ids.numpy(), {**arrays, "labels": batch.labels.cpu().numpy()}


@torch.no_grad()
def teacher_outputs(
    job: PhaseA, kind: str, batch: Batch, generator: torch.Generator
) -> dict[str, Tensor]:
    """The stored arrays of one batch but for its labels, on the device."""
    parameters = None
    if job.per_image is not None:
        parameters = job.per_image.gather(batch.ids, job.device).detach()
    gaussians = job.teacher.gaussians(parameters)  # [B or 1, L, H, T, 4]
    gaussians = gaussians.expand(len(batch), *gaussians.shape[1:])  # [B, L, H, T, 4]
    mode, passes = job.settings.phase_a.mode, label_passes(job)
    logits = predict(job.teacher, batch.images, gaussians, mode, passes, generator)
    return {**KINDS[kind].arrays(job.teacher, gaussians, parameters), "logits": logits}
