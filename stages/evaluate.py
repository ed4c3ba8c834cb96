"""Evaluate: how good a trained student is, on the validation split unless the test split is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm

from gaupipe import data as datasets
from gaupipe.data import Batches
from gaupipe.errors import UserError
from gaupipe.training import score_model, select_device
from stages.run_directory import RunDirectory


def run(run_dir: Path, key: str, split: str = "val", distilled: bool = True) -> dict[str, Any]:
    """Top-1 and top-5 accuracy and cross-entropy of the saved student folder, as timm loads it."""
    run = RunDirectory(run_dir)
    settings = run.settings()
    folder = run.student(key, distilled) / "student"
    if not folder.is_dir():
        raise UserError(f"{folder} is not there: 'gaupipe phase-b --run-dir {run_dir} --student {key}' trains it")
    data = datasets.load(settings.data)
    images = getattr(data, split)
    if images is None:
        raise UserError(f"data set {data.name} has no {split} split: evaluate on val")
    device = select_device(settings)
    student = timm.create_model(f"local-dir:{folder}", pretrained=True).to(device)
    scores = score_model(student, Batches(images, data, settings.data.eval_batch_size, settings.data.workers), device)
    return {"student": key, "split": split, "images": len(images), "top1": scores["acc"], "top5": scores["top5"],
            "loss": scores["loss"]}
