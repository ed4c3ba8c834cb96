"""The students of a run: loaded, and beside them the store that each learned from."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from timm.models.vision_transformer import VisionTransformer

import store
from gaupipe.data.splits import ImageData
from gaupipe.distillation.job import check_targets
from gaupipe.distillation.student import check_fit
from gaupipe.settings import Settings
from gaupipe.system.errors import UserError
from gaupipe.vit.saving import load_folder
from stages.runs import kept_epochs
from stages.runs.directory import RunDirectory, check_name
from stages.runs.students import recorded_store


@dataclass(frozen=True)
class TrainedStudent:
    """A student of a run, as timm loads its folder, in eval mode."""

    run: RunDirectory
    name: str
    distilled: bool
    settings: Settings
    model: VisionTransformer

    @property
    def folder(self) -> Path:
        """The folder with its metrics, its checkpoint and ``student/``."""
        return self.run.student(self.name, self.distilled)

    @property
    def has_other_teacher(self) -> bool:
        """True if it learned from another teacher than its run's."""
        learned = recorded_store(self.folder)
        return learned is not None and learned[1] != self.run.teacher_digest()


def load_student(
    run_dir: Path, name: str | None = None, distilled: bool | None = None
) -> TrainedStudent:
    """The student of a name, or with None the one trained last.

    ``distilled`` None is what :meth:`RunDirectory.is_distilled` says. Raises UserError where the
    student is not there, damaged, no ViT, or not the one that student.json beside it describes.
    """
    run = RunDirectory(run_dir)
    run.settings()
    distilled = run.is_distilled(name) if distilled is None else distilled
    there = run.students(distilled)
    plain = "" if distilled else " --no-distill"
    command = f"'gaupipe phase-b --run-dir {run_dir}{plain}"
    if name is None and not there:
        raise UserError(f"{run_dir} has no student: {command}' trains one")
    name = name or there[-1]
    check_name(name)
    folder = run.student(name, distilled) / "student"
    if not folder.is_dir():
        others = f"; there are {', '.join(there)}" if there else ""
        raise UserError(
            f"{folder} is not there: {command} --student ATTENTION --name {name}' trains it{others}"
        )
    remedy = f"{command} --name {name} --resume' writes it again from its checkpoint"
    settings = run.student_settings(name, distilled)
    model = load_folder(folder, remedy)
    if not isinstance(model, VisionTransformer):
        raise UserError(f"{folder} holds a {type(model).__name__}, no student: {remedy}")
    kept_epochs.entry(folder.parent)
    return TrainedStudent(run, name, distilled, settings, model)


def check_data(student: TrainedStudent, data: ImageData) -> None:
    """Raises UserError for a student of other images or classes than the data set's."""
    model = student.model
    takes = (model.in_chans, *model.patch_embed.img_size, model.num_classes)
    if takes != (data.channels, data.image_size, data.image_size, data.num_classes):
        raise UserError(
            f"{student.run.path}: the student is for {takes[0]} channels, {takes[1]} x {takes[2]} "
            f"pixels and {takes[3]} classes, the data set {data.name} has {data.channels}, "
            f"{data.image_size} x {data.image_size} and {data.num_classes}"
        )


def open_maps(student: TrainedStudent, data: ImageData) -> store.Store | None:
    """The store that the student learned from; where that is gone, or the student learned from
    none, the run's own. None where neither is there, finished, and of as many blocks and heads as
    the student."""
    for url, teacher_sha256 in stores_of(student):
        with contextlib.suppress(store.UnfinishedStore, UserError):
            maps = store.open(url, dataset_sha256=data.sha256, teacher_sha256=teacher_sha256)
            check_fit(student.model, maps.schema, student.settings.phase_b, url)
            check_targets(maps.schema, student.settings, url)
            return maps
    return None


def stores_of(student: TrainedStudent) -> list[tuple[str, str | None]]:
    """(url, sha256 of its teacher) of the stores that a student may have learned from, the
    likeliest first."""
    run = student.run
    recorded = recorded_store(student.folder)
    if recorded is None:
        return [(str(run.maps), run.teacher_digest())]
    own = (str(run.maps), run.teacher_digest() or recorded[1])
    return [recorded, own] if recorded[1] == own[1] else [recorded]
