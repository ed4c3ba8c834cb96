"""A teacher that was trained before, and that phase A fine-tunes on the labels first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.places import folder_of
from gaupipe.settings.sections import LOCAL
from gaupipe.system.device import prepare_device
from gaupipe.teachers.base import Teacher
from gaupipe.teachers.loading import readable
from gaupipe.teachers.readable_vit import PredictingModel, ReadableViT
from gaupipe.teachers.trained import TrainedOnLabels, trained_network
from gaupipe.teachers.vit import TrainedVit
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.state import Identity
from gaupipe.vit.build import create_model
from gaupipe.vit.fine_tuning import weights_sha256
from gaupipe.vit.inputs import as_taken, input_of
from gaupipe.vit.pretrained import load_pretrained


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
        build_optimizer(model, settings.phase_a.optim, settings.phase_a.most_epochs, 100)
        network = readable(model, data, settings.phase_a.teacher)
        return of_network(settings, data, network)

    @classmethod
    def finished(
        cls, settings: Settings, data: ImageData, folder: Path, with_images: bool = True
    ) -> Teacher | None:
        return of_network(settings, data, trained_network(folder, data))

    @property
    def images_for_training(self) -> ImageData:
        takes = input_of(self.timm_model, self.data, self.settings.phase_a.teacher)
        train, taken = as_taken(self.data.train, self.data, takes)
        val, _ = as_taken(self.data.val, self.data, takes)
        return replace(taken, train=train, val=val, interpolation=takes.interpolation)

    def identity(self) -> Identity:
        return super().identity() | weights_sha256(self.settings.phase_a.teacher)


@dataclass
class FineTunedVit(FineTuned, TrainedVit):
    """A :class:`FineTuned` model whose attention can be read."""


def of_network(settings: Settings, data: ImageData, network: PredictingModel) -> FineTuned:
    """The teacher of a ``network``, on the settings' device."""
    device = prepare_device(settings.device, settings.threads)
    kind = FineTunedVit if isinstance(network, ReadableViT) else FineTuned
    return kind(settings, data, device, network.to(device))
