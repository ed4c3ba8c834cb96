"""Evaluate: how good a trained student is, on the validation split unless the test split is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import store
import timm
import torch
from torch import Tensor, nn

from gaupipe import data as datasets
from gaupipe.config import Settings
from gaupipe.data import Batches, ImageData, Split
from gaupipe.distillation import patch_rows
from gaupipe.errors import UserError
from gaupipe.losses import feature_loss
from gaupipe.models import forward_with_maps
from gaupipe.training import score, select_device
from stages import phase_b
from stages.run_directory import RunDirectory

TEACHER_IMAGES = 4096
"""Training images, evenly spaced, on which student and teacher are compared."""


def load_student(run_dir: Path, key: str, distilled: bool = True) -> tuple[Settings, nn.Module]:
    """The settings of a run and one of its students, as timm loads its folder, in eval mode."""
    run = RunDirectory(run_dir)
    settings = run.settings()
    folder = run.student(key, distilled) / "student"
    if not folder.is_dir():
        plain = "" if distilled else " --no-distill"
        raise UserError(f"{folder} is not there: 'gaupipe phase-b --run-dir {run_dir} --student {key}{plain}' trains it")
    return settings, timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def run(run_dir: Path, key: str, split: str = "val", distilled: bool = True) -> dict[str, Any]:
    """Top-1 and top-5 accuracy, cross-entropy and calibration error on a split; where the run's store is there
    and fits the student, also how far student and teacher agree on training images."""
    settings, student = load_student(run_dir, key, distilled)
    data = datasets.load(settings.data)
    images = getattr(data, split)
    if images is None:
        raise UserError(f"data set {data.name} has no {split} split: evaluate on val")
    device = select_device(settings)
    student.to(device)
    logits, labels = predictions(student, images, data, settings, device)
    scores = {"student": key, "split": split, "images": len(images), **metrics(logits, labels)}
    url = str(RunDirectory(run_dir).maps)
    try:
        maps = store.open(url, dataset_sha256=data.sha256)
        phase_b.check_fit(student, maps.schema, settings, url)
    except (store.StoreError, UserError):
        return scores  # maps that are not there or do not fit say nothing about this student
    return scores | teacher_agreement(student, maps, data, settings, device)


@torch.inference_mode()
def predictions(model: nn.Module, images: Split, data: ImageData, settings: Settings, device: torch.device
                ) -> tuple[Tensor, Tensor]:
    """Logits [N, C] float32 and labels [N] of a split, on the CPU, in canonical order."""
    batches = Batches(images, data, settings.data.eval_batch_size, settings.data.workers)
    pairs = [(model(pixels).float().cpu(), labels.cpu()) for pixels, labels, _ in batches.epoch(device)]
    return torch.cat([logits for logits, _ in pairs]), torch.cat([labels for _, labels in pairs])


def metrics(logits: Tensor, labels: Tensor, bins: int = 15) -> dict[str, float]:
    """top1, top5, loss (cross-entropy) and calibration_error of logits [N, C] for labels [N].

    The calibration error is the expected one: over ``bins`` equal intervals of confidence, the mean distance of
    accuracy from confidence, weighted by the images in the bin.
    """
    scores = score([(logits, labels)])
    right = logits.argmax(-1) == labels
    confidence = logits.softmax(-1).amax(-1)
    which = (confidence * bins).ceil().long().clamp(1, bins)
    gaps = [(which == b).float().mean() * (right[which == b].float().mean() - confidence[which == b].mean()).abs()
            for b in which.unique()]
    return {"top1": scores["acc"], "top5": scores["top5"], "loss": scores["loss"],
            "calibration_error": sum(gaps).item()}


@torch.inference_mode()
def teacher_agreement(student: nn.Module, maps: store.Store, data: ImageData, settings: Settings, device: torch.device
                      ) -> dict[str, Any]:
    """Over training images: the share on which student and teacher predict the same class, and the KL of each block's
    map from the teacher's (teacher first, mean over images, heads and queries; null for a block without one)."""
    image_ids = data.train.evenly_spaced(TEACHER_IMAGES)
    count = len(image_ids)
    job = phase_b.PhaseB(settings, data, device, student, settings.phase_b.optim, maps)
    batches = Batches(data.train, data, settings.data.batch_size, settings.data.workers)
    same, divergence = 0, {}
    for images, _, ids in batches.epoch(device, image_ids=image_ids):
        stored = maps.gather(ids.numpy())
        logits, rows = forward_with_maps(student, images)
        same += (logits.argmax(-1).cpu().numpy() == stored["logits"].argmax(-1)).sum()
        teacher = job.teacher_maps(stored)
        for layer, row in enumerate(rows):
            if teacher.layers[layer] is not None:
                row = patch_rows(row, student.num_prefix_tokens)
                hidden = torch.isneginf(row) if torch.isneginf(row).any() else None
                kl = feature_loss(row, teacher.map(layer), hidden=hidden).item()
                divergence[layer] = divergence.get(layer, 0.0) + kl * len(ids) / count
    return {"teacher_images": count, "teacher_agreement": int(same) / count,
            "map_kl": [divergence.get(layer) for layer in range(len(student.blocks))]}
