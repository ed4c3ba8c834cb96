"""What a run has trained, loaded: its teacher and its students, and the store that each of these
learned from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from timm.models.vision_transformer import VisionTransformer

import store
from gaupipe.data.splits import ImageData
from gaupipe.distillation.job import check_views
from gaupipe.distillation.student import check_fit
from gaupipe.settings import Settings
from gaupipe.system.errors import UserError
from gaupipe.system.messages import LOG
from gaupipe.teachers.base import MapShape, Teacher, teacher_class
from gaupipe.vit.saving import load_folder
from stages.runs import kept_epochs
from stages.runs.directory import RunDirectory, check_name, store_of_unlabelled
from stages.runs.students import recorded_stores


def load_teacher(
    directory: RunDirectory,
    data: ImageData | None = None,
    *,
    with_images: bool = True,
    settings: Settings | None = None,
) -> Teacher:
    """The finished teacher of a run, in eval mode. ``with_images`` False leaves out the per-image
    parameters; ``settings`` are those of the run, where they have been read already, with what may
    change at any time. Raises UserError if phase A has not finished."""
    settings = settings or directory.settings()
    data = data or directory.load_data(settings)
    if directory.teacher_digest() is None:
        raise unfinished(directory)
    teacher = teacher_class(settings).finished(settings, data, directory.phase_a, with_images)
    if teacher is None:
        raise unfinished(directory)
    if teacher.given_sha256():
        check_unchanged(teacher, directory)
    return teacher


def unfinished(directory: RunDirectory) -> UserError:
    """The error for a run whose phase A has not finished."""
    return UserError(
        f"{directory.path}: phase A has not finished; 'gaupipe phase-a {directory.config} "
        f"--run-dir {directory.path} --resume' does that"
    )


def check_unchanged(teacher: Teacher, directory: RunDirectory) -> None:
    """Raises UserError for another teacher than the run's."""
    if teacher.sha256 != directory.teacher_digest():
        raise UserError(
            f"phase_a.teacher: {teacher.settings.phase_a.teacher} has changed since "
            f"{directory.path} was started with it: restore it, or start another run"
        )


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
        """True if it learned the maps, or all, of another teacher than its run's."""
        learned = recorded_stores(self.folder)
        return bool(learned) and learned[0][1] != self.run.teacher_digest()

    @property
    def has_other_predictions(self) -> bool:
        """True if the predictions that it learned are of a second store."""
        return len(recorded_stores(self.folder)) == 2


def load_student(run_dir: Path, name: str | None = None, plain: bool = False) -> TrainedStudent:
    """The student of a name, or with None the one trained last; ``plain`` the one that was trained
    without a teacher, which is otherwise taken only where phase B has none of this name.

    Raises UserError where the student is not there, damaged, no ViT, or not the one that
    student.json beside it describes.
    """
    run = RunDirectory(run_dir)
    run.settings()
    asked = name is not None or plain
    distilled = not plain and run.is_distilled(name)
    there = run.students(distilled)
    command = f"'gaupipe phase-b --run-dir {run_dir}"
    if not distilled:
        command += " --no-distill"
    if name is None and not there:
        raise UserError(f"{run_dir} has no student: {command}' trains one")
    if not (asked or distilled) and run.phase_a.exists():
        LOG.info("%s: phase B has trained nothing; %s learned labels alone", run_dir, there[-1])
    name = name or there[-1]
    check_name(name)
    folder = run.student(name, distilled) / "student"
    if not folder.is_dir():
        names = dict.fromkeys([*run.students(), *run.students(distilled=False)])
        ways = [f"there are {', '.join(names)}"] if names else []
        if run.phase_a.exists() or not names:
            ways.append(f"{command} --student ATTENTION --name {name}' trains it")
        raise UserError(f"{folder} is not there: {'; '.join(ways)}")
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
    """The store of :func:`store_of`. None where it is not there, finished, and of as many blocks
    and heads as the student; a line says so of one that the student learned from."""
    url, teacher_sha256 = store_of(student)
    if data.sha256 == data.unlabelled_sha256:
        url = store_of_unlabelled(url)
    try:
        maps = store.open(url, dataset_sha256=data.sha256, teacher_sha256=teacher_sha256)
        check_fit(student.model, MapShape.of_store(maps.schema), student.settings.phase_b, url)
        check_views(maps.schema, student.settings, data.image_size, url)
    except store.UnfinishedStore as error:
        if recorded_stores(student.folder):
            LOG.warning(f"the student is not compared with its maps: {error}")
        return None
    except UserError:
        return None
    return maps


def store_of(student: TrainedStudent) -> tuple[str, str | None]:
    """(url, sha256 of its teacher) of the store that a student learned from; of one that learned
    from none, the run's own."""
    recorded = recorded_stores(student.folder)
    if recorded:
        return recorded[0]  # that of the maps
    return str(student.run.maps), student.run.teacher_digest()
