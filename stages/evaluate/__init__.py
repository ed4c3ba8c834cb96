"""Evaluate: how good a trained student is, over all and for each class, and where it fails.

Axis letters: N images, C classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import store
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batch, Batches
from gaupipe.data.sources import images_with_labels
from gaupipe.data.splits import ImageData, Split
from gaupipe.distillation.job import MapReader
from gaupipe.distillation.losses import feature_loss, patch_map
from gaupipe.settings import Settings, places
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import utf8
from gaupipe.teachers.base import Teacher, Wanted
from gaupipe.teachers.notes import StoreNotes
from gaupipe.training.scores import Metrics, classification_metrics, predictions, predictions_of
from gaupipe.vit.forward import forward_with_maps
from gaupipe.vit.saving import class_names, saved_sha256
from stages import predict
from stages.evaluate import confusion as figure
from stages.evaluate.by_class import ByClass, by_class, labelled
from stages.runs import kept_epochs, ranks
from stages.runs.trained import TrainedStudent, check_data, load_student, load_teacher, open_maps


class BesideTeacher(TypedDict, total=False):
    """A teacher that knows unseen images, on the same split; ``no_teacher`` says why it is not
    there."""

    teacher_top1: float
    teacher_loss: float
    same_class_as_teacher: float
    no_teacher: str


class Agreement(TypedDict, total=False):
    """Student and teacher on training images."""

    teacher_images: int
    teacher_agreement: float
    """Share of the images of which both predict the same class."""
    map_kl: list[float | None]
    """KL of each block's map from the teacher's, None for a block without one."""


class Scores(Metrics, BesideTeacher, Agreement, ByClass):
    student: str
    split: str
    images: int
    epoch: int
    """That the student is of, from 1."""


TEACHER_IMAGES = 4096
"""Training images, evenly spaced, on which student and teacher are compared."""


def run(
    run_dir: Path,
    name: str | None = None,
    *,
    split: str = "val",
    folder: Path | None = None,
    plain: bool = False,
    out: Path | None = None,
    confusion: Path | None = None,
    alone: bool = False,
) -> Scores:
    """Accuracy with its 95 % interval, cross-entropy and calibration error on a split, or on the
    images of a ``folder`` with a folder for each class; the accuracy of each class, the confusion
    matrix (a row for each class, a column for each prediction) and the most confident mistakes.
    Where the run's store is complete and fits the student, also how far student and teacher agree
    on training images, and how good a teacher is that knows unseen images; ``alone`` leaves both
    out, for which the teacher does not see the images.

    ``name`` and ``plain`` are those of :func:`load_student`. The predictions of all images go
    to ``out``, as ``gaupipe predict`` writes them, and a picture of the confusion matrix
    to ``confusion``. Raises UserError for other images or classes than those that the run began
    with, StoreError for the store of another teacher or data set, and for a damaged one.
    """
    maps: store.Store | None = None
    teacher: Teacher | str | None = None
    with distributed.rank_zero_first():
        student = load_student(run_dir, name, plain)
        if folder is not None:
            data = folder_data(student, folder)
        else:
            data = student.run.load_data(student.settings, test=split == "test")
            if split not in data.splits:
                raise UserError(f"data set {data.name} has no {split} split: evaluate on val")
            check_data(student, data)
            if not alone:
                maps = open_maps(student, data)
                teacher = teacher_of_unseen(student, data)
    weights = student.folder / "student"
    files = {
        f"{weights}, sha256": saved_sha256(weights),
        "the teacher": teacher if isinstance(teacher, str) else "is there",
    }
    ranks.check_same(student.settings, data, files)
    images = getattr(data, split)
    logits, labels = predictions(student.model, images, data, student.settings)
    beside: BesideTeacher = {}
    if isinstance(teacher, str):
        beside = {"no_teacher": teacher}
    elif teacher is not None:
        beside = beside_teacher(teacher, images, logits)
    agreement: Agreement = {}
    if maps is not None:
        agreement = teacher_agreement(student.model, maps, data, student.settings)
        if student.has_other_predictions:  # of another teacher than this store's
            agreement.pop("teacher_agreement", None)
    names = class_names(student.model, data.num_classes)
    rows = labelled(logits, labels, images, names)
    scores: Scores = {
        "student": student.name,
        "split": split if folder is None else str(folder),
        "images": len(images),
        "epoch": kept_epochs.entry(student.folder)["epoch"],
        **classification_metrics(logits, labels),
        **beside,
        **agreement,
        **by_class(rows, names),
    }
    if out is not None and distributed.is_main():
        predict.write(rows, out)
    if confusion is not None and distributed.is_main():
        figure.draw(scores["confusion"], names, confusion)
    return scores


def folder_data(student: TrainedStudent, folder: Path) -> ImageData:
    """The images of a folder with a folder for each class, as the student sees images. Raises
    UserError for a class that the student does not know, and for a student of grey images."""
    places.check_data(folder)
    model: Any = student.model
    config = model.pretrained_cfg
    size = model.patch_embed.img_size[0]
    names = class_names(model, model.num_classes)
    settings = student.settings.data.model_copy(update={"image_size": size})
    source = images_with_labels(str(folder), settings)
    classes = [utf8(name) for name in source.class_names]  # as the student has them
    unknown = sorted({*classes} - {*names})
    if unknown:
        known = ", ".join(names[:10])
        if len(names) > 10:
            known += ", ..."
        raise UserError(
            f"--data {folder}: the student has no class {unknown[0]!r}; its classes are {known}"
        )
    numbers = np.array([names.index(name) for name in classes])
    source.labels = numbers[source.labels]
    source.class_names = tuple(names)
    images = Split.of_all(source)
    data = ImageData(
        name=str(folder),
        train=images,
        val=images,
        num_classes=len(names),
        channels=3,
        image_size=size,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        sha256=source.fingerprint().hex(),
    )
    check_data(student, data)
    return data


def teacher_of_unseen(student: TrainedStudent, data: ImageData) -> Teacher | str | None:
    """The run's teacher, if it predicts the classes of unseen images. Or the reason
    why it is not to be had, where the student learned from another one, or its files have gone."""
    run = student.run
    phase = run.settings().phase_a
    if not phase.kind.predicts_new_images or run.teacher_digest() is None:
        return None
    if student.has_other_teacher or student.has_other_predictions:
        return "the student learned from another teacher than the run's"
    try:
        teacher = load_teacher(run, data)
    except UserError as error:
        return str(error)
    return teacher if teacher.predicts else None


@torch.inference_mode()
def beside_teacher(teacher: Teacher, images: Split, logits: Tensor) -> BesideTeacher:
    """Top-1 accuracy and cross-entropy of a teacher on the split, and the share of images whose
    class it predicts as ``logits`` [N, C] do."""
    draws = torch.Generator(teacher.device).manual_seed(teacher.settings.seed)

    def predict(batch: Batch) -> Tensor:
        logits = teacher.outputs(batch, Wanted(draws)).logits
        assert logits is not None  # teacher_of_unseen() asked
        return logits

    teacher_logits, labels = predictions_of(predict, teacher.batches(images))
    scores = classification_metrics(teacher_logits, labels)
    same = teacher_logits.argmax(-1) == logits.argmax(-1)
    return {
        "teacher_top1": scores["top1"],
        "teacher_loss": scores["loss"],
        "same_class_as_teacher": same.float().mean().item(),
    }


@torch.inference_mode()
def teacher_agreement(
    student: VisionTransformer, maps: store.Store, data: ImageData, settings: Settings
) -> Agreement:
    """Over training images: the share on which student and teacher predict the same class, and
    the KL of each block's map from the teacher's (teacher first, mean over images, heads and
    queries; null for a block without one)."""
    image_ids = data.train.evenly_spaced(TEACHER_IMAGES)
    count = len(image_ids)  # of all ranks together
    image_ids = np.array_split(image_ids, distributed.world_size())[distributed.rank()]
    device = next(student.parameters()).device
    teacher_maps = None
    if maps.schema.has_maps:
        teacher_maps = MapReader(maps, student, settings.phase_b, device)
    batches = Batches(data.train, data, device, settings.data.batch_size, settings.data.workers)
    same = torch.zeros((), dtype=torch.float64)
    divergence = torch.zeros(len(student.blocks), dtype=torch.float64)
    if StoreNotes.of(maps.schema).views is None:
        loaded = batches.in_order(image_ids)
    else:  # the first view of each image, as its maps were made
        views = maps.schema.views
        augment = Augment(settings.augment, settings.seed)
        loaded = batches.views(image_ids * views, augment, views)
    for batch in loaded:
        batch.stored = maps.gather(batch.ids.numpy())
        logits, log_maps = forward_with_maps(student, batch.images)
        predicted = logits.argmax(-1).cpu().numpy()
        same += (predicted == batch.stored["logits"].argmax(-1)).sum()
        if teacher_maps is None:
            continue
        maps_of_batch = teacher_maps.of(batch)
        for block, log_map in enumerate(log_maps):
            if maps_of_batch.layers[block] is None:
                continue
            log_map = patch_map(log_map, student.num_prefix_tokens)
            hidden = None
            if torch.isneginf(log_map).any():  # the attention hides some keys from a query
                hidden = torch.isneginf(log_map)
            kl = feature_loss(log_map, maps_of_batch.map(block), hidden=hidden).item()
            divergence[block] += kl * len(batch) / count
    agreement: Agreement = {"teacher_images": count}
    if StoreNotes.of(maps.schema).has_predictions:
        agreement["teacher_agreement"] = int(distributed.all_reduce_sum(same)) / count
    if teacher_maps is not None:
        kls: list[float | None] = distributed.all_reduce_sum(divergence).tolist()
        for block, layer in enumerate(teacher_maps.layers):
            if layer is None:
                kls[block] = None
        agreement["map_kl"] = kls
    return agreement
