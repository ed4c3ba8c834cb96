"""A training: a ViT that learns from the labels of its data, its losses, and the loop over
batches. Phase B adds a teacher's maps to the same loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import PatchDropout
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batch, train_and_val
from gaupipe.data.buckets import Buckets, check_buckets
from gaupipe.data.mixing import Mix, mixed_targets
from gaupipe.data.splits import ImageData
from gaupipe.settings import (
    BaselineSettings,
    ExportSettings,
    Settings,
    TrainChanges,
    TrainSettings,
)
from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.system.device import choose_precision, select_device
from gaupipe.system.progress import EpochMetrics
from gaupipe.teachers.fine_tuning import weights_sha256
from gaupipe.training import loggers
from gaupipe.training.epochs import loop
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import percent, score_model
from gaupipe.training.state import TrainingState
from gaupipe.training.student import build_student


def hard_loss(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, mixed: Mix | None = None
) -> Tensor:
    """Cross-entropy of logits [B, C] with labels [B] (*eq. 1*), or with the probabilities that
    ``mixed`` makes of them; optionally smoothed."""
    if mixed is not None:
        # F.one_hot would look at the labels on the host
        one_hot = torch.zeros_like(logits).scatter_(1, labels[:, None], 1.0)
        labels = mixed_targets(one_hot, mixed)
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


@dataclass
class Training:
    """A ViT, the ``student``, that learns from the labels of its data."""

    settings: Settings
    data: ImageData
    device: torch.device
    student: VisionTransformer
    train: TrainSettings

    @property
    def epochs(self) -> int:
        return self.train.epochs

    @property
    def augment(self) -> AugmentSettings:
        return self.settings.augment

    def label(self, folder: Path) -> str:
        """The name of the training in lines and on the bar."""
        return f"{folder.name} (plain)"

    def identity(self) -> dict[str, object]:
        """Settings, data and teacher that a checkpoint belongs to."""
        # the epoch to keep, the store and the trainings of other students may change
        changes = {
            "train": self.train.model_copy(update={"keep": "last"}),
            "phase_b": self.settings.phase_b.model_copy(update=dict(TrainChanges())),
            "baseline": BaselineSettings(),
            "export": ExportSettings(),
        }
        return flatten(self.settings.model_copy(update=changes), Scope.ANYTIME) | {
            "the data set": self.data.sha256,
            **weights_sha256(self.settings.model.name),
        }

    def losses(self) -> LabelLosses:
        """A module that gives the losses of a (batch, gamma)."""
        return LabelLosses(self)

    def gamma(self, epoch: int) -> float:
        """The weight of L_feat in an epoch counted from 0."""
        return 0.0

    def share_of_dropped_patches(self, epoch: int) -> float:
        """The share of the patches that the student drops in an epoch counted from 0."""
        if epoch >= self.epochs // 2 or self.gamma(epoch):
            return 0.0
        return self.train.patch_drop_rate

    def drop_patches(self, epoch: int) -> None:
        """From now on the student drops the patches of an epoch counted from 0."""
        if isinstance(self.student.patch_drop, PatchDropout):
            self.student.patch_drop.prob = self.share_of_dropped_patches(epoch)

    def maps_of_epoch(self, epoch: int) -> tuple[Any, int | None]:
        """The stored maps of an epoch's batches, and the view of the images that they show."""
        return None, None

    def source_of_maps(self) -> tuple[str, str] | None:
        """(url, sha256 of its teacher) of the store that the student learns from, if any."""
        return None

    def remarks(self) -> list[str]:
        """Lines to print before the first epoch."""
        rate = self.train.patch_drop_rate
        if rate and not any(map(self.share_of_dropped_patches, range(self.epochs))):
            return [
                f"patch_drop_rate={rate} drops nothing: patches are dropped in the first "
                "half of the epochs, except while maps are compared (phase_b.gamma_schedule)"
            ]
        return []

    def ending(self, state: TrainingState[VisionTransformer], folder: Path) -> str:
        """A line about a training that has ended: which epoch is kept where, how good it is, and
        why the training ended early."""
        assert state.best
        keep = self.train.keep
        best = state.best["epoch"]
        last = len(state.metrics)
        kept = best if keep == "best" else last
        accuracies = [entry["val_acc"] or 0.0 for entry in state.metrics]
        line = f"{folder / 'student'} is of epoch {kept}"
        if best == last:
            line += ", the best"
        elif keep == "best":
            line += ", the best (train.keep=best)"
        else:
            line += " (train.keep=last)"
        images = len(self.data.val)
        accuracy = percent(accuracies[kept - 1], images)
        line += f": val {accuracy}, the 95 % interval of {images:,} images"
        if best != last and keep == "best":
            line += f"; {folder / 'last'} is of epoch {last}: {100 * accuracies[-1]:.1f} %"
        elif best != last:
            line += f"; {folder / 'best'} is of epoch {best}: {100 * accuracies[best - 1]:.1f} %"
        if last < self.epochs:
            line += f"; patience={self.train.patience} ended the training"
        return line

    def is_over(self, state: TrainingState[VisionTransformer], metrics: EpochMetrics) -> bool:
        """True if the training ends early after an epoch with these ``metrics``."""
        patience = self.train.patience
        since_best = state.keep_best(metrics)  # also without patience: the best may be kept
        return patience is not None and since_best >= patience


@dataclass(frozen=True)
class StepLosses:
    """Means over the images of a batch, scalars: the ``loss`` to minimise, what it is a weighted
    sum of, and the accuracy. None for what the batch was not compared with."""

    loss: Tensor
    loss_hard: Tensor
    """Cross-entropy with the labels."""
    acc: Tensor
    loss_feat: Tensor | None = None
    """Distance from the teacher's maps."""
    loss_soft: Tensor | None = None
    """Distance from the teacher's predictions."""

    def by_name(self) -> dict[str, Tensor]:
        """Those that there are, as the logs name them."""
        return {name: value for name, value in vars(self).items() if value is not None}


class LabelLosses(nn.Module):
    """The cross-entropy with the labels."""

    def __init__(self, job: Training) -> None:
        super().__init__()
        self.student = job.student
        self.label_smoothing = job.train.label_smoothing
        self.forward_student: Callable[..., Tensor] = job.student
        if job.settings.compile:
            self.forward_student = torch.compile(job.student)

    def forward(self, batch: Batch, gamma: float = 0.0) -> StepLosses:
        """Losses of a batch without a teacher; ``gamma`` is for those of phase B."""
        return self.label_losses(self.forward_student(batch.images).float(), batch)

    def label_losses(self, logits: Tensor, batch: Batch) -> StepLosses:
        """Losses of logits [B, C] float32."""
        loss = hard_loss(logits, batch.labels, self.label_smoothing, batch.mixed)
        return StepLosses(loss, loss, acc=(logits.argmax(-1) == batch.labels).float().mean())


def train(job: Training, state: TrainingState[VisionTransformer], folder: Path) -> None:
    """Trains all epochs that are left: each batch makes an optimizer step, each epoch a score, a
    line of metrics.jsonl and a checkpoint."""
    settings = job.settings
    label = job.label(folder)
    loss_module = job.losses()
    training, validation = train_and_val(job.data, settings.data, job.device)
    augment = Augment(job.augment, settings.seed)
    is_new = not state.metrics

    with loop(settings, state, training, folder, label, job.epochs) as running:
        update = running.update
        progress = running.progress
        if is_new:  # a resumed training has said them
            for remark in job.remarks():
                progress.line(f"{label}: {remark}")
        for epoch in running.epochs():
            compute_losses = update.data_parallel(loss_module)
            gamma = job.gamma(epoch.number)
            maps, view = job.maps_of_epoch(epoch.number)
            job.drop_patches(epoch.number)
            for batch in training.epoch(epoch.number, augment, maps, view, epoch.first):
                with update.forward():
                    losses: StepLosses = compute_losses(batch, gamma)  # images [B, C, h, w]
                update(losses.loss, batch.weight)
                epoch.add(len(batch), **losses.by_name())
            means = epoch.means()

            scores = score_model(state.kept, validation)
            metrics = epoch.metrics(
                train_loss=means["loss"],
                train_acc=means["acc"],
                val_acc=scores.acc,
                val_loss=scores.loss,
                loss_soft=means.get("loss_soft"),
                loss_hard=means["loss_hard"],
                loss_feat=means.get("loss_feat"),
                gamma=gamma,
            )
            state.finished = job.is_over(state, metrics) or running.is_last(epoch)
            running.show(epoch, means["loss"], train=means["acc"], val=scores.acc)
            running.save(epoch, metrics)
    progress.line(f"{label}: {job.ending(state, folder)}")


def training_state(job: Training) -> TrainingState[VisionTransformer]:
    """The optimizer of a ViT and its schedule, freshly started."""
    steps = Buckets(len(job.data.train)).steps(job.settings.data.batch_size)
    optimizer, schedule = build_optimizer(job.student, job.train.optim, job.epochs, steps)
    return TrainingState(
        job.student,
        optimizer,
        schedule,
        job.train.optim,
        choose_precision(job.settings.precision, job.device, job.student.embed_dim),
        identity=job.identity(),
    )


def build(settings: Settings, data: ImageData, afresh: bool = True) -> Training:
    """A student that learns from the labels alone, freshly started. ``afresh`` False leaves trained
    weights out. Writes nothing. Raises UserError for settings that do not fit."""
    device = select_device(settings.device, settings.threads)
    train = settings.baseline_training
    student = build_student(settings, data, train, trained=afresh).to(device)
    return Training(settings, data, device, student, train)


def check_training(settings: Settings, data: ImageData) -> None:
    """Raises UserError for loggers that are not installed, and for too few images."""
    loggers.check(settings.log.to)
    check_buckets(len(data.train), settings.data.num_buckets, settings.data.batch_size)
