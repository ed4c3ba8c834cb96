"""Phase A: train the teacher, a ViT with GauAttention, until its training accuracy enters the
window.

Axis letters: B images, L blocks, H heads, T tokens, P raw numbers of a Gaussian, C classes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gaupipe.augment import Augment
from gaupipe.building import build_optimizer, build_vit, select_device
from gaupipe.config import IRRELEVANT, PhaseASettings, Settings, flatten
from gaupipe.data import Batch, Batches, ImageData, load_data
from gaupipe.errors import UserError
from gaupipe.gaussians import expected_map, move
from gaupipe.image_state import ImageState
from gaupipe.progress import EpochProgress
from gaupipe.stored_maps import GaussianAttention, check_export, chosen
from gaupipe.student import MapShape, check_student
from gaupipe.teacher import Teacher, predict
from gaupipe.training import TrainingState, Update, epochs, score
from stages import trained_teacher
from stages.key_attention import save_snapshot
from stages.resources import check_resources, make_plan, per_image_in_files, sizes_of
from stages.run_directory import RunDirectory, allowed, write_whole
from stages.teacher_job import TeacherJob


@dataclass
class PhaseA(TeacherJob):
    """A teacher on its data; ``per_image`` is None for a teacher that is the shared prior alone."""

    teacher: Teacher
    per_image: ImageState | None

    @property
    def has_parameters_of_images(self) -> bool:
        return self.settings.phase_a.per_image

    @torch.no_grad()
    def gaussians(self, image_ids: Tensor | None, count: int) -> Tensor:
        """Gaussians [count, L, H, T, 4] of training images, or the shared prior's for None."""
        parameters = None
        if self.per_image is not None and image_ids is not None:
            parameters = self.per_image.gather(image_ids, self.device)
        gaussians = self.teacher.gaussians(parameters)
        return gaussians.expand(count, *gaussians.shape[1:])

    @torch.no_grad()
    def show(self, batch: Batch, generator: torch.Generator) -> tuple[GaussianAttention, Tensor]:
        parameters = None
        if self.per_image is not None:
            parameters = self.per_image.gather(batch.ids, self.device).detach()
        gaussians = self.teacher.gaussians(parameters)  # [B or 1, L, H, T, 4]
        gaussians = gaussians.expand(len(batch), *gaussians.shape[1:])  # [B, L, H, T, 4]
        mode = self.settings.phase_a.mode
        logits = predict(self.teacher, batch.images, gaussians, mode, self.label_passes, generator)
        return GaussianAttention(self.teacher, gaussians, parameters), logits

    @property
    def label_passes(self) -> int:
        """Forward passes behind one stored prediction."""
        phase = self.settings.phase_a
        return phase.label_passes if phase.mode == "stochastic" else 1

    def sha256(self) -> str:
        return teacher_sha256(self)

    def notes(self) -> dict[str, Any]:
        return {
            "mode": self.settings.phase_a.mode,
            "label_passes": self.label_passes,
            "data": self.settings.data.model_dump(mode="json"),
        }


def run(
    settings: Settings,
    run_dir: Path,
    *,
    resume: bool = False,
    force: bool = False,
    data: ImageData | None = None,
) -> list[dict[str, Any]]:
    """Trains the teacher in ``run_dir`` and returns its metrics, one dict per epoch.

    resume   continues from the last checkpoint, or starts where there is none; without it a folder
             that holds a phase A is refused
    force    starts a job that memory or disk do not seem to hold
    data     the data set of the settings, where it has been read already

    Raises UserError before anything is written.
    """
    run = RunDirectory(run_dir)
    run.check_free(settings, resume)
    data = data or load_data(settings.data)
    if not settings.phase_a.learns_gaussians:
        return trained_teacher.run(settings, run, data, resume=resume)
    teacher = build_teacher(settings, data)
    check_student(settings, data, MapShape.of(teacher), teacher.weights())
    check_export(
        chosen(settings), teacher, teacher.grid, settings.phase_a.per_image, prefix="export."
    )
    if not force:  # before any per-image parameter is made
        check_resources(make_plan(settings, sizes_of(teacher, data)), run_dir)
    job = build(settings, run.phase_a, data)
    state = training_state(job)
    with run.locked():
        run.check_free(settings, resume)
        run.start(settings)
        data.write_split(run_dir / "split.json")
        state.load(run.phase_a / "checkpoint")
        train(job, state, run.phase_a)
        if (
            not run.teacher_sha256.is_file()
        ):  # a finished teacher does not change, and it can be large
            digest = teacher_sha256(replace(job, teacher=state.kept))
            write_whole(run.teacher_sha256, digest + "\n")
    return state.metrics


def train(job: PhaseA, state: TrainingState[Teacher], folder: Path) -> None:
    """Epochs until the training accuracy enters the window or ``max_epochs`` are done."""
    settings, phase, data = job.settings, job.settings.phase_a, job.data
    teacher, per_image = job.teacher, job.per_image
    training = job.batches(data.train, settings.data.batch_size)
    evaluation, validation = job.batches(data.train), job.batches(data.val)
    augment = Augment(phase.augment, settings.seed)
    generator = torch.Generator(job.device)
    forward = torch.compile(teacher) if settings.compile else teacher
    update = Update(state, training.steps)
    parameters = noise = None

    done, total = len(state.metrics), phase.max_epochs
    with EpochProgress("phase A", len(data.train), total, done) as progress:
        for epoch in epochs(state, folder, progress, settings.seed):
            generator.manual_seed(settings.seed * 1_000_003 + epoch.number)
            for batch in training.epoch(epoch.number, augment):  # images [B, channels, h, w]
                with update.autocast():
                    if per_image is not None:
                        parameters = per_image.gather(batch.ids, job.device)  # [B, L, H, T, P] leaf
                    gaussians = teacher.gaussians(parameters)  # [B or 1, L, H, T, 4]
                    gaussians = move(gaussians, batch.geometry, teacher.grid)
                    if phase.mode == "stochastic":
                        noise = teacher.noise(batch.images, generator)  # [B, L, H, T, 2]
                    logits = forward(batch.images, gaussians, noise)  # [B, C]
                    loss = cross_entropy(logits, batch.labels)
                update(loss)
                # an image occurs once an epoch, so its parameters step at once
                if per_image is not None and parameters is not None:
                    per_image.update(batch.ids, update.per_image_gradient(parameters))
                epoch.add(len(batch), loss=loss)
            if per_image is not None:
                per_image.end_epoch()
            losses = epoch.means()

            trained = replace(job, teacher=state.kept)
            train_acc = score_teacher(trained, evaluation, seen=True)["acc"]
            val_acc = score_teacher(trained, validation, seen=False)["acc"] if phase.prior else None
            epoch.finish(train_loss=losses["loss"], train_acc=train_acc, val_acc=val_acc)
            state.finished = train_acc >= phase.stop_accuracy or epoch.number + 1 == total
            save_snapshot(folder, epoch.number + 1, settings, data, maps_of(trained))
            unseen = "" if val_acc is None else f", unseen {val_acc:.4f}"
            progress.line(
                f"phase A epoch {epoch.number + 1}/{total}: loss {losses['loss']:.4f}, "
                f"train acc {train_acc:.4f}{unseen}, {epoch.seconds:.1f} s"
            )
        if per_image is not None:
            per_image.release()
        if remark := remark_on_accuracy(phase, state.metrics[-1]["train_acc"]):
            progress.line(f"phase A: {remark}")


def maps_of(job: PhaseA) -> Any:
    """What :func:`save_snapshot` needs of a teacher."""

    def maps(_images: Tensor, image_ids: Tensor) -> list[Tensor]:
        gaussians = job.gaussians(image_ids, len(image_ids))
        return list(expected_map(gaussians, job.teacher.grid).unbind(1))

    return maps


def remark_on_accuracy(phase: PhaseASettings, accuracy: float) -> str | None:
    """What to say of a training accuracy that ended outside the window; None inside it."""
    if accuracy < phase.stop_accuracy:
        return (
            f"{phase.max_epochs} epochs were not enough for a training accuracy of "
            f"{phase.stop_accuracy}: {accuracy:.4f}; raise phase_a.max_epochs or phase_a.rows.lr"
        )
    if accuracy > max(phase.upper_accuracy, phase.stop_accuracy):
        return (
            f"the training accuracy {accuracy:.4f} is above the window's upper bound "
            f"{phase.upper_accuracy}: the teacher has begun to memorise; lower phase_a.rows.lr"
        )
    return None


@torch.no_grad()
def score_teacher(job: PhaseA, batches: Batches, *, seen: bool) -> dict[str, float]:
    """Accuracy and loss of the teacher: with the per-image parameters, or (unseen images) with the
    shared prior alone. One sampled pass in ``stochastic`` mode."""
    job.teacher.eval()
    generator = torch.Generator(job.device).manual_seed(job.settings.seed)

    def scored():
        for batch in batches.in_order():
            gaussians = job.gaussians(batch.ids if seen else None, len(batch))
            mode = job.settings.phase_a.mode
            logits = predict(job.teacher, batch.images, gaussians, mode, generator=generator)
            yield logits, batch.labels

    return score(scored())


def build(settings: Settings, folder: Path, data: ImageData) -> PhaseA:
    """Everything phase A needs, freshly started; per-image parameters beyond the memory budget
    are to lie in ``folder``/rows. Writes nothing; raises UserError for what is wrong."""
    device = select_device(settings)
    teacher = build_teacher(settings, data)
    per_image = None
    if settings.phase_a.per_image:
        per_image = build_per_image(settings, teacher, len(data.train), folder / "rows")
    return PhaseA(settings, data, device, teacher.to(device), per_image)


def build_teacher(settings: Settings, data: ImageData) -> Teacher:
    """A freshly started teacher on the CPU."""
    phase = settings.phase_a
    torch.manual_seed(settings.seed)
    sizes = phase.compression
    compression = (sizes.embedding, sizes.hidden) if sizes else None
    vit = build_vit(settings.model, data, "gaussian")
    if vit.num_prefix_tokens:
        raise UserError(
            "model.args: a class or register token has no place on the grid that Gaussians lie on: "
            "take class_token and reg_tokens out"
        )
    return Teacher(vit, phase.parametrisation, phase.prior, compression)


def build_per_image(
    settings: Settings, teacher: Teacher, num_images: int, folder: Path
) -> ImageState:
    """The per-image parameters at their start, in memory or, beyond the budget, in files."""
    optim = settings.phase_a.rows
    in_files = per_image_in_files(optim, num_images, math.prod(teacher.per_image_shape))
    return ImageState(
        num_images,
        torch.zeros(teacher.per_image_shape),
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        moments_dtype=getattr(torch, optim.moments),
        folder=folder if in_files else None,
        initial_std=optim.initial_std,
        seed=settings.seed,
    )


def training_state(job: PhaseA) -> TrainingState[Teacher]:
    """The optimizer of the network and its schedule, freshly started."""
    phase, teacher = job.settings.phase_a, job.teacher
    steps = -(-len(job.data.train) // job.settings.data.batch_size)
    groups = []
    if phase.prior:
        groups.append({"params": [teacher.prior], "lr": phase.prior_lr, "weight_decay": 0.0})
    if teacher.decoder:
        decoder = {"params": list(teacher.decoder.parameters()), "lr": phase.optim.lr}
        groups.append({**decoder, "weight_decay": phase.optim.weight_decay})
    optimizer, schedule = build_optimizer(teacher.vit, phase.optim, phase.max_epochs, steps, groups)
    return TrainingState(
        teacher,
        optimizer,
        schedule,
        phase.optim,
        job.settings.precision,
        job.per_image,
        identity=identity(job),
    )


def identity(job: PhaseA) -> dict[str, Any]:
    """What a checkpoint belongs to: every setting that phase A reads, and the data set."""
    settings = {
        name: value
        for name, value in flatten(job.settings).items()
        if not allowed(name, ("phase_b.", "baseline.", "export.", *IRRELEVANT))
    }
    return settings | {"the data set": job.data.sha256}


def load(run: RunDirectory, data: ImageData | None = None, *, download: bool = False) -> TeacherJob:
    """The finished teacher of a run, in eval mode. ``download`` fetches published weights that are
    not on this machine. Raises UserError if phase A has not finished."""
    settings = run.settings()
    if download:
        phase = settings.phase_a.model_copy(update={"download": True})
        settings = settings.model_copy(update={"phase_a": phase})
    data = data or load_data(settings.data)
    if not settings.phase_a.learns_gaussians:
        return trained_teacher.load(run, settings, data)
    job = build(settings, run.phase_a, data)
    state = training_state(job)
    if not state.load(run.phase_a / "checkpoint") or not state.finished:
        raise UserError(
            f"{run.path}: phase A has not finished; 'gaupipe phase-a {run.config} --run-dir "
            f"{run.path} --resume' does that"
        )
    job.teacher = state.kept.eval()
    return job


def teacher_sha256(job: PhaseA) -> str:
    """A digest of the teacher's weights and per-image parameters."""
    digest = hashlib.sha256()
    for name, tensor in sorted(job.teacher.state_dict().items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensor.cpu().numpy()).data)
    for parameters in job.per_image.chunks() if job.per_image is not None else ():
        digest.update(np.ascontiguousarray(parameters.numpy()).data)
    return digest.hexdigest()
