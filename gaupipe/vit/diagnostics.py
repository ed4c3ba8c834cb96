"""The effect of the orthogonal projection on the tokens, block by block (*BeliefFormer, figures 4
and 8*)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gaupipe.attention.base import merge_heads
from gaupipe.attention.standard import in_steps
from gaupipe.vit.forward import embed


@dataclass
class BlockGeometry:
    """Norms, and angles in degrees, of one block's attention, each [B, T] float32.

    X are the tokens that enter the block, MH the heads' weighted sums of V, D their part
    perpendicular to V (in "xsa" head by head) and W the output projection without its bias.
    """

    mh_norm: Tensor
    """|MH|"""
    d_norm: Tensor
    """|D|, never more than |MH| (*BeliefFormer, eq. 13*)"""
    mh_update_norm: Tensor
    """|MH W|, the update of standard attention (in "attentionx" it is -MH W: MH has a minus)"""
    d_update_norm: Tensor
    """|D W|, the update of belief-attention"""
    mh_update_angle: Tensor
    """angle between MH W and X"""
    d_update_angle: Tensor
    """angle between D W and X"""


@torch.no_grad()
def belief_geometry(model: VisionTransformer, images: Tensor) -> list[BlockGeometry]:
    """The geometry of every block of a model with any of gaupipe's student attentions, for a
    batch of images [B, C, height, width]. D is "belief"'s, or "xsa"'s in a model that has it. Call
    ``model.eval()`` first unless dropout is wanted."""
    x = embed(model, images)  # [B, T, d], as all signals below
    blocks = []
    modules: Iterable[Any] = model.blocks  # torch knows their parts as "Tensor | Module"
    for block in modules:
        attention = in_steps(block.attn)
        tokens = block.norm1(x)
        q, k, v = attention.project(tokens)  # [B, H, T, d_m] each
        mh = attention.merge(attention.attend(q, k, v, None, False), tokens)
        v = merge_heads(v)
        d = attention.perpendicular(mh, v)

        mh_update = F.linear(mh, attention.proj.weight)
        d_update = F.linear(d, attention.proj.weight)
        geometry = BlockGeometry(
            mh_norm=norm(mh),
            d_norm=norm(d),
            mh_update_norm=norm(mh_update),
            d_update_norm=norm(d_update),
            mh_update_angle=angle(mh_update, x),
            d_update_angle=angle(d_update, x),
        )
        blocks.append(geometry)

        # the model's own update, with what it has of LayerScale and stochastic depth
        x = x + block.drop_path1(block.ls1(attention.proj_drop(attention.combine(mh, v))))
        x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    return blocks


def norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.float(), dim=-1)


def angle(a: Tensor, b: Tensor) -> Tensor:
    """Degrees between vectors on the last axis, from 0 to 180."""
    return torch.rad2deg(torch.acos(F.cosine_similarity(a.float(), b.float(), dim=-1).clamp(-1, 1)))
