"""What a store notes of its teacher, and of the images that its maps were made from."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

import store
from gaupipe.data.augment import Augment
from gaupipe.settings import Settings
from gaupipe.settings.augment import AugmentSettings


@dataclass(frozen=True)
class Drawing:
    """How the views of a store are drawn: phase B must draw the same."""

    seed: int
    augment: dict[str, Any]
    """The settings ``augment``, as JSON, but for what comes after a view is drawn."""
    image_size: int
    """The student's, in whose pixels shifts and crops are drawn."""

    @classmethod
    def of(cls, settings: Settings, image_size: int) -> Drawing:
        after_drawing = {"mixup", "cutmix"}
        if settings.augment.randaugment is None:  # which draws from operations that move, or not
            after_drawing.add("geometry")
        augment = settings.augment.model_dump(mode="json", exclude=after_drawing)
        return cls(settings.seed, augment, image_size)

    def augmentation(self) -> Augment:
        return Augment(AugmentSettings.model_validate(self.augment), self.seed, self.image_size)


@dataclass(frozen=True)
class StoreNotes:
    """The ``extra`` of a store's schema. What does not belong to a store is None there."""

    teacher: str | None = None
    """``phase_a.teacher``; None in a store of another program, which does not say."""
    predicts: bool | None = None
    """Whether it, or a probe on its features, predicts the classes."""
    probe: str | None = None
    """The digest of the training images that a probe was fitted to, where one predicts."""
    mode: str | None = None
    """``phase_a.mode`` of a teacher with Gaussians."""
    label_passes: int | None = None
    """Passes over which its predictions are the mean."""
    data: dict[str, Any] | None = None
    """The settings ``data`` of the images, as JSON."""
    files: Sequence[str] | None = None
    """Paths of image files and folders, where the images are no data set."""
    transform: dict[str, Any] | None = None
    """Of such images: keywords of ``timm.data.create_transform``."""
    class_names: Sequence[str] | None = None
    """Of such images: the names of the teacher's classes; empty where they have none."""
    teacher_args: dict[str, Any] | None = None
    """Keywords that a trained ViT was built with."""
    views: Drawing | None = None
    """The drawing of the views that the maps are of; None for maps of the images themselves."""
    tokens: list[str] | None = None
    """Names of the class and register tokens that come before the patches, where they are stored
    too."""
    layers: list[int] | None = None
    """The teacher's blocks that are stored, where not all are."""
    precision: str | None = None
    """In which the teacher computed, where it is not float32."""
    pooled_from: list[int] | None = None
    """(h, w) of the teacher's maps, where those of the store are coarser."""

    @classmethod
    def of(cls, schema: store.Schema) -> StoreNotes:
        """Those of a store; notes of others are ignored."""
        values = {}
        for name, shape in get_type_hints(cls).items():
            with contextlib.suppress(ValidationError):
                values[name] = TypeAdapter(shape).validate_python(schema.extra.get(name))
        if values.get("transform") is None:
            values["files"] = None
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def has_predictions(self) -> bool:
        """Whether the logits of the store predict its classes."""
        return self.predicts is not False
