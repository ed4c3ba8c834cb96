"""The whole method: phase A, export, phase B, and the same ViT trained plainly beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gaupipe import distributed
from gaupipe.config import Settings
from gaupipe.data import ImageData, load_data
from gaupipe.progress import total_seconds
from gaupipe.student import check_baseline
from stages import export_maps, phase_a, phase_b, ranks
from stages.run_directory import RunDirectory


def run(settings: Settings, run_dir: Path, attention: str | None = None) -> list[dict[str, Any]]:
    """Runs every stage that has not finished in ``run_dir``, with a student of this attention, and
    returns the lines of the summary table."""
    attention = attention or settings.phase_b.student
    settings = settings.model_copy(
        update={"phase_b": settings.phase_b.model_copy(update={"student": attention})}
    )
    run_directory = RunDirectory(run_dir)

    def prepare() -> ImageData:
        data = load_data(settings.data)
        if settings.baseline.enabled:
            check_baseline(settings, data)
        for distilled in (True, False):
            # a damaged student is refused before anything runs
            run_directory.overrides(attention, distilled)
        return data

    ranks.check_shared(run_dir)
    data = distributed.main_first(prepare)
    ranks.check_same(settings, data)
    teacher = phase_a.run(settings, run_dir, resume=True, data=data)
    export_maps.ensure(run_dir, export=settings.export, data=data)
    student = phase_b.run(run_dir, attention, resume=True, data=data)
    last = teacher[-1]
    learns = settings.phase_b
    made = (
        "from the teacher"
        if learns.alpha == learns.gamma == 0 and learns.warm_start != "none"
        else "distilled"
    )
    lines = [
        {
            "model": "teacher (phase A)",
            "epochs": last["epoch"],
            "train_acc": last["train_acc"],
            "val_acc": last["val_acc"],
            "seconds": total_seconds(teacher),
        },
        {
            "model": f"{attention}, {made}",
            "epochs": len(student),
            "train_acc": student[-1]["train_acc"],
            "val_acc": student[-1]["val_acc"],
            "seconds": total_seconds(student),
        },
    ]
    if settings.baseline.enabled:
        plain = phase_b.run(run_dir, attention, resume=True, distilled=False, data=data)
        lines.append(
            {
                "model": f"{attention}, plain",
                "epochs": len(plain),
                "train_acc": plain[-1]["train_acc"],
                "val_acc": plain[-1]["val_acc"],
                "seconds": total_seconds(plain),
            }
        )
    return lines
