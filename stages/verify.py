"""Verify: every file of a store is what was written, and what was written is what the teacher
says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

import store
from gaupipe.distillation.kinds import KINDS, StoredAttention
from gaupipe.system.errors import UserError
from gaupipe.system.progress import EpochProgress
from store.encoding import LOG_STD_STEP, MEAN_STEP, decode, encode

if TYPE_CHECKING:
    from gaupipe.data.batches import Batches
    from stages.phase_a.job import TeacherJob


def run(url: str) -> list[store.Problem]:
    """Everything that is wrong in a store. Raises StoreError where there is none."""
    try:
        images = store.open(url, allow_incomplete=True).schema.num_images
    except store.StoreError:
        images = 1  # what is wrong with it comes next
    with EpochProgress("verify", images, 1) as progress:
        done = 0

        def advance(shards: int, total: int) -> None:
            nonlocal done
            now = images * shards // total
            progress.advance(now - done)
            done = now

        return store.verify(url, progress=advance)


def against_teacher(url: str, run_dir: Path | None = None, sample: int = 256) -> list[str]:
    """Runs the teacher of a run again on at least ``sample`` images and says where the store
    differs from it.

    ``run_dir`` is by default the folder that the store lies in. Whole batches of the export are
    compared, chosen at random, so that predictions that are the mean of sampled passes are made of
    the same draws. Raises UserError if the run is not there and StoreError if the store is another
    teacher's.
    """
    from stages import export_maps
    from stages.phase_a import gaussian as phase_a
    from stages.runs.directory import RunDirectory

    if run_dir is None and "://" in url:
        raise UserError(f"{url}: --teacher needs the --run-dir of the teacher")
    run = RunDirectory(run_dir or Path(url).absolute().parent)
    settings = run.settings()
    maps_of = store.open(url).schema
    teacher = maps_of.extra.get("teacher")
    is_own = run.teacher_digest() == maps_of.teacher_sha256
    if is_own or teacher in (None, "gaussian", "vit"):
        job = phase_a.load(run)
    else:  # one that export-maps was given
        job = export_maps.other_teacher(settings, teacher, maps_of.extra.get("teacher_args"))
    maps = store.open(url, dataset_sha256=job.data.sha256, teacher_sha256=job.sha256())
    read = KINDS[maps.schema.kind].reader(maps, torch.device("cpu"))
    size = job.settings.data.eval_batch_size
    batches = job.batches(job.data.train)
    spans = [
        (start, min(start + size, shard.stop))
        for shard in store.join(url).shards
        for start in range(shard.start, shard.stop, size)
    ]
    differences: list[str] = []
    distances: list[np.ndarray] = []
    stored, own = maps.decoder(), export_maps.decoder(job, maps.schema.kind) or {}
    differences += [
        f"decoder/{name} is not the teacher's"
        for name in sorted(stored.keys() | own.keys())
        if not same(stored.get(name), own.get(name))
    ]
    for index in np.random.default_rng().permutation(len(spans)):
        if sum(map(len, distances)) >= sample:
            break
        entries = np.arange(*spans[index])
        for ids, own in export_maps.outputs(job, maps.schema, batches, entries):
            stored = maps.gather(ids)
            own = {
                name: decode(name, encode(name, values, maps.schema, int(ids[0])), maps.schema)
                for name, values in own.items()
            }
            if settings.phase_a.learns_gaussians and teacher is None:
                names = [name for name in stored if name != "logits"]
            else:  # a fit, or the choice of keys, may turn out otherwise on another machine
                names = ["labels"]
                differences += distant(ids, read(stored), read(own), job.shape.layers)
            differences += [
                difference
                for name in names
                if (difference := unequal(name, ids, stored[name], own[name], maps.schema.encoding))
            ]
            distances.append(total_variation(stored["logits"], own["logits"]))
    distance = float(np.concatenate(distances).mean())
    if not (distance <= 0.01 or distance <= 0.01 + noise(job, maps.schema, batches, spans[index])):
        differences.append(
            f"logits are not the teacher's: mean total variation {distance:.4f} of the predicted "
            "classes"
        )
    return differences


def same(stored: np.ndarray | None, own: np.ndarray | None) -> bool:
    """Whether an array of a decoder is the teacher's, to another device's arithmetic."""
    if stored is None or own is None or stored.shape != own.shape:
        return False
    return np.allclose(stored, own, rtol=1e-5, atol=1e-6)


def unequal(
    name: str, ids: np.ndarray, stored: np.ndarray, own: np.ndarray, encoding: str = "float16"
) -> str | None:
    """Which of these images' numbers differ by more than their encoding and another device's
    arithmetic explain, in words. Of 8-bit Gaussians that is one code."""
    coarse = encoding == "uint8" and name == "gaussians"
    own, stored = own.astype(np.float32), stored.astype(np.float32)
    if coarse:
        close = np.concatenate(
            [
                np.isclose(stored[..., :2], own[..., :2], rtol=2**-8, atol=MEAN_STEP),
                np.isclose(
                    stored[..., 2:], own[..., 2:], rtol=np.expm1(LOG_STD_STEP) + 2**-8, atol=0
                ),
            ],
            -1,
        )
    else:
        close = np.isclose(stored, own, rtol=2**-8, atol=2**-10)
    wrong = ~close.reshape(len(ids), -1).all(1)
    if not wrong.any():
        return None
    return (
        f"image {ids[wrong.argmax()]}: {name} not the teacher's "
        f"({wrong.sum()} of {len(ids)} images of its batch)"
    )


def distant(
    ids: np.ndarray, stored: StoredAttention, own: StoredAttention, layers: int
) -> list[str]:
    """Which of these images' maps are further from the teacher's than another device's arithmetic
    explains, in words: a mean total variation over 0.01."""
    distances = [
        (stored.map(layer) - own.map(layer)).abs().sum(-1).mean((1, 2)) / 2
        for layer in range(layers)
    ]  # of [B, H, T] each
    wrong = (torch.stack(distances).mean(0) > 0.01).numpy()
    if not wrong.any():
        return []
    return [
        f"image {ids[wrong.argmax()]}: its maps are not the teacher's ({wrong.sum()} of "
        f"{len(ids)} images of its batch)"
    ]


def total_variation(stored: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Total variation [B] between the class probabilities of two arrays of logits [B, C]."""
    probabilities = [
        np.exp(logits - logits.max(1, keepdims=True))
        for logits in (stored.astype(np.float64), own.astype(np.float64))
    ]
    first, second = (values / values.sum(1, keepdims=True) for values in probabilities)
    return np.abs(first - second).sum(1) / 2


def noise(job: TeacherJob, schema: store.Schema, batches: Batches, span: tuple[int, int]) -> float:
    """Twice the mean total variation between predictions of these images from different draws; 0 in
    ``expected`` mode.

    A kind of device other than the export's draws other random numbers; the same kind draws the
    same.
    """
    from stages import export_maps

    phase = job.settings.phase_a
    if phase.mode == "expected" or not phase.learns_gaussians:
        return 0.0
    first, second = (
        np.concatenate(
            [
                arrays["logits"]
                for _, arrays in export_maps.outputs(
                    job, schema, batches, np.arange(*span), seed=seed
                )
            ]
        )
        for seed in (-1, -2)
    )
    return 2 * float(total_variation(first, second).mean())
