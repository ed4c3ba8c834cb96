"""GauAttention: a query samples one point of the grid instead of comparing itself with keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaupipe.gaussians import from_raw, outer, point_axes

START_STD = 1.0
"""Std, in tokens, at which the Gaussians of a token start that predicts them."""


def predicted_gaussians(
    prior: Tensor, predictor: Tensor, tokens: Tensor, parametrisation: str = "loc_scale"
) -> Tensor:
    """Gaussians [B, H, T, 4] that tokens [B, T, d] predict for themselves: their raw numbers are
    ``prior`` [H, T, P] plus a linear map of the token by ``predictor`` [H * P, d]. Computed in
    float32 under autocast."""
    with torch.autocast(tokens.device.type, enabled=False):
        raw = F.linear(tokens.to(predictor.dtype), predictor)  # [B, T, H * P]
        raw = raw.unflatten(-1, (-1, prior.shape[-1])).transpose(1, 2)  # [B, H, T, P]
        return from_raw(prior + raw, parametrisation)


class GaussianAttention(nn.Module):
    """Reads V where the queries' Gaussians point, then projects (*GauTransformer, eq. 8*). There
    are no Q and K.

    Takes the arguments of timm's ``Attention``; those that concern queries and keys are ignored.
    There is no class token (the grid has no cell for one).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
        **_unused,
    ) -> None:
        super().__init__()
        assert dim % num_heads == 0, f"dim {dim} should be divisible by num_heads {num_heads}"
        self.num_heads = num_heads
        self.v = nn.Linear(dim, dim, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, axes: tuple[Tensor, Tensor]) -> Tensor:
        """Residual update [B, T, d] of tokens x [B, T, d] that read V through a whole map.

        ``axes`` are the two factors ([B, H, T, h], [B, H, T, w]) of the map, from
        :func:`gaupipe.gaussians.expected_axes` or :func:`gaupipe.gaussians.point_axes`.
        """
        v = self.project(x)
        return self.combine(outer(*axes).to(v.dtype) @ v)

    def at_points(self, x: Tensor, points: Tensor, grid: tuple[int, int]) -> Tensor:
        """Residual update [B, T, d] of tokens x [B, T, d] whose queries read V at ``points`` [B, H,
        T, 2], (x, y) in normalised coordinates, by bilinear interpolation.

        The same numbers as :meth:`forward` with :func:`gaupipe.gaussians.point_axes`. On a CPU
        torch's grid_sample is the faster way; elsewhere its gradient adds up in no fixed order, and
        a run would not repeat.
        """
        if x.device.type != "cpu":
            return self(x, point_axes(points, grid))
        v = self.project(x)
        B, H, T, d_m = v.shape
        planes = v.float().transpose(2, 3).reshape(B * H, d_m, *grid)
        read = F.grid_sample(
            planes,
            points.reshape(B * H, T, 1, 2),
            mode="bilinear",
            padding_mode="border",
            align_corners=True,
        )  # [B * H, d_m, T, 1]
        return self.combine(read.view(B, H, d_m, T).transpose(2, 3).to(v.dtype))

    def project(self, x: Tensor) -> Tensor:
        """V [B, H, T, d_m] of tokens x [B, T, d]."""
        return self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def combine(self, heads: Tensor) -> Tensor:
        """The update [B, T, d] from what each head read, [B, H, T, d_m]."""
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))
