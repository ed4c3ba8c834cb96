"""Which epoch a student is of: the last, or the best on the validation images."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from pathlib import Path
from typing import Any

from timm.models.vision_transformer import VisionTransformer

from gaupipe.system import digests
from gaupipe.settings import PhaseBSettings
from gaupipe.data.splits import ImageData
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.vit.models import save_student
from gaupipe.training.state import TrainingState

FILE = "student.json"
"""Says which epoch the folder ``student`` beside it is of."""
WEIGHTS = "sha256"
"""In it: the digest of that folder's weights. A file without it is believed."""
REMEDY = "continue the training with --resume, or remove the folder of the student"


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
    # no digest until the weights are there: a reader sees that this was interrupted
    _write(folder, {**said, "last": last, WEIGHTS: None})
    save_student(students[chosen], folder / "student", **data.data_config)
    _write(folder, {**said, "last": last, WEIGHTS: _weights(folder)})


def finished(folder: Path) -> bool:
    """Whether ``folder``/student is there, and its saving was not interrupted."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads((folder / FILE).read_bytes())[WEIGHTS] is None:
            return False
    return (folder / "student").is_dir()


def check(folder: Path, epochs: int) -> dict[str, Any]:
    """What student.json says; {} before version 0.2, which had none.

    Raises UserError where ``folder``/student ended after another number of epochs than its
    metrics: files of two trainings were copied into one folder.
    """
    said = _said(folder)
    if said.get("last", epochs) != epochs:
        raise UserError(
            f"{folder}: student.json is of {said['last']} epochs of training, metrics.jsonl has "
            f"{epochs}: the files are not of one training; remove the folder, and it is "
            "trained again"
        )
    return said


def of_student(folder: Path) -> int | None:
    """The number of the epoch, from 1, that ``folder``/student is of; None where it is not said, as
    before version 0.2: the last. Raises UserError where student.json is of other weights."""
    return _said(folder).get("epoch")


def entry_of_student(folder: Path, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``metrics`` say of the epoch that ``folder``/student is of. Raises UserError as
    :func:`check` and :func:`of_student` do."""
    return metrics[check(folder, len(metrics)).get("epoch", len(metrics)) - 1]


def _write(folder: Path, said: dict[str, Any]) -> None:
    write_whole(folder / FILE, json.dumps(said) + "\n")


def _weights(folder: Path) -> str | None:
    """The digest of the weights in ``folder``/student; None where it is not listed."""
    return next(iter((digests.read(folder / "student") or {}).get("model.safetensors", [])), None)


def _said(folder: Path) -> dict[str, Any]:
    """What student.json says; {} before version 0.2, which had none. Raises UserError for what
    cannot be read, and where the weights beside it are others."""
    path = folder / FILE
    try:
        said = json.loads(path.read_bytes())
        epochs = range(1, said["last"] + 1)
        damaged = said["epoch"] not in epochs or said["last"] not in epochs
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        said, damaged = {}, True
    if damaged:
        raise UserError(f"{path} is damaged: {REMEDY}")
    if WEIGHTS in said and _weights(folder) not in (None, said[WEIGHTS]):
        raise UserError(
            f"{folder / 'student'}: student.json beside it is of other weights, as after an "
            f"interruption: {REMEDY}"
        )
    return said
