"""A teacher that is a trained ViT, whose attention can be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from gaupipe.data.batches import Batch
from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.load import parse
from gaupipe.settings.teachers import TEACHERS
from gaupipe.system.device import prepare_device
from gaupipe.system.errors import UserError
from gaupipe.system.messages import warn_once
from gaupipe.teachers.base import MapShape, Outputs, Teacher, Wanted, outline
from gaupipe.teachers.loading import load_network
from gaupipe.teachers.model import ModelTeacher
from gaupipe.teachers.readable_vit import PredictingModel, ReadableViT, parts_of_teachers
from gaupipe.vit.inputs import spread_of


@dataclass
class VitTeacher(ModelTeacher):
    """A trained ViT, whose attention can be read, on the data of a run."""

    network: ReadableViT

    forms: ClassVar[frozenset[str]] = frozenset({"maps"})

    @classmethod
    def outline(cls, settings: Settings, data: ImageData) -> Teacher:
        return load_teacher(settings, data)

    @classmethod
    def finished(
        cls, settings: Settings, data: ImageData, folder: Path, with_images: bool = True
    ) -> Teacher | None:
        teacher = load_teacher(settings, data)
        teacher.load_probe(folder)
        return teacher

    @property
    def shape(self) -> MapShape:
        return MapShape.of(self.network)

    @property
    def tokens(self) -> int:
        return super().tokens + self.network.prefix

    def outputs(self, batch: Batch, wanted: Wanted) -> Outputs:
        if not wanted.layers:
            return super().outputs(batch, wanted)
        logits, features, shown = self.network.forward_with_maps(batch.images, wanted.layers)
        return Outputs(self.probed(logits, features, wanted.image_ids), shown, features)

    @property
    def kept_prefix(self) -> int:
        return int(self.network.kept_prefix)

    def weights(self) -> dict[str, Tensor]:
        return dict(self.network.weights())

    def spread(self) -> Tensor | None:
        return spread_of(self.network.model, self.data, self.network.takes)

    def remarks(self) -> list[str]:
        """A line where a student that starts with its weights gets images that are normalised
        otherwise than these weights expect."""
        takes = self.network.takes
        data = self.data
        if np.allclose([takes.mean, takes.std], [data.mean, data.std], atol=1e-3):
            return []
        mean, std = ([round(value, 4) for value in values] for values in (takes.mean, takes.std))
        wanted = f"data.scaling={{mean: {mean}, std: {std}}}"
        return [f"the weights that it starts with expect {wanted}, and its images have another one"]

    def say_before(self) -> None:
        """Says of a teacher with parts that its student has not that its maps may not help, unless
        it was trained for this student."""
        parts = parts_of_teachers(self.network.model)
        if parts and not self.kind.trained:
            warn_once(
                f"gaupipe: {self.network.name}: has {' and '.join(parts)}, which its student "
                "lacks: students of such teachers lost up to 5 points (arXiv 2605.07191); compare "
                "with the same ViT without a teacher"
            )


def other_teacher(
    settings: Settings,
    data: ImageData,
    teacher: str,
    teacher_args: dict[str, Any] | None = None,
) -> Teacher:
    """A trained model in place of a run's own teacher."""
    if teacher in TEACHERS:
        raise UserError(
            f"--teacher {teacher}: is for a run, which 'gaupipe phase-a --set "
            f"phase_a.teacher={teacher}' begins; here local-dir:FOLDER or a timm name is right"
        )
    changes: dict[str, Any] = {"teacher": teacher, "teacher_args": teacher_args or {}}
    parsed = parse({"phase_a": changes}, f"--teacher {teacher}").phase_a
    settings = settings.model_copy(update={"phase_a": parsed})
    return outline(settings, data).begin(Path())


def load_teacher(settings: Settings, data: ImageData) -> ModelTeacher:
    """The teacher whose weights the settings name: a ViT whose attention can be read, or any other
    model, for its predictions. Raises UserError for what cannot be loaded."""
    phase = settings.phase_a
    network = load_network(phase.teacher, data, phase.teacher_args, download=settings.download)
    return teacher_of(settings, data, network)


def teacher_of(settings: Settings, data: ImageData, network: PredictingModel) -> ModelTeacher:
    """The teacher of a trained ``network``, on the settings' device."""
    device = prepare_device(settings.device, settings.threads)
    if isinstance(network, ReadableViT):
        return VitTeacher(settings, data, device, network.to(device))
    return ModelTeacher(settings, data, device, network.to(device))
