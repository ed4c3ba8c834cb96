"""JiT-B/16 as a classifier (*Belief2, 4.2*): a ViT for timm with the parts of a diffusion model, Li
and He's "Just image Transformer" (arXiv 2511.13720).

Axis letters: B images, H heads, T tokens, d model width, d_m head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    PatchEmbed,
    RmsNorm,
    SwiGLU,
    build_rotary_pos_embed,
    build_sincos2d_pos_embed,
)
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from gaupipe.system.errors import UserError
from gaupipe.vit.models import PLACELESS, GauViT, config_of, create_gauvit

BOTTLENECK = 128
"""Channels that a patch has before it gets the width of the model."""


class Modulation(nn.Module):
    """Vectors by which adaLN changes tokens: a linear map of a condition, zero at the start.

    JiT's condition is an embedding of the time and the class of a noisy image. A classifier sees
    no noise and is not told the class, so here it is the same for all images: a learned vector [d].
    """

    def __init__(self, dim: int, vectors: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.condition = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.modulation = nn.Linear(dim, vectors * dim, device=device, dtype=dtype)
        self.init_weights()

    def init_weights(self) -> None:
        """Again by timm, after it gave every linear layer its usual start."""
        nn.init.normal_(self.condition, std=0.02)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def modulate(self) -> Tensor:
        """The vectors, one after the other, [vectors * d]."""
        return self.modulation(F.silu(self.condition))


class ModulatedNorm(Modulation):
    """RMSNorm of tokens [B, T, d], which are then scaled and shifted."""

    def __init__(self, dim: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(dim, 2, device, dtype)
        self.norm = RmsNorm(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale = self.modulate().chunk(2)
        return self.norm(x) * (1 + scale) + shift


class ModulatedGate(Modulation):
    """The update [B, T, d] of a branch times a gate [d], which is 0 at the start."""

    def __init__(self, dim: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(dim, 1, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.modulate()


class JiTBlock(Block):
    """timm's block with adaLN, whose gates take the place of layer scales."""

    ls1: Any
    ls2: Any

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        placed = {name: kwargs.get(name) for name in ("device", "dtype")}
        self.norm1 = ModulatedNorm(dim, **placed)
        self.norm2 = ModulatedNorm(dim, **placed)
        self.ls1 = ModulatedGate(dim, **placed)
        self.ls2 = ModulatedGate(dim, **placed)


class BottleneckEmbed(PatchEmbed):
    """timm's patch embedding by way of :data:`BOTTLENECK` channels."""

    proj: Any

    def __init__(
        self, *, embed_dim: int, device: Any = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        placed = dict(device=device, dtype=dtype)
        super().__init__(embed_dim=BOTTLENECK, **{**kwargs, **placed, "bias": False})
        widen = nn.Conv2d(BOTTLENECK, embed_dim, kernel_size=1, **placed)
        self.proj = nn.Sequential(self.proj, widen)


class RotaryNorm(nn.Module):
    """Normalises queries or keys [B, H, T, d_m], then turns their channels, two by two, by angles
    that grow with the row (first half) and the column (second half) of the token on the grid (h,
    w)."""

    positions: Tensor

    def __init__(self, norm: RmsNorm, grid: tuple[int, int]) -> None:
        super().__init__()
        self.norm = norm
        width = len(norm.weight)
        device = norm.weight.device
        if width % 4:
            raise UserError(
                f"a JiT turns the channels of a head by fours: embed_dim / num_heads is {width}"
            )
        sin, cos = build_rotary_pos_embed(list(grid), dim=width, in_pixels=False, device=device)
        self.register_buffer("positions", torch.cat([sin, cos], dim=-1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return apply_rot_embed_cat(self.norm(x), self.positions)


class JiT(GauViT):
    """:class:`GauViT` with JiT's parts: RMSNorm, SwiGLU, adaLN, queries and keys normalised and
    turned by their place, a fixed position embedding, a bottleneck before the first block.

    Takes the keywords of :class:`GauViT`, but for those that would replace one of these parts, and
    those with which a token has no place on the grid: raises UserError for both.
    """

    def __init__(self, **kwargs: Any) -> None:
        parts: dict[str, Any] = dict(
            norm_layer=RmsNorm,
            mlp_layer=SwiGLU,
            act_layer=nn.SiLU,
            block_fn=JiTBlock,
            embed_layer=BottleneckEmbed,
            qk_norm=True,
        )
        fixed = ("rezero", "init_values", "pos_embed", "pre_norm", *parts)
        for name in (*fixed, *PLACELESS):
            if kwargs.get(name):
                raise UserError(f"{name}: a JiT is built without a choice of it, leave it out")
        super().__init__(**kwargs, **parts)
        for name in parts:
            del self.gaupipe_args[name]
        assert self.pos_embed is not None
        self.pos_embed.requires_grad_(False)
        grid = self.patch_embed.grid_size
        for block in self.blocks:
            attention: Any = block.attn
            if hasattr(attention, "q_norm"):  # else it compares no queries with keys
                attention.q_norm = RotaryNorm(attention.q_norm, grid)
                attention.k_norm = RotaryNorm(attention.k_norm, grid)

    @torch.no_grad()
    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """timm's start, but the position embedding is one of sines and cosines."""
        super().init_weights(*args, **kwargs)
        assert self.pos_embed is not None
        self.pos_embed.copy_(build_sincos2d_pos_embed(self.patch_embed.grid_size, self.embed_dim))


default_cfgs = generate_default_cfgs(
    {"gauvit_jit_base_patch16_256": {**config_of(256, 1000), "first_conv": "patch_embed.proj.0"}}
)


@register_model
def gauvit_jit_base_patch16_256(pretrained: bool = False, **kwargs: Any) -> JiT:
    """JiT-B/16 as a classifier (*Belief2, 4.2 and table 1*): 128.8 M parameters, 256 tokens."""
    ratio = 8 / 3  # SwiGLU has three matrices: as many parameters as an FFN of ratio 4 has in two
    sizes = dict(embed_dim=768, depth=12, num_heads=12, mlp_ratio=ratio)
    preset = dict(img_size=256, patch_size=16, **sizes)
    return create_gauvit("gauvit_jit_base_patch16_256", pretrained, preset, kwargs, JiT)
