"""A narrow ResNet for small images, in timm's registry."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.layers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

from gaupipe.vit.models import config_of
from gaupipe.vit.stem import SharedBatchNorm

FULL_RESOLUTION = 64
"""Pixels a side from which on the first convolution halves the image."""

SMALLEST = 8
"""Pixels a side up to which the last stage does not halve: a single pixel of a single image has no
variance, by which batch norm could divide it."""


class NarrowResNet(ResNet):
    """timm's ``ResNet`` whose stem is one 3 x 3 convolution, of stride 2 from 64 pixels on, without
    pooling: ResNet's own would leave a single pixel of 32 in the last stage."""

    def __init__(self, img_size: Any = 32, in_chans: int = 3, **kwargs: Any) -> None:
        size = to_2tuple(img_size)[0]
        if size <= SMALLEST:
            kwargs["output_stride"] = 16
        norm = partial(SharedBatchNorm, apply_act=False)  # the blocks have their own ReLU
        super().__init__(in_chans=in_chans, norm_layer=norm, **kwargs)
        stride = 2 if size >= FULL_RESOLUTION else 1
        first: Any = self.conv1
        first = nn.Conv2d(in_chans, first.out_channels, 3, stride, padding=1, bias=False)
        nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
        self.conv1 = first
        self.maxpool: Any = nn.Identity()
        self.img_size = size
        self.in_chans = in_chans


CONFIG = {**config_of(32, 10), "first_conv": "conv1", "classifier": "fc"}
default_cfgs = generate_default_cfgs({"gauresnet_pico": CONFIG})


@register_model
def gauresnet_pico(pretrained: bool = False, **kwargs: Any) -> NarrowResNet:
    """A ResNet with 0.18 million parameters, one block in each of four stages."""
    preset: dict[str, Any] = dict(block=BasicBlock, channels=(12, 24, 48, 96), layers=(1, 1, 1, 1))
    model: Any = build_model_with_cfg(
        NarrowResNet, "gauresnet_pico", pretrained, **{**preset, **kwargs}
    )
    return model
