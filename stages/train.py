"""Train: a ViT learns from the labels, as a student without a teacher or as a teacher itself.
Phase B adds a teacher's maps to the same loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.layers import PatchDropout
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import store
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batch, train_and_val
from gaupipe.data.buckets import Buckets, check_buckets
from gaupipe.data.splits import ImageData, load_data
from gaupipe.distillation.losses import hard_loss
from gaupipe.distillation.student import build_student, check_baseline
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
from gaupipe.system import distributed
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.teachers.fine_tuning import weights_sha256
from gaupipe.training import loggers
from gaupipe.training.epochs import loop
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import score_model
from gaupipe.training.state import TrainingState, has_checkpoint
from stages.runs import kept_epochs, ranks
from stages.runs.directory import RunDirectory, lock_of_process, locked, say_if_afresh
from stages.runs.students import make_folder, removed_if_refused, write_request

ELSEWHERE = "another --run-dir starts afresh"


@dataclass
class Training:
    """A ViT, the ``student``, that learns from the labels of its data."""

    settings: Settings
    data: ImageData
    device: torch.device
    student: VisionTransformer
    train: TrainSettings
    maps: store.Store | None = None
    """The store of a teacher's maps, in phase B."""

    @property
    def epochs(self) -> int:
        return self.train.epochs

    @property
    def augment(self) -> AugmentSettings:
        return self.settings.augment

    def label(self, folder: Path) -> str:
        """The name of the training in lines and on the bar."""
        return f"{folder.name} (plain)"

    def identity(self) -> dict[str, Any]:
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

    def losses(self) -> nn.Module:
        """A module that gives the losses of a (batch, gamma) by name."""
        return LabelLosses(self)

    def gamma(self, epoch: int) -> float:
        """The weight of L_feat in an epoch counted from 0."""
        return 0.0

    def drop_patches(self, epoch: int) -> float:
        """The share of the patches that the student drops in an epoch counted from 0, from now."""
        drops = epoch < self.epochs // 2 and not self.gamma(epoch)
        rate = self.train.patch_drop_rate if drops else 0.0
        if isinstance(self.student.patch_drop, PatchDropout):
            self.student.patch_drop.prob = rate
        return rate

    def maps_of_epoch(self, epoch: int) -> tuple[Any, int | None]:
        """The stored maps of an epoch's batches, and the view of the images that they show."""
        return None, None

    def remarks(self) -> list[str]:
        """Lines to print before the first epoch."""
        return []

    def ending(self, state: TrainingState, folder: Path) -> str:
        """A line about a training that has ended: why early, and which epoch is kept where."""
        assert state.best
        train, best, last = self.train, state.best["epoch"], len(state.metrics)
        accuracy = state.metrics[best - 1]["val_acc"]
        early = f"; patience={train.patience} ended it" if last < self.epochs else ""
        kept = best if train.keep == "best" else last
        return (
            f"epoch {best} is the best (val_acc {accuracy:.4f}){early}; {folder / 'student'} is of "
            f"epoch {kept} (keep={train.keep})"
        )

    def is_over(self, state: TrainingState, metrics: dict[str, Any]) -> bool:
        """True if the training ends early after an epoch with these ``metrics``."""
        patience, since_best = self.train.patience, state.keep_best(metrics)
        return patience is not None and since_best >= patience


class LabelLosses(nn.Module):
    """The cross-entropy with the labels."""

    def __init__(self, job: Training) -> None:
        super().__init__()
        self.student, self.label_smoothing = job.student, job.train.label_smoothing
        self.forward_student = torch.compile(job.student) if job.settings.compile else job.student

    def forward(self, batch: Batch, gamma: float = 0.0) -> dict[str, Tensor]:
        """Losses by name, of which "loss" is the one to minimise, and "acc": means over the
        batch."""
        losses = self.of_labels(self.forward_student(batch.images).float(), batch)
        return {"loss": losses["loss_hard"], **losses}

    def of_labels(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """ "loss_hard" and "acc" of logits [B, C] float32."""
        loss = hard_loss(logits, batch.labels, self.label_smoothing, batch.mixed)
        return {"loss_hard": loss, "acc": (logits.argmax(-1) == batch.labels).float().mean()}


def train(job: Training, state: TrainingState[VisionTransformer], folder: Path) -> None:
    """All epochs that are left."""
    settings, label, losses = job.settings, job.label(folder), job.losses()
    training, validation = train_and_val(job.data, settings.data, job.device)
    augment = Augment(job.augment, settings.seed)
    done = len(state.metrics)

    with loop(settings, state, training, folder, label, job.epochs) as running:
        update, progress = running.update, running.progress
        for remark in job.remarks() if not done else ():
            progress.line(f"{label}: {remark}")
        for epoch in running.epochs():
            losses_of = update.data_parallel(losses)
            gamma, (maps, view) = job.gamma(epoch.number), job.maps_of_epoch(epoch.number)
            job.drop_patches(epoch.number)
            # images [B, channels, h, w]
            for batch in training.epoch(epoch.number, augment, maps, view, epoch.first):
                with update.forward():
                    values = losses_of(batch, gamma)
                update(values["loss"], batch.weight)
                epoch.add(len(batch), **values)
            means = epoch.means()

            scores = score_model(state.kept, validation)
            epoch.finish(
                train_loss=means["loss"],
                train_acc=means["acc"],
                val_acc=scores["acc"],
                val_loss=scores["loss"],
                loss_soft=means.get("loss_soft"),
                loss_hard=means["loss_hard"],
                loss_feat=means.get("loss_feat"),
                gamma=gamma,
            )
            state.finished = job.is_over(state, epoch.metrics) or running.is_last(epoch)
            running.line(
                epoch,
                f"loss {means['loss']:.3f}, train {100 * means['acc']:.1f} %, "
                f"val {100 * scores['acc']:.1f} %",
            )
        progress.line(f"{label}: {job.ending(state, folder)}")


def training_state(job: Training) -> TrainingState[VisionTransformer]:
    """The optimizer of a ViT and its schedule, freshly started."""
    steps = Buckets(len(job.data.train)).steps(job.settings.data.batch_size)
    optimizer, schedule = build_optimizer(job.student, job.train.optim, job.epochs, steps)
    precision, identity = job.settings.precision, job.identity()
    optim = job.train.optim
    return TrainingState(job.student, optimizer, schedule, optim, precision, identity=identity)


def train_into(
    folder: Path,
    settings: Settings,
    build: Callable[[ImageData, bool], Training],
    data: ImageData | None = None,
    resume: bool = False,
) -> list[dict[str, Any]]:
    """Trains the student that ``build`` makes of (data, True if it starts afresh) into ``folder``,
    or goes on with one, and returns its metrics.

    A training that is refused leaves the settings of an earlier one as they were.
    """
    distributed.on_main(lambda: say_if_afresh(folder, resume))

    def start() -> Training:
        images = data or load_data(settings.data, settings.download)
        images.check_split(folder.parent.parent / "split.json")
        check_training(settings, images)
        return build(images, not has_checkpoint(folder / "checkpoint"))

    with locked(folder, "student"):
        job = distributed.main_first(start)
        ranks.check_same(settings, job.data)
        state = training_state(job)
        distributed.main_first(lambda: state.load(folder / "checkpoint"))
        maps = (job.maps.url, job.maps.schema.teacher_sha256) if job.maps else None
        distributed.on_main(lambda: write_request(folder, settings, maps))
        train(job, state, folder)
        distributed.on_main(lambda: kept_epochs.save(state, folder, job.train.keep, job.data))
    return state.metrics


def train_plain(
    settings: Settings, folder: Path, *, data: ImageData | None = None, resume: bool = False
) -> list[dict[str, Any]]:
    """Trains a student on the labels alone into ``folder``, as :func:`train_into` does."""
    return train_into(folder, settings, partial(build, settings), data, resume)


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


def run(
    settings: Settings,
    run_dir: Path,
    attention: str | None = None,
    *,
    resume: bool = False,
    data: ImageData | None = None,
) -> list[dict[str, Any]]:
    """Trains a ViT into ``run_dir``/plain/ATTENTION and returns its metrics, one dict per epoch.

    The training is the baseline's of the other stages: the same loop, and with the same settings
    the same numbers. Several attentions may be trained in one run, at the same time too.
    ``attention`` None is the settings' ``model.attention``; ``resume`` continues from the last
    checkpoint; ``data`` is the data set of the settings, where it has been read already.

    Raises UserError before anything is written.
    """
    attention = attention or settings.model.attention
    run = RunDirectory(run_dir)
    request = ranks.resolve(lambda: resolve(settings, run, attention, resume, data))
    created = distributed.broadcast(distributed.on_main(lambda: begin(run, request, resume)))
    with removed_if_refused(request.folder, created), run.locked(shared=True):
        return train_plain(request.settings, request.folder, data=request.data, resume=resume)


@dataclass(frozen=True)
class Request:
    """A student to be trained in a run: settings and data, checked."""

    settings: Settings
    data: ImageData
    folder: Path


def resolve(
    settings: Settings, run: RunDirectory, attention: str, resume: bool, data: ImageData | None
) -> Request:
    """The request for a student of this ``attention``. Raises UserError for a training that the
    run directory or the machine does not allow."""
    settings = run.settled(settings.with_section("model", attention=attention))
    before = run.settings() if run.config.is_file() else settings
    # another epoch to keep does not make another run
    asked = settings.with_section("train", keep=before.train.keep)
    run.check(asked.with_section("baseline", keep=before.baseline.keep))
    folder = run.student(attention, distilled=False)
    if not resume and folder.exists():
        raise UserError(f"{folder} already exists: --resume continues it, {ELSEWHERE}")
    images = data or load_data(settings.data, settings.download)
    images.check_split(run.split)
    check_training(settings, images)
    select_device(settings.device, settings.threads)
    check_baseline(settings, images, trained=not has_checkpoint(folder / "checkpoint"))
    return Request(run.with_baseline(settings, attention), images, folder)


def begin(run: RunDirectory, request: Request, resume: bool) -> bool:
    """Writes the run's settings and split, where it has none, and the settings of a new student,
    so that they are known after any interruption. Returns True if there was no student."""
    if not run.split.is_file():  # which is written last
        with lock_of_process(run.path, "run"):
            run.start(request.settings, request.data, resume=True)
    run.follow(request.settings)
    created = not request.folder.exists()
    if not resume:
        make_folder(request.folder, ELSEWHERE, request.settings)  # another may have been quicker
    return created
