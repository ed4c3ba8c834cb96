"""The training of phase B: a ViT that learns from the labels, the teacher's predictions and the
stored attention maps, in the loop of :mod:`gaupipe.training.job`.

Axis letters: B images, L blocks, H heads, T tokens, C classes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from timm.models.vision_transformer import VisionTransformer

import store
from gaupipe.data.batches import Batch
from gaupipe.data.mixing import mixed_targets
from gaupipe.data.splits import ImageData
from gaupipe.distillation.kinds import StoredAttentionReader
from gaupipe.distillation.losses import (
    ConstantMaps,
    FeatureLoss,
    TeacherMaps,
    drawn_queries,
    soft_loss,
)
from gaupipe.distillation.reading import StoredImages, StoredOfEpoch, StoresOfSplit
from gaupipe.distillation.student import (
    check_fit,
    check_soft_loss,
    layer_map,
    without_predictions,
)
from gaupipe.settings import PhaseBSettings, Settings, TrainSettings
from gaupipe.settings.teachers import teacher_kind
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import MapShape, Teacher
from gaupipe.teachers.notes import Drawing, StoreNotes
from gaupipe.training.job import (
    EpochPlan,
    LabelLosses,
    StepLosses,
    Training,
    make_training,
)
from gaupipe.training.state import Identity


class StudentLosses(LabelLosses):
    """The losses of phase B for a batch. The student's maps are compared with ``teacher_maps``,
    None where there are none, and gamma is 0."""

    def __init__(
        self,
        student: VisionTransformer,
        settings: Settings,
        train: TrainSettings,
        teacher_maps: MapReader | ConstantMaps | None,
        teacher_predicts: bool = True,
    ) -> None:
        compile = settings.compile
        super().__init__(student, train, compile)
        self.phase = phase = settings.phase_b
        self.teacher_maps = teacher_maps
        self.teacher_predicts = teacher_predicts
        if phase.gamma:
            with_loss = FeatureLoss(student, phase.temperature, phase.divergence)
            self.forward_with_loss = torch.compile(with_loss) if compile else with_loss

    def forward(self, batch: Batch, gamma: float = 0.0, alpha: float = 0.0) -> StepLosses:
        """Losses of a batch, with their weighted sum (*GauTransformer, eq. 11*). L_feat is there
        unless ``gamma``, its weight, is 0. What ``alpha``, the weight of L_soft, is below the
        settings' the labels have."""
        loss_soft = loss_feat = None
        if gamma:
            assert self.teacher_maps is not None
            maps = self.teacher_maps.of(batch)
            tokens = self.student.patch_embed.num_patches
            device = batch.images.device
            maps.queries = drawn_queries(self.phase.queries, batch.place, tokens, device)
            logits, loss_feat = self.forward_with_loss(batch.images, maps)  # [B, C], scalar
        else:
            logits = self.forward_student(batch.images)  # [B, C]
        logits = logits.float()
        losses = self.label_losses(logits, batch)
        label_weight = self.phase.beta + self.phase.alpha - alpha
        loss = label_weight * losses.loss_hard
        if batch.stored is not None and self.teacher_predicts:
            teacher_logits = torch.from_numpy(batch.stored["logits"]).to(logits.device).float()
            temperature = self.phase.soft_temperature
            probabilities = (teacher_logits / temperature).softmax(-1)
            targets = mixed_targets(probabilities, batch.mixed)  # [B, C]
            loss_soft = soft_loss(logits, targets, temperature)
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
        self.reader = StoredAttentionReader(maps, device)

    def of(self, batch: Batch) -> TeacherMaps:
        """The maps of a batch."""
        assert batch.stored is not None  # read with the images, from the same store
        stored = self.reader.attention(batch.stored)
        return TeacherMaps(stored, self.layers, self.grid, self.heads, batch.geometry, batch.mixed)


def build_distilled(
    settings: Settings,
    data: ImageData,
    device: torch.device,
    student: VisionTransformer,
    train: TrainSettings,
    stored: StoresOfSplit,
    unlabelled: StoresOfSplit | None = None,
) -> Training:
    """The training, as ``train`` says, of a ``student`` that lies on the ``device``, from what is
    ``stored`` of the training images and, where there are such, of the images without labels.
    Raises UserError for a student or a loss that the stores do not fit."""
    maps, predictions = stored
    if settings.phase_b.gamma:
        check_fit(student, MapShape.of_store(maps.schema), settings.phase_b, maps.url)
    for one in stored:
        check_views(one.schema, settings, data.image_size, one.url)
    if predictions is not maps:
        check_second_store(stored, settings.phase_b)
    remarks = remarks_on_maps(settings, maps.schema, student)
    predicts = StoreNotes.of(predictions.schema).has_predictions
    if not predicts:
        if settings.phase_b.alpha:
            remarks.append("its teacher predicts nothing, so phase_b.alpha is 0")
        settings = without_predictions(settings)
    phase = settings.phase_b
    if unlabelled is not None:
        check_alike(stored, unlabelled, settings)
    epochs = plan_epochs(settings, train.epochs, stored, unlabelled)
    if phase.shuffle_maps and not maps.schema.store_kind.arrays(maps.schema):
        raise UserError(
            f"phase_b.shuffle_maps: no image has maps of its own in {maps.url}: leave it out"
        )
    teacher_maps = None
    if maps.schema.has_maps:
        teacher_maps = MapReader(maps, student, phase, device)
    losses = StudentLosses(student, settings, train, teacher_maps, predicts)
    job = make_training(settings, data, device, student, train, losses, epochs, remarks)
    job.unlabelled = unlabelled is not None
    job.identity |= identity_of_maps(maps.schema)
    job.sources = [(maps.url, maps.schema.teacher_sha256)]
    if predictions is not maps:
        job.identity |= identity_of_predictions(predictions.schema)
        job.sources.append((predictions.url, predictions.schema.teacher_sha256))
    return job


def build_without_store(
    teacher: Teacher, student: VisionTransformer, train: TrainSettings
) -> Training:
    """The training, as ``train`` says, of a ``student`` that lies on the teacher's device, from the
    maps that all images share. Raises UserError for a student or a loss that the maps do not
    fit."""
    settings = without_predictions(teacher.settings)
    maps = constant_maps(teacher, student)
    epochs = [EpochPlan(gamma) for gamma in settings.phase_b.gammas(train.epochs)]
    losses = StudentLosses(student, settings, train, maps)
    name = settings.phase_a.teacher
    remarks = [f"{name} has {teacher.describe()}; it predicts nothing, so phase_b.alpha is 0"]
    data = teacher.data
    return make_training(settings, data, teacher.device, student, train, losses, epochs, remarks)


def constant_maps(teacher: Teacher, student: VisionTransformer) -> ConstantMaps:
    """The maps that all images share, as those of a ``student`` on the teacher's device are
    compared with them. Raises UserError where they do not fit."""
    phase = teacher.settings.phase_b
    maps = teacher.constant_maps(student)
    assert maps is not None  # of a teacher without a store
    shape = MapShape.of(maps)
    check_fit(student, shape, phase, teacher.settings.phase_a.teacher)
    layers = layer_map(phase, shape.layers, shape.layers)
    return ConstantMaps(maps.to(teacher.device), layers, shape.grid, phase.head_map)


def check_alike(stored: StoresOfSplit, unlabelled: StoresOfSplit, settings: Settings) -> None:
    """Raises UserError for stores of training images and of images ``unlabelled`` that no batch can
    mix: of other teachers or views, without predictions, or, where maps are compared, of other
    maps."""
    remedy = "'gaupipe export-maps --overwrite' writes both"
    for one, other in zip(stored, unlabelled, strict=True):
        first = one.schema
        second = other.schema
        where = f"{other.url}: holds the images without labels of"
        if first.teacher_sha256 != second.teacher_sha256:
            raise UserError(f"{where} another teacher than {one.url}: {remedy}")
        notes = StoreNotes.of(second)
        if StoreNotes.of(first).probe != notes.probe:
            raise UserError(f"{where} a probe that has learned other labels: {remedy}")
        if (first.views, StoreNotes.of(first).views) != (second.views, notes.views):
            raise UserError(f"{where} other views than {one.url}: {remedy}")
    if not StoreNotes.of(unlabelled.predictions.schema).has_predictions:
        raise UserError(
            f"{unlabelled.predictions.url}: holds the images without labels of a teacher that "
            "predicts no classes: nothing is said of them"
        )
    check_soft_loss(settings)
    maps = stored.maps
    other = unlabelled.maps
    if settings.phase_b.gamma and identity_of_maps(maps.schema) != identity_of_maps(other.schema):
        raise UserError(
            f"{other.url}: holds the images without labels of other maps than {maps.url}: {remedy}"
            ", or set phase_b.gamma=0"
        )


def plan_epochs(
    settings: Settings, count: int, stored: StoresOfSplit, unlabelled: StoresOfSplit | None = None
) -> list[EpochPlan]:
    """For each of ``count`` epochs the weights of L_feat and L_soft, and what is read of the stores
    of the training images and of the images ``unlabelled``."""
    phase = settings.phase_b
    images = [StoredImages(*stored, phase, settings.seed)]
    if unlabelled is not None:
        images.append(StoredImages(*unlabelled, phase, settings.seed))
    epochs = []
    for epoch, gamma in enumerate(phase.gammas(count)):
        alpha = phase.alpha if epoch < (phase.alpha_epochs or count) else 0.0
        reader = StoredOfEpoch(images, epoch, with_maps=gamma > 0)
        # once a store of views has nothing to say, there is no need to see its views again
        if reader.view is not None and not gamma and not alpha:
            epochs.append(EpochPlan())
            continue
        epochs.append(EpochPlan(gamma, alpha, stored=reader))
    return epochs


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
        "the grid of the store": None if schema.grid is None else [*schema.grid],
        "the precision of the store": notes.precision,
        "a probe predicts": notes.probe,
    }


def identity_of_predictions(schema: store.Schema) -> Identity:
    """What of a second store, of predictions, a checkpoint belongs to."""
    return {
        "the teacher of the predictions": schema.teacher_sha256,
        "the views of the predictions": schema.views,
        "a probe predicts": StoreNotes.of(schema).probe,
        "the precision of the predictions": StoreNotes.of(schema).precision,
    }


def remarks_on_maps(
    settings: Settings, schema: store.Schema, student: VisionTransformer
) -> list[str]:
    """Lines about what of a store's maps, and of their teacher, the student does not get."""
    phase = settings.phase_b
    augment = settings.augment
    remarks = []
    if phase.gamma and schema.has_maps and len(student.blocks) != schema.layers:
        layers = layer_map(phase, len(student.blocks), schema.maps.layers)
        remarks.append(f"its blocks are compared with the stored blocks {layers}")
    if phase.warm_start in ("slice", "teacher") and settings.model.stem != "patch":
        remarks.append("its convolutional stem is no part of the teacher's weights")
    moves = augment.geometry == "follow" and (augment.crop_padding or augment.resized_crop)
    if moves and phase.gamma and schema.views == 1:
        teacher = StoreNotes.of(schema).teacher
        if teacher is not None and teacher_kind(teacher).shows_views:
            remarks.append(
                "shifts and crops move the stored maps; the teacher would not show them so: "
                "'gaupipe export-maps --views' stores the maps of the views"
            )
    return remarks


def check_views(schema: store.Schema, settings: Settings, image_size: int, url: str) -> None:
    """Raises UserError for views that phase B would draw otherwise."""
    views = StoreNotes.of(schema).views
    if schema.views > 1 and views != Drawing.of(settings, image_size):
        raise UserError(
            f"{url}: holds views drawn with another augmentation, seed or image size, or in a way "
            "that it does not note: "
            "phase B must draw the same; change it back, or export again"
        )


def check_second_store(stored: StoresOfSplit, phase: PhaseBSettings) -> None:
    """Raises UserError for a store of predictions that is not needed beside that of the maps, or
    that lacks views of theirs."""
    maps, predictions = stored
    where = predictions.url
    if not StoreNotes.of(predictions.schema).has_predictions:
        raise UserError(f"{where}: its teacher predicts no classes; leave it out")
    if not phase.alpha:
        raise UserError(f"{where}: phase_b.alpha is 0, so no predictions are learned; set it")
    if not phase.gamma:
        raise UserError(
            f"{where}: no maps are compared, so one store is enough: --maps {predictions.url}"
        )
    count = predictions.schema.views
    if count > 1 and not 1 < maps.schema.views <= count:
        raise UserError(
            f"{where}: has {count} views of an image and {maps.url} {maps.schema.views}: the "
            "images of an epoch that compares maps are of one view that both have; export "
            "predictions of the images themselves or, of a teacher that sees views, "
            f"2 to {count} views of the maps"
        )
