"""JiT-B/16 as a classifier (*Belief2, 4.2*): for timm, a ViT with the parts of a diffusion model, Li
and He's "Just image Transformer" (arXiv 2511.13720).

Axis letters: B images, H heads, T tokens, d model width, d_m head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, RmsNorm, SwiGLU
from timm.layers import build_rotary_pos_embed, build_sincos2d_pos_embed
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from gaupipe.system.errors import UserError
from gaupipe.vit.models import GauViT, config_of, create_gauvit

BOTTLENECK = 128
"""Channels that a patch has before it gets the width of the model."""


class Modulation(nn.Module):
    """Vectors by which adaLN changes tokens: a linear map of a condition, zero at the start.

    JiT's condition is an embedding of the time and the class of a noisy image. A classifier sees
    no noise and is not told the class, so here it is the same for all images: a learned vector [d].
    """

    def __init__(self, dim: int, vectors: int, device=None, dtype=None) -> None:
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

    def __init__(self, dim: int, device=None, dtype=None) -> None:
        super().__init__(dim, 2, device, dtype)
        self.norm = RmsNorm(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale = self.modulate().chunk(2)
        return self.norm(x) * (1 + scale) + shift


class ModulatedGate(Modulation):
    """The update [B, T, d] of a branch times a gate [d], which is 0 at the start."""

    def __init__(self, dim: int, device=None, dtype=None) -> None:
        super().__init__(dim, 1, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.modulate()


class JiTBlock(Block):
    """timm's block with adaLN, whose gates take the place of layer scales."""

    def __init__(self, dim: int, *args, device=None, dtype=None, **kwargs) -> None:
        super().__init__(dim, *args, device=device, dtype=dtype, **kwargs)
        self.norm1 = ModulatedNorm(dim, device, dtype)
        self.norm2 = ModulatedNorm(dim, device, dtype)
        self.ls1 = ModulatedGate(dim, device, dtype)
        self.ls2 = ModulatedGate(dim, device, dtype)


class BottleneckEmbed(PatchEmbed):
    """timm's patch embedding by way of :data:`BOTTLENECK` channels."""

    def __init__(self, *, device=None, dtype=None, **kwargs) -> None:
        super().__init__(device=device, dtype=dtype, **kwargs)
        whole = self.proj
        self.proj = nn.Sequential(
            nn.Conv2d(
                whole.in_channels,
                BOTTLENECK,
                whole.kernel_size,
                whole.stride,
                bias=False,
                device=device,
                dtype=dtype,
            ),
            nn.Conv2d(BOTTLENECK, whole.out_channels, 1, device=device, dtype=dtype),
        )


class RotaryNorm(nn.Module):
    """Normalises queries or keys [B, H, T, d_m], then turns their channels, two by two, by angles
    that grow with the row (first half) and the column (second half) of the token on the grid (h,
    w)."""

    places: Tensor

    def __init__(self, norm: nn.Module, grid: tuple[int, int], head_dim: int, device=None) -> None:
        super().__init__()
        self.norm = norm
        sin, cos = build_rotary_pos_embed(list(grid), dim=head_dim, in_pixels=False, device=device)
        self.register_buffer("places", torch.cat([sin, cos], dim=-1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return apply_rot_embed_cat(self.norm(x), self.places)


class JiT(GauViT):
    """:class:`GauViT` with JiT's parts: RMSNorm, SwiGLU, adaLN, queries and keys that are normalised
    and turned by their place, a fixed position embedding, a bottleneck before the first block.

    Takes the keywords of :class:`GauViT`, but for those that would replace one of these parts, and
    those with which a token has no place on the grid: raises UserError for both.
    """

    def __init__(self, **kwargs) -> None:
        parts = dict(
            norm_layer=RmsNorm,
            mlp_layer=SwiGLU,
            act_layer=nn.SiLU,
            block_fn=JiTBlock,
            embed_layer=BottleneckEmbed,
            qk_norm=True,
        )
        fixed = ("rezero", "init_values", "pos_embed", "pre_norm", *parts)
        placeless = ("class_token", "reg_tokens", "patch_drop_rate", "dynamic_img_size")
        for name in (*fixed, *placeless):
            if kwargs.get(name):
                raise UserError(f"{name}: a JiT is built without a choice of it, leave it out")
        super().__init__(**kwargs, **parts)
        for name in parts:
            del self.gaupipe_args[name]
        self.pos_embed.requires_grad_(False)
        head_dim = self.embed_dim // self.blocks[0].attn.num_heads
        if head_dim % 4:
            raise UserError(
                f"a JiT turns the channels of a head in groups of 4: embed_dim {self.embed_dim} / "
                f"num_heads gives {head_dim}"
            )
        for block in self.blocks:
            if hasattr(block.attn, "q_norm"):
                for name in ("q_norm", "k_norm"):
                    norm = getattr(block.attn, name)
                    grid = self.patch_embed.grid_size
                    turned = RotaryNorm(norm, grid, head_dim, norm.weight.device)
                    setattr(block.attn, name, turned)

    @torch.no_grad()
    def init_weights(self, *args, **kwargs) -> None:
        """timm's start, but the position embedding is one of sines and cosines."""
        super().init_weights(*args, **kwargs)
        self.pos_embed.copy_(build_sincos2d_pos_embed(self.patch_embed.grid_size, self.embed_dim))


default_cfgs = generate_default_cfgs(
    {"gauvit_jit_base_patch16_256": {**config_of(256, 1000), "first_conv": "patch_embed.proj.0"}}
)


@register_model
def gauvit_jit_base_patch16_256(pretrained: bool = False, **kwargs) -> JiT:
    """JiT-B/16 as a classifier (*Belief2, 4.2 and table 1*): 128.8 M parameters, 256 tokens."""
    preset = dict(img_size=256, patch_size=16, embed_dim=768, depth=12, num_heads=12)
    preset["mlp_ratio"] = 8 / 3  # of each of SwiGLU's three matrices: as many as 4 for two
    return create_gauvit("gauvit_jit_base_patch16_256", pretrained, preset, kwargs, JiT)
