"""Convolutional stems in place of a ViT's patch embedding.

Axis letters: B images, d model width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.layers import ConvNormAct, PatchEmbed
from timm.layers.norm_act import BatchNormAct2d
from timm.models.resnet import BasicBlock
from timm.models.vision_transformer_hybrid import ConvStem
from torch import Tensor, nn

from gaupipe.system import distributed
from gaupipe.system.errors import UserError


class ConvPatchEmbed(PatchEmbed):
    """timm's ``PatchEmbed`` with timm's ``ConvStem`` as its ``proj`` (*Xiao et al., Early
    Convolutions Help Transformers See Better, arXiv 2106.14881*).

    3 x 3 convolutions of stride 2, each with batch norm and ReLU, halve the image until a token is
    left of each patch, and a 1 x 1 convolution projects. Their channels double up to d. So the grid
    is the one that patches of this size would have. Takes the arguments of ``PatchEmbed``. Raises
    UserError unless ``patch_size`` is a power of two, at least 2.
    """

    key = "conv"
    first_conv = "patch_embed.proj.0.conv"
    """The first convolution in a ViT's state_dict, which timm calls so too."""

    def __init__(
        self,
        img_size: Any = 224,
        patch_size: Any = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        placed = {"device": device, "dtype": dtype}
        super().__init__(img_size, patch_size, in_chans, embed_dim, **kwargs, **placed)
        height, width = self.patch_size
        halvings = height.bit_length() - 1
        if height != width or height != 2**halvings or not halvings:
            shown = height if height == width else f"{height} x {width}"
            raise UserError(
                f"stem {self.key}: convolutions halve the image, so the patch_size should be 2, 4, "
                f"8, 16 or another power of two, got {shown}; the stem patch takes any"
            )
        self.proj: Any = self.convolutions(in_chans, embed_dim, halvings, **placed)

    def convolutions(
        self, in_chans: int, embed_dim: int, halvings: int, **placed: Any
    ) -> nn.Sequential:
        """[B, in_chans, height, width] -> [B, d, height, width], both halved ``halvings`` times."""
        return ConvStem(
            in_chans,
            depth=halvings + 1,
            channels=(*doubling(embed_dim, halvings), embed_dim),
            kernel_size=(3,) * halvings + (1,),
            stride=(2,) * halvings + (1,),
            norm_layer=batch_norm,  # type: ignore[arg-type]  # timm takes functions, too
            **placed,
        )


class ResidualPatchEmbed(ConvPatchEmbed):
    """A stem like :class:`ConvPatchEmbed` with ResNet's blocks (timm's ``BasicBlock``) at the two
    resolutions before the last halving.

    Patches of 2 and 4 pixels begin with a convolution of stride 1, because they leave too few
    halvings for two resolutions. Larger patches do not: convolutions at full resolution would cost
    more than all the rest.
    """

    key = "residual"
    first_conv = "patch_embed.proj.0.0.conv"

    def convolutions(
        self, in_chans: int, embed_dim: int, halvings: int, **placed: Any
    ) -> nn.Sequential:
        """See :meth:`ConvPatchEmbed.convolutions`."""
        strides = [2] * halvings
        if halvings <= 2:
            strides = [1, *strides]
        stages: list[nn.Module] = []
        inputs = in_chans
        for stage, outputs in enumerate(doubling(embed_dim, len(strides))):
            layers: list[nn.Module] = [
                ConvNormAct(inputs, outputs, 3, strides[stage], norm_layer=batch_norm, **placed)
            ]
            if len(strides) - stage in (2, 3):
                norm: Any = partial(SharedBatchNorm, apply_act=False)  # the block has its own ReLU
                layers.append(BasicBlock(outputs, outputs, norm_layer=norm, **placed))
            stages.append(nn.Sequential(*layers))
            inputs = outputs
        return nn.Sequential(*stages, nn.Conv2d(embed_dim, embed_dim, 1, **placed))


def doubling(channels: int, layers: int) -> list[int]:
    """The channels behind each of so many layers, which double up to ``channels``."""
    return [max(1, channels // 2**times) for times in reversed(range(layers))]


def batch_norm(channels: int, **kwargs: Any) -> BatchNormAct2d:
    """The batch norm and ReLU behind a convolution."""
    return SharedBatchNorm(channels, **kwargs)


class SharedBatchNorm(BatchNormAct2d):
    """timm's batch norm with an activation, by the statistics of the whole batch, also where
    several processes share it.

    torch's ``SyncBatchNorm`` does the same, but on GPUs alone.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, height, width], B the images on this rank."""
        if not self.training or distributed.world_size() == 1:
            return super().forward(x)
        mean, variance, count = whole_moments(x)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            assert self.momentum is not None
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        shift = self.bias - mean * scale
        normal = x.float() * scale[:, None, None] + shift[:, None, None]
        return self.act(self.drop(normal.to(x.dtype)))


def whole_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance [channels] float32 of x [B, channels, height, width] over all ranks'
    images, and the number of values of a channel. Differentiable, and collective in both
    directions."""
    x = x.float()
    counted = x.new_tensor([x.numel() / x.shape[1]])
    count = distributed.all_reduce_sum(counted)
    mean = _SumOverRanks.apply(x.sum((0, 2, 3))) / count
    squares = (x - mean[:, None, None]).square().sum((0, 2, 3))
    return mean, _SumOverRanks.apply(squares) / count, count


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks; each rank's part has a share in every rank's loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return distributed.all_reduce_sum(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return distributed.all_reduce_sum(grad)


STEMS: dict[str, type[PatchEmbed]] = {
    "patch": PatchEmbed,
    "conv": ConvPatchEmbed,
    "residual": ResidualPatchEmbed,
}
"""The ``embed_layer`` of timm's ``VisionTransformer`` for each ``stem``."""
