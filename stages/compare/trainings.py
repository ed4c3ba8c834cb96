"""Trainings of a comparison: the settings of each, where it lies, and what it has reached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from gaupipe.distillation.export import is_complete
from gaupipe.settings import Settings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.system.progress import EpochMetrics, epochs_in, read_metrics
from gaupipe.teachers.notes import Drawing
from gaupipe.training.scores import unpacked
from gaupipe.training.state import val_acc
from stages.compare.rows import Row
from stages.runs import kept_epochs
from stages.runs.directory import RunDirectory

COSTS_FILE = "costs.json"
"""Beside a student: what its training cost."""

TEST_FILE = "test.json"
"""Beside a student: its score on the test split."""


class ScoresOnTest(TypedDict):
    """What is read of :data:`TEST_FILE`."""

    top1: float
    right: str
    """Which images: :func:`gaupipe.training.scores.packed`."""
    images: int
    test_sha256: str | None


@dataclass(frozen=True)
class FinishedTraining:
    """A training in the results. The lists have the value after each epoch."""

    seed: int
    folder: str
    phase_a_epochs: int
    test_acc: float | None
    """None without ``--test``, as the next two."""
    test_images: int | None
    right: str | None
    """Which test images it got right, a bit each (:func:`gaupipe.training.scores.packed`)."""
    val_acc: list[float]
    val_loss: list[float]
    loss_hard: list[float]
    """Of the training images' labels, which all rows have."""
    seconds: list[float]
    processor_seconds: list[float]
    costs: Mapping[str, float]
    """Of the student, by the names of :class:`stages.compare.costs.Costs`."""
    phase_a_costs: Mapping[str, float]
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
    data_sha256: str
    image_size: int
    unlabelled_sha256: str | None = None
    """Names the images without labels that it learns from."""
    test_sha256: str | None = None
    """Names the test images that are scored, too; None where none are."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Digests, by name, of the files that the settings name: weights of a teacher or of a ViT that
    is fine-tuned, and imports that define one of them."""
    own_attention: Mapping[str, str] = field(default_factory=dict)
    """Those of imports, where the student's attention is of one."""

    @property
    def teacher(self) -> RunDirectory:
        images = self.data_sha256, self.unlabelled_sha256
        name = digest(as_teacher(self.settings), *images, dict(self.sources))
        return RunDirectory(self.root / "teachers" / name)

    @property
    def maps(self) -> Path:
        """The teacher's store for this training; stores of other kinds lie beside it."""
        export = self.settings.export
        held: list[Any] = [export.model_dump()]
        if export.views is not None:  # other students draw other views
            held.append(asdict(Drawing.of(self.settings, self.image_size)))
        return self.teacher.path / f"{export.kind}-{_sha256(held)}.zarr"

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
        images = self.data_sha256, self.unlabelled_sha256
        counted = *images, self.row.plain, dict(self.sources), dict(self.own_attention)
        return self.root / "students" / digest(self.settings, *counted)

    @property
    def finished(self) -> bool:
        written = (self.folder / COSTS_FILE).is_file() and kept_epochs.finished(self.folder)
        return written and (self.test_sha256 is None or self.test_scores() is not None)

    def test_scores(self) -> ScoresOnTest | None:
        """The content of :data:`TEST_FILE`; None where there is none of these test images."""
        path = self.folder / TEST_FILE
        if not path.is_file():
            return None
        scores: ScoresOnTest = json.loads(path.read_bytes())
        if scores["test_sha256"] != self.test_sha256:
            return None
        return scores

    def read(self) -> FinishedTraining:
        """Reads the finished training from its files: its curves, and what it has cost. Raises
        UserError where the files are not of one training."""
        metrics = read_metrics(self.folder / "metrics.jsonl")
        kept_epochs.entry(self.folder)
        phase_a: list[EpochMetrics] = []
        if not self.row.plain:
            phase_a = read_metrics(self.folder / "phase_a.jsonl")
        costs = json.loads((self.folder / COSTS_FILE).read_text())
        scores = self.test_scores()
        test_acc = test_images = right = None
        if scores is not None:
            test_acc = scores["top1"]
            test_images = scores["images"]
            right = scores["right"]
        return FinishedTraining(
            seed=self.settings.seed,
            folder=str(self.folder.relative_to(self.root)),
            phase_a_epochs=epochs_in(phase_a),
            test_acc=test_acc,
            test_images=test_images,
            right=right,
            val_acc=[val_acc(entry) for entry in metrics],
            val_loss=[entry["val_loss"] for entry in metrics],
            loss_hard=[entry["loss_hard"] for entry in metrics],
            seconds=[entry["seconds"] for entry in metrics],
            processor_seconds=[entry.get("processor_seconds", 0.0) for entry in metrics],
            costs=costs["student"],
            phase_a_costs=costs["phase_a"],
        )
