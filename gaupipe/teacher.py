"""The teacher of phase A: a ViT with GauAttention, the Gaussians it reads through, and its two forward modes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gaupipe.gaussians import RAW_SIZE, expected_axes, from_raw, initial_raw, point_axes, sample
from gaupipe.models import run_blocks


class Teacher(nn.Module):
    """A ViT whose blocks hold :class:`~gaupipe.attention.gaussian.GaussianAttention`.

    The raw numbers of a Gaussian are prior[block, head, query] + the image's own row, where the shared prior is learned
    from every image. Without a prior the row is everything; without a row (an unseen image) the prior is.
    """

    def __init__(self, vit: nn.Module, parametrisation: str = "loc_scale", prior: bool = True) -> None:
        super().__init__()
        self.vit = vit
        self.parametrisation = parametrisation
        self.grid: tuple[int, int] = tuple(vit.patch_embed.grid_size)
        self.layers, self.heads = len(vit.blocks), vit.blocks[0].attn.num_heads
        shape = (self.layers, self.heads, self.grid[0] * self.grid[1], RAW_SIZE[parametrisation])
        self.prior = nn.Parameter(initial_raw(parametrisation).expand(shape).clone()) if prior else None

    def initial_row(self) -> Tensor:
        """The row [L, H, T, P] an image starts with: zeros on top of a prior, else mean 0 and std 1."""
        raw = initial_raw(self.parametrisation)
        if self.prior is not None:
            raw = torch.zeros_like(raw)
        return raw.expand(self.layers, self.heads, self.grid[0] * self.grid[1], raw.numel()).clone()

    def gaussians(self, rows: Tensor | None) -> Tensor:
        """Gaussians [B, L, H, T, 4] of the images with these rows [B, L, H, T, P]; the prior's, with B = 1, for None."""
        if rows is None:
            if self.prior is None:
                raise ValueError("a teacher without a shared prior has no Gaussians for unseen images")
            rows = torch.zeros_like(self.prior).unsqueeze(0)
        return from_raw(rows if self.prior is None else rows + self.prior, self.parametrisation)

    def forward(self, images: Tensor, gaussians: Tensor, mode: str, generator: torch.Generator | None = None) -> Tensor:
        """Logits [B, C] of images [B, 3, height, width] that look where ``gaussians`` [B or 1, L, H, T, 4] say.

        ``expected`` reads through the exact expected map. ``stochastic`` samples one point for every query: one pass is
        one draw, and predictions are the mean of several (:func:`predict`).
        """
        def attend(layer: int, attention: nn.Module, tokens: Tensor) -> Tensor:
            own = gaussians[:, layer]
            if mode == "stochastic":
                own = own.expand(len(images), *own.shape[1:])
                return attention(tokens, point_axes(sample(own, generator), self.grid))
            return attention(tokens, expected_axes(own, self.grid))

        return run_blocks(self.vit, images, attend)


@torch.no_grad()
def predict(teacher: Teacher, images: Tensor, gaussians: Tensor, mode: str, passes: int = 1,
            generator: torch.Generator | None = None) -> Tensor:
    """Log-probabilities [B, C] of the teacher, which must be in eval mode.

    In ``stochastic`` mode the probabilities of ``passes`` sampled passes are averaged: a single pass at the means is
    not the function that was trained. In ``expected`` mode one pass is exact.
    """
    if mode == "expected":
        return teacher(images, gaussians, mode).float().log_softmax(-1)
    draws = [teacher(images, gaussians, mode, generator).float().log_softmax(-1) for _ in range(passes)]
    return torch.stack(draws).logsumexp(0) - torch.log(torch.tensor(float(passes)))
