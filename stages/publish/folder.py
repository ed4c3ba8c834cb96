"""Publish: a student as a folder for others, with a model card that the run fills in."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import store
from gaupipe.distillation.export import stored_export
from gaupipe.settings import PhaseASettings, Settings
from gaupipe.settings.load import dump
from gaupipe.settings.sections import HFDS, LOCAL, Section
from gaupipe.settings.teachers import TEACHERS
from gaupipe.system.files import check_new_folder, replaced
from gaupipe.teachers.notes import StoreNotes
from gaupipe.training.scores import classification_metrics, predictions
from gaupipe.vit.saving import STUDENT_FILES
from stages.publish import model_card
from stages.runs.directory import STUDENT_NAME
from stages.runs.trained import TrainedStudent, check_data, load_student, store_of

CARD = "README.md"


def publish(
    run_dir: Path,
    name: str | None = None,
    *,
    out: Path,
    plain: bool = False,
) -> Path:
    """Writes a student, its settings and a model card to the folder ``out``, as a whole or not at
    all.

    The card gives accuracy and loss on the validation images and, where the data set has some, on
    the test images. Paths of this machine are in none of the files. Raises UserError for an ``out``
    that is there, and for other images or classes than those that the run began with.
    """
    student = load_student(run_dir, name, plain)
    data = student.run.load_data(student.settings, test=True)
    check_data(student, data)
    scores: dict[str, dict[str, Any]] = {}
    for split, images in {"validation": data.val, "test": data.test}.items():
        if images is not None:
            logits, labels = predictions(student.model, images, data, student.settings)
            scores[split] = {"images": len(images), **classification_metrics(logits, labels)}
    title = out.name if STUDENT_NAME.fullmatch(out.name) else student.name
    settings = published_settings(student)
    card = model_card.write(student, data, scores, settings, title)
    with replaced(out) as folder:
        for file in STUDENT_FILES:
            shutil.copy(student.folder / "student" / file, folder)
        (folder / "settings.yaml").write_text(dump(settings))
        (folder / CARD).write_text(card, "utf-8")
        check_new_folder("--out", out)  # by another process, meanwhile
    return out


def published_settings(student: TrainedStudent) -> Settings:
    """The settings of a student and of the store it learned from, for another machine: of each path
    its last part alone, no device, no loggers."""
    settings = student.settings
    phase = settings.phase_a
    export = settings.export
    if student.distilled:
        url, teacher_sha256 = store_of(student)
        with contextlib.suppress(store.StoreError):  # it may be gone
            schema = store.open(url, teacher_sha256=teacher_sha256).schema
            export = stored_export(url) or export
            notes = StoreNotes.of(schema)
            if student.has_other_teacher and notes.teacher and notes.teacher not in TEACHERS:
                args = notes.teacher_args or {}
                phase = PhaseASettings(teacher=notes.teacher, teacher_args=args)
    changes = {
        "phase_a": phase,
        "export": export,
        "device": Settings().device,
        "log": Settings().log,
    }
    return without_folders(settings.model_copy(update=changes))


def without_folders(value: Any) -> Any:
    """The settings, or one of their values, with the last part alone of each path. A text is a path
    if it is absolute, also after ``hfds/``, or begins with ``local-dir:``."""
    if isinstance(value, Section):
        return value.model_copy(update=without_folders(dict(value)))
    if isinstance(value, Path):
        return Path(value.name)
    if isinstance(value, dict):
        return {name: without_folders(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_folders(part) for part in value]
    if isinstance(value, str):
        start = next((one for one in (LOCAL, HFDS) if value.startswith(one)), "")
        path = value.removeprefix(start)
        if start == LOCAL or os.path.isabs(path):
            return start + Path(path).name
    return value
