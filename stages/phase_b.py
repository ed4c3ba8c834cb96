"""Phase B: an ordinary ViT learns from the labels, the teacher's predictions and the stored attention maps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import store
import torch
from torch import Tensor, nn

from gaupipe import data as datasets
from gaupipe.config import OptimSettings, Settings
from gaupipe.data import Batches, ImageData
from gaupipe.errors import UserError
from gaupipe.gaussians import expected_map
from gaupipe.losses import feature_losses, gamma_at, hard_loss, soft_loss
from gaupipe.models import forward_with_maps, save_student
from gaupipe.progress import EpochProgress, MetricsLog
from gaupipe.training import TrainingState, build_optimizer, build_vit, score_model, select_device, train_epoch
from stages.run_directory import RunDirectory


@dataclass
class PhaseB:
    """A student on its data; ``maps`` is None for plain training on the labels alone."""

    settings: Settings
    data: ImageData
    device: torch.device
    student: nn.Module
    optim: OptimSettings
    maps: store.Store | None


def build(settings: Settings, key: str, maps_url: str | None) -> PhaseB:
    """Everything phase B needs, freshly started; plain training where ``maps_url`` is None. Writes nothing."""
    device = select_device(settings)
    data = datasets.load(settings.data)
    student = build_student(settings, key, data).to(device)
    if maps_url is None:
        return PhaseB(settings, data, device, student, settings.baseline.optim or settings.phase_b.optim, None)
    maps = store.open(maps_url, dataset_sha256=data.sha256)
    check_fit(student, maps)
    return PhaseB(settings, data, device, student, settings.phase_b.optim, maps)


def build_student(settings: Settings, key: str, data: ImageData) -> nn.Module:
    """The student with the weights that the seed starts it with, on the CPU."""
    torch.manual_seed(settings.seed)
    return build_vit(settings.model, data, key, attention_options=settings.phase_b.attention_options)


def check_fit(student: nn.Module, maps: store.Store) -> None:
    """Raises UserError if the stored maps are not of the student's grid, blocks and heads."""
    own = {"grid": tuple(student.patch_embed.grid_size), "layers": len(student.blocks),
           "heads": student.blocks[0].attn.num_heads}
    for name, size in own.items():
        stored = getattr(maps.schema, name)
        stored = tuple(stored) if name == "grid" else stored
        if stored != size:
            raise UserError(f"{maps.url}: the store holds maps with {name} {stored}, the student has {size}: "
                            "use the model that phase A used")


def run(run_dir: Path, key: str | None = None, maps_url: str | None = None, resume: bool = False,
        distilled: bool = True) -> list[dict[str, Any]]:
    """Trains a student in ``run_dir`` and returns its metrics, one dict per epoch.

    ``distilled=False`` trains the same model on the labels alone. ``resume`` continues from the last checkpoint, or
    starts where there is none; without it a student that is there is refused. Raises UserError before anything is
    written.
    """
    run = RunDirectory(run_dir)
    settings = run.settings()
    key = key or settings.phase_b.student
    folder = run.student(key, distilled)
    if not resume and folder.exists():
        raise UserError(f"{folder} already exists: --resume continues it, another --run-dir starts afresh")
    job = build(settings, key, (maps_url or str(run.maps)) if distilled else None)
    batches = Batches(job.data.train, job.data, settings.data.batch_size, settings.data.workers)
    optimizer, schedule = build_optimizer(job.student, job.optim, settings.phase_b.epochs, batches.steps())
    state = TrainingState(job.student, optimizer)
    state.load(folder / "checkpoint")
    train(job, batches, state, schedule, folder)
    save_student(job.student, folder / "student", mean=job.data.mean, std=job.data.std)
    return state.metrics


def train(job: PhaseB, batches: Batches, state: TrainingState, schedule: Any, folder: Path) -> None:
    """All epochs that are not done yet, a checkpoint after each."""
    phase, seed = job.settings.phase_b, job.settings.seed
    label = folder.name if job.maps else f"{folder.name} (plain)"
    log = MetricsLog(folder / "metrics.jsonl", state.metrics)
    validation = Batches(job.data.val, job.data, job.settings.data.eval_batch_size, job.settings.data.workers)
    with EpochProgress(label, len(job.data.train), phase.epochs, len(state.metrics)) as progress:
        while not state.finished:
            epoch = len(state.metrics)
            started = time.monotonic()
            gamma = gamma_at(epoch, phase.gamma, phase.gamma_schedule, phase.gamma_epochs or phase.epochs)
            step = distillation_step(job, gamma, batches.shuffled((seed, epoch))) if job.maps else plain_step(job)
            losses = train_epoch(job.student, batches, job.device, state.optimizer, schedule, seed, epoch,
                                 job.optim.clip_grad, progress, step)
            seconds = time.monotonic() - started
            scores = score_model(job.student, validation, job.device)
            log.append({"epoch": epoch + 1, "train_loss": losses["loss"], "train_acc": losses["acc"],
                        "val_acc": scores["acc"], "val_loss": scores["loss"], "seconds": round(seconds, 3),
                        "images_per_s": round(len(job.data.train) / seconds, 1),
                        **{name: losses.get(name) for name in ("loss_soft", "loss_hard", "loss_feat")},
                        "gamma": gamma if job.maps else 0.0})
            state.finished = epoch + 1 == phase.epochs
            state.save(folder / "checkpoint")
            progress.line(f"{label} epoch {epoch + 1}/{phase.epochs}: loss {losses['loss']:.4f}, "
                          f"validation accuracy {scores['acc']:.4f}, {seconds:.1f} s")


def plain_step(job: PhaseB):
    """A step on the labels alone."""
    def step(images: Tensor, labels: Tensor, image_ids: Tensor):
        logits = job.student(images)
        loss = hard_loss(logits, labels)
        return {"loss": loss, "loss_hard": loss, "acc": accuracy(logits, labels)}, None
    return step


def distillation_step(job: PhaseB, gamma: float, order: Iterator[np.ndarray]):
    """A step on L = alpha L_soft + beta L_hard + gamma L_feat (*GauTransformer, eq. 11*).

    ``order`` holds the image ids of the epoch's batches, so that the store can read ahead.
    """
    phase, schema = job.settings.phase_b, job.maps.schema
    targets = job.maps.prefetch(order)

    def step(images: Tensor, labels: Tensor, image_ids: Tensor):
        stored = next(targets)
        losses = {}
        if gamma:
            logits, rows = forward_with_maps(job.student, images)
            teacher_maps = stored_maps(stored, schema, job.device)
            losses["loss_feat"] = feature_losses(rows, teacher_maps, phase.temperature, phase.direction)
        else:
            logits = job.student(images)
        losses["loss_soft"] = soft_loss(logits, torch.from_numpy(stored["logits"]).to(job.device))
        losses["loss_hard"] = hard_loss(logits, labels)
        losses["loss"] = (phase.alpha * losses["loss_soft"] + phase.beta * losses["loss_hard"]
                          + gamma * losses.get("loss_feat", 0.0))
        return {**losses, "acc": accuracy(logits, labels)}, None

    return step


def stored_maps(stored: dict[str, np.ndarray], schema: store.Schema, device: torch.device) -> Iterator[Tensor]:
    """The teacher's maps of a batch, block by block: [B, H, T, T] float32."""
    name = "gaussians" if schema.kind == "gaussian" else "maps"
    values = torch.from_numpy(stored[name]).to(device)
    for layer in range(schema.layers):
        own = values[:, layer].float()
        yield expected_map(own, schema.grid) if schema.kind == "gaussian" else own


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the batch whose largest logit is its label."""
    return (logits.argmax(-1) == labels).float().mean()
