"""The start of a ViT's weights: timm's way, wider, or mimetic."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from gaupipe.settings import ModelSettings
from gaupipe.system.errors import UserError

QUERY_KEY = (0.7, 0.7)
VALUE_PROJECTION = (0.4, -0.4)
"""(scale of the noise, multiple of the identity) of W_Q W_K' and of W_V W_proj at a mimetic
start."""


def start_weights(vit: VisionTransformer, model: ModelSettings) -> None:
    """Gives a freshly built ``vit`` the start that the settings ask for. Raises UserError where
    it cannot be."""
    if vit.pos_embed is None and (model.init == "mimetic" or model.pos_embed_std is not None):
        raise UserError(
            "model.args: without a position embedding, model.init should be normal and "
            "model.pos_embed_std null"
        )
    if model.init_std is not None:
        for name, module in vit.named_modules():
            if isinstance(module, nn.Linear) and name != "head":
                _trunc_normal(module.weight, model.init_std)
    if model.init == "mimetic":
        start_mimetic(vit)
    if model.pos_embed_std is not None:
        assert vit.pos_embed is not None
        _trunc_normal(vit.pos_embed, model.pos_embed_std)


@torch.no_grad()
def start_mimetic(vit: VisionTransformer) -> None:
    """Mimetic initialisation (*Trockman and Kolter, arXiv 2305.09828*): weights that look like
    those of a trained ViT.

    In every block W_Q W_K' of each head is close to 0.7 Z + 0.7 I, at the rank a head has, and W_V
    W_proj is 0.4 Z - 0.4 I, with Z of variance 1/d; biases start at 0. The position embedding
    starts sinusoidal. Q and K are left alone in an attention without them. Raises UserError for a
    width that is no multiple of 4.
    """
    dim = vit.embed_dim
    if dim % 4:
        raise UserError(f"model.init=mimetic: embed_dim should be a multiple of 4, got {dim}")
    assert vit.pos_embed is not None
    patches = build_sincos2d_pos_embed(vit.patch_embed.grid_size, dim=dim)
    vit.pos_embed[:, -len(patches) :] = patches  # others may lie in front of them
    for block in vit.blocks:
        attention: Any = block.attn  # torch knows its parts as "Tensor | Module"
        v, proj = factors(dim, *VALUE_PROJECTION)
        attention.proj.weight.copy_(proj.mT)
        if hasattr(attention, "qkv"):
            rank = dim // attention.num_heads
            heads = [factors(dim, *QUERY_KEY, rank) for _ in range(attention.num_heads)]
            columns = [q for q, _k in heads] + [k.mT for _q, k in heads] + [v]
            attention.qkv.weight.copy_(torch.cat(columns, dim=1).mT)
        else:
            attention.v.weight.copy_(v.mT)
        for name, bias in attention.named_parameters():
            if name.endswith("bias"):
                bias.zero_()


def factors(
    dim: int, noise: float, identity: float, rank: int | None = None
) -> tuple[Tensor, Tensor]:
    """(L [dim, rank], R [rank, dim]) with L R as close to noise * Z + identity * I as the rank
    allows; Z is normal with variance 1/dim."""
    wanted = noise * torch.randn(dim, dim) / dim**0.5 + identity * torch.eye(dim)
    left, values, right = torch.linalg.svd(wanted)
    root = values[:rank].sqrt()
    return left[:, :rank] * root, root.unsqueeze(1) * right[:rank]


def _trunc_normal(weight: Tensor, std: float) -> None:
    """Normal numbers, cut at two standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
