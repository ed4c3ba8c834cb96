"""A training: a ViT that learns from the labels of its data, its losses, and the loop over
batches. Phase B and the training of the teacher ``vit`` are the same loop: phase B adds losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.layers import PatchDropout
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batch, StoredOfImages, train_and_val
from gaupipe.data.buckets import Buckets
from gaupipe.data.images import UNLABELLED
from gaupipe.data.mixing import Mix, mixed_targets
from gaupipe.data.splits import ImageData, Split
from gaupipe.settings import (
    ExportSettings,
    Settings,
    TrainChanges,
    TrainSettings,
)
from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.system.device import choose_precision, prepare_device
from gaupipe.system.progress import EpochMetrics
from gaupipe.training.epochs import loop
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import score_model
from gaupipe.training.state import Identity, TrainingState
from gaupipe.training.student import build_student
from gaupipe.vit.fine_tuning import fine_tunes, remarks_on_start, weights_sha256


def hard_loss(
    logits: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    mixed: Mix | None = None,
    labelled: float | None = None,
) -> Tensor:
    """Cross-entropy of logits [B, C] with labels [B] (*eq. 1*), or with the probabilities that
    ``mixed`` makes of them; optionally smoothed. The sum over the images that have a label, divided
    by ``labelled``, which is the size of the batch where all have one."""
    if labelled is None:
        labelled = len(labels)
    has_label = labels != UNLABELLED
    labels = labels.clamp(min=0)  # what stands for no label is no class
    if mixed is not None:
        # F.one_hot would look at the labels on the host
        one_hot = torch.zeros_like(logits).scatter_(1, labels[:, None], 1.0)
        labels = mixed_targets(one_hot, mixed)
    losses = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    return torch.where(has_label, losses, 0.0).sum() / (labelled or 1.0)


@dataclass(frozen=True)
class StepLosses:
    """Means over the images of a batch, scalars: the ``loss`` to minimise, what it is a weighted
    sum of, and the accuracy. None for what the batch was not compared with. Those of labels are
    means as :attr:`Batch.labelled` defines them."""

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
    """The cross-entropy of a student with the labels."""

    def __init__(
        self, student: VisionTransformer, train: TrainSettings, compile: bool = False
    ) -> None:
        super().__init__()
        self.student = student
        self.label_smoothing = train.label_smoothing
        self.forward_student: Callable[..., Tensor] = student
        if compile:
            self.forward_student = torch.compile(student)

    def forward(self, batch: Batch, gamma: float = 0.0, alpha: float = 0.0) -> StepLosses:
        """Losses of a batch without a teacher; the weights are for those of phase B."""
        return self.label_losses(self.forward_student(batch.images).float(), batch)

    def label_losses(self, logits: Tensor, batch: Batch) -> StepLosses:
        """Losses of logits [B, C] float32, of the images that have a label."""
        loss = hard_loss(logits, batch.labels, self.label_smoothing, batch.mixed, batch.labelled)
        labels = batch.labels
        if batch.mixed is not None:
            labels = batch.mixed.main_labels(labels)
        right = (logits.argmax(-1) == labels).float()  # never where there is no label
        return StepLosses(loss, loss, acc=right.sum() / (batch.labelled or 1.0))


@dataclass(frozen=True)
class EpochPlan:
    """What changes from epoch to epoch."""

    gamma: float = 0.0
    """The weight of L_feat."""
    alpha: float = 0.0
    """The weight of L_soft."""
    dropped: float = 0.0
    """The share of the patches that the student drops."""
    stored: StoredOfImages | None = None
    """Reads what the teacher says of batches; None for a training without a store."""


@dataclass
class Training:
    """A ViT, the ``student``, and what the loop of :func:`train` needs to train it. Its builders
    fill it: :func:`build_plain`, those of phase B, and that of the teacher ``vit``."""

    settings: Settings
    data: ImageData
    device: torch.device
    student: VisionTransformer
    train: TrainSettings
    """Of this ViT: the optimizer, the patience, the epoch that is kept."""
    augment: AugmentSettings
    losses: LabelLosses
    """Gives the losses of a (batch, gamma, alpha)."""
    epochs: list[EpochPlan]
    identity: Identity
    unlabelled: bool = False
    """An epoch has the images without labels too."""
    sources: Sequence[tuple[str, str]] = ()
    """(url, sha256 of its teacher) of the stores that the student learns from: of the maps, and of
    the predictions where those are of a second one."""
    stop_accuracy: float | None = None
    """The accuracy on the training images that ends the training of a teacher."""
    remarks: Sequence[str] = ()
    """Lines to print before the first epoch."""

    @cached_property
    def images(self) -> Split:
        """The images of an epoch."""
        return self.data.with_unlabelled() if self.unlabelled else self.data.train


def train(job: Training, state: TrainingState[VisionTransformer], folder: Path, label: str) -> None:
    """Trains all epochs that are left: each batch makes an optimizer step, each epoch a score, a
    line of metrics.jsonl and a checkpoint. ``label`` names the training in lines and on the bar."""
    batches, validation = train_and_val(job.data, job.settings.data, job.device, job.images)
    augment = Augment(job.augment, job.settings.seed)
    total = len(job.epochs)

    with loop(job.settings, state, batches, augment, folder, label, total, job.remarks) as running:
        update = running.update
        for epoch in running.epochs():  # the first may go on in its middle
            plan = job.epochs[epoch.number]
            drop_patches(job.student, plan.dropped)
            compute_losses = update.data_parallel(job.losses)
            for batch in batches.epoch(epoch.number, augment, plan.stored, epoch.first):
                with update.forward():  # autocast
                    losses: StepLosses = compute_losses(batch, plan.gamma, plan.alpha)
                update.backward(losses.loss, batch.weight)
                update.step_if_due()
                epoch.end_batch(batch, **losses.by_name())  # saves, if checkpoint_minutes are over
            means = epoch.end()

            scores = score_model(state.kept, validation)
            metrics = epoch.metrics(
                train_loss=means["loss"],
                train_acc=means["acc"],
                val_acc=scores.acc,
                val_loss=scores.loss,
                loss_soft=means.get("loss_soft"),
                loss_hard=means["loss_hard"],
                loss_feat=means.get("loss_feat"),
                gamma=plan.gamma,
                alpha=plan.alpha,
            )
            state.finished = is_over(job, state, metrics) or running.is_last(epoch)
            running.show(epoch, means["loss"], train=means["acc"], val=scores.acc)
            running.save(epoch, metrics)  # metrics.jsonl and the checkpoint


def is_over(job: Training, state: TrainingState[VisionTransformer], metrics: EpochMetrics) -> bool:
    """True if the training ends early after an epoch with these ``metrics``. Copies the weights of
    a student that is the best so far, which may be the ones to keep."""
    if job.stop_accuracy is not None:  # of a teacher the last epoch is kept
        return (metrics["train_acc"] or 0.0) >= job.stop_accuracy
    since_best = state.keep_best(metrics)
    patience = job.train.patience
    return patience is not None and since_best >= patience


def drop_patches(student: VisionTransformer, share: float) -> None:
    """From now on the student drops this share of the patches."""
    patch_drop = getattr(student, "patch_drop", None)
    if isinstance(patch_drop, PatchDropout):
        patch_drop.prob = share


def training_state(job: Training) -> TrainingState[VisionTransformer]:
    """The optimizer of a ViT and its schedule, freshly started."""
    steps = Buckets(len(job.images)).steps(job.settings.data.batch_size)
    identity = job.identity
    if job.unlabelled:
        identity = identity | {"the images without labels": job.data.unlabelled_sha256}
    optimizer, schedule = build_optimizer(job.student, job.train.optim, len(job.epochs), steps)
    return TrainingState(
        job.student,
        optimizer,
        schedule,
        job.train.optim,
        choose_precision(job.settings.precision, job.device, job.student.num_features),
        identity=identity,
    )


def build_plain(settings: Settings, data: ImageData, afresh: bool = True) -> Training:
    """A student that learns from the labels alone, freshly started. ``afresh`` False leaves trained
    weights out. Writes nothing. Raises UserError for settings that do not fit."""
    device = prepare_device(settings.device, settings.threads)
    train = settings.train
    student = build_student(settings, data, train, from_weights=afresh).to(device)
    epochs = [EpochPlan()] * train.epochs
    losses = LabelLosses(student, train, settings.compile)
    return make_training(settings, data, device, student, train, losses, epochs)


def make_training(
    settings: Settings,
    data: ImageData,
    device: torch.device,
    student: VisionTransformer,
    train: TrainSettings,
    losses: LabelLosses,
    epochs: list[EpochPlan],
    remarks: Sequence[str] = (),
) -> Training:
    """A student's training, with or without a teacher: its images and its checkpoints are those of
    the settings, and it drops patches as ``train`` says."""
    notes = [*remarks]
    if train.patch_drop_rate:
        epochs = with_dropped_patches(epochs, train.patch_drop_rate)
        if not any(plan.dropped for plan in epochs):
            notes.append(
                f"patch_drop_rate={train.patch_drop_rate} drops nothing: patches are dropped in "
                "the first half of the epochs, except while maps are compared "
                "(phase_b.gamma_schedule)"
            )
    if fine_tunes(settings.model.name):
        notes += remarks_on_start(settings.model)
    # the epoch to keep, the store and the trainings of other students may change
    changes = {
        "train": train.model_copy(update={"keep": "last"}),
        "phase_b": settings.phase_b.model_copy(update=dict(TrainChanges())),
        "export": ExportSettings(),
    }
    identity: Identity = flatten(settings.model_copy(update=changes), Scope.ANYTIME)
    identity["the data set"] = data.sha256
    identity |= weights_sha256(settings.model.name)
    return Training(
        settings=settings,
        data=data,
        device=device,
        student=student,
        train=train,
        augment=settings.augment,
        losses=losses,
        epochs=epochs,
        identity=identity,
        remarks=notes,
    )


def with_dropped_patches(epochs: Sequence[EpochPlan], share: float) -> list[EpochPlan]:
    """The epochs of a student that drops this share of the patches in the first half of them, but
    not while its maps are compared: a teacher's are of all patches."""
    half = len(epochs) // 2
    first = [plan if plan.gamma else replace(plan, dropped=share) for plan in epochs[:half]]
    return [*first, *epochs[half:]]
