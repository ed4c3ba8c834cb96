"""Which epoch a student is of: the last, or the best on the validation images."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from timm.models.vision_transformer import VisionTransformer

from gaupipe.config import PhaseBSettings
from gaupipe.data import ImageData
from gaupipe.errors import UserError
from gaupipe.folders import write_whole
from gaupipe.models import save_student
from gaupipe.training import TrainingState

FILE = "student.json"
"""Says which epoch the folder ``student`` beside it is of."""


def save(
    state: TrainingState[VisionTransformer], folder: Path, phase: PhaseBSettings, data: ImageData
) -> None:
    """Writes ``folder``/student, of the epoch that ``phase.keep`` names. Where best and last epoch
    are different ones, the folder ``best`` or ``last`` beside it has the other.

    Raises UserError for the best epoch of a training that an earlier version finished.
    """
    last, best = len(state.metrics), state.best and state.best["epoch"]
    if phase.keep == "best" and best is None:
        raise UserError(
            f"{folder}: phase_b.keep=best: an earlier version of gaupipe trained this student and "
            "kept its last epoch alone: take phase_b.keep=last"
        )
    students = {"last": state.kept}
    if state.best and best != last:
        students["best"] = copy.deepcopy(state.kept)
        students["best"].load_state_dict(state.best["modules"])
    chosen = phase.keep if phase.keep in students else "last"  # the last is the best
    for name in ("last", "best"):
        if name in students and name != chosen:
            save_student(students[name], folder / name, **data.data_config)
        elif (folder / name).is_dir():
            shutil.rmtree(folder / name)
    epoch = best if phase.keep == "best" else last
    said = {"epoch": epoch, "keep": phase.keep, "best": best, "best_by": phase.best_by}
    write_whole(folder / FILE, json.dumps({**said, "last": last}) + "\n")
    save_student(students[chosen], folder / "student", **data.data_config)


def check(folder: Path, epochs: int) -> None:
    """Raises UserError where ``folder``/student ended after another number of epochs than its
    metrics: files of two trainings were copied into one folder."""
    last = _said(folder, "last")
    if last is not None and last != epochs:
        raise UserError(
            f"{folder}: student.json is of {last} epochs of training, metrics.jsonl has {epochs}: "
            "the files are not of one training; remove the folder, and it is trained again"
        )


def of_student(folder: Path) -> int | None:
    """The number of the epoch, from 1, that ``folder``/student is of; None where it is not said, as
    before version 0.2: the last."""
    return _said(folder, "epoch")


def entry_of_student(folder: Path, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``metrics`` say of the epoch that ``folder``/student is of."""
    epoch = of_student(folder)
    return metrics[-1 if epoch is None or epoch > len(metrics) else epoch - 1]


def _said(folder: Path, key: str) -> int | None:
    try:
        epoch = json.loads((folder / FILE).read_bytes())[key]
        return epoch if isinstance(epoch, int) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
