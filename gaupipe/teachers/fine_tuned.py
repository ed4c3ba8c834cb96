"""A teacher that was trained before, and that phase A fine-tunes on the labels first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.places import folder_of
from gaupipe.settings.sections import LOCAL
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import MapShape, Teacher
from gaupipe.teachers.loading import readable
from gaupipe.teachers.trained import TrainedOnLabels
from gaupipe.teachers.vit import VitTeacher, teacher_of
from gaupipe.training.job import Training
from gaupipe.training.optimizer import check_optimizer
from gaupipe.training.state import Identity
from gaupipe.vit.build import create_model
from gaupipe.vit.fine_tuning import weights_sha256
from gaupipe.vit.inputs import as_taken, input_of
from gaupipe.vit.pretrained import load_pretrained
from gaupipe.vit.stem import SharedBatchNorm


def check_batch_norm(model: nn.Module, teacher: str) -> None:
    """Raises UserError for batch normalisation by the images of one process among several."""
    kinds = nn.BatchNorm1d, nn.BatchNorm2d
    norms = [module for module in model.modules() if isinstance(module, kinds)]
    alone = any(not isinstance(norm, SharedBatchNorm) for norm in norms)
    if alone and distributed.world_size() > 1:
        raise UserError(
            f"phase_a.fine_tune_epochs: the batch norm of {teacher} would see the images of one "
            "process alone: fine-tune it in one process"
        )


@dataclass
class FineTuned(TrainedOnLabels):
    """Any timm model with the weights that the settings name, and a head for the classes of the
    data set. It learns from images as its weights expect them."""

    @classmethod
    def model(cls, settings: Settings, data: ImageData, device: str | None = None) -> nn.Module:
        torch.manual_seed(settings.seed)  # of a new head
        phase = settings.phase_a
        arguments = {
            "num_classes": data.num_classes,
            "in_chans": data.channels,
            **phase.teacher_args,
        }
        if device is None:
            trained = load_pretrained(phase.teacher, arguments, settings.download)
            return trained.requires_grad_(True)
        source = phase.teacher
        if source.startswith(LOCAL):
            source = f"{LOCAL}{folder_of(source)}"
        return create_model(source, arguments).to(device)

    @classmethod
    def outline(cls, settings: Settings, data: ImageData) -> Teacher:
        """As :meth:`Teacher.outline`: without its weights, but on the CPU, where a blank image
        shows whether its attention can be read."""
        model: Any = cls.model(settings, data, "cpu")
        check_batch_norm(model, settings.phase_a.teacher)
        check_optimizer(model, settings.phase_a.optim, settings.phase_a.most_epochs)
        before = teacher_of(settings, data, readable(model, data, settings.phase_a.teacher))
        if isinstance(before, VitTeacher):
            return FineTunedVit(settings, data, before.device, model, before)
        return cls(settings, data, before.device, model)

    @property
    def images_for_training(self) -> ImageData:
        takes = input_of(self.network, self.data, self.settings.phase_a.teacher)
        train, taken = as_taken(self.data.train, self.data, takes)
        val, _ = as_taken(self.data.val, self.data, takes)
        return replace(taken, train=train, val=val, interpolation=takes.interpolation)

    def training(self) -> Training:
        """As that of every teacher; images are shifted by the same part of them as a student's."""
        training = super().training()
        ratio = training.data.image_size / self.data.image_size
        shift = round(training.augment.crop_padding * ratio)
        augment = training.augment.model_copy(update={"crop_padding": shift})
        return replace(training, augment=augment)

    def identity(self) -> Identity:
        return super().identity() | weights_sha256(self.settings.phase_a.teacher)


@dataclass
class FineTunedVit(FineTuned):
    """The outline of one whose attention can be read. ``before`` is the teacher that it would be
    without its training."""

    before: VitTeacher

    forms: ClassVar[frozenset[str]] = frozenset({"maps"})

    def begin(self, folder: Path) -> Teacher:
        return FineTuned(self.settings, self.data, self.device, self.network).begin(folder)

    @property
    def shape(self) -> MapShape:
        return self.before.shape

    @property
    def tokens(self) -> int:
        return self.before.tokens

    def weights(self) -> dict[str, Tensor]:
        return self.before.weights()
