"""A ViT with GauAttention as a teacher: its Gaussians, two forward modes and attention maps.

Axis letters: B images, L blocks, H heads, T tokens, P raw numbers of a Gaussian, E embedding width,
C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from gaupipe.attention.gaussian import GaussianAttention
from gaupipe.maps.gaussians import (
    RAW_SIZE,
    expected_axes,
    expected_map,
    from_raw,
    initial_raw,
    sample,
)
from gaupipe.teachers.image_state import ImageState
from gaupipe.teachers.readable_vit import sha256_of
from gaupipe.vit.forward import run_blocks

AT_ONCE = 2**18
"""Numbers of a map that are computed at once on a CPU: they stay in its cache."""


@dataclass(eq=False)
class GaussianMaps:
    """The attention of a batch from a teacher with Gaussians."""

    grid: tuple[int, int]
    """(h, w) in tokens."""
    gaussians: Tensor  # [B, L, H, T, 4]
    parameters: Tensor | None = None
    """[B, ...], of a teacher with per-image parameters."""

    dropped: None = None
    """Gaussians leave no attention out."""

    @property
    def blocks(self) -> Iterator[Tensor]:
        """For each block [B, H, T, T] float32, made one by one; rows sum to 1."""
        for layer in range(self.gaussians.shape[1]):
            yield self.maps(layers=[layer])[:, 0]

    @torch.no_grad()
    def maps(
        self, dtype: torch.dtype = torch.float32, layers: Sequence[int] | None = None
    ) -> Tensor:
        """[B, L, H, T, T] of some ``layers``, by default of all, computed in float32 and rounded to
        ``dtype``."""
        images, all_layers, heads, tokens, _ = self.gaussians.shape
        wanted = list(range(all_layers) if layers is None else layers)
        maps = self.gaussians.new_empty(images, len(wanted), heads, tokens, tokens, dtype=dtype)
        at_once = images
        if maps.device.type == "cpu":
            at_once = max(1, AT_ONCE // (heads * tokens * tokens))
        for position, layer in enumerate(wanted):
            for first in range(0, images, at_once):
                part = slice(first, first + at_once)
                maps[part, position] = expected_map(self.gaussians[part, layer], self.grid)
        return maps


class Decoder(nn.Module):
    """Compression network: one two-layer network per block turns an image's embedding into its
    Gaussians' raw numbers (*GauTransformer, section 3.3.2*)."""

    def __init__(self, layers: int, embedding: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.weight1 = nn.Parameter(torch.randn(layers, embedding, hidden) / math.sqrt(embedding))
        self.bias1 = nn.Parameter(torch.zeros(layers, hidden))
        self.weight2 = nn.Parameter(
            torch.randn(layers, hidden, outputs) * (0.1 / math.sqrt(hidden))
        )

    def forward(self, embeddings: Tensor) -> Tensor:
        """Raw numbers [B, L, outputs] of embeddings [B, L, E]. Their bias is the shared prior."""
        with torch.autocast(embeddings.device.type, enabled=False):  # coordinates stay float32
            hidden = torch.einsum("ble,leh->blh", embeddings.float(), self.weight1) + self.bias1
            return torch.einsum("blh,lho->blo", nn.functional.gelu(hidden), self.weight2)


class GaussianViT(nn.Module):
    """A ViT whose blocks hold :class:`~gaupipe.attention.gaussian.GaussianAttention`.

    The raw numbers of a Gaussian are prior[block, head, query] plus the image's residual. The
    per-image parameters are that residual, or with a ``compression`` (embedding, hidden) an
    embedding that a :class:`Decoder` turns into it. Without ``prior`` the prior is not learned and
    stays at mean 0 and std 1.

    ``passes`` is the number of sampled passes of one prediction; None: one exact pass.
    """

    def __init__(
        self,
        vit: VisionTransformer,
        parametrisation: str = "loc_scale",
        prior: bool = True,
        compression: tuple[int, int] | None = None,
        passes: int | None = None,
    ) -> None:
        super().__init__()
        block: Any  # timm says Module
        for block in vit.blocks:
            block.attn.give_gaussians()
        self.vit = vit
        self.parametrisation = parametrisation
        self.passes = passes

        self.grid: tuple[int, int] = tuple(vit.patch_embed.grid_size)
        self.layers = len(vit.blocks)
        self.heads = block.attn.num_heads
        tokens = self.grid[0] * self.grid[1]
        self.raw_shape = (self.layers, self.heads, tokens, RAW_SIZE[parametrisation])

        # without a prior these stay at the start, to which an image's own numbers are added
        start = initial_raw(parametrisation)
        self.prior = nn.Parameter(start.expand(self.raw_shape).clone(), requires_grad=prior)
        self.decoder = None
        if compression:
            self.decoder = Decoder(self.layers, *compression, math.prod(self.raw_shape[1:]))

    @property
    def per_image_shape(self) -> tuple[int, ...]:
        """Shape of one image's parameters: [L, H, T, P], or [L, E] with a compression."""
        if self.decoder is None:
            return self.raw_shape
        return (self.layers, self.decoder.embedding)

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """The weights of its ViT, for a student that starts from them, with the prior of each block
        in ``loc_scale`` by the name of a student's."""
        gaussians = from_raw(self.prior, self.parametrisation)  # [L, H, T, 4]
        log_std = gaussians[..., 2:].clamp_min(1e-6).log()
        prior = torch.cat([gaussians[..., :2], log_std], dim=-1)
        return self.vit.state_dict() | {
            f"blocks.{layer}.attn.prior": prior[layer] for layer in range(self.layers)
        }

    def sha256(self, per_image: ImageState | None = None) -> str:
        """A digest of the weights and of the per-image parameters. Collective."""
        parameters = ""
        if per_image is not None:
            parameters = " ".join(["buckets", *per_image.sha256s()])
        return sha256_of(self.state_dict(), parameters)

    def gaussians(self, parameters: Tensor | None) -> Tensor:
        """Gaussians [B, L, H, T, 4] of the images with these parameters ``[B, *per_image_shape]``;
        the prior's, with B = 1, for None."""
        raw = self.prior.unsqueeze(0)  # [1, L, H, T, P]
        if parameters is not None:
            residual = parameters
            if self.decoder is not None:
                residual = self.decoder(parameters)
            raw = raw + residual.view(len(parameters), *self.raw_shape)  # [B, L, H, T, P]
        return from_raw(raw, self.parametrisation)

    @torch.no_grad()
    def forward_with_maps(
        self,
        images: Tensor,
        parameters: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, GaussianMaps]:
        """(log-probabilities [B, C], attention) of images [B, channels, height, width] in eval
        mode, with their ``parameters`` ``[B, *per_image_shape]``; None: the prior alone.
        ``generator`` draws the points of sampled passes."""
        gaussians = self.gaussians(parameters)  # [B or 1, L, H, T, 4]
        gaussians = gaussians.expand(len(images), *gaussians.shape[1:])
        logits = self.predict(images, gaussians, self.passes, generator)
        return logits, GaussianMaps(self.grid, gaussians, parameters)

    @torch.no_grad()
    def predict(
        self,
        images: Tensor,
        gaussians: Tensor,
        passes: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Log-probabilities [B, C] in eval mode: the mean of the probabilities of so many sampled
        ``passes``, or with None one exact pass; a single pass at the means is not the function that
        was trained."""
        if passes is None:
            return self(images, gaussians).float().log_softmax(-1)
        draws = [
            self(images, gaussians, self.noise(images, generator)).float().log_softmax(-1)
            for _ in range(passes)
        ]
        return torch.stack(draws).logsumexp(0) - math.log(passes)

    def forward(
        self,
        images: Tensor,
        gaussians: Tensor,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, C] of images [B, channels, height, width].

        gaussians   [B or 1, L, H, T, 4]
        noise       [B, L, H, T, 2], standard normal: every query reads at one sampled point. None:
                    through the exact expected map
        """

        def attend(layer: int, attention: GaussianAttention, tokens: Tensor) -> Tensor:
            if noise is not None:
                points = sample(gaussians[:, layer], noise[:, layer])  # [B, H, T, 2]
                return attention.at_points(tokens, points, self.grid)
            return attention.through(tokens, expected_axes(gaussians[:, layer], self.grid))

        return run_blocks(self.vit, images, attend)

    def noise(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Standard normal numbers [B, L, H, T, 2] for one sampled pass."""
        return torch.randn(
            len(images), *self.raw_shape[:3], 2, generator=generator, device=images.device
        )
