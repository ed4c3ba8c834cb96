"""Typed settings: one pydantic model for each section of a run's YAML file.

A docstring stands under every field, and becomes a row of a table in docs/commands.md. What
commands may change a setting is the :class:`~gaupipe.settings.sections.Scope` in its annotation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.data import FILE_IMAGE_SIZE, DataSettings
from gaupipe.settings.export import ExportSettings
from gaupipe.settings.model import ModelSettings, StudentKey
from gaupipe.settings.phase_a import PhaseASettings
from gaupipe.settings.phase_b import PhaseBSettings
from gaupipe.settings.sections import Count, Scope, Section, Weight, section_of
from gaupipe.settings.train import OptimSettings, TrainChanges, TrainSettings

__all__ = [
    "FILE_IMAGE_SIZE",
    "DataSettings",
    "ExportSettings",
    "LogSettings",
    "ModelSettings",
    "OptimSettings",
    "PhaseASettings",
    "PhaseBSettings",
    "Settings",
    "StudentKey",
    "TrainChanges",
    "TrainSettings",
    "scope",
]


class LogSettings(Section):
    """Views of a training while it runs, beside the metrics of its epochs."""

    to: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where losses and metrics are shown: any of ``tensorboard``, ``wandb`` (Weights & Biases) and
    ``trackio``, each of which is an extra of the same name."""
    every: Count = 50
    """Steps (batches) between two lines of steps.jsonl, which the loggers of ``to`` get too; 0
    writes none."""


class Settings(Section):
    """Everything that determines a run."""

    seed: Annotated[int, Field(ge=0, lt=2**31), Scope.STUDENT] = 0
    """Seed of all random numbers of the run."""
    device: Annotated[str, Scope.ANYTIME] = "auto"
    """``auto`` takes a GPU where there is one. Any other value is the name of a torch device, such
    as ``cpu`` or ``cuda:1``."""
    threads: Annotated[Annotated[int, Field(gt=0, le=1024)] | None, Scope.ANYTIME] = None
    """Processor threads for torch; null leaves torch's choice."""
    precision: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Scope.STUDENT] = "auto"
    """Precision of the forward pass. ``bfloat16`` and ``float16`` are mixed precision: Gaussians,
    coordinates and losses stay float32. ``auto`` is decided when the run begins, and written to its
    ``config.yaml``: ``bfloat16`` for a ViT of width 192 or more where the processor or GPU
    multiplies such numbers, else ``float32``."""
    compile: Annotated[bool, Scope.STUDENT] = False
    """Compile the forward pass with torch.compile."""
    grad_checkpointing: Annotated[bool, Scope.ANYTIME] = False
    """Compute the activations of each block of a ViT again in the backward pass (timm's
    ``set_grad_checkpointing``): less memory, more time, the same results."""
    checkpoint_minutes: Annotated[Weight | None, Scope.ANYTIME] = 10.0
    """Minutes after which a training writes a checkpoint in the middle of an epoch; 0 writes one
    after every step of the optimizer. Null writes checkpoints between epochs alone."""
    download: Annotated[bool, Scope.ANYTIME] = False
    """Let torchvision and timm fetch a data set and published weights that are not on this
    machine."""
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    augment: Annotated[AugmentSettings, Scope.STUDENT] = AugmentSettings()
    train: Annotated[TrainSettings, Scope.STUDENT] = TrainSettings()
    phase_a: PhaseASettings = PhaseASettings()
    export: ExportSettings = ExportSettings()
    log: Annotated[LogSettings, Scope.ANYTIME] = LogSettings()
    phase_b: Annotated[PhaseBSettings, Scope.STUDENT] = PhaseBSettings()

    def with_section(self, name: str, **changes: Any) -> Settings:
        """These settings with other values in a section, which are not checked again."""
        section = getattr(self, name).model_copy(update=changes)
        return self.model_copy(update={name: section})

    def with_buckets(self, count: int | None) -> Settings:
        """These settings with this number of buckets, where they do not name one; one process alone
        is left as it is."""
        if self.data.buckets is not None or count in (None, 1):
            return self
        return self.with_section("data", buckets=count)

    @property
    def phase_a_augment(self) -> AugmentSettings:
        """The augmentation of phase A. Where a teacher learns Gaussians, no images are mixed: it
        learns where to look in single images."""
        if not self.phase_a.augment:
            return AugmentSettings()
        if self.phase_a.kind.mixes_images:
            return self.augment
        return self.augment.model_copy(update={"mixup": 0.0, "cutmix": 0.0})

    @property
    def student_training(self) -> TrainSettings:
        """What the student of phase B is trained with: ``train``, and what ``phase_b`` has in its
        place, ``optim`` key by key."""
        fields = self.train.model_dump()
        fields["optim"] |= self.phase_b.optim
        for name in fields.keys() - {"optim"}:
            value = getattr(self.phase_b, name)
            if value is not None:
                fields[name] = value
        return TrainSettings.model_validate(fields)

    def with_training(self, *, distilled: bool) -> Settings:
        """These settings for one student alone: ``train`` is what it is trained with, and
        ``phase_b`` does not change that."""
        train = self.student_training if distilled else self.train
        phase_b = self.phase_b.model_copy(update=dict(TrainChanges()))
        return self.model_copy(update={"train": train, "phase_b": phase_b})

    def without_student(self) -> Settings:
        """These settings with the defaults of whatever phase A does not read."""
        model = self.model
        defaults = ModelSettings()
        read_by_students = ["attention", "attention_options", "match_params", "student_args"]
        if not self.phase_a.most_epochs:  # the teacher is not built of these settings
            read_by_students.append("stem")
        unread = {name: getattr(defaults, name) for name in read_by_students}
        model = model.model_copy(update=unread)
        changes = {
            "model": model,
            "train": TrainSettings(),
            "phase_b": PhaseBSettings(),
            "export": ExportSettings(),
        }
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.phase_b.warm_start == "exact":
            self._check_exact()
        start = self.phase_b.warm_start
        allowed = self.phase_a.kind.warm_starts
        if start not in ("none", "exact", *allowed):
            teacher = self.phase_a.teacher
            right = " or ".join(["none", *allowed])
            raise ValueError(
                f"phase_b.warm_start={start}: the teacher {teacher} allows {right}, "
                "and phase_a.teacher=vit also slice"
            )
        return self

    def _check_exact(self) -> None:
        """A student that is to be its teacher needs one that it can be."""
        teacher = self.phase_a
        model = self.model
        needed = {
            "phase_a.teacher=gaussian": "exact" in teacher.kind.warm_starts,
            "phase_a.per_image=none": teacher.per_image == "none",
            "phase_a.mode=expected": teacher.mode == "expected",
            "model.attention=standard": model.attention == "standard",
            "model.attention_options={prior: true}": model.attention_options.get("prior") is True,
            "model.match_params=false": not model.match_params,
            "model.student_args={} but for drop rates": all(
                name.endswith("_rate") for name in model.student_args
            ),
        }
        missing = [name for name, there in needed.items() if not there]
        if missing:
            raise ValueError(f"phase_b.warm_start=exact needs {missing[0]}")


def scope(name: str) -> Scope:
    """The scope of the setting "a.b": that of its field, or of the innermost section around it that
    has one. Keywords in a setting, as in "model.args.depth", have the scope of the setting."""
    section: type[Section] | None = Settings
    innermost = Scope.RUN
    for part in name.split("."):
        field = section.model_fields.get(part) if section else None
        if field is None:
            break
        for fact in field.metadata:
            if isinstance(fact, Scope):
                innermost = fact
        section = section_of(field.annotation)
    return innermost
