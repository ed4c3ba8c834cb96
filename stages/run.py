"""The whole method: phase A, export, phase B, and the same ViT trained plainly beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gaupipe import data as datasets
from gaupipe.comparison import total_seconds
from gaupipe.config import Settings
from gaupipe.data import ImageData
from gaupipe.training import build_optimizer
from gaupipe.warm_start import warm_start
from stages import export_maps, phase_a, phase_b


def run(settings: Settings, run_dir: Path, key: str | None = None) -> list[dict[str, Any]]:
    """Runs every stage that has not finished in ``run_dir`` and returns the rows of the summary table."""
    key = key or settings.phase_b.student
    settings = settings.model_copy(update={"phase_b": settings.phase_b.model_copy(update={"student": key})})
    data = datasets.load(settings.data)
    check(settings, key, data)
    if settings.baseline.enabled:
        check_plain(settings, key, data)
    teacher = phase_a.run(settings, run_dir, resume=True)
    export_maps.ensure(run_dir)
    student = phase_b.run(run_dir, key, resume=True)
    last = teacher[-1]
    learns = settings.phase_b
    made = "from the teacher" if learns.alpha == learns.gamma == 0 and learns.warm_start != "none" else "distilled"
    rows = [{"model": "teacher (phase A)", "epochs": last["epoch"], "train_acc": last["train_acc"],
             "val_acc": last["val_acc"], "seconds": total_seconds(teacher)},
            {"model": f"{key}, {made}", "epochs": len(student), "train_acc": student[-1]["train_acc"],
             "val_acc": student[-1]["val_acc"], "seconds": total_seconds(student)}]
    if settings.baseline.enabled:
        plain = phase_b.run(run_dir, key, resume=True, distilled=False)
        rows.append({"model": f"{key}, plain", "epochs": len(plain), "train_acc": plain[-1]["train_acc"],
                     "val_acc": plain[-1]["val_acc"], "seconds": total_seconds(plain)})
    return rows


def check(settings: Settings, key: str, data: ImageData, kind: str | None = None, encoding: str = "float16") -> None:
    """Raises UserError (StoreError for a kind and encoding that do not go together) now for what phase B could not do
    after hours of phase A."""
    student, teacher = phase_b.build_student(settings, key, data), phase_a.build_teacher(settings, data)
    job = phase_a.PhaseA(settings, data, torch.device("cpu"), teacher, None)
    phase_a.training_state(job, steps_per_epoch=100)
    kind = kind or export_maps.default_kind(settings, encoding)
    phase_b.check_fit(student, export_maps.make_schema(job, kind, encoding, "0" * 64), settings, "maps.zarr")
    if settings.phase_b.warm_start != "none":
        warm_start(student, teacher.vit.state_dict())
    build_optimizer(student, settings.phase_b.optim, settings.phase_b.epochs, steps_per_epoch=100)


def check_plain(settings: Settings, key: str, data: ImageData) -> None:
    """Raises UserError for what training on the labels alone could not do."""
    student = phase_b.build_student(settings, key, data)
    build_optimizer(student, settings.baseline.optim or settings.phase_b.optim, settings.phase_b.epochs, steps_per_epoch=100)
