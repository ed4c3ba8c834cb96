"""Phase A with an ordinary ViT as the teacher: one that is trained here on the labels, or one that
was trained before.

Axis letters: B images, L blocks, H heads, T patches, C classes.
"""

from __future__ import annotations

import json
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batch, train_and_val
from gaupipe.data.buckets import Buckets
from gaupipe.data.splits import ImageData, Split
from gaupipe.distillation.kinds import MapAttention, check_export, chosen
from gaupipe.distillation.losses import hard_loss
from gaupipe.distillation.student import MapShape, check_student
from gaupipe.settings import IRRELEVANT, Settings
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.system.progress import read_metrics
from gaupipe.teachers.vit import LOCAL, VitTeacher, load_vit, weights_of_patches
from gaupipe.training.epochs import loop
from gaupipe.training.optimizer import build_optimizer, build_vit, select_device
from gaupipe.training.state import (
    TrainingState,
    accuracy,
    label_targets,
    score,
    score_model,
)
from gaupipe.vit.models import save_student
from stages.figures import attention_images
from stages.figures.key_attention import save_snapshot, student_attention
from stages.phase_a.job import TeacherJob
from stages.runs.directory import RunDirectory, without


class TrainedTeacher(TeacherJob):
    """A trained ViT on the data of a run."""

    teacher: VitTeacher

    @torch.inference_mode()
    def show(
        self, batch: Batch, generator: torch.Generator, maps: bool = False
    ) -> tuple[MapAttention, Tensor]:
        """The attention of a batch and its log-probabilities [B, C]; zeros where the teacher
        predicts no classes."""
        seen = self.teacher(batch.images)
        attention = MapAttention(seen.maps, self.teacher.grid, seen.dropped)
        return attention, seen.logits.log_softmax(-1) if self.teacher.predicts else seen.logits

    def sha256(self) -> str:
        return self._sha256

    @cached_property
    def _sha256(self) -> str:  # a trained teacher does not change
        return self.teacher.sha256()

    def notes(self) -> dict[str, Any]:
        return {
            "teacher": self.settings.phase_a.teacher,
            "predicts": self.teacher.predicts,
            "data": self.settings.data.model_dump(mode="json", exclude={"buckets"}),
        }


def run(
    settings: Settings, run: RunDirectory, data: ImageData, *, resume: bool, students: bool = True
) -> list[dict[str, Any]]:
    """Phase A in a run directory: trains the teacher ``vit``, or scores one that was trained
    before. Returns its metrics, one dict per epoch.

    ``resume`` continues from the last checkpoint; ``students`` is that of :func:`phase_a.run`.
    Raises UserError before anything is written.
    """
    job = distributed.main_first(lambda: check(settings, data, students))
    if job is not None:
        if distributed.size() > 1:
            job.common_sha256()
        if run.teacher_digest() is not None:
            check_unchanged(job, run)
    state = training_state(settings, data) if job is None else None

    def finish(teacher: TrainedTeacher | None) -> None:
        if teacher is None:
            assert state is not None
            teacher = keep(settings, data, state.kept, run.phase_a / "teacher")
        if not run.teacher_sha256.is_file():
            write_whole(run.teacher_sha256, teacher.sha256() + "\n")

    with run.locked():
        distributed.on_main(lambda: run.start(settings, data, resume))
        if job is not None:
            metrics = adopt(job, run.phase_a / "metrics.jsonl")
        else:
            assert state is not None
            saved = state
            distributed.main_first(lambda: saved.load(run.phase_a / "checkpoint"))
            train(settings, data, state, run.phase_a)
            metrics = state.metrics
        distributed.on_main(lambda: finish(job))
    return metrics


def keep(
    settings: Settings, data: ImageData, vit: VisionTransformer, folder: Path
) -> TrainedTeacher:
    """The finished teacher ``vit`` as a folder that timm loads, written where it is not whole."""
    try:
        return build(settings, data, folder)
    except UserError:
        save_student(vit, folder, **data.data_config)
        return build(settings, data, folder)


def check(settings: Settings, data: ImageData, students: bool = True) -> TrainedTeacher | None:
    """Raises UserError for what neither phase could do with the teacher that the settings name,
    or, without ``students``, phase A. Returns it where it was trained before."""
    if settings.phase_a.teacher == "vit":
        vit = build_model(settings, data, "meta")
        shape = MapShape.of(vit)
        if students:
            check_student(settings, data, shape, weights_of_patches(vit))
            check_store(settings, vit, shape)
        build_optimizer(vit, settings.phase_a.optim, settings.phase_a.max_epochs, 100)
        return None
    job = build(settings, data)
    if students:
        warm = settings.phase_b.warm_start != "none"
        check_student(settings, data, job.shape, job.teacher.weights() if warm else {})
        check_store(settings, job.teacher, job.shape)
        check_predictions(job)
    return job


def check_store(settings: Settings, teacher: nn.Module, shape: MapShape) -> None:
    """Raises UserError for a store of the settings that cannot hold the teacher's maps."""
    export = chosen(settings, tokens=shape.grid[0] * shape.grid[1])
    check_export(export, settings.augment, teacher, shape.grid, prefix="export.")


def check_predictions(job: TrainedTeacher) -> None:
    """Raises UserError for a loss that needs predictions of a teacher that makes none."""
    if job.settings.phase_b.alpha and not job.teacher.predicts:
        raise UserError(
            f"phase_b.alpha: the teacher {job.settings.phase_a.teacher} predicts no classes: set "
            "phase_b.alpha=0, and phase_b.beta to what the labels are to weigh"
        )


class LabelLoss(nn.Module):
    """The loss of a ViT that learns from the labels alone."""

    def __init__(self, settings: Settings, vit: VisionTransformer) -> None:
        super().__init__()
        self.vit = torch.compile(vit) if settings.compile else vit
        self.label_smoothing = settings.phase_a.label_smoothing

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The cross-entropy with the labels, "loss", and the accuracy, "acc", means over the
        batch."""
        logits = self.vit(batch.images)  # [B, C]
        targets = label_targets(batch.labels, batch.mixed, logits)
        loss = hard_loss(logits.float(), targets, self.label_smoothing)
        return {"loss": loss, "acc": accuracy(logits, batch.labels)}


def train(
    settings: Settings, data: ImageData, state: TrainingState[VisionTransformer], folder: Path
) -> None:
    """Epochs on the labels alone until the training accuracy reaches ``stop_accuracy`` or
    ``max_epochs`` are done."""
    phase, device = settings.phase_a, select_device(settings)
    training, validation = train_and_val(data, settings.data, device)
    augment = Augment(settings.phase_a_augment, settings.seed)
    loss_module = LabelLoss(settings, state.modules)

    with loop(settings, state, training, folder, "phase A", phase.max_epochs) as running:
        update = running.update
        for epoch in running.epochs():
            losses_of = update.replicated(loss_module)
            # images [B, channels, h, w]
            for batch in training.epoch(epoch.number, augment, first=epoch.first):
                with update.forward():
                    losses = losses_of(batch)
                update(losses["loss"], batch.weight)
                epoch.add(len(batch), **losses)
            means = epoch.means()

            scores = score_model(state.kept, validation)
            epoch.finish(
                train_loss=means["loss"],
                train_acc=means["acc"],
                val_acc=scores["acc"],
                val_loss=scores["loss"],
            )
            attention = student_attention(state.kept, device)
            save_snapshot(folder, epoch.number + 1, settings, data, attention)
            state.finished = means["acc"] >= phase.stop_accuracy or running.is_last(epoch)
            if state.finished:
                grid = state.kept.patch_embed.grid_size
                attention_images.show(
                    running.steps, data, settings.data.num_buckets, attention, grid
                )
            running.line(
                epoch,
                f"loss {means['loss']:.4f}, train acc {means['acc']:.4f}, "
                f"validation acc {scores['acc']:.4f}",
            )


def adopt(job: TrainedTeacher, path: Path) -> list[dict[str, Any]]:
    """Scores a teacher that was trained before, once, and writes the metrics ``path``: one entry,
    of epoch 0. Without a head for the classes the accuracies are None."""
    if distributed.agree(path.is_file()):
        return read_metrics(path)
    started = time.monotonic()
    metrics: dict[str, Any] = {"epoch": 0, "train_loss": None, "train_acc": None, "val_acc": None}
    if job.teacher.predicts:
        train, val = (score_split(job, split) for split in (job.data.train, job.data.val))
        metrics |= {"train_loss": train["loss"], "train_acc": train["acc"], "val_acc": val["acc"]}
    rate = len(job.data.train) / (time.monotonic() - started)
    metrics |= {"seconds": 0.0, "images_per_s": round(rate, 1)}

    def write() -> None:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps(metrics) + "\n")

    distributed.on_main(write)
    return [metrics]


@torch.inference_mode()
def score_split(job: TrainedTeacher, split: Split) -> dict[str, float]:
    """Accuracy and loss of the teacher on a split."""
    return score(
        (job.teacher.predict(batch.images), batch.labels) for batch in job.batches(split).of_rank()
    )


def build(settings: Settings, data: ImageData, folder: Path | None = None) -> TrainedTeacher:
    """The teacher that the settings name; for ``vit`` the one that was trained into ``folder``.

    Raises UserError for a teacher that cannot be loaded or read, or does not fit the data.
    """
    phase, device = settings.phase_a, select_device(settings)
    if phase.teacher == "vit":
        remedy = "'gaupipe phase-a --resume' writes it again"
        vit = load_vit(f"{LOCAL}{folder}", data, {}, remedy=remedy)
    else:
        vit = load_vit(phase.teacher, data, phase.teacher_args, download=phase.download)
    return TrainedTeacher(settings, data, device, vit.to(device))


def load(run: RunDirectory, settings: Settings, data: ImageData) -> TrainedTeacher:
    """The finished teacher of a run. Raises UserError where phase A has not finished, and for a
    teacher that has changed since."""
    if run.teacher_digest() is None:
        raise UserError(
            f"{run.path}: phase A has not finished; 'gaupipe phase-a {run.config} --run-dir "
            f"{run.path} --resume' does that"
        )
    job = build(settings, data, run.phase_a / "teacher")
    check_unchanged(job, run)
    return job


def check_unchanged(job: TrainedTeacher, run: RunDirectory) -> None:
    """Raises UserError for another teacher than the run's."""
    if job.sha256() != run.teacher_digest():
        raise UserError(
            f"phase_a.teacher: {job.settings.phase_a.teacher} is not the teacher that {run.path} "
            "was started with: its weights have changed; restore them, or start another run"
        )


def build_model(
    settings: Settings, data: ImageData, device: str | None = None
) -> VisionTransformer:
    """A freshly started teacher ``vit``: the ViT of the settings with standard attention."""
    torch.manual_seed(settings.seed)
    own = ("phase_a.teacher_args", settings.phase_a.teacher_args)
    return build_vit(settings.model, data, "standard", device, own)


def training_state(settings: Settings, data: ImageData) -> TrainingState[VisionTransformer]:
    """A freshly started teacher ``vit``, its optimizer and its schedule."""
    phase = settings.phase_a
    vit = build_model(settings, data).to(select_device(settings))
    steps = Buckets(len(data.train)).steps(settings.data.batch_size)
    optimizer, schedule = build_optimizer(vit, phase.optim, phase.max_epochs, steps)
    identity = without(settings, ("phase_b.", "baseline.", "export.", *IRRELEVANT))
    identity["the data set"] = data.sha256
    return TrainingState(
        vit, optimizer, schedule, phase.optim, settings.precision, identity=identity
    )
