"""Phase A: train the teacher, a ViT with GauAttention, until its training accuracy enters the window."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gaupipe import data as datasets
from gaupipe.augment import Augment
from gaupipe.config import IRRELEVANT, Settings, flatten
from gaupipe.data import Batches, ImageData
from gaupipe.errors import UserError
from gaupipe.gaussians import Geometry, expected_map, move
from gaupipe.image_state import ImageState
from gaupipe.progress import EpochProgress, MetricsLog
from gaupipe.teacher import Teacher, predict
from gaupipe.training import TrainingState, build_optimizer, build_vit, score, select_device, train_epoch
from stages.key_attention import save_snapshot
from stages.resources import check_resources, make_plan, per_image_in_files, sizes_of
from stages.run_directory import RunDirectory, allowed, write_whole


@dataclass
class PhaseA:
    """A teacher with its rows on its data; ``rows`` is None for a teacher that is the shared prior alone."""

    settings: Settings
    data: ImageData
    device: torch.device
    teacher: Teacher
    rows: ImageState | None

    @torch.no_grad()
    def gaussians(self, image_ids: Tensor | None, count: int) -> Tensor:
        """Gaussians [count, L, H, T, 4] of training images, or for None the shared prior's, on the device."""
        rows = self.rows.gather(image_ids, self.device) if self.rows and image_ids is not None else None
        gaussians = self.teacher.gaussians(rows)
        return gaussians.expand(count, *gaussians.shape[1:])


def build(settings: Settings, folder: Path, data: ImageData | None = None) -> PhaseA:
    """Everything phase A needs, freshly started; rows beyond the memory budget are to lie in ``folder``/rows. Writes
    nothing; raises UserError for what is wrong."""
    device = select_device(settings)
    data = data or datasets.load(settings.data)
    teacher = build_teacher(settings, data)
    rows = build_rows(settings, teacher, len(data.train), folder / "rows") if settings.phase_a.residual else None
    return PhaseA(settings, data, device, teacher.to(device), rows)


def build_teacher(settings: Settings, data: ImageData) -> Teacher:
    """A freshly started teacher on the CPU."""
    phase = settings.phase_a
    torch.manual_seed(settings.seed)
    compression = phase.compression and (phase.compression.embedding, phase.compression.hidden)
    vit = build_vit(settings.model, data, "gaussian")
    if vit.num_prefix_tokens:
        raise UserError("model.args: a class or register token has no place on the grid that Gaussians lie on: take "
                        "class_token and reg_tokens out")
    return Teacher(vit, phase.parametrisation, phase.prior, compression)


def build_rows(settings: Settings, teacher: Teacher, num_images: int, folder: Path) -> ImageState:
    """The images' rows at their start, in memory or, beyond the budget, in files in ``folder``."""
    rows = settings.phase_a.rows
    in_files = per_image_in_files(rows, num_images, math.prod(teacher.row_shape))
    return ImageState(num_images, torch.zeros(teacher.row_shape), lr=rows.lr, betas=rows.betas, eps=rows.eps,
                      moments_dtype=getattr(torch, rows.moments), folder=folder if in_files else None,
                      initial_std=rows.initial_std, seed=settings.seed)


def load(run: RunDirectory) -> PhaseA:
    """The finished teacher of a run, in eval mode. Raises UserError if phase A has not finished."""
    job = build(run.settings(), run.phase_a)
    state = training_state(job, steps_per_epoch=100)
    if not state.load(run.phase_a / "checkpoint") or not state.finished:
        raise UserError(f"{run.path}: phase A has not finished; 'gaupipe phase-a {run.config} --run-dir {run.path} "
                        "--resume' does that")
    job.teacher = state.kept.eval()
    return job


def run(settings: Settings, run_dir: Path, resume: bool = False, force: bool = False) -> list[dict[str, Any]]:
    """Trains the teacher in ``run_dir`` and returns its metrics, one dict per epoch.

    ``resume`` continues from the last checkpoint, or starts where there is none. Without it a folder that holds a
    phase A is refused, and so is a job that memory or disk cannot hold, unless ``force``. Raises UserError before
    anything is written.
    """
    from stages import phase_b  # it imports this module
    run = RunDirectory(run_dir)
    check_free(run, settings, resume)
    data = datasets.load(settings.data)
    phase_b.check(settings, data)
    job = build(settings, run.phase_a, data)
    if not force:
        check_resources(make_plan(settings, sizes_of(job.teacher, job.data)), run_dir)
    batches = Batches(job.data.train, job.data, settings.data.batch_size, settings.data.workers)
    state = training_state(job, batches.steps())
    with run.locked():
        check_free(run, settings, resume)
        run.start(settings)
        job.data.write_split(run_dir / "split.json")
        state.load(run.phase_a / "checkpoint")
        train(job, batches, state, run.phase_a)
        if not run.teacher_sha256.is_file():  # a finished teacher does not change, and its rows can be many
            write_whole(run.teacher_sha256, teacher_sha256(replace(job, teacher=state.kept)) + "\n")
    return state.metrics


def check_free(run: RunDirectory, settings: Settings, resume: bool) -> None:
    """Raises UserError if the folder holds another run, or a phase A that is not to be continued."""
    run.check(settings)
    if not resume and run.phase_a.exists():
        raise UserError(f"{run.path} already holds a phase A: --resume continues it, another --run-dir starts afresh")


def teacher_sha256(job: PhaseA) -> str:
    """A digest of the teacher's weights and rows."""
    digest = hashlib.sha256()
    for name, tensor in sorted(job.teacher.state_dict().items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensor.cpu().numpy()))
    for rows in job.rows.chunks() if job.rows else ():
        digest.update(np.ascontiguousarray(rows.numpy()))
    return digest.hexdigest()


def train(job: PhaseA, batches: Batches, state: TrainingState, folder: Path) -> None:
    """Epochs until the window is reached or ``max_epochs`` are done, a checkpoint after each."""
    phase, seed = job.settings.phase_a, job.settings.seed
    log = MetricsLog(folder / "metrics.jsonl", state.metrics)
    evaluation = Batches(job.data.train, job.data, job.settings.data.eval_batch_size, job.settings.data.workers)
    validation = Batches(job.data.val, job.data, job.settings.data.eval_batch_size, job.settings.data.workers)
    generator = torch.Generator(job.device)

    forward = torch.compile(job.teacher) if job.settings.compile else job.teacher

    augment = Augment(phase.augment, seed)

    def step(images: Tensor, labels: Tensor, image_ids: Tensor, geometry: Geometry | None):
        rows = job.rows.gather(image_ids, job.device) if job.rows else None
        noise = job.teacher.noise(images, generator) if phase.mode == "stochastic" else None
        gaussians = move(job.teacher.gaussians(rows), geometry, job.teacher.grid)
        logits = forward(images, gaussians, noise)
        return {"loss": cross_entropy(logits, labels)}, rows

    with EpochProgress("phase A", len(job.data.train), phase.max_epochs, len(state.metrics)) as progress:
        while not state.finished:
            epoch = len(state.metrics)
            started = time.monotonic()
            generator.manual_seed(seed * 1_000_003 + epoch)
            losses = train_epoch(state, batches, job.device, augment, progress, step)
            if job.rows:
                job.rows.end_epoch()
            seconds = time.monotonic() - started
            kept = replace(job, teacher=state.kept)
            train_acc = score_teacher(kept, evaluation, seen=True)["acc"]
            val_acc = score_teacher(kept, validation, seen=False)["acc"] if phase.prior else None
            log.append({"epoch": epoch + 1, "train_loss": losses["loss"], "train_acc": train_acc, "val_acc": val_acc,
                        "seconds": round(seconds, 3), "images_per_s": round(len(job.data.train) / seconds, 1)})
            state.finished = train_acc >= phase.stop_accuracy or epoch + 1 == phase.max_epochs
            save_snapshot(folder, epoch + 1, job.settings, job.data, lambda _images, ids: list(
                expected_map(kept.gaussians(ids, len(ids)), job.teacher.grid).unbind(1)))
            state.save(folder / "checkpoint")
            if state.finished and job.rows:
                job.rows.release()
            unseen = f", unseen {val_acc:.4f}" if val_acc is not None else ""
            progress.line(f"phase A epoch {epoch + 1}/{phase.max_epochs}: loss {losses['loss']:.4f}, "
                          f"train acc {train_acc:.4f}{unseen}, {seconds:.1f} s")
    log_end(progress, phase, state)


def log_end(progress: EpochProgress, phase: Any, state: TrainingState) -> None:
    """Says where the training accuracy ended when it is not in the window."""
    accuracy = state.metrics[-1]["train_acc"]
    if accuracy < phase.stop_accuracy:
        progress.line(f"phase A: {phase.max_epochs} epochs were not enough for a training accuracy of "
                      f"{phase.stop_accuracy}: {accuracy:.4f}; raise phase_a.max_epochs or phase_a.rows.lr")
    elif accuracy > max(phase.upper_accuracy, phase.stop_accuracy):
        progress.line(f"phase A: the training accuracy {accuracy:.4f} is above the window's upper bound "
                      f"{phase.upper_accuracy}: the teacher has begun to memorise; lower phase_a.rows.lr")


@torch.no_grad()
def score_teacher(job: PhaseA, batches: Batches, seen: bool) -> dict[str, float]:
    """Accuracy and loss of the teacher: with the images' own rows, or (unseen images) with the shared prior alone.

    One sampled pass in ``stochastic`` mode.
    """
    job.teacher.eval()
    generator = torch.Generator(job.device).manual_seed(job.settings.seed)
    mode = job.settings.phase_a.mode
    return score((predict(job.teacher, images, job.gaussians(ids if seen else None, len(images)), mode,
                          generator=generator), labels) for images, labels, ids in batches.epoch(job.device))


def training_state(job: PhaseA, steps_per_epoch: int) -> TrainingState:
    """The optimizers of network and rows, freshly started."""
    phase, teacher = job.settings.phase_a, job.teacher
    groups = []
    if phase.prior:
        groups.append({"params": [teacher.prior], "lr": phase.prior_lr, "weight_decay": 0.0})
    if teacher.decoder:
        groups.append({"params": list(teacher.decoder.parameters()), "lr": phase.optim.lr,
                       "weight_decay": phase.optim.weight_decay})
    optimizer, schedule = build_optimizer(teacher.vit, phase.optim, phase.max_epochs, steps_per_epoch, groups)
    return TrainingState(teacher, optimizer, schedule, phase.optim, job.settings.precision, job.rows,
                         identity=identity(job))


def identity(job: PhaseA) -> dict[str, Any]:
    """What a checkpoint of phase A belongs to: every setting that phase A reads, and the data set."""
    settings = {name: value for name, value in flatten(job.settings).items()
                if not allowed(name, ("phase_b.", "baseline.", *IRRELEVANT))}
    return settings | {"the data set": job.data.sha256}
