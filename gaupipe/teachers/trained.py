"""A teacher that phase A trains on the labels, in the loop of plain training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings, TrainSettings
from gaupipe.settings.sections import LOCAL
from gaupipe.system import distributed
from gaupipe.system.device import prepare_device
from gaupipe.system.messages import LOG
from gaupipe.teachers.base import MapShape, Teacher, ending, identity
from gaupipe.teachers.loading import load_network
from gaupipe.teachers.model import ModelTeacher
from gaupipe.teachers.vit import teacher_of
from gaupipe.training.job import EpochPlan, LabelLosses, Training, train, training_state
from gaupipe.training.optimizer import check_optimizer
from gaupipe.training.state import Identity, TrainingState
from gaupipe.vit.build import build_vit
from gaupipe.vit.saving import save_student


@dataclass
class TrainedOnLabels(Teacher):
    """A model of :meth:`model`, which phase A trains until a training accuracy is reached; then it
    is a :class:`ModelTeacher`."""

    network: Any  # some class of timm's

    @classmethod
    def model(cls, settings: Settings, data: ImageData, device: str | None = None) -> nn.Module:
        """The freshly started model; on the ``device`` "meta" without weights."""
        raise NotImplementedError

    @classmethod
    def outline(cls, settings: Settings, data: ImageData) -> Teacher:
        model: Any = cls.model(settings, data, "meta")
        check_optimizer(model, settings.phase_a.optim, settings.phase_a.most_epochs)
        return cls(settings, data, prepare_device(settings.device, settings.threads), model)

    def begin(self, folder: Path) -> Teacher:
        model = self.model(self.settings, self.data).to(self.device)
        return type(self)(self.settings, self.data, self.device, model)

    @classmethod
    def finished(
        cls, settings: Settings, data: ImageData, folder: Path, with_images: bool = True
    ) -> ModelTeacher:
        remedy = "'gaupipe phase-a --resume' writes it again"
        network = load_network(f"{LOCAL}{folder / 'teacher'}", data, {}, remedy=remedy)
        return teacher_of(settings, data, network)

    @property
    def features(self) -> int:
        return int(self.network.num_features)

    def identity(self) -> Identity:
        """Settings and data that its checkpoint belongs to."""
        return identity(self.settings, self.data)

    def training(self) -> Training:
        """Its training: on the labels, until a training accuracy is reached."""
        settings = self.settings
        phase = settings.phase_a
        # no label smoothing: maps of a teacher with smoothed labels teach less
        how = TrainSettings(epochs=phase.most_epochs, optim=phase.optim)
        return Training(
            settings=settings,
            data=self.images_for_training,
            device=self.device,
            student=self.network,
            train=how,
            augment=settings.phase_a_augment,
            losses=LabelLosses(self.network, how, settings.compile),
            epochs=[EpochPlan()] * phase.most_epochs,
            identity=self.identity(),
            stop_accuracy=phase.stop_accuracy,
        )

    def training_state(self) -> TrainingState[Any]:
        return training_state(self.training())

    def train(self, state: TrainingState[Any], folder: Path) -> Teacher:
        """Epochs until the training accuracy is reached or ``most_epochs`` are done; then the model
        is saved as timm loads it."""
        images = self.images_for_training
        train(self.training(), state, folder, "phase A")
        LOG.info(f"phase A: {ending(self.settings.phase_a, state.metrics)}")

        with distributed.rank_zero_first():
            if distributed.is_main():
                save_student(state.kept, folder / "teacher", **images.data_config)
            return self.finished(self.settings, self.data, folder)


@dataclass
class TrainedVit(TrainedOnLabels):
    """The ViT of the settings with standard attention."""

    network: VisionTransformer

    forms: ClassVar[frozenset[str]] = frozenset({"maps"})

    @classmethod
    def model(cls, settings: Settings, data: ImageData, device: str | None = None) -> nn.Module:
        torch.manual_seed(settings.seed)
        changes = ("phase_a.teacher_args", settings.phase_a.teacher_args)
        return build_vit(settings.model, data, "standard", device, changes)

    @property
    def shape(self) -> MapShape:
        return MapShape.of(self.network)

    @property
    def tokens(self) -> int:
        return super().tokens + self.network.num_prefix_tokens

    def weights(self) -> dict[str, Tensor]:
        return self.network.state_dict()
