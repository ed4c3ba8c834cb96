"""Evaluate: how good a trained student is, on the validation split unless the test split is
asked for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gaupipe.data.splits import ImageData, Split, load_data
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import cross_entropy

import store
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.distillation.feature_loss import patch_map
from gaupipe.distillation.losses import feature_loss
from gaupipe.distillation.student import check_fit, layer_map
from gaupipe.settings import Settings
from gaupipe.system import digests, distributed
from gaupipe.system.device import select_device
from gaupipe.system.errors import UserError
from gaupipe.teachers.gaussian import Teacher
from gaupipe.teachers.vit import VitTeacher
from gaupipe.vit.forward import forward_with_maps
from gaupipe.vit.saving import load_folder
from stages import phase_b
from stages.phase_a import gaussian as phase_a
from stages.runs import kept_epochs, ranks
from stages.runs.directory import RunDirectory, check_name

TEACHER_IMAGES = 4096
"""Training images, evenly spaced, on which student and teacher are compared."""


def load_student(
    run_dir: Path, name: str | None = None, distilled: bool = True
) -> tuple[Settings, VisionTransformer, str]:
    """The settings of a student, the student as timm loads its folder, in eval mode, and its name.

    ``name`` None is the student trained last. Raises UserError where the student is not there,
    damaged, no ViT, or not the one that student.json beside it describes.
    """
    run = RunDirectory(run_dir)
    run.settings()
    there, plain = run.students(distilled), "" if distilled else " --no-distill"
    command = f"'gaupipe phase-b --run-dir {run_dir}{plain}"
    if name is None and not there:
        raise UserError(f"{run_dir} has no student: {command}' trains one")
    if name is None:
        name = there[-1]
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
    kept_epochs.of_student(folder.parent)
    return settings, model, name


def run(
    run_dir: Path,
    name: str | None = None,
    *,
    split: str = "val",
    distilled: bool | None = None,
) -> dict[str, Any]:
    """Top-1 and top-5 accuracy, cross-entropy and calibration error on a split; where the run's
    store is complete and fits the student, also how far student and teacher agree on training
    images. ``distilled`` None is what :meth:`RunDirectory.is_distilled` says. Raises StoreError
    for the store of another teacher or data set, and for a damaged one."""
    run = RunDirectory(run_dir)

    def load() -> tuple[Settings, VisionTransformer, Path, ImageData, store.Store | None]:
        learned = run.is_distilled(name) if distilled is None else distilled
        settings, student, named = load_student(run_dir, name, learned)
        data = load_data(settings.data)
        if getattr(data, split) is None:
            raise UserError(f"data set {data.name} has no {split} split: evaluate on val")
        check_data(student, data, run_dir)
        folder = run.student(named, learned)
        maps = open_maps(run, data, student, settings, folder)
        return (
            settings,
            student.to(select_device(settings.device, settings.threads)),
            folder,
            data,
            maps,
        )

    settings, student, folder, data, maps = distributed.main_first(load)
    ranks.check_same(settings, data)
    weights = (digests.read(folder / "student") or {}).get("model.safetensors")
    what = f"{folder / 'student'}, sha256"
    distributed.check_same({what: weights}, "should be the same student everywhere")
    images, device = getattr(data, split), next(student.parameters()).device
    logits, labels = predictions(student, images, data, settings, device)
    scores: dict[str, Any] = {"student": folder.name, "split": split, "images": len(images)}
    if epoch := kept_epochs.of_student(folder):
        scores["epoch"] = epoch
    scores |= metrics(logits, labels)
    scores |= beside_teacher(run, folder, images, data, logits)
    if maps is not None:
        scores |= teacher_agreement(student, maps, data, settings, device)
    return scores


@torch.inference_mode()
def beside_teacher(
    run: RunDirectory, folder: Path, images: Split, data: ImageData, logits: Tensor
) -> dict[str, Any]:
    """Of a teacher that is a trained ViT with predictions, or predicts its Gaussians: its top-1
    accuracy and cross-entropy on the split, and the share on which it predicts the class that
    ``logits`` [N, C] do. Nothing for other teachers, which know no unseen images. ``no_teacher``
    says why, where the teacher is no longer there, and where the student in ``folder`` learned from
    another one than the run's."""
    phase = run.settings().phase_a
    if (phase.learns_gaussians and not phase.predicts_gaussians) or run.teacher_digest() is None:
        return {}
    learned = distributed.broadcast(read_json(folder / "maps.json"))
    if learned is not None and learned["teacher_sha256"] != distributed.broadcast(
        run.teacher_digest()
    ):
        return {"no_teacher": "the student learned from another teacher than the run's"}
    job, missing = None, None
    try:
        job = phase_a.load(run, data)
    except UserError as error:  # a folder that has moved, or weights that are no longer there
        missing = str(error)
    reasons = [reason for reason in distributed.all_gather_object(missing) if reason]
    if job is None or reasons:
        return {"no_teacher": reasons[0]}
    teacher = job.teacher
    if isinstance(teacher, VitTeacher) and not teacher.predicts:
        return {}
    predict = partial(teacher, gaussians=None) if isinstance(teacher, Teacher) else teacher.predict
    own, labels = predictions(predict, images, data, job.settings, job.device)
    scores = metrics(own, labels)
    return {
        "teacher_top1": scores["top1"],
        "teacher_loss": scores["loss"],
        "same_class_as_teacher": (own.argmax(-1) == logits.argmax(-1)).float().mean().item(),
    }


def check_data(student: VisionTransformer, data: ImageData, run_dir: Path) -> None:
    """Raises UserError for a student of other images or classes than the run's."""
    takes = (student.in_chans, *student.patch_embed.img_size, student.num_classes)
    if takes != (data.channels, data.image_size, data.image_size, data.num_classes):
        raise UserError(
            f"{run_dir}: the student is for {takes[0]} channels, {takes[1]} x {takes[2]} pixels "
            f"and {takes[3]} classes, the data set {data.name} has {data.channels}, "
            f"{data.image_size} x {data.image_size} and {data.num_classes}"
        )


def open_maps(
    run: RunDirectory,
    data: ImageData,
    student: VisionTransformer,
    settings: Settings,
    folder: Path,
) -> store.Store | None:
    """The store that a student in ``folder`` learned from; where that is gone, or the student
    learned from none, the run's own. None where neither is there, finished, and of as many blocks
    and heads as the student."""
    for url, teacher_sha256 in stores_of(run, folder):
        with contextlib.suppress(store.UnfinishedStore, UserError):
            maps = store.open(url, dataset_sha256=data.sha256, teacher_sha256=teacher_sha256)
            check_fit(student, maps.schema, settings.phase_b, url)
            phase_b.check_targets(maps.schema, settings, url)
            return maps
    return None


def stores_of(run: RunDirectory, folder: Path) -> list[tuple[str, str | None]]:
    """(url, sha256 of its teacher) of the stores that a student in ``folder`` may have learned
    from, the likeliest first. The run's own store is found where the run is now."""
    own = (str(run.maps), run.teacher_digest())
    learned = read_json(folder / "maps.json")
    if learned is None:
        return [own]
    recorded = (learned["url"], learned["teacher_sha256"])
    if recorded[1] != own[1]:
        return [recorded]
    was_own = Path(recorded[0]).name == run.maps.name
    return [own, recorded] if was_own else [recorded, own]


def read_json(path: Path) -> dict[str, str] | None:
    """What a student's maps.json says; None where there is none, as before version 0.2."""
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
    model: Callable[[Tensor], Tensor],
    images: Split,
    data: ImageData,
    settings: Settings,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Logits [N, C] float32 and labels [N] of a split, on the CPU, in canonical order. Ranks share
    the work, and every one gets all of it."""
    sizes, world = settings.data, distributed.world_size()
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
    student: VisionTransformer,
    maps: store.Store,
    data: ImageData,
    settings: Settings,
    device: torch.device,
) -> dict[str, Any]:
    """Over training images: the share on which student and teacher predict the same class, and
    the KL of each block's map from the teacher's (teacher first, mean over images, heads and
    queries; null for a block without one)."""
    image_ids = data.train.evenly_spaced(TEACHER_IMAGES)
    count = len(image_ids)
    image_ids = np.array_split(image_ids, distributed.world_size())[distributed.rank()]
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
        logits, rows = forward_with_maps(student, batch.images)
        same += (logits.argmax(-1).cpu().numpy() == batch.stored["logits"].argmax(-1)).sum()
        teacher = job.teacher_maps(batch)
        for layer, row in enumerate(rows):
            if layers[layer] is not None:
                row = patch_map(row, student.num_prefix_tokens)
                hidden = torch.isneginf(row) if torch.isneginf(row).any() else None
                kl = feature_loss(row, teacher.map(layer), hidden=hidden).item()
                divergence[layer] += kl * len(batch) / count
    kls = distributed.all_reduce_sum(divergence).tolist()
    return {
        "teacher_images": count,
        "teacher_agreement": int(distributed.all_reduce_sum(same)) / count,
        "map_kl": [None if of is None else kl for of, kl in zip(layers, kls, strict=True)],
    }
