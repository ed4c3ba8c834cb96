"""The epoch that a student is of: the last, or the best on the validation images."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from pathlib import Path
from typing import Any

from timm.models.vision_transformer import VisionTransformer

from gaupipe.data.splits import ImageData
from gaupipe.system import digests
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.training.state import TrainingState
from gaupipe.vit.saving import save_student

FILE = "student.json"
"""Says which epoch the folder ``student`` beside it is of."""
REMEDY = "continue the training with --resume, or remove the folder of the student"


def save(state: TrainingState[VisionTransformer], folder: Path, keep: str, data: ImageData) -> None:
    """Writes ``folder``/student, of the ``best`` or the ``last`` epoch, as ``keep`` says. Where
    these are different ones, the folder ``best`` or ``last`` beside it has the other."""
    assert state.best is not None  # the training has ended
    last, best = len(state.metrics), state.best["epoch"]
    students = {"last": state.kept}
    if best != last:
        students["best"] = copy.deepcopy(state.kept)
        students["best"].load_state_dict(state.best["modules"])
    student = students.pop(keep, None) or students.pop("last")  # the last may be the best
    for name in ("last", "best"):
        if name in students:
            save_student(students[name], folder / name, **data.data_config)
        elif (folder / name).is_dir():
            shutil.rmtree(folder / name)
    entry = {"epoch": best if keep == "best" else last, "keep": keep, "best": best, "last": last}
    # no digest until the weights are there: a reader sees that this was interrupted
    _write(folder, {**entry, "sha256": None})
    save_student(student, folder / "student", **data.data_config)
    _write(folder, {**entry, "sha256": _weights(folder)})


def finished(folder: Path) -> bool:
    """Whether ``folder``/student is there, and its saving was not interrupted."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads((folder / FILE).read_bytes())["sha256"] is not None
    return False


def check(folder: Path, epochs: int) -> dict[str, Any]:
    """The content of student.json. Raises UserError where ``folder``/student ended after another
    number of epochs than its metrics: files of two trainings were copied into one folder."""
    entry = _read(folder)
    if entry["last"] != epochs:
        raise UserError(
            f"{folder}: student.json is of {entry['last']} epochs of training, metrics.jsonl has "
            f"{epochs}: the files are not of one training; remove the folder, and it is "
            "trained again"
        )
    return entry


def of_student(folder: Path) -> int:
    """The number of the epoch, from 1, that ``folder``/student is of. Raises UserError where
    student.json is damaged or of other weights."""
    return _read(folder)["epoch"]


def entry_of_student(folder: Path, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of ``metrics`` for the epoch that ``folder``/student is of. Raises UserError as
    :func:`check` and :func:`of_student` do."""
    return metrics[check(folder, len(metrics))["epoch"] - 1]


def _write(folder: Path, entry: dict[str, Any]) -> None:
    write_whole(folder / FILE, json.dumps(entry) + "\n")


def _weights(folder: Path) -> str | None:
    """The digest of the weights in ``folder``/student; None where it is not listed."""
    return next(iter((digests.read(folder / "student") or {}).get("model.safetensors", [])), None)


def _read(folder: Path) -> dict[str, Any]:
    """The content of student.json. Raises UserError for what cannot be read, and where the weights
    beside it are others."""
    path = folder / FILE
    try:
        entry = json.loads(path.read_bytes())
        epochs = range(1, entry["last"] + 1)
        if not {entry["epoch"], entry["last"]} <= {*epochs}:
            raise ValueError("it names an epoch that has not been")
        sha256 = entry["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is missing or damaged: {REMEDY}") from None
    if _weights(folder) not in (None, sha256):
        raise UserError(
            f"{folder / 'student'}: student.json beside it is of other weights, as after an "
            f"interruption: {REMEDY}"
        )
    return entry
