"""The epoch that a student is of: the last, or the best on the validation images."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from pathlib import Path
from typing import TypedDict

from timm.models.vision_transformer import VisionTransformer

from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.system.messages import LOG
from gaupipe.training.job import Training
from gaupipe.training.scores import percent
from gaupipe.training.state import TrainingState
from gaupipe.vit.saving import save_student, saved_sha256

FILE = "student.json"
"""Says which epoch the folder ``student`` beside it is of."""
REMEDY = "continue the training with --resume, or remove the folder of the student"


def save(job: Training, state: TrainingState[VisionTransformer], folder: Path, label: str) -> None:
    """Writes ``folder``/student, of the ``best`` or the ``last`` epoch, as ``train.keep`` says, and
    says which it is, of the training called ``label``. Where these are different ones, the folder
    ``best`` or ``last`` beside it has the other."""
    assert state.best is not None  # the training has ended
    keep = job.train.keep
    data = job.data
    LOG.info(f"{label}: {describe(job, state, folder)}")
    last = len(state.metrics)
    best = state.best["epoch"]
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
    kept: KeptEpoch = {
        "epoch": best if keep == "best" else last,
        "keep": keep,
        "best": best,
        "last": last,
        "sha256": None,  # until the weights are there: a reader sees that this was interrupted
    }
    _write(folder, kept)
    save_student(student, folder / "student", **data.data_config)
    _write(folder, {**kept, "sha256": _noted(folder)})


def describe(job: Training, state: TrainingState[VisionTransformer], folder: Path) -> str:
    """A line about a training that has ended: which epoch is kept where, how good it is, and why
    the training ended early."""
    assert state.best
    keep = job.train.keep
    best = state.best["epoch"]
    last = len(state.metrics)
    kept = best if keep == "best" else last
    accuracies = [entry["val_acc"] or 0.0 for entry in state.metrics]

    line = f"{folder / 'student'} is of epoch {kept}"
    if best == last:
        line += ", the best"
    elif keep == "best":
        line += ", the best (train.keep=best)"
    else:
        line += " (train.keep=last)"

    images = len(job.data.val)
    accuracy = percent(accuracies[kept - 1], images)
    line += f": val {accuracy}, the 95 % interval of {images:,} images"

    # the weights that were not asked for lie beside
    if best != last and keep == "best":
        line += f"; {folder / 'last'} is of epoch {last}: {100 * accuracies[-1]:.1f} %"
    elif best != last:
        line += f"; {folder / 'best'} is of epoch {best}: {100 * accuracies[best - 1]:.1f} %"
    if last < len(job.epochs):
        line += f"; patience={job.train.patience} ended the training"
    return line


def finished(folder: Path) -> bool:
    """True if ``folder``/student was saved, to the end."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads((folder / FILE).read_bytes())["sha256"] is not None
    return False


class KeptEpoch(TypedDict):
    """student.json. Epochs count from 1."""

    epoch: int
    """That ``student`` is of."""
    keep: str
    """``best`` or ``last``, as it was asked."""
    best: int
    last: int
    sha256: str | None
    """Of the weights; None while they are written."""


def entry(folder: Path) -> KeptEpoch:
    """The content of student.json. Raises UserError for a file that is damaged or of other
    weights."""
    path = folder / FILE
    try:
        entry: KeptEpoch = json.loads(path.read_bytes())
        if not 1 <= entry["epoch"] <= entry["last"]:
            raise ValueError("it names an epoch that has not been")
        sha256 = entry["sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is missing or damaged: {REMEDY}") from None
    if _noted(folder) not in (None, sha256):
        raise UserError(
            f"{folder / 'student'}: student.json beside it is of other weights, as after an "
            f"interruption: {REMEDY}"
        )
    return entry


def _write(folder: Path, entry: KeptEpoch) -> None:
    write_whole(folder / FILE, json.dumps(entry) + "\n")


def _noted(folder: Path) -> str | None:
    """The digest that ``folder``/student notes of itself; None where it notes none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return saved_sha256(folder / "student")
    return None
