"""Evaluate: how good a trained student is, on the validation split unless the test split is
asked for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import store
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.splits import ImageData, Split, load_data
from gaupipe.distillation.feature_loss import patch_map
from gaupipe.distillation.losses import feature_loss
from gaupipe.distillation.student import check_fit, layer_map
from gaupipe.settings import Settings
from gaupipe.system import digests, distributed
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.vit.forward import forward_with_maps
from gaupipe.vit.saving import load_folder
from stages import phase_b
from stages.phase_a import gaussian as phase_a
from stages.runs import kept_epochs, ranks
from stages.runs.directory import RunDirectory, check_name

TEACHER_IMAGES = 4096
"""Training images, evenly spaced, on which student and teacher are compared."""


@dataclass(frozen=True)
class TrainedStudent:
    """A student of a run, as timm loads its folder, in eval mode."""

    run: RunDirectory
    name: str
    distilled: bool
    settings: Settings
    model: VisionTransformer

    @property
    def folder(self) -> Path:
        """The folder with its metrics, its checkpoint and ``student/``."""
        return self.run.student(self.name, self.distilled)

    @property
    def has_other_teacher(self) -> bool:
        """True if it learned from another teacher than its run's."""
        learned = recorded_store(self.folder)
        return learned is not None and learned["teacher_sha256"] != self.run.teacher_digest()


def load_student(
    run_dir: Path, name: str | None = None, distilled: bool | None = None
) -> TrainedStudent:
    """The student of a name, or with None the one trained last.

    ``distilled`` None is what :meth:`RunDirectory.is_distilled` says. Raises UserError where the
    student is not there, damaged, no ViT, or not the one that student.json beside it describes.
    """
    run = RunDirectory(run_dir)
    run.settings()
    distilled = run.is_distilled(name) if distilled is None else distilled
    there, plain = run.students(distilled), "" if distilled else " --no-distill"
    command = f"'gaupipe phase-b --run-dir {run_dir}{plain}"
    if name is None and not there:
        raise UserError(f"{run_dir} has no student: {command}' trains one")
    name = name or there[-1]
    check_name(name)
    folder = run.student(name, distilled) / "student"
    if not folder.is_dir():
        others = f"; there are {', '.join(there)}" if there else ""
        raise UserError(
            f"{folder} is not there: {command} --student ATTENTION --name {name}' trains it{others}"
        )
    remedy = f"{command} --name {name} --resume' writes it again from its checkpoint"
    settings = run.student_settings(name, distilled)
    model = load_folder(folder, remedy)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{folder} holds a {type(model).__name__}, no student: {remedy}")
    kept_epochs.entry(folder.parent)
    return TrainedStudent(run, name, distilled, settings, model)


def run(
    run_dir: Path,
    name: str | None = None,
    *,
    split: str = "val",
    distilled: bool | None = None,
) -> dict[str, Any]:
    """Top-1 and top-5 accuracy, cross-entropy and calibration error on a split; where the run's
    store is complete and fits the student, also how far student and teacher agree on training
    images.

    ``name`` and ``distilled`` are those of :func:`load_student`. Raises StoreError for the store of
    another teacher or data set, and for a damaged one.
    """

    def load() -> tuple[TrainedStudent, ImageData, store.Store | None]:
        student = load_student(run_dir, name, distilled)
        data = load_data(student.settings.data)
        if getattr(data, split) is None:
            raise UserError(f"data set {data.name} has no {split} split: evaluate on val")
        check_data(student, data)
        return student, data, open_maps(student, data)

    student, data, maps = distributed.main_first(load)
    ranks.check_same(student.settings, data)
    folder, images = student.folder, getattr(data, split)
    weights = (digests.read(folder / "student") or {}).get("model.safetensors")
    same = {f"{folder / 'student'}, sha256": weights}
    distributed.check_same(same, "should be the same student everywhere")
    logits, labels = predictions(student.model, images, data, student.settings)
    scores: dict[str, Any] = {"student": student.name, "split": split, "images": len(images)}
    scores["epoch"] = kept_epochs.entry(folder)["epoch"]
    scores |= metrics(logits, labels)
    scores |= beside_teacher(student, images, data, logits)
    if maps is not None:
        scores |= teacher_agreement(student.model, maps, data, student.settings)
    return scores


@torch.inference_mode()
def beside_teacher(
    student: TrainedStudent, images: Split, data: ImageData, logits: Tensor
) -> dict[str, Any]:
    """Top-1 accuracy and cross-entropy of the teacher on the split, and the share of images whose
    class it predicts as ``logits`` [N, C] do. For a teacher that knows unseen images: a trained ViT
    with predictions.

    ``no_teacher`` says why, where the teacher is no longer there, and where the student learned
    from another one than the run's.
    """
    run = student.run
    phase = run.settings().phase_a
    if phase.learns_gaussians or run.teacher_digest() is None:
        return {}
    if distributed.broadcast(student.has_other_teacher):
        return {"no_teacher": "the student learned from another teacher than the run's"}
    try:
        job = distributed.main_first(lambda: phase_a.load(run, data))
    except UserError as error:  # a folder that has moved, or weights that are no longer there
        return {"no_teacher": str(error)}
    teacher = job.teacher
    if not teacher.predicts:
        return {}
    teacher_logits, labels = predictions(teacher, images, data, job.settings)
    scores = metrics(teacher_logits, labels)
    same = teacher_logits.argmax(-1) == logits.argmax(-1)
    return {
        "teacher_top1": scores["top1"],
        "teacher_loss": scores["loss"],
        "same_class_as_teacher": same.float().mean().item(),
    }


def check_data(student: TrainedStudent, data: ImageData) -> None:
    """Raises UserError for a student of other images or classes than the data set's."""
    model = student.model
    takes = (model.in_chans, *model.patch_embed.img_size, model.num_classes)
    if takes != (data.channels, data.image_size, data.image_size, data.num_classes):
        raise UserError(
            f"{student.run.path}: the student is for {takes[0]} channels, {takes[1]} x {takes[2]} "
            f"pixels and {takes[3]} classes, the data set {data.name} has {data.channels}, "
            f"{data.image_size} x {data.image_size} and {data.num_classes}"
        )


def open_maps(student: TrainedStudent, data: ImageData) -> store.Store | None:
    """The store that the student learned from; where that is gone, or the student learned from
    none, the run's own. None where neither is there, finished, and of as many blocks and heads as
    the student."""
    for url, teacher_sha256 in stores_of(student):
        with contextlib.suppress(store.UnfinishedStore, UserError):
            maps = store.open(url, dataset_sha256=data.sha256, teacher_sha256=teacher_sha256)
            check_fit(student.model, maps.schema, student.settings.phase_b, url)
            phase_b.check_targets(maps.schema, student.settings, url)
            return maps
    return None


def stores_of(student: TrainedStudent) -> list[tuple[str, str | None]]:
    """(url, sha256 of its teacher) of the stores that a student may have learned from, the
    likeliest first. The run's own store is found where the run is now."""
    run, learned = student.run, recorded_store(student.folder)
    if learned is None:
        return [(str(run.maps), run.teacher_digest())]
    recorded = (learned["url"], learned["teacher_sha256"])
    of_run = (str(run.maps), run.teacher_digest() or recorded[1])
    if recorded[1] != of_run[1]:
        return [recorded]
    moved = Path(recorded[0]).name == run.maps.name
    return [of_run, recorded] if moved else [recorded, of_run]


def recorded_store(folder: Path) -> dict[str, str] | None:
    """``url`` and ``teacher_sha256`` of the store that the student in ``folder`` learned from, by
    its maps.json; None for a student that learned from none."""
    path = folder / "maps.json"
    if not path.is_file():
        return None
    try:
        learned = json.loads(path.read_bytes())
        return {key: str(learned[key]) for key in ("url", "teacher_sha256")}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(
            f"{path} is damaged: it should name the url and the teacher_sha256 of the store that "
            "the student learned from; remove it"
        ) from None


@torch.inference_mode()
def predictions(
    model: Callable[[Tensor], Tensor], images: Split, data: ImageData, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Logits [N, C] float32 and labels [N] of a split, on the CPU, in canonical order. The device
    is that of the settings. Ranks share the work, and every one gets all of it."""
    sizes, world, device = (
        settings.data,
        distributed.world_size(),
        select_device(settings.device, settings.threads),
    )
    if isinstance(model, nn.Module):
        model = model.to(device)
    batches = Batches(images, data, device, sizes.eval_batch_size, sizes.workers, world)
    mine = [
        (batch.ids, model(batch.images).float().cpu(), batch.labels.cpu())
        for batch in batches.of_rank()
    ]
    parts = [part for of_rank in distributed.all_gather_object(mine) for part in of_rank]
    ids, logits, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = ids.argsort()
    return logits[order], labels[order]


def metrics(logits: Tensor, labels: Tensor, bins: int = 15) -> dict[str, float]:
    """top1, top5, loss (cross-entropy) and calibration_error of logits [N, C] for labels [N].

    The calibration error is the expected one: over ``bins`` equal intervals of confidence, the mean
    distance of accuracy from confidence, weighted by the images in the bin.
    """
    best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels.unsqueeze(-1)
    right = best[:, 0]
    confidence = logits.softmax(-1).amax(-1)
    which = (confidence * bins).ceil().long().clamp(1, bins)
    gaps = [
        (which == b).float().mean()
        * (right[which == b].float().mean() - confidence[which == b].mean()).abs()
        for b in which.unique()
    ]
    return {
        "top1": right.double().mean().item(),
        "top5": best.any(-1).double().mean().item(),
        "loss": cross_entropy(logits, labels, reduction="sum").item() / len(labels),
        "calibration_error": sum(gaps).item(),
    }


@torch.inference_mode()
def teacher_agreement(
    student: VisionTransformer, maps: store.Store, data: ImageData, settings: Settings
) -> dict[str, Any]:
    """Over training images: the share on which student and teacher predict the same class, and
    the KL of each block's map from the teacher's (teacher first, mean over images, heads and
    queries; null for a block without one)."""
    image_ids = data.train.evenly_spaced(TEACHER_IMAGES)
    count = len(image_ids)
    image_ids = np.array_split(image_ids, distributed.world_size())[distributed.rank()]
    device = next(student.parameters()).device
    job = phase_b.PhaseB(settings, data, device, student, settings.phase_b.optim, maps)
    batches = Batches(data.train, data, device, settings.data.batch_size, settings.data.workers)
    layers = layer_map(settings.phase_b, len(student.blocks), maps.schema.layers)
    same = torch.zeros((), dtype=torch.float64)
    divergence = torch.zeros(len(layers), dtype=torch.float64)
    if maps.schema.extra.get("views") is None:
        loaded = batches.in_order(image_ids)
    else:  # the first view of each image, as its maps were made
        views, augment = maps.schema.views, Augment(settings.augment, settings.seed)
        loaded = batches.views(image_ids * views, augment, views)
    for batch in loaded:
        batch.stored = maps.gather(batch.ids.numpy())
        logits, log_maps = forward_with_maps(student, batch.images)
        same += (logits.argmax(-1).cpu().numpy() == batch.stored["logits"].argmax(-1)).sum()
        teacher = job.teacher_maps(batch)
        for block, log_map in enumerate(log_maps):
            if layers[block] is not None:
                log_map = patch_map(log_map, student.num_prefix_tokens)
                hidden = torch.isneginf(log_map) if torch.isneginf(log_map).any() else None
                kl = feature_loss(log_map, teacher.map(block), hidden=hidden).item()
                divergence[block] += kl * len(batch) / count
    kls = distributed.all_reduce_sum(divergence).tolist()
    return {
        "teacher_images": count,
        "teacher_agreement": int(distributed.all_reduce_sum(same)) / count,
        "map_kl": [None if layer is None else kl for layer, kl in zip(layers, kls, strict=True)],
    }
