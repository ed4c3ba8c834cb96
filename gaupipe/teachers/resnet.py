"""The teacher ``resnet``: a narrow ResNet, trained on the labels. It has no attention maps; its
habit of looking at neighbours is what its predictions of other images pass on to a ViT."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.teachers.trained import TrainedOnLabels
from gaupipe.vit.build import create_model


@dataclass
class ResNetTeacher(TrainedOnLabels):
    """timm's ResNet with one narrow block a stage (:func:`gaupipe.vit.resnet.gauresnet_pico`)."""

    @classmethod
    def model(cls, settings: Settings, data: ImageData, device: str | None = None) -> nn.Module:
        torch.manual_seed(settings.seed)
        sizes = {"num_classes": data.num_classes, "in_chans": data.channels}
        arguments = {**sizes, "img_size": data.image_size, **settings.phase_a.teacher_args}
        model = create_model("gauresnet_pico", arguments)
        return model.to(device) if device else model
