"""Export: the Gaussians, predictions and labels of the finished teacher go to the attention-map store."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import store
import torch

from gaupipe.data import Batches
from gaupipe.gaussians import expected_map
from gaupipe.progress import EpochProgress
from gaupipe.teacher import predict
from stages import phase_a
from stages.phase_a import PhaseA
from stages.run_directory import RunDirectory


def run(run_dir: Path, kind: str = "gaussian", out: str | None = None, overwrite: bool = False) -> str:
    """Writes the store of a run whose phase A has finished and returns its path or URL.

    An unfinished store of the same teacher is continued; a finished one is refused unless ``overwrite``.
    """
    run = RunDirectory(run_dir)
    job = phase_a.load(run)
    url = out or str(run.maps)
    schema = make_schema(job, kind)
    writer = store.create(url, schema, overwrite=overwrite, resume=not overwrite)
    write(job, writer, kind)
    return url


def ensure(run_dir: Path) -> str:
    """The store of a run: as it is if it is complete, else written."""
    url = str(RunDirectory(run_dir).maps)
    try:
        store.open(url)
    except store.StoreError:
        run(run_dir)
    return url


def make_schema(job: PhaseA, kind: str) -> store.Schema:
    """What the store of this teacher says about itself."""
    phase = job.settings.phase_a
    passes = phase.label_passes if phase.mode == "stochastic" else 1
    return store.Schema(
        kind=kind, num_images=len(job.data.train), grid=job.teacher.grid, layers=job.teacher.layers,
        heads=job.teacher.heads, num_classes=job.data.num_classes, dataset=job.data.name,
        dataset_sha256=job.data.sha256, teacher_sha256=teacher_sha256(job), parametrisation=phase.parametrisation,
        extra={"mode": phase.mode, "label_passes": passes, "data": job.settings.data.model_dump(mode="json")})


def write(job: PhaseA, writer: store.Writer, kind: str) -> None:
    """Runs the teacher over the images of every shard that is not finished yet."""
    schema, phase, data = writer.schema, job.settings.phase_a, job.data
    images = sum(shard.stop - shard.start for shard in writer.pending())
    started = time.monotonic()
    with EpochProgress("export", images, 1) as progress:
        progress.line(f"export: {images:,} images as {kind}, at most {schema.total_bytes / 1e6:,.1f} MB "
                      f"({schema.bytes_per_image / 1e3:,.1f} kB an image) before compression")
        batches = Batches(data.train, data, job.settings.data.eval_batch_size, job.settings.data.workers)
        for shard in writer.pending():
            parts: dict[str, list[np.ndarray]] = {}
            generator = torch.Generator(job.device).manual_seed(job.settings.seed * 1_000_003 + shard.start)
            for pixels, labels, ids in batches.epoch(job.device, image_ids=np.arange(shard.start, shard.stop)):
                for name, array in arrays(job, kind, pixels, ids, phase.mode, phase.label_passes, generator).items():
                    parts.setdefault(name, []).append(array)
                parts.setdefault("labels", []).append(labels.cpu().numpy())
                progress.advance(len(ids))
            writer.write(shard, {name: np.concatenate(arrays) for name, arrays in parts.items()})
        writer.finish()
        seconds = time.monotonic() - started
        progress.line(f"export: {images:,} images in {seconds:.1f} s, {images / max(seconds, 1e-9):,.0f} images/s")


@torch.no_grad()
def arrays(job: PhaseA, kind: str, pixels: torch.Tensor, ids: torch.Tensor, mode: str, passes: int,
           generator: torch.Generator) -> dict[str, np.ndarray]:
    """The stored arrays of one batch but for its labels."""
    gaussians = job.gaussians(ids)
    logits = predict(job.teacher, pixels, gaussians, mode, passes, generator)
    named = {"gaussians": gaussians} if kind == "gaussian" else {"maps": expected_map(gaussians, job.teacher.grid)}
    return {name: tensor.float().cpu().numpy() for name, tensor in {**named, "logits": logits}.items()}


def teacher_sha256(job: PhaseA) -> str:
    """A digest of the teacher's weights and rows."""
    digest = hashlib.sha256()
    tensors: dict[str, Any] = dict(job.teacher.state_dict())
    if job.rows:
        tensors["rows"] = job.rows.rows
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensor.cpu().numpy()))
    return digest.hexdigest()
