"""Phase B: an ordinary ViT learns from the labels, the teacher's predictions and the stored attention maps."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import store
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from gaupipe import STUDENTS, config
from gaupipe import data as datasets
from gaupipe.augment import Augment, Mix, mix, mixed_targets
from gaupipe.config import IRRELEVANT, OptimSettings, Settings, flatten
from gaupipe.data import Batches, ImageData
from gaupipe.distillation import TeacherMaps, forward_with_feature_loss
from gaupipe.errors import UserError
from gaupipe.gaussians import Geometry, expected_map
from gaupipe.losses import gamma_at, hard_loss, soft_loss
from gaupipe.models import save_student
from gaupipe.progress import EpochProgress, MetricsLog
from gaupipe.teacher import Teacher
from gaupipe.training import (TrainingState, build_optimizer, build_vit, has_checkpoint, score_model, select_device, train_epoch)
from gaupipe.warm_start import fit_queries_and_keys, warm_start
from stages import phase_a
from stages.export_maps import default_kind, gaussians_reader, make_schema
from stages.key_attention import save_snapshot, student_attention
from stages.run_directory import RunDirectory, check_name, locked, write_whole


WARM_START_IMAGES = 256
"""Training images, evenly spaced, on which Q and K are fitted to the prior."""


@dataclass
class PhaseB:
    """A student on its data; ``maps`` is None for plain training on the labels alone."""

    settings: Settings
    data: ImageData
    device: torch.device
    student: nn.Module
    optim: OptimSettings
    maps: store.Store | None

    def teacher_maps(self, stored: dict[str, np.ndarray], geometry: Geometry | None = None, mixed: Mix | None = None
                     ) -> TeacherMaps:
        """The teacher's attention of a batch read from the store, on the device, moved and mixed as its images were."""
        schema, phase = self.maps.schema, self.settings.phase_b
        dense = schema.kind == "dense"
        values = torch.from_numpy(stored["maps"]).to(self.device) if dense else self.read_gaussians(stored)
        grid = tuple(self.student.patch_embed.grid_size)
        return TeacherMaps(values, schema.grid, phase.layer_map or list(range(schema.layers)), phase.mean_heads,
                           grid if grid != schema.grid else None, dense, geometry, mixed)

    @cached_property
    def read_gaussians(self) -> Callable[[dict[str, np.ndarray]], Tensor]:
        """What makes Gaussians [B, L, H, T, 4] of rows read from the store."""
        return gaussians_reader(self.maps, self.device)


def build(settings: Settings, maps_url: str | None, teacher_sha256: str | None = None) -> PhaseB:
    """Everything phase B needs, freshly started; plain training where ``maps_url`` is None. Writes nothing.

    Raises UserError for settings that do not fit, StoreError for maps of another data set or teacher."""
    device = select_device(settings)
    data = datasets.load(settings.data)
    student = build_student(settings, data).to(device)
    if maps_url is None:
        return PhaseB(settings, data, device, student, settings.baseline.optim or settings.phase_b.optim, None)
    maps = store.open(maps_url, dataset_sha256=data.sha256, teacher_sha256=teacher_sha256,
                      preload_bytes=int(settings.phase_b.preload_gb * 1e9))
    check_fit(student, maps.schema, settings, maps_url)
    return PhaseB(settings, data, device, student, settings.phase_b.optim, maps)


def build_student(settings: Settings, data: ImageData, device: str | None = None) -> nn.Module:
    """The student with the weights that the seed starts it with, on the CPU; without any on the ``device`` "meta"."""
    phase = settings.phase_b
    torch.manual_seed(settings.seed)
    model = settings.model.model_copy(update={"args": {**settings.model.args, **phase.model_args}})
    return build_vit(model, data, phase.student, device, attention_options=phase.attention_options,
                     match_params=phase.match_params, rezero=phase.rezero)


def check_fit(student: nn.Module, schema: Any, settings: Settings, where: str) -> None:
    """Raises UserError if maps with the ``grid``, ``layers``, ``heads`` and ``kind`` of ``schema`` cannot be compared with
    the student's as the settings say. ``where`` names the store."""
    phase = settings.phase_b
    depth, heads = len(student.blocks), student.blocks[0].attn.num_heads
    grid = tuple(student.patch_embed.grid_size)
    if phase.layer_map is None and depth != schema.layers:
        raise UserError(f"{where}: the store holds maps with layers {schema.layers}, the student has {depth}: use the "
                        "model of phase A, or name the stored block for each of the student's in phase_b.layer_map")
    if phase.layer_map is not None and (
            len(phase.layer_map) != depth or any(layer is not None and layer >= schema.layers for layer in phase.layer_map)):
        raise UserError(f"phase_b.layer_map: should have {depth} entries, each null or 0 to {schema.layers - 1}, got "
                        f"{phase.layer_map}")
    if schema.kind == "dense" and phase.augment.geometry == "follow" and (
            phase.augment.flip or phase.augment.crop_padding or phase.augment.resized_crop):
        raise UserError("phase_b.augment: dense maps cannot move with a cropped or mirrored image: export a gaussian store, "
                        "or set phase_b.augment.geometry=ignore")
    if phase.layer_weights is not None and len(phase.layer_weights) != depth:
        raise UserError(f"phase_b.layer_weights: should have {depth} entries, got {len(phase.layer_weights)}")
    if phase.gamma and not any((weight and layer is not None) for weight, layer in zip(
            phase.layer_weights or [1.0] * depth, phase.layer_map or range(depth))):
        raise UserError("phase_b.layer_map and layer_weights leave no block to compare: set phase_b.gamma=0 for that")
    if not phase.mean_heads and heads != schema.heads:
        raise UserError(f"{where}: the store holds maps with heads {schema.heads}, the student has {heads}: use the "
                        "model of phase A, or set phase_b.mean_heads=true")
    if grid != schema.grid and (not phase.match_grid or schema.kind == "dense"):
        raise UserError(f"{where}: the store holds {schema.kind} maps with grid {schema.grid}, the student has {grid}: "
                        "use the model of phase A, or a gaussian store and phase_b.match_grid=true")


def check(settings: Settings, data: ImageData, kind: str | None = None, encoding: str = "float16") -> None:
    """Raises UserError (StoreError for a kind and encoding that do not go together) now for what phase B could not do
    after hours of phase A."""
    student, teacher = build_student(settings, data, "meta"), phase_a.build_teacher(settings, data)
    job = phase_a.PhaseA(settings, data, torch.device("cpu"), teacher, None)
    phase_a.training_state(job, steps_per_epoch=100)
    kind = kind or default_kind(settings, encoding)
    check_fit(student, make_schema(job, kind, encoding, "0" * 64), settings, "maps.zarr")
    if settings.phase_b.warm_start != "none":
        warm_start(student, teacher.vit.state_dict())
    build_optimizer(student, settings.phase_b.optim, settings.phase_b.epochs, steps_per_epoch=100)


def check_plain(settings: Settings, data: ImageData) -> None:
    """Raises UserError for what training on the labels alone could not do."""
    student = build_student(settings, data, "meta")
    build_optimizer(student, settings.baseline.optim or settings.phase_b.optim, settings.phase_b.epochs, steps_per_epoch=100)


def run(run_dir: Path, student: str | None = None, *, name: str | None = None, overrides: Sequence[str] = (),
        maps_url: str | None = None, resume: bool = False, distilled: bool = True) -> list[dict[str, Any]]:
    """Trains a student in ``run_dir`` and returns its metrics, one dict per epoch.

    student     its attention; None is the settings' ``phase_b.student``
    name        of its folder; None is its attention
    overrides   settings ``a.b=c`` in which it differs from the run; only some may (:data:`config.IN_PHASE_B`)
    maps_url    the attention-map store; None is the run's own
    resume      continues from the last checkpoint, or starts where there is none; without it a student that is there is
                refused
    distilled   False trains the same model on the labels alone

    Raises UserError before anything is written.
    """
    run = RunDirectory(run_dir)
    if maps_url and not distilled:
        raise UserError("--maps: training on the labels alone (--no-distill) reads no maps: leave one of the two out")
    settings = run.settings()
    if name is None:
        name = student or settings.phase_b.student
    check_name(name)
    recorded = run.overrides(name, distilled)
    settings = run.with_overrides([*recorded, *overrides, *([f"phase_b.student={student}"] if student else [])])
    student = settings.phase_b.student
    if name in STUDENTS and name != student:
        raise UserError(f"--name {name}: is the name of an attention, and this student's is {student}: choose another name")
    folder = run.student(name, distilled)
    if not resume and folder.exists():
        raise UserError(f"{folder} already exists: --resume continues it, --name NAME trains another student beside it")
    overrides = [*recorded, *(entry for entry in (*overrides, f"phase_b.student={student}") if entry not in recorded)]
    return train_student(settings, folder, run if distilled else None, maps_url, lock=run, overrides=overrides)


def train_student(settings: Settings, folder: Path, teacher: RunDirectory | None, maps_url: str | None = None,
                  lock: RunDirectory | None = None, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Trains a student into ``folder``, or goes on with the one that is there, and returns its metrics.

    ``teacher`` is the run whose phase A it learns from, None for the labels alone; ``maps_url`` its store, null for the
    run's own, which must then be of that teacher. ``lock`` is the run that must not change meanwhile, ``overrides``
    in what the settings differ from that run's.
    """
    url = (maps_url or str(teacher.maps)) if teacher else None
    own = (teacher.teacher_sha256.read_text().strip()
           if teacher and maps_url is None and teacher.teacher_sha256.is_file() else None)
    with contextlib.ExitStack() as locks:
        if lock:
            locks.enter_context(lock.locked(shared=True))
        job = build(settings, url, own)
        batches = Batches(job.data.train, job.data, settings.data.batch_size, settings.data.workers)
        optimizer, schedule = build_optimizer(job.student, job.optim, settings.phase_b.epochs, batches.steps())
        identity = {name: value for name, value in flatten(settings).items() if name not in IRRELEVANT}
        identity |= {"the data set": job.data.sha256,
                     "the teacher of the maps": job.maps and job.maps.schema.teacher_sha256,
                     "the kind of store": job.maps and job.maps.schema.kind}
        if teacher and settings.phase_b.warm_start != "none" and not has_checkpoint(folder / "checkpoint"):
            start_from_teacher(job, phase_a.load(teacher).teacher)
        state = TrainingState(job.student, optimizer, schedule, job.optim, settings.precision, identity=identity)
        locks.enter_context(locked(folder, "student"))
        state.load(folder / "checkpoint")
        write_whole(folder / "config.yaml", config.dump(settings))
        write_whole(folder / "overrides.json", json.dumps(list(overrides)) + "\n")
        train(job, batches, state, folder)
        save_student(state.kept, folder / "student", mean=job.data.mean, std=job.data.std)
    return state.metrics


def start_from_teacher(job: PhaseB, teacher: Teacher) -> None:
    """The warm start that the settings ask for."""
    phase, student = job.settings.phase_b, job.student
    warm_start(student, teacher.vit.state_dict())
    if phase.warm_start == "prior":
        with torch.no_grad():
            prior = expected_map(teacher.gaussians(None), teacher.grid)                # [1, L, H, T, T]
        if phase.mean_heads:
            prior = prior.mean(2, keepdim=True)
        layers = phase.layer_map or range(len(student.blocks))
        ids = job.data.train.evenly_spaced(WARM_START_IMAGES)
        batches = Batches(job.data.train, job.data, job.settings.data.batch_size, workers=0)
        images = torch.cat([images for images, _, _ in batches.epoch(job.device, image_ids=ids)])
        fit_queries_and_keys(student, [None if layer is None else prior[:, layer] for layer in layers], images,
                             job.settings.seed)


def train(job: PhaseB, batches: Batches, state: TrainingState, folder: Path) -> None:
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
            step = (distillation_step(job, epoch, gamma, batches.shuffled((seed, epoch))) if job.maps
                    else plain_step(job, epoch))
            losses = train_epoch(state, batches, job.device, Augment(phase.augment, seed), progress, step)
            seconds = time.monotonic() - started
            scores = score_model(state.kept, validation, job.device)
            log.append({"epoch": epoch + 1, "train_loss": losses["loss"], "train_acc": losses["acc"],
                        "val_acc": scores["acc"], "val_loss": scores["loss"], "seconds": round(seconds, 3),
                        "images_per_s": round(len(job.data.train) / seconds, 1),
                        **{name: losses.get(name) for name in ("loss_soft", "loss_hard", "loss_feat")},
                        "gamma": gamma if job.maps else 0.0})
            state.finished = epoch + 1 == phase.epochs
            attention = student_attention(state.kept, job.device)
            save_snapshot(folder, epoch + 1, job.settings, job.data, attention)
            state.save(folder / "checkpoint")
            progress.line(f"{label} epoch {epoch + 1}/{phase.epochs}: loss {losses['loss']:.4f}, "
                          f"validation acc {scores['acc']:.4f}, {seconds:.1f} s")


def plain_step(job: PhaseB, epoch: int):
    """A step on the labels alone."""
    phase = job.settings.phase_b
    forward = torch.compile(job.student) if job.settings.compile else job.student

    def step(images: Tensor, labels: Tensor, image_ids: Tensor, geometry: Geometry | None):
        images, mixed = mix(images, image_ids, job.settings.seed, epoch, phase.augment)
        logits = forward(images).float()
        loss = hard_loss(logits, label_targets(labels, mixed, logits), phase.label_smoothing)
        return {"loss": loss, "loss_hard": loss, "acc": accuracy(logits, labels)}, None

    return step


def distillation_step(job: PhaseB, epoch: int, gamma: float, order: list[np.ndarray]):
    """A step on L = alpha L_soft + beta L_hard + gamma L_feat (*GauTransformer, eq. 11*).

    ``order`` holds the image ids of the epoch's batches, so that the store can read ahead.
    """
    phase = job.settings.phase_b
    targets = job.maps.prefetch(order)
    others = np.random.default_rng(job.settings.seed).permutation(len(job.maps)) if phase.shuffle_maps else None
    compiled = torch.compile if job.settings.compile else (lambda function: function)
    forward, forward_with_loss = compiled(job.student), compiled(forward_with_feature_loss)

    def step(images: Tensor, labels: Tensor, image_ids: Tensor, geometry: Geometry | None):
        stored = next(targets)
        images, mixed = mix(images, image_ids, job.settings.seed, epoch, phase.augment)
        losses = {}
        if gamma:
            maps = stored if others is None else job.maps.gather(others[image_ids.numpy()])
            logits, losses["loss_feat"] = forward_with_loss(
                job.student, images, job.teacher_maps(maps, geometry, mixed), phase.layer_weights, phase.temperature,
                phase.direction)
        else:
            logits = forward(images)
        logits = logits.float()
        teacher = torch.from_numpy(stored["logits"]).to(job.device).float().softmax(-1)
        losses["loss_soft"] = soft_loss(logits, mixed_targets(teacher, mixed))
        losses["loss_hard"] = hard_loss(logits, label_targets(labels, mixed, logits), phase.label_smoothing)
        losses["loss"] = (phase.alpha * losses["loss_soft"] + phase.beta * losses["loss_hard"]
                          + gamma * losses.get("loss_feat", 0.0))
        return {**losses, "acc": accuracy(logits, labels)}, None

    return step


def label_targets(labels: Tensor, mixed: Mix | None, logits: Tensor) -> Tensor:
    """Labels [B], or for a mixed batch the probabilities [B, C] that their mix stands for."""
    return labels if mixed is None else mixed_targets(one_hot(labels, logits.shape[-1]).to(logits.dtype), mixed)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the batch whose largest logit is its label."""
    return (logits.argmax(-1) == labels).float().mean()
