"""The student of phase B: built from the settings, and compared in shape with a teacher's maps."""

from __future__ import annotations

from timm.models.vision_transformer import VisionTransformer

from gaupipe.data.unlabelled import folder_beside
from gaupipe.distillation.losses import check_has_maps
from gaupipe.distillation.store_choice import plan_export
from gaupipe.distillation.warm_start import start_from_teacher
from gaupipe.settings import PhaseBSettings, Settings
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import MapShape, Teacher
from gaupipe.training.student import outline_student
from gaupipe.vit.slicing import evenly_spaced


def layer_map(phase: PhaseBSettings, depth: int, layers: int) -> list[int | None]:
    """For each of the student's ``depth`` blocks the stored block, of ``layers``, that it is
    compared with: ``phase_b.layer_map``, or evenly spaced from the first to the last."""
    if phase.layer_map is not None:
        return phase.layer_map
    return [*evenly_spaced(depth, layers)]


def check_fit(
    student: VisionTransformer, maps: MapShape | None, phase: PhaseBSettings, where: str
) -> None:
    """Raises UserError if ``maps`` of this shape cannot be compared with the student's as the
    settings say; None is a store without maps. ``where`` names the store."""
    if phase.gamma:
        check_has_maps(student)
    if maps is None:
        if phase.gamma:
            raise UserError(
                f"{where}: no attention maps are stored in the kind predictions, and "
                f"phase_b.gamma={phase.gamma:g} compares some: set phase_b.gamma=0, or choose "
                "another kind"
            )
        return
    shape = MapShape.of(student)
    layers = layer_map(phase, shape.layers, maps.layers)
    if len(layers) != shape.layers or any((layer or 0) >= maps.layers for layer in layers):
        raise UserError(
            f"phase_b.layer_map: should have {shape.layers} entries, each null or 0 to "
            f"{maps.layers - 1}, got {phase.layer_map}"
        )
    if phase.gamma and all(layer is None for layer in layers):
        raise UserError("phase_b.layer_map leaves no block to compare: set phase_b.gamma=0")
    head_map = phase.head_map
    heads = shape.heads
    stored = maps.heads
    if isinstance(head_map, list) and (
        len(head_map) != heads or max(head_map, default=0) >= stored
    ):
        raise UserError(
            f"phase_b.head_map: should have {heads} entries, each 0 to {stored - 1}, got {head_map}"
        )
    if head_map is None and heads != stored:
        raise UserError(
            f"{where}: the maps have {stored} heads, the student has {heads}: set "
            "phase_b.head_map=mean, or to a list with the stored head for each of the student's, "
            "or give the student as many heads as the teacher has"
        )


def without_predictions(settings: Settings) -> Settings:
    """The settings of a student whose teacher predicts nothing: alpha is 0. Raises UserError where
    nothing else is left to learn from."""
    if settings.phase_b.beta + settings.phase_b.gamma == 0:
        raise UserError(
            f"phase_b.alpha: {settings.phase_a.teacher} predicts no classes, and beta and gamma "
            "are 0: set phase_b.beta=1"
        )
    return settings.with_section("phase_b", alpha=0.0)


def check_unlabelled(settings: Settings) -> None:
    """Raises UserError for a teacher that says nothing of images without labels."""
    if not settings.phase_a.kind.predicts_new_images:
        raise UserError(
            f"data.unlabelled: the teacher {settings.phase_a.teacher} predicts nothing of images "
            "without labels: take --teacher resnet, which phase A trains on the labels, or a "
            f"pretrained model's name; or {_without_them(settings)}"
        )


def check_soft_loss(settings: Settings) -> None:
    """Raises UserError for images without labels whose predictions weigh nothing."""
    if not settings.phase_b.alpha:
        raise UserError(
            "phase_b.alpha: is 0, and images without labels teach by predictions: set "
            f"phase_b.alpha=1, or {_without_them(settings)}"
        )


def _without_them(settings: Settings) -> str:
    """How to do without images without labels."""
    if settings.data.unlabelled is not None:
        return "begin a run without data.unlabelled"
    return f"move {folder_beside(settings.data)} away and begin a run"


def check_student(teacher: Teacher) -> None:
    """Raises UserError before phase A for a student that phase B could not train with what a
    ``teacher`` gives, and for a store that cannot hold it. Nothing is computed: the student is
    built on the meta device."""
    settings = teacher.settings
    phase = settings.phase_b
    student = outline_student(settings, teacher.data, settings.student_training)
    if teacher.data.unlabelled is not None:
        check_soft_loss(settings)
    teacher.check_student()
    if not teacher.kind.predicts:
        without_predictions(settings)
    constant = teacher.constant_maps(student)
    if constant is not None:
        check_fit(student, MapShape.of(constant), phase, settings.phase_a.teacher)
        return
    if phase.gamma and not teacher.forms:
        raise UserError(
            f"phase_b.gamma: the teacher {settings.phase_a.teacher} has no attention maps to "
            "compare: set phase_b.gamma=0"
        )
    export = plan_export(teacher)
    maps = None
    if teacher.forms:
        maps = teacher.shape.stored(export)
    if phase.gamma:
        check_fit(student, maps, phase, "the teacher")
    if phase.warm_start != "none":
        shape = teacher.shape
        weights = teacher.weights()
        start_from_teacher(student, phase.warm_start, weights, shape.heads, shape.grid)
