"""Phase A: train the teacher, a ViT with GauAttention, until its training accuracy enters the window."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gaupipe import data as datasets
from gaupipe.config import Settings
from gaupipe.data import Batches, ImageData
from gaupipe.errors import UserError
from gaupipe.image_state import ImageState
from gaupipe.progress import EpochProgress, MetricsLog
from gaupipe.teacher import Teacher, predict
from gaupipe.training import TrainingState, build_optimizer, build_vit, score, select_device, train_epoch
from stages.run_directory import RunDirectory


@dataclass
class PhaseA:
    """A teacher with its rows on its data; ``rows`` is None for a teacher that is the shared prior alone."""

    settings: Settings
    data: ImageData
    device: torch.device
    teacher: Teacher
    rows: ImageState | None

    def gaussians(self, image_ids: Tensor) -> Tensor:
        """Gaussians [B, L, H, T, 4] of training images, on the device, without a gradient."""
        with torch.no_grad():
            rows = self.rows.gather(image_ids, self.device) if self.rows else None
            gaussians = self.teacher.gaussians(rows)
            return gaussians.expand(len(image_ids), *gaussians.shape[1:])


def build(settings: Settings) -> PhaseA:
    """Everything phase A needs, freshly started. Writes nothing; raises UserError for what is wrong."""
    device = select_device(settings)
    data = datasets.load(settings.data)
    phase = settings.phase_a
    torch.manual_seed(settings.seed)
    teacher = Teacher(build_vit(settings.model, data, "gaussian"), phase.parametrisation, phase.prior).to(device)
    rows = ImageState(len(data.train), teacher.initial_row(), lr=phase.rows.lr, betas=phase.rows.betas,
                      eps=phase.rows.eps) if phase.residual else None
    return PhaseA(settings, data, device, teacher, rows)


def load(run: RunDirectory) -> PhaseA:
    """The finished teacher of a run, in eval mode. Raises UserError if phase A has not finished."""
    job = build(run.settings())
    state = _state(job, steps_per_epoch=1)[0]
    if not state.load(run.phase_a / "checkpoint") or not state.finished:
        raise UserError(f"{run.path}: phase A has not finished; 'gaupipe phase-a {run.config} --run-dir {run.path} "
                        "--resume' does that")
    job.teacher.eval()
    return job


def run(settings: Settings, run_dir: Path, resume: bool = False) -> list[dict[str, Any]]:
    """Trains the teacher in ``run_dir`` and returns its metrics, one dict per epoch.

    ``resume`` continues from the last checkpoint, or starts where there is none. Without it a folder that holds a
    phase A is refused. Raises UserError before anything is written.
    """
    run = RunDirectory(run_dir)
    run.check(settings)
    if not resume and run.phase_a.exists():
        raise UserError(f"{run_dir} already holds a phase A: --resume continues it, another --run-dir starts afresh")
    job = build(settings)
    batches = Batches(job.data.train, job.data, settings.data.batch_size, settings.data.workers)
    state, schedule = _state(job, batches.steps())
    run.start(settings)
    job.data.write_split(run_dir / "split.json")
    state.load(run.phase_a / "checkpoint")
    train(job, batches, state, schedule, run.phase_a)
    return state.metrics


def train(job: PhaseA, batches: Batches, state: TrainingState, schedule: Any, folder: Path) -> None:
    """Epochs until the window is reached or ``max_epochs`` are done, a checkpoint after each."""
    phase, seed = job.settings.phase_a, job.settings.seed
    log = MetricsLog(folder / "metrics.jsonl", state.metrics)
    evaluation = Batches(job.data.train, job.data, job.settings.data.eval_batch_size, job.settings.data.workers)
    validation = Batches(job.data.val, job.data, job.settings.data.eval_batch_size, job.settings.data.workers)
    generator = torch.Generator(job.device)

    def step(images: Tensor, labels: Tensor, image_ids: Tensor):
        rows = job.rows.gather(image_ids, job.device) if job.rows else None
        logits = job.teacher(images, job.teacher.gaussians(rows), phase.mode, generator)
        loss = cross_entropy(logits, labels)
        # a row's gradient is that of its own image's loss, whatever the size of the batch
        return {"loss": loss}, (lambda: job.rows.update(image_ids, rows.grad * len(image_ids))) if job.rows else None

    with EpochProgress("phase A", len(job.data.train), phase.max_epochs, len(state.metrics)) as progress:
        while not state.finished:
            epoch = len(state.metrics)
            started = time.monotonic()
            generator.manual_seed(seed * 1_000_003 + epoch)
            losses = train_epoch(job.teacher, batches, job.device, state.optimizer, schedule, seed, epoch,
                                 phase.optim.clip_grad, progress, step)
            seconds = time.monotonic() - started
            train_acc = score_teacher(job, evaluation, seen=True)["acc"]
            val_acc = score_teacher(job, validation, seen=False)["acc"] if phase.prior else None
            log.append({"epoch": epoch + 1, "train_loss": losses["loss"], "train_acc": train_acc, "val_acc": val_acc,
                        "seconds": round(seconds, 3), "images_per_s": round(len(job.data.train) / seconds, 1)})
            state.finished = train_acc >= phase.stop_accuracy or epoch + 1 == phase.max_epochs
            state.save(folder / "checkpoint")
            unseen = f", unseen {val_acc:.4f} (prior alone)" if val_acc is not None else ""
            progress.line(f"phase A epoch {epoch + 1}/{phase.max_epochs}: loss {losses['loss']:.4f}, "
                          f"train accuracy {train_acc:.4f}{unseen}, {seconds:.1f} s")
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
    return score((predict(job.teacher, images, job.gaussians(ids) if seen else job.teacher.gaussians(None), mode,
                          generator=generator), labels) for images, labels, ids in batches.epoch(job.device))


def _state(job: PhaseA, steps_per_epoch: int) -> tuple[TrainingState, Any]:
    phase = job.settings.phase_a
    prior = [{"params": [job.teacher.prior], "lr": phase.prior_lr, "weight_decay": 0.0}] if phase.prior else []
    optimizer, schedule = build_optimizer(job.teacher.vit, phase.optim, phase.max_epochs, steps_per_epoch, prior)
    return TrainingState(job.teacher, optimizer, job.rows), schedule
