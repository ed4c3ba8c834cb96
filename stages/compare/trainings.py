"""Trainings of a comparison: the settings of each, where it lies, and what it has reached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gaupipe.distillation.export import is_complete
from gaupipe.settings import Settings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.teachers.notes import Drawing
from gaupipe.training.scores import unpacked
from stages.compare.rows import Row
from stages.runs import kept_epochs
from stages.runs.directory import RunDirectory

FILE = "training.json"
"""Beside a student: its :class:`FinishedTraining`, a line of JSON."""


@dataclass(frozen=True, kw_only=True)
class FinishedTraining:
    """All that a comparison reads of a training. The lists have the value after each epoch."""

    seed: int
    folder: str
    phase_a_epochs: int
    test_sha256: str | None = None
    """Of the test images that were scored; None without ``--test``, as the next three."""
    test_acc: float | None = None
    test_images: int | None = None
    right: str | None = None
    """Which test images it got right, a bit each (:func:`gaupipe.training.scores.packed`)."""
    val_acc: list[float]
    val_loss: list[float]
    loss_hard: list[float]
    """Of the training images' labels, which all rows have."""
    seconds: list[float]
    processor_seconds: list[float]
    costs: Mapping[str, Any]
    """Of the student, by the names of :class:`stages.compare.costs.Costs`."""
    phase_a_costs: Mapping[str, Any]
    """Of its teacher and the export; empty where neither counts."""
    sharing: int = 1
    """Trainings of the comparison, with this one, that need this very phase A and export."""

    @property
    def final_acc(self) -> float:
        return self.val_acc[-1]

    @property
    def right_images(self) -> np.ndarray | None:
        """bool [N] of the test images; None without ``--test``."""
        if self.right is None or self.test_images is None:
            return None
        return unpacked(self.right, self.test_images)

    def cost(self, name: str) -> float:
        """What the training took of one cost, phase A counted."""
        return self.costs[name] + self.phase_a_costs.get(name, 0)


def as_teacher(settings: Settings) -> Settings:
    """The settings of the phase A of a training."""
    settings = settings.without_student()
    return settings.model_copy(update={"augment": settings.phase_a_augment})


def digest(settings: Settings, *more: Any) -> str:
    """A training's name, made of all settings that change its result, also of those that have their
    default, and of what counts besides: the sha256 of the data set first of all."""
    described = flatten(settings, Scope.ANYTIME)
    return _sha256([described, *more])


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class RowTraining:
    """One row trained with one seed. The names of its folders in ``root`` are made of its
    settings, so that the same training is found again, whichever comparison asks for it."""

    row: Row
    settings: Settings
    root: Path
    data_sha256: tuple[str, str | None]
    """Names the images with labels, and those without that it learns from."""
    image_size: int
    test_sha256: str | None = None
    """Names the test images that are scored, too; None where none are."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests, by name, of the files that the settings name: weights of a teacher or of a ViT that
    is fine-tuned, and imports that define one of them."""
    own_attention: Mapping[str, str] = field(default_factory=dict)
    """Those of imports, where the student's attention is of one."""

    @property
    def teacher_run(self) -> RunDirectory:
        name = digest(as_teacher(self.settings), *self.data_sha256, dict(self.sources))
        return RunDirectory(self.root / "teachers" / name)

    @property
    def maps(self) -> Path:
        """The teacher's store for this training; stores of other kinds lie beside it."""
        export = self.settings.export
        held: list[Any] = [export.model_dump()]
        if export.views is not None:  # other students draw other views
            held.append(asdict(Drawing.of(self.settings, self.image_size)))
        return self.teacher_run.path / f"{export.kind}-{_sha256(held)}.zarr"

    @property
    def exported(self) -> bool:
        """Whether the store, where the teacher has one, and the costs beside it are there."""
        url = self.maps_url
        return self.phase_a_costs.is_file() and (url is None or is_complete(url))

    @property
    def maps_url(self) -> str | None:
        """The store that the training reads; None for a training without one."""
        if self.row.plain or not self.settings.phase_a.kind.stored:
            return None
        return str(self.maps)

    @property
    def phase_a_costs(self) -> Path:
        return self.maps.with_suffix(".json")

    @property
    def needs_phase_a(self) -> bool:
        """Whether phase A counts among the costs of this training: not where the student has
        nothing of a teacher that was trained before but a slice of its weights, which needs neither
        its maps nor its predictions."""
        settings = self.settings
        trained_here = settings.phase_a.most_epochs > 0
        reads_store = settings.phase_b.gamma > 0 or settings.phase_b.alpha > 0
        return not self.row.plain and (trained_here or reads_store)

    @property
    def folder(self) -> Path:
        files = dict(self.sources), dict(self.own_attention)
        name = digest(self.settings, *self.data_sha256, self.row.plain, *files)
        return self.root / "students" / name

    def read(self) -> FinishedTraining | None:
        """The training, if it has finished and was scored on the test images that are asked for.
        Raises UserError where the student is of another training."""
        path = self.folder / FILE
        if not (path.is_file() and kept_epochs.finished(self.folder)):
            return None
        kept_epochs.entry(self.folder)
        training = FinishedTraining(**json.loads(path.read_bytes()))
        if self.test_sha256 is None:
            return replace(training, test_sha256=None, test_acc=None, test_images=None, right=None)
        return training if training.test_sha256 == self.test_sha256 else None
