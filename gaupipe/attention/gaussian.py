"""GauAttention: a query looks where its Gaussian points instead of comparing itself with keys.

Axis letters: B images, H heads, T tokens on a grid (h, w), d model width, d_m = d / H head width, P
raw numbers of a Gaussian.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from gaupipe.attention.base import StudentAttention
from gaupipe.attention.kernels import at_least_float32, pad_to
from gaupipe.maps.gaussians import expected_axes, from_raw, outer, point_axes, raw_at_tokens
from gaupipe.system.errors import UserError

Grid = tuple[int, int]


class GaussianAttention(StudentAttention):
    """Reads V where the queries' Gaussians point, then projects: update MH W (*GauTransformer, eq.
    8*). There are no Q and K.

    Without a ``grid`` the Gaussians are given with the tokens: the attention of phase A's teacher.
    With one (h, w), as ``gauvit`` models have, a token predicts its own: raw numbers
    (``loc_scale``) ``prior`` [H, T, 4], at the start on the token with a std of one token, plus a
    linear map ``predictor`` [H * 4, d] of the token, at the start 0. Class and register tokens have
    no place on a grid. Arguments as timm's ``Attention``.
    """

    compares = False
    marks_weights = False  # no other attention has its names
    has_map = True  # the Gaussians are
    positions: Tensor

    def __init__(self, *args: Any, grid: Grid | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = 1.0  # Q K' is log P, see project
        self.grid = grid
        self.prior: nn.Parameter | None = None
        self.predictor: nn.Parameter | None = None
        if grid is not None:
            device = self.v.weight.device
            self.prior = gaussian_prior(self.num_heads, grid, device)
            self.predictor = nn.Parameter(
                torch.zeros(self.num_heads * 4, self.attn_dim, device=device)
            )
            register_positions(self, grid, self.head_dim, device)

    def give_gaussians(self) -> None:
        """From now on Gaussians are given with the tokens."""
        if self.grid is not None:
            del self.positions
        self.grid = None
        self.prior = None
        self.predictor = None

    def gaussians(self, x: Tensor) -> Tensor:
        """Gaussians [B, H, T, 4] float32 that tokens x [B, T, d] predict for themselves."""
        if self.prior is None or self.predictor is None:
            raise UserError(
                "attention 'gaussian' predicts where to look on a grid: build the model with "
                "timm.create_model of a gauvit_ model, or give the Gaussians with the tokens"
            )
        return predicted_gaussians(self.prior, self.predictor, x)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q [B, H, T, h + w], the logarithms of the expected map's factors, the keys' places as K,
        and V: Q K' is the logarithm of the map."""
        gaussians = self.gaussians(x)
        assert self.grid is not None
        v = self.values(x)
        q = log_factors(gaussians, self.grid, self.head_dim).to(v.dtype)
        k = self.positions.to(v.dtype).expand_as(q)
        return q, k, v

    def through(self, x: Tensor, axes: tuple[Tensor, Tensor]) -> Tensor:
        """The update [B, T, d] of tokens x [B, T, d] that read V through a given map, by its
        factors ([B, H, T, h], [B, H, T, w]), from :func:`gaupipe.maps.gaussians.expected_axes` or
        :func:`gaupipe.maps.gaussians.point_axes`."""
        v = self.values(x)
        return self.output(outer(*axes).to(v.dtype) @ v, v, x)

    def at_points(self, x: Tensor, points: Tensor, grid: Grid) -> Tensor:
        """The update [B, T, d] of tokens x [B, T, d] whose queries read V at ``points`` [B, H, T,
        2], (x, y) in normalised coordinates, by bilinear interpolation.

        As :meth:`through` with :func:`gaupipe.maps.gaussians.point_axes`. grid_sample is faster on
        a CPU; on a GPU its gradient adds up in no fixed order, and a run would not repeat.
        """
        if x.device.type != "cpu":
            return self.through(x, point_axes(points, grid))
        v = self.values(x)
        B, H, T, d_m = v.shape
        planes = at_least_float32(v).transpose(2, 3).reshape(B * H, d_m, *grid)
        # what is not a number, in a training that has diverged, would be read out of bounds
        grid_points = points.reshape(B * H, T, 1, 2).to(planes.dtype).nan_to_num()
        values = F.grid_sample(
            planes, grid_points, "bilinear", "border", True
        )  # [B * H, d_m, T, 1]
        return self.output(values.view(B, H, d_m, T).transpose(2, 3).to(v.dtype), v, x)


def gaussian_prior(heads: int, grid: Grid, device: torch.device | None = None) -> nn.Parameter:
    """Raw numbers (``loc_scale``) [H, T, 4] of a Gaussian on each token, its std one token."""
    start = raw_at_tokens(grid).to(device)
    return nn.Parameter(start.expand(heads, *start.shape).clone())


@torch.fx.wrap
def predicted_gaussians(prior: Tensor, predictor: Tensor, tokens: Tensor) -> Tensor:
    """Gaussians [B, H, T, 4] that tokens [B, T, d] predict for themselves: their raw numbers
    (``loc_scale``) are ``prior`` [H, T, 4] plus a linear map of the token by ``predictor``
    [H * 4, d]. Computed in float32 under autocast."""
    with torch.autocast(tokens.device.type, enabled=False):
        raw = F.linear(tokens.to(predictor.dtype), predictor)  # [B, T, H * 4]
        raw = raw.unflatten(-1, (-1, 4)).transpose(1, 2)  # [B, H, T, 4]
        return from_raw(prior + raw, "loc_scale")


def register_positions(
    attention: nn.Module, grid: Grid, least: int, device: torch.device | None
) -> None:
    """Gives an attention the buffer ``positions`` [T, h + w or ``least``], those of the keys on the
    two axes, one-hot. So q positions' is log P for q of :func:`log_factors`."""
    h, w = grid
    along_y = torch.eye(h, device=device).repeat_interleave(w, dim=0)
    along_x = torch.eye(w, device=device).repeat(h, 1)
    positions = pad_to(torch.cat([along_y, along_x], dim=-1), max(h + w, least))
    attention.register_buffer("positions", positions, persistent=False)


@torch.fx.wrap
def log_factors(gaussians: Tensor, grid: Grid, least: int = 0) -> Tensor:
    """The logarithms of the two factors of the expected map of Gaussians [..., T, 4] side by side,
    [..., T, h + w], with zeros behind them up to a width of at ``least`` so many.

    A weight below the smallest normal number counts as that number, 1.2e-38, and gets no gradient.
    """
    with torch.autocast(gaussians.device.type, enabled=False):
        axes = torch.cat(expected_axes(gaussians, grid), dim=-1)
        logs = axes.clamp_min(torch.finfo(axes.dtype).tiny).log()
        return pad_to(logs, max(logs.shape[-1], least))
