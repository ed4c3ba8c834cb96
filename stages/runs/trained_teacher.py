"""Settings that follow from a teacher that is trained already: what its student is like, and what
it takes from the teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timm.data import resolve_model_data_config

from gaupipe.distillation.warm_start import refuse_slice
from gaupipe.settings import Settings
from gaupipe.settings.load import Overrides, load, read_overrides, read_yaml, with_overrides
from gaupipe.system.errors import UserError
from gaupipe.teachers.readable_vit import has_standard_attention
from gaupipe.vit.build import create_model
from gaupipe.vit.fine_tuning import build_untrained, sizes_of
from gaupipe.vit.slicing import VitSizes
from stages.runs.choices import Choices
from stages.runs.presets import MOST_VIEWS


@dataclass(frozen=True)
class TeacherSizes:
    """The sizes of a trained teacher of which a student may be a slice, how its images are scaled,
    and the parts that its state_dict names, on the meta device."""

    sizes: VitSizes
    scaling: dict[str, list[float]]
    weights: dict[str, Any]


def look_at(name: str, arguments: dict[str, Any]) -> TeacherSizes | None:
    """The sizes of the teacher of this name, without its weights; None where no student can begin
    with a slice of it. What is wrong with a name shows when the teacher is loaded."""
    try:
        vit = build_untrained(name, arguments, "meta")
    except UserError:
        return None
    if not has_standard_attention(vit):
        return None
    scaled = resolve_model_data_config(vit)
    scaling = {key: [float(value) for value in scaled[key]] for key in ("mean", "std")}
    return TeacherSizes(sizes_of(vit), scaling, vit.state_dict())


def choose_start(choices: Choices, teacher: TeacherSizes | None) -> None:
    """Whether the student, whose model is settled, begins with a slice of the teacher, and how
    heads are compared."""
    if not str(choices.given("model.name", "gauvit_")).startswith("gauvit_"):
        return  # it has weights of its own
    try:
        student = student_of(choices)
    except UserError:
        return  # it is refused later
    asked = sizes_of(student)
    heads = teacher.sizes.heads if teacher is not None else None
    if asked.heads != heads:
        reason = f"each head learns from the mean of the teacher's {heads or 'heads'}"
        choices.choose("phase_b.head_map", "mean", reason)
    if teacher is None:
        reason = "no slice can be cut of this teacher: it is no VisionTransformer of timm's"
        choices.choose("phase_b.warm_start", "none", reason)
        return
    try:
        teacher.sizes.check(asked, "no slice")
        refuse_slice(student, teacher.weights, "no slice")
    except UserError as error:
        choices.choose("phase_b.warm_start", "none", str(error))
        return
    reason = "it begins with a part of the teacher's weights, which needs no training"
    if choices.choose("phase_b.warm_start", "slice", reason) != "none":
        for key, values in teacher.scaling.items():
            choices.choose(f"data.scaling.{key}", values)


def student_of(choices: Choices) -> Any:
    """The ViT of the settings without weights. Raises UserError where timm cannot build it."""
    args = {**choices.given("model.args", {}), **choices.given("model.student_args", {})}
    size = choices.given("data.image_size")
    if size is not None:
        args["img_size"] = size
    name = choices.given("model.name", "gauvit_pico_patch2_8")
    return create_model(name, {**args, "device": "meta"})


def with_trained_teacher(
    source: str, overrides: Overrides, settings: Settings
) -> tuple[Settings, list[str]]:
    """The settings of a configuration, with what follows from its trained teacher where the
    configuration is silent; and lines that say why."""
    choices = Choices(with_overrides(read_yaml(source) or {}, overrides))
    phase = settings.phase_a
    choose_start(choices, look_at(phase.teacher, phase.teacher_args))
    if settings.augment.draws_views and settings.phase_b.gamma:
        epochs = settings.phase_b.gamma_ends(settings.student_training.epochs)
        reason = "views of each image whose maps are stored; moved maps fit shifts badly"
        choices.choose("export.views", min(max(2, epochs), MOST_VIEWS), reason)
    changes = read_overrides(overrides) | {key: choices.given(key) for key in choices.chosen}
    return load(source, changes), [f"  {line}" for line in choices.lines()]
