"""The training of phase B: a ViT that learns from the labels, the teacher's predictions and the
stored attention maps, in the loop of :mod:`gaupipe.training.job`.

Axis letters: B images, L blocks, H heads, T tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer

import store
from gaupipe.data.batches import Batch
from gaupipe.data.mixing import mixed_targets
from gaupipe.data.splits import ImageData
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.distillation.losses import FeatureLoss, TeacherMaps, gamma_at, soft_loss
from gaupipe.distillation.student import check_fit, layer_map
from gaupipe.settings import PhaseBSettings, Settings
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import MapShape
from gaupipe.teachers.notes import Drawing, StoreNotes
from gaupipe.training.job import (
    EpochPlan,
    LabelLosses,
    StepLosses,
    Training,
    remarks_on_patches,
    share_of_dropped_patches,
    student_training,
)
from gaupipe.training.state import Identity

PRELOAD_BYTES = 2 * 10**9
"""The size of the largest store that is read into memory whole."""


class StudentLosses(LabelLosses):
    """The losses of phase B for a batch. ``teacher_maps`` gives the maps that the student's are
    compared with; it is None where there are none, and gamma is 0."""

    def __init__(
        self,
        student: VisionTransformer,
        settings: Settings,
        teacher_maps: Callable[[Batch], TeacherMaps] | None,
        teacher_predicts: bool = True,
    ) -> None:
        compile = settings.compile
        super().__init__(student, settings.student_training, compile)
        self.phase = phase = settings.phase_b
        self.teacher_maps = teacher_maps
        self.teacher_predicts = teacher_predicts
        if phase.gamma:
            with_loss = FeatureLoss(student, phase.temperature, phase.direction, compile)
            self.forward_with_loss = torch.compile(with_loss) if compile else with_loss

    def forward(self, batch: Batch, gamma: float = 0.0, alpha: float = 0.0) -> StepLosses:
        """Losses of a batch, with their weighted sum (*GauTransformer, eq. 11*). L_feat is there
        unless ``gamma``, its weight, is 0. What ``alpha``, the weight of L_soft, is below the
        settings' the labels have."""
        loss_soft = loss_feat = None
        if gamma:
            assert self.teacher_maps is not None
            maps = self.teacher_maps(batch)
            logits, loss_feat = self.forward_with_loss(batch.images, maps)  # [B, C], scalar
        else:
            logits = self.forward_student(batch.images)  # [B, C]
        logits = logits.float()
        losses = self.label_losses(logits, batch)
        loss = (self.phase.beta + self.phase.alpha - alpha) * losses.loss_hard
        if batch.stored is not None and self.teacher_predicts:
            teacher = torch.from_numpy(batch.stored["logits"]).to(logits.device)
            targets = mixed_targets(teacher.float().softmax(-1), batch.mixed)  # [B, C]
            loss_soft = soft_loss(logits, targets)
            loss = alpha * loss_soft + loss
        if loss_feat is not None:
            loss = loss + gamma * loss_feat
        return replace(losses, loss=loss, loss_feat=loss_feat, loss_soft=loss_soft)


class MapReader:
    """Gives the stored attention of a batch, on the device, moved and mixed as its images were.
    ``layers`` has for each block of the student the stored one that it is compared with."""

    def __init__(
        self,
        maps: store.Store,
        student: VisionTransformer,
        phase: PhaseBSettings,
        device: torch.device,
    ) -> None:
        self.layers = layer_map(phase, len(student.blocks), maps.schema.maps.layers)
        self.heads = phase.head_map
        self.grid = tuple(student.patch_embed.grid_size)
        self.read = MAP_KINDS[maps.schema.kind].reader(maps, device)

    def __call__(self, batch: Batch) -> TeacherMaps:
        assert batch.stored is not None  # read with the images, from the same store
        stored = self.read(batch.stored)
        return TeacherMaps(stored, self.layers, self.grid, self.heads, batch.geometry, batch.mixed)


def build(
    settings: Settings,
    data: ImageData,
    device: torch.device,
    student: VisionTransformer,
    maps: store.Store,
) -> Training:
    """The training of a ``student`` that lies on the ``device``, from a store of ``maps``. Raises
    UserError for a student or a loss that the maps do not fit."""
    phase = settings.phase_b
    train = settings.student_training
    check_fit(student, MapShape.of_store(maps.schema), phase, maps.url)
    check_targets(maps.schema, settings, data.image_size, maps.url)
    epochs = plan_epochs(settings, maps)
    if phase.shuffle_maps and not maps.schema.kind_class.arrays(maps.schema):
        raise UserError(
            f"phase_b.shuffle_maps: no image has maps of its own in {maps.url}: leave it out"
        )
    predicts = StoreNotes.of(maps.schema).has_predictions
    reader = None
    if maps.schema.has_maps:
        reader = MapReader(maps, student, phase, device)
    losses = StudentLosses(student, settings, reader, predicts)
    remarks = remarks_on_patches(train, epochs) + remarks_on_maps(settings, maps.schema, student)
    job = student_training(settings, data, device, student, train, losses, epochs, remarks)
    return replace(
        job,
        identity=job.identity | identity_of_maps(maps.schema),
        source_of_maps=(maps.url, maps.schema.teacher_sha256),
    )


def plan_epochs(settings: Settings, maps: store.Store) -> list[EpochPlan]:
    """For each epoch the weights of L_feat and L_soft, and what is read of a store of ``maps``."""
    phase = settings.phase_b
    train = settings.student_training
    views = maps.schema.views
    others = None
    if phase.shuffle_maps:
        others = other_images(len(maps) // views, settings.seed)
    epochs = []
    for epoch, gamma in enumerate(gammas(settings)):
        dropped = share_of_dropped_patches(train, epoch, gamma)
        alpha = phase.alpha if epoch < phase.alpha_ends(train.epochs) else 0.0
        # once a store of views has nothing to say, there is no need to see its views again
        if views > 1 and not gamma and not alpha:
            epochs.append(EpochPlan(dropped=dropped))
            continue
        view = None
        if views > 1:
            view = epoch % views
        stored = MapsOfEpoch(maps, view or 0, others, with_maps=gamma > 0)
        epochs.append(EpochPlan(gamma, alpha, dropped, stored, view))
    return epochs


def gammas(settings: Settings) -> list[float]:
    """The weight of L_feat in each epoch of a student."""
    phase = settings.phase_b
    epochs = settings.student_training.epochs
    end = phase.gamma_ends(epochs)
    return [gamma_at(epoch, phase.gamma, phase.gamma_schedule, end) for epoch in range(epochs)]


def identity_of_maps(schema: store.Schema) -> Identity:
    """What of a store a checkpoint belongs to."""
    kind = schema.kind
    if schema.k:
        kind += f" k {schema.k}"
    if schema.views > 1:
        kind += f" views {schema.views}"
    notes = StoreNotes.of(schema)
    return {
        "the teacher of the maps": schema.teacher_sha256,
        "the kind of store": kind,
        "the encoding of the store": schema.encoding,
        "the blocks of the store": notes.layers,
        "the grid of the store": schema.to_attributes()["grid"],
        "the precision of the store": notes.precision,
        "a probe predicts": notes.probe,
    }


def remarks_on_maps(
    settings: Settings, schema: store.Schema, student: VisionTransformer
) -> list[str]:
    """Lines about what of a store's maps, and of their teacher, the student does not get."""
    phase = settings.phase_b
    augment = settings.augment
    remarks = []
    if schema.has_maps and len(student.blocks) != schema.layers:
        layers = layer_map(phase, len(student.blocks), schema.maps.layers)
        remarks.append(f"its blocks are compared with the stored blocks {layers}")
    if phase.warm_start in ("slice", "teacher") and settings.model.stem == "conv":
        remarks.append("its convolutional stem is no part of the teacher's weights")
    moved = augment.geometry == "follow" and (augment.crop_padding or augment.resized_crop)
    if StoreNotes.of(schema).teacher and schema.views == 1 and moved and phase.gamma:
        remarks.append(
            "shifts and crops move the stored maps; a trained ViT would not show them so: "
            "'gaupipe export-maps --views' stores the maps of the views"
        )
    return remarks


def check_targets(schema: store.Schema, settings: Settings, image_size: int, url: str) -> None:
    """Raises UserError for a loss without stored predictions, and for views that phase B would draw
    otherwise."""
    notes = StoreNotes.of(schema)
    if settings.phase_b.alpha and not notes.has_predictions:
        raise UserError(
            f"{url}: the teacher of these maps predicts no classes: set phase_b.alpha=0, and "
            "phase_b.beta to what the labels are to weigh"
        )
    if notes.views is not None and notes.views != Drawing.of(settings, image_size):
        raise UserError(
            f"{url}: holds maps of views drawn with another augmentation, seed or image size: "
            "phase B must draw the same; change it back, or export again"
        )


class MapsOfEpoch:
    """The stored entries of one epoch: of each image its entry for one of the views.

    With ``others`` [N], a control, image i gets the maps of the image others[i], with its own
    predictions. Without ``with_maps`` predictions are read alone: maps are by far the largest
    arrays.
    """

    def __init__(
        self,
        maps: store.Store,
        view: int = 0,
        others: np.ndarray | None = None,
        with_maps: bool = True,
    ) -> None:
        self.maps = maps
        self.view = view
        self.views = maps.schema.views
        self.others = others
        schema = maps.schema
        self.predictions = ["logits"]
        if schema.labelled:
            self.predictions.append("labels")
        self.names = self.predictions
        if with_maps:
            self.names = [*schema.kind_class.arrays(schema), *self.predictions]

    def prefetch(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """As :meth:`store.Store.prefetch`."""
        stored = self._prefetch(batches)
        if self.others is None:
            yield from stored
            return
        others = self._prefetch([self.others[image_ids] for image_ids in batches])
        for mine, other in zip(stored, others, strict=True):
            yield {**other, **{name: mine[name] for name in self.predictions}}

    def _prefetch(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        entries = [image_ids * self.views + self.view for image_ids in batches]
        return self.maps.prefetch(entries, names=self.names)


def other_images(images: int, seed: int) -> np.ndarray:
    """For each of so many images another one, int64 [N], always the same: one cycle through all, so
    that none keeps its own maps."""
    # a stream of its own: default_rng(seed) draws the order of the first epoch, whose batches
    # would hold almost all the images whose maps they get
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
    order = generator.permutation(images)
    others = np.empty_like(order)
    others[order] = np.roll(order, 1)
    return others
