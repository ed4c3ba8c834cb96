"""Phase B: an ordinary ViT learns from the labels, the teacher's predictions and the stored
attention maps.

Axis letters: B images, L blocks, H heads, T tokens, C classes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import store
from gaupipe import settings as config
from gaupipe.attention import STUDENTS
from gaupipe.data.augment import Augment, draw_queries, mixed_targets
from gaupipe.data.batches import Batch, Batches, train_and_val
from gaupipe.data.buckets import Buckets, check_buckets
from gaupipe.data.splits import ImageData, load_data
from gaupipe.distillation.feature_loss import TeacherMaps, forward_with_feature_loss
from gaupipe.distillation.kinds import KINDS, Reader, StoredRows, of_block
from gaupipe.distillation.losses import gamma_at, hard_loss, soft_loss
from gaupipe.distillation.student import build_student, check_fit, layer_map
from gaupipe.distillation.warm_start import fit_queries_and_keys, hand_over, warm_start
from gaupipe.maps.gaussians import expected_map
from gaupipe.maps.views import take_queries
from gaupipe.settings import IRRELEVANT, OptimSettings, PhaseBSettings, Settings, check_used
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.teachers.gaussian import Teacher
from gaupipe.teachers.vit import VitTeacher
from gaupipe.training import loggers
from gaupipe.training.epochs import loop
from gaupipe.training.optimizer import build_optimizer, select_device
from gaupipe.training.state import (
    TrainingState,
    accuracy,
    has_checkpoint,
    label_targets,
    score_model,
)
from stages import export_maps
from stages.figures import geometry
from stages.figures.key_attention import save_snapshot, student_attention
from stages.phase_a import gaussian as phase_a
from stages.runs import kept_epochs, ranks
from stages.runs.directory import RunDirectory, check_name, locked, without

WARM_START_IMAGES = 256
"""Training images, evenly spaced, on which Q and K are fitted to the prior."""

WARM_START_BATCH = 64
"""Of these how many a teacher predicts Gaussians for at a time."""


@dataclass
class PhaseB:
    """A student on its data; ``maps`` is None for the baseline, which learns from the labels
    alone."""

    settings: Settings
    data: ImageData
    device: torch.device
    student: VisionTransformer
    optim: OptimSettings
    maps: store.Store | None

    @property
    def teacher_store(self) -> store.Store:
        """``maps`` of a student that is distilled."""
        assert self.maps is not None
        return self.maps

    def teacher_maps(self, batch: Batch, epoch: int | None = None) -> TeacherMaps:
        """The stored attention of a batch, on the device, moved and mixed as its images were; of
        the queries that an epoch, counted from 0, compares, or of all."""
        phase, depth, queries = self.settings.phase_b, len(self.student.blocks), None
        assert batch.stored is not None  # read with the images, from the same store
        if epoch is not None and phase.feature_queries < 1:
            tokens, seed = self.student.patch_embed.num_patches, self.settings.seed
            queries = draw_queries(seed, epoch, batch.ids, tokens, phase.feature_queries)
            queries = queries.to(self.device, non_blocking=True)
        return TeacherMaps(
            self.read(batch.stored),
            layer_map(self.settings, depth, self.teacher_store.schema.layers),
            tuple(self.student.patch_embed.grid_size),
            phase.head_map,
            phase.mean_heads,
            batch.geometry,
            batch.mixed,
            queries,
        )

    @cached_property
    def read(self) -> Reader:
        """What makes the attention of a batch of arrays read from the store."""
        maps = self.teacher_store
        read = KINDS[maps.schema.kind].reader(maps, self.device)
        return average(maps, read) if self.settings.phase_b.average_maps else read

    def gamma(self, epoch: int) -> float:
        """The weight of L_feat in an epoch counted from 0; the baseline has none."""
        phase = self.settings.phase_b
        if self.maps is None:
            return 0.0
        return gamma_at(
            epoch, phase.gamma, phase.gamma_schedule, phase.gamma_epochs or phase.epochs
        )


class StudentLosses(nn.Module):
    """The losses of phase B for a batch."""

    def __init__(self, job: PhaseB) -> None:
        super().__init__()
        self.student, self.job = job.student, job
        compiled = torch.compile if job.settings.compile else (lambda function: function)
        self.forward_student = compiled(job.student)
        self.forward_with_loss = compiled(forward_with_feature_loss)
        self.zero = torch.zeros((), device=job.device)  # L_feat where no maps are compared

    def forward(
        self, batch: Batch, gamma: float, copy: bool = False, epoch: int = 0
    ) -> dict[str, Tensor]:
        """Each loss by name, their weighted sum "loss" (*GauTransformer, eq. 11*), and "acc", all
        means over the batch.

        L_feat is there unless ``gamma``, its weight, is 0. ``copy``: attention copy. The ``epoch``,
        counted from 0, and the image ids say which queries are compared.
        """
        phase, loss_feat = self.job.settings.phase_b, self.zero
        if gamma or copy:
            logits, loss_feat = self.forward_with_loss(
                self.student,
                batch.images,
                self.job.teacher_maps(batch, epoch),
                phase.layer_weights,
                phase.temperature,
                phase.direction,
                copy,
            )  # [B, C], scalar
        else:
            logits = self.forward_student(batch.images)  # [B, C]
        logits = logits.float()
        labels = label_targets(batch.labels, batch.mixed, logits)
        losses = {"loss_hard": hard_loss(logits, labels, phase.label_smoothing)}
        losses["loss"] = losses["loss_hard"]
        if batch.stored is not None:
            teacher = torch.from_numpy(batch.stored["logits"]).to(logits.device)
            targets = mixed_targets(teacher.float().softmax(-1), batch.mixed)  # [B, C]
            losses["loss_soft"] = soft_loss(logits, targets)
            losses["loss"] = (
                phase.alpha * losses["loss_soft"]
                + phase.beta * losses["loss_hard"]
                + gamma * loss_feat
            )
        elif self.job.maps is not None:
            losses["loss"] = phase.beta * losses["loss_hard"]
        if gamma:
            losses["loss_feat"] = loss_feat
        return {**losses, "acc": accuracy(logits, batch.labels)}


def run(
    run_dir: Path,
    student: str | None = None,
    *,
    name: str | None = None,
    overrides: Sequence[str] = (),
    maps_url: str | None = None,
    resume: bool = False,
    distilled: bool = True,
    data: ImageData | None = None,
) -> list[dict[str, Any]]:
    """Trains a student in ``run_dir`` and returns its metrics, one dict per epoch.

    student     its attention; None is the settings' ``phase_b.student``
    name        of its folder; None is its attention
    overrides   settings ``a.b=c`` in which it differs from the run; only some may
                (:data:`gaupipe.settings.IN_PHASE_B`)
    maps_url    the attention-map store; None is the run's own
    resume      continues from the last checkpoint, or starts where there is none; without it a
                student that is there is refused
    distilled   False trains the baseline, the same model on the labels alone
    data        the data set of the settings, where it has been read already

    Raises UserError before anything is written.
    """
    run = RunDirectory(run_dir)

    def prepare() -> tuple[Settings, Path, list[str], ImageData]:
        if maps_url == "":
            raise UserError("--maps '': should be the path or URL of a store")
        if maps_url and not distilled:
            raise UserError(
                "--maps: training on the labels alone (--no-distill) reads no maps: leave one of "
                "the two out"
            )
        named = name if name is not None else student or run.settings().phase_b.student
        check_name(named)
        asked = [*overrides, *([f"phase_b.student={student}"] if student else [])]
        recorded = run.overrides(named, distilled)
        settings = run.with_overrides([*recorded, *asked])
        if not distilled:
            check_used(asked, settings)
        folder = run.student(named, distilled)
        recorded_before = (folder / "overrides.json").is_file()
        if settings.data.buckets is None and distributed.size() > 1 and not recorded_before:
            asked.append(f"data.buckets={distributed.size()}")
            settings = run.with_overrides([*recorded, *asked])
        attention = settings.phase_b.student
        if named in STUDENTS and named != attention:
            raise UserError(
                f"--name {named}: is the name of an attention, and this student's is {attention}: "
                "choose another name"
            )
        if not resume and folder.exists():
            raise UserError(
                f"{folder} already exists: --resume continues it, --name NAME trains another "
                "student beside it"
            )
        latest = dict.fromkeys(reversed([*recorded, *asked]))  # of two values the last counts
        images = data or load_data(settings.data)
        images.check_split(run.split)
        return settings, folder, [*reversed(latest)], images

    ranks.check_shared(run_dir)
    settings, folder, all_overrides, images = distributed.main_first(prepare)
    with run.locked(shared=True):
        return train_student(
            settings,
            folder,
            teacher=run if distilled else None,
            maps_url=maps_url,
            overrides=all_overrides,
            data=images,
        )


def train_student(
    settings: Settings,
    folder: Path,
    *,
    teacher: RunDirectory | None,
    maps_url: str | None = None,
    overrides: Sequence[str] = (),
    data: ImageData | None = None,
) -> list[dict[str, Any]]:
    """Trains a student into ``folder``, or goes on with the one that is there, and returns its
    metrics.

    teacher     the run whose phase A it learns from; None for the baseline
    maps_url    the teacher's store; None is the run's own, which must then be of that teacher
    overrides   in what the settings differ from those of the run
    """
    if teacher is None and settings.baseline.epochs is not None:
        phase = settings.phase_b.model_copy(update={"epochs": settings.baseline.epochs})
        settings = settings.model_copy(update={"phase_b": phase})

    def prepare() -> tuple[PhaseB, TrainingState[VisionTransformer]]:
        images = data or load_data(settings.data)
        loggers.check(settings.log.to)
        check_buckets(len(images.train), settings.data.num_buckets, settings.data.batch_size)
        job = build(settings, images, teacher, maps_url)
        if teacher and settings.phase_b.warm_start != "none" and not has_checkpoint(checkpoint):
            start_from_teacher(job, phase_a.load(teacher, job.data, with_images=False).teacher)
        return job, training_state(job)

    def start() -> None:
        write_whole(folder / "config.yaml", config.dump(settings))
        write_whole(folder / "overrides.json", json.dumps(overrides) + "\n")
        if job.maps is not None:
            url = job.maps.url
            learned = {
                "url": url if "://" in url else os.path.abspath(url),
                "teacher_sha256": job.maps.schema.teacher_sha256,
            }
            write_whole(folder / "maps.json", json.dumps(learned) + "\n")

    checkpoint = folder / "checkpoint"
    job, state = distributed.main_first(prepare)
    ranks.check_same(settings, job.data)
    if job.maps is not None:
        distributed.check_same(
            {f"{job.maps.url}, sha256 of its teacher": job.maps.schema.teacher_sha256},
            "every machine should see the same store",
        )

    def finish() -> None:
        geometry.draw(state.metrics, folder)
        kept_epochs.save(state, folder, settings.phase_b, job.data)

    with locked(folder, "student"):
        distributed.main_first(lambda: state.load(checkpoint))
        distributed.on_main(start)
        train(job, state, folder)
        distributed.on_main(finish)
    return state.metrics


def train(job: PhaseB, state: TrainingState[VisionTransformer], folder: Path) -> None:
    """All epochs that are left, on L = alpha L_soft + beta L_hard + gamma L_feat
    (*GauTransformer, eq. 11*); without maps on the labels alone."""
    settings, phase, student, maps = job.settings, job.settings.phase_b, job.student, job.maps
    training, validation = train_and_val(job.data, settings.data, job.device)
    augment = Augment(settings.augment, settings.seed)
    loss_module = StudentLosses(job)
    projection = geometry.Geometry(job.data, job.device, settings.geometry_every)
    views = 1 if maps is None else maps.schema.views
    shuffled = settings.seed if phase.shuffle_maps else None

    label = folder.name if job.maps is not None else f"{folder.name} (plain)"
    done = len(state.metrics)
    with loop(settings, state, training, folder, label, phase.epochs) as running:
        update, progress = running.update, running.progress
        if maps is not None and len(student.blocks) != maps.schema.layers:
            layers = layer_map(settings, len(student.blocks), maps.schema.layers)
            progress.line(f"{label}: its blocks are compared with the stored blocks {layers}")
        if maps is not None and not done and moves_roughly(maps.schema, settings):
            progress.line(
                f"{label}: shifts and crops move the stored maps; a trained ViT would not show "
                "them so: 'gaupipe export-maps --views' stores the maps of the views"
            )
        for epoch in running.epochs():
            losses_of = update.replicated(loss_module)
            gamma = job.gamma(epoch.number)
            copy = maps is not None and epoch.number < phase.copy_epochs
            stored, view = None, None
            # once a store of views has nothing to say, there is no need to see its views again
            if maps is not None and (views == 1 or gamma or copy or phase.alpha):
                view = epoch.number % views if views > 1 else None
                stored = MapsOfEpoch(maps, view or 0, shuffled)
            for batch in training.epoch(epoch.number, augment, stored, view, epoch.first):
                with update.forward():
                    losses = losses_of(batch, gamma, copy, epoch.number)
                update(losses["loss"], batch.weight)
                projection.measure(student, update.batch, epoch)
                epoch.add(len(batch), **losses)
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
            epochs_back = state.keep_best(epoch.metrics, phase.best_by)
            early = phase.patience is not None and epochs_back >= phase.patience
            state.finished = early or running.is_last(epoch)
            attention = student_attention(state.kept, job.device)
            save_snapshot(folder, epoch.number + 1, settings, job.data, attention)
            running.line(epoch, f"loss {means['loss']:.4f}, validation acc {scores['acc']:.4f}")
        if state.best and len(state.metrics) > done:
            progress.line(f"{label}: {epochs_in_words(state, phase)}")


def moves_roughly(schema: store.Schema, settings: Settings) -> bool:
    """Whether maps of a trained ViT are moved by shifts or crops and compared."""
    augment, phase = settings.augment, settings.phase_b
    moved = augment.geometry == "follow" and (augment.crop_padding or augment.resized_crop)
    compared = phase.gamma or phase.copy_epochs
    return bool(schema.views == 1 and moved and compared and schema.extra.get("teacher"))


def epochs_in_words(state: TrainingState, phase: PhaseBSettings) -> str:
    """Which epoch was the best of a training that has finished, and why it ended early."""
    assert state.best
    number, last = state.best["epoch"], len(state.metrics)
    value = state.metrics[number - 1][phase.best_by]
    early = f"; no better one in {last - number}: stopped" if last < phase.epochs else ""
    kept = number if phase.keep == "best" else last
    return f"epoch {number} is the best ({phase.best_by} {value:.4f}){early}; kept: epoch {kept}"


def build(
    settings: Settings, data: ImageData, teacher: RunDirectory | None, maps_url: str | None = None
) -> PhaseB:
    """Everything phase B needs, freshly started; the baseline without a ``teacher``. Writes
    nothing.

    Raises UserError for settings that do not fit, StoreError for maps of another data set or
    teacher.
    """
    device = select_device(settings)
    student = build_student(settings, data).to(device)
    if teacher is None:
        return PhaseB(settings, data, device, student, settings.baseline_optim, None)
    teacher_sha256 = teacher.teacher_digest() if maps_url is None else None
    url = maps_url or str(teacher.maps)
    maps = store.open(
        url,
        dataset_sha256=data.sha256,
        teacher_sha256=teacher_sha256,
        preload_bytes=int(settings.phase_b.preload_gb * 1e9),
    )
    check_fit(student, maps.schema, settings, url)
    check_targets(maps.schema, settings, url)
    job = PhaseB(settings, data, device, student, settings.phase_b.optim, maps)
    _ = job.read  # a damaged decoder shows before anything is written
    return job


def check_targets(schema: store.Schema, settings: Settings, url: str) -> None:
    """Raises UserError for a loss that the stored predictions cannot give, and for views that
    phase B could not draw again."""
    if settings.phase_b.alpha and not schema.extra.get("predicts", True):
        raise UserError(
            f"{url}: the teacher of these maps predicts no classes: set phase_b.alpha=0, and "
            "phase_b.beta to what the labels are to weigh"
        )
    drawn = schema.extra.get("views")
    if drawn is not None and drawn != export_maps.drawing(settings):
        raise UserError(
            f"{url}: holds maps of views drawn with another augmentation or another seed: "
            "phase B must draw the same; change them back, or export again"
        )


def training_state(job: PhaseB) -> TrainingState[VisionTransformer]:
    """The optimizer of the student and its schedule, freshly started."""
    settings, schema = job.settings, job.maps and job.maps.schema
    steps = Buckets(len(job.data.train)).steps(settings.data.batch_size)
    optimizer, schedule = build_optimizer(job.student, job.optim, settings.phase_b.epochs, steps)
    identity = without(settings, ("export.", "phase_b.keep", *IRRELEVANT))
    identity |= {
        "the data set": job.data.sha256,
        "the teacher of the maps": schema and schema.teacher_sha256,
        "the kind of store": schema and kind_of(schema),
        "the encoding of the store": schema and schema.encoding,
    }
    precision = settings.precision
    return TrainingState(job.student, optimizer, schedule, job.optim, precision, identity=identity)


def kind_of(schema: store.Schema) -> str:
    """What a store keeps, for a student's identity; in one word for the kinds of version 0.1."""
    more = {"k": schema.k, "views": None if schema.views == 1 else schema.views}
    return " ".join([schema.kind, *(f"{name} {value}" for name, value in more.items() if value)])


def start_from_teacher(job: PhaseB, teacher: Teacher | VitTeacher) -> None:
    """The warm start that the settings ask for."""
    phase, student = job.settings.phase_b, job.student
    start = hand_over if phase.warm_start == "exact" else warm_start
    start(student, teacher.weights())
    if phase.warm_start != "prior":
        return
    assert isinstance(teacher, Teacher)  # the settings allow it for no other
    ids = job.data.train.evenly_spaced(WARM_START_IMAGES)
    batches = Batches(job.data.train, job.data, job.device, job.settings.data.batch_size)
    images = torch.cat([batch.images for batch in batches.in_order(ids)])
    gaussians = gaussians_of(teacher, images)  # [N or 1, L, H, T, 4]

    def map_of(layer: int) -> Tensor:
        heads = of_block(gaussians, layer, phase.head_map)
        maps = expected_map(heads, teacher.grid)  # [N or 1, H, T, T]
        return maps.mean(1, keepdim=True) if phase.mean_heads else maps

    layers = layer_map(job.settings, len(student.blocks), teacher.layers)
    maps = (None if layer is None else map_of(layer) for layer in layers)
    fit_queries_and_keys(student, maps, images, job.settings.seed)


@torch.no_grad()
def gaussians_of(teacher: Teacher, images: Tensor) -> Tensor:
    """Gaussians [1, L, H, T, 4] of the shared prior, or, of a teacher that predicts them, those of
    the images [N, C, height, width]: [N, L, H, T, 4]."""
    if not teacher.predicts_gaussians:
        return teacher.gaussians(None)
    batches = images.split(WARM_START_BATCH)
    return torch.cat([teacher.look(batch)[1] for batch in batches])


@torch.no_grad()
def average(maps: store.Store, read: Reader, at_once: int = 256) -> Reader:
    """A control: what reads for every image the mean of all maps of a store."""
    schema, sums = maps.schema, torch.zeros(())  # that becomes [L, H, T, T]
    batches = np.array_split(np.arange(len(maps)), -(-len(maps) // at_once))
    for stored in maps.prefetch(batches):
        attention = read(stored)
        sums = sums + torch.stack([attention.map(layer).sum(0) for layer in range(schema.layers)])
    mean = sums / len(maps)  # [L, H, T, T]

    def read_mean(stored: dict[str, np.ndarray]) -> StoredRows:
        whole = mean.expand(len(stored["labels"]), *mean.shape)

        def rows(layer: int, heads: Sequence[int] | None, queries: Tensor | None) -> Tensor:
            return take_queries(of_block(whole, layer, heads), queries)

        return StoredRows(rows, schema.grid)

    return read_mean


class MapsOfEpoch:
    """What a store holds for the images of one epoch: of each its entry for one of the views.

    With a ``seed``, a control, every image gets the maps of another one, always the same, with its
    own logits.
    """

    def __init__(self, maps: store.Store, view: int = 0, seed: int | None = None) -> None:
        self.maps, self.view, self.views = maps, view, maps.schema.views
        images = len(maps) // self.views
        self.others = None
        if seed is not None:  # one cycle through all images: none keeps its own maps
            order = np.random.default_rng(seed).permutation(images)
            self.others = np.empty_like(order)
            self.others[order] = np.roll(order, 1)

    def prefetch(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """As :meth:`store.Store.prefetch`."""
        stored = self._prefetch(batches)
        if self.others is None:
            yield from stored
            return
        others = self._prefetch([self.others[image_ids] for image_ids in batches])
        for mine, other in zip(stored, others, strict=True):
            yield {**other, "logits": mine["logits"], "labels": mine["labels"]}

    def _prefetch(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        entries = [image_ids * self.views + self.view for image_ids in batches]
        return self.maps.prefetch(entries)
