"""Two-dimensional axis-aligned Gaussians over the token grid: where a query looks.

A *Gaussian* is four float32 numbers on the last axis, (mean_x, mean_y, std_x, std_y), in normalised
coordinates: -1 and +1 are the centres of the first and last token of an axis, so that the pixel
coordinate is u = (s + 1) / 2 * (n - 1). Points outside the grid read the border. x runs along the
width w of a grid (h, w), y along its height h; tokens are in row-major order, j = j_y * w + j_x.

Axis letters: B images, L blocks, H heads, T tokens (T = h * w), P raw numbers per Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

RAW_SIZE = {"loc_scale": 4, "paper": 8}
"""Raw numbers per Gaussian of each parametrisation."""

MIN_STD_PIXELS = 1e-3
"""A narrower Gaussian is a point to float32."""

MAX_STD_PIXELS = 2e3
"""A wider Gaussian has all its mass on the borders."""

MAX_LOG_STD = 11.0
"""Larger ones change nothing but overflow: exp(11) is more than MAX_STD_PIXELS on every grid, and
the largest power that a float16 store can hold."""


def initial_raw(parametrisation: str) -> Tensor:
    """The raw numbers [P] of a Gaussian with mean 0 and std 1 (*GauTransformer, section 3.2*: mu
    0, sigma 1)."""
    if parametrisation == "loc_scale":
        return torch.zeros(4)
    return torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0])


def raw_at_tokens(grid: tuple[int, int]) -> Tensor:
    """The raw numbers (``loc_scale``) [T, 4] of a Gaussian on each token of a grid (h, w), its std
    one token along both axes."""
    h, w = grid
    y, x = torch.meshgrid(_token_centres(h), _token_centres(w), indexing="ij")
    means = torch.stack([x, y], dim=-1).flatten(0, 1)  # [T, 2]
    stds = torch.tensor([2 / max(n - 1, 1) for n in reversed(grid)]).expand_as(means)
    return torch.cat([means, stds.log()], dim=-1)


def _token_centres(n: int) -> Tensor:
    """The normalised coordinates [n] of n tokens; of one alone the middle."""
    if n == 1:
        return torch.zeros(1)
    return torch.linspace(-1, 1, n)


def from_raw(raw: Tensor, parametrisation: str) -> Tensor:
    """Turns raw learned numbers [..., P] into Gaussians [..., 4], float32.

    ``loc_scale``: (mean_x, mean_y, log std_x, log std_y), log std at most ``MAX_LOG_STD``.
    ``paper``: (mu_s, sigma_s, mu_l, sigma_l), each for x and y, with mean = (mu_s + mu_l) /
    sigma_l^2 and std = |sigma_s| / sigma_l^2 (*GauTransformer, eq. 5*; the sign of sigma_s does not
    change the distribution).
    """
    raw = raw.float()
    if parametrisation == "loc_scale":
        return torch.cat([raw[..., :2], raw[..., 2:].clamp_max(MAX_LOG_STD).exp()], dim=-1)
    mu_s, sigma_s, mu_l, sigma_l = raw.split(2, dim=-1)
    shrink = sigma_l.square().clamp_min(1e-6)
    return torch.cat([(mu_s + mu_l) / shrink, sigma_s.abs() / shrink], dim=-1)


def sample(gaussians: Tensor, noise: Tensor) -> Tensor:
    """One point (x, y) [..., 2] from each Gaussian [..., 4] (*eq. 5*); ``noise`` [..., 2] is
    standard normal."""
    mean, std = gaussians.split(2, dim=-1)
    return mean + std * noise


def point_axes(points: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Bilinear weights of points [..., 2] along each axis: ([..., h], [..., w]), each summing to 1.

    The weight of key j is max(0, 1 - |u_y - j_y|) * max(0, 1 - |u_x - j_x|), the product of the two
    returned tensors, with u clamped to the grid (*GauTransformer, eq. 6*, read as ordinary bilinear
    interpolation).
    """
    h, w = grid
    return _hat(points[..., 1], h), _hat(points[..., 0], w)


def expected_axes(gaussians: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Expectation of :func:`point_axes` over each Gaussian [..., 4]: ([..., h], [..., w]), exact,
    each summing to 1. The expected attention of a query is their outer product.
    """
    h, w = grid
    gaussians = gaussians.to(torch.promote_types(gaussians.dtype, torch.float32))
    return (
        axis_weights(gaussians[..., 1], gaussians[..., 3], h),
        axis_weights(gaussians[..., 0], gaussians[..., 2], w),
    )


def outer(along_y: Tensor, along_x: Tensor) -> Tensor:
    """The attention of queries [..., h * w] from its two factors [..., h] and [..., w]."""
    return (along_y.unsqueeze(-1) * along_x.unsqueeze(-2)).flatten(-2)


def expected_map(gaussians: Tensor, grid: tuple[int, int]) -> Tensor:
    """The attention map that Gaussians [..., T, 4] stand for: [..., T, h * w], float32, for
    each query summing to 1 over the keys."""
    return outer(*expected_axes(gaussians, grid))


def local_axes(grid: tuple[int, int], stds: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The two factors ([H, T, h], [H, T, w]) of :func:`local_map`, float32, each summing to 1."""
    h, w = grid
    # written so that an infinite std gives 0, and a tiny one no overflow
    scale = (1 / torch.tensor(stds, dtype=torch.float64)).view(-1, 1, 1)
    along_y = (-0.5 * (_token_distances(h) * scale).square()).softmax(-1).float()  # [H, h, h]
    along_x = (-0.5 * (_token_distances(w) * scale).square()).softmax(-1).float()  # [H, w, w]
    return along_y.repeat_interleave(w, dim=1), along_x.repeat(1, h, 1)


def local_map(grid: tuple[int, int], stds: Sequence[float]) -> Tensor:
    """A map [H, T, T] float32 with a Gaussian round each token, for each head of another std in
    ``stds``, in tokens: t_ij in proportion to exp(-|x_i - x_j|^2 / (2 std^2)), renormalised over
    the tokens of a grid (h, w). A std of infinity makes uniform rows.

    Unlike :func:`expected_map` nothing beyond the border is read from the border.
    """
    return outer(*local_axes(grid, stds))


def _token_distances(n: int) -> Tensor:
    tokens = torch.arange(n, dtype=torch.float64)
    return tokens[:, None] - tokens


def token_stretch(grid: tuple[int, int]) -> list[float]:
    """(x, y) of the border of the image in token coordinates of a grid (h, w): n / (n - 1), as the
    outer centres lie half a patch inside. An axis of one token has the stretch 0.
    """
    h, w = grid
    return [n / (n - 1) if n > 1 else 0.0 for n in (w, h)]


def _pixels(s: Tensor, n: int) -> Tensor:
    return (s + 1) * ((n - 1) / 2)


def _hat(s: Tensor, n: int) -> Tensor:
    """Weights [..., n] of linear interpolation at the normalised coordinate s [...]: the limit of
    :func:`axis_weights` for a std of 0. At a kink the derivative is the mean of both sides."""
    if n == 1:
        return torch.ones_like(s).unsqueeze(-1)
    return _weights(_ramp(_distances(_pixels(s, n), n)))


def axis_weights(mean: Tensor, std: Tensor, n: int) -> Tensor:
    """E[_hat(u)] for u ~ N(mean, std^2): [..., n].

    With R(a) = E[max(0, u - a)] = s * phi(z) + (m - a) * Phi(z), z = (m - a) / s, the weight of an
    inner key is the second difference R(j-1) - 2 R(j) + R(j+1), and the two border keys take what
    lies beyond them. R(a) is split into its kink max(0, m - a), whose differences are exact, and a
    small even rest: so the smallest weights, too, have a small relative error.
    """
    if n == 1:
        return torch.ones_like(mean).unsqueeze(-1)
    pixels = std * ((n - 1) / 2)
    # where the std is cut to the largest, the mean shrinks with it: what matters is m / s
    m = _pixels(mean, n) * (MAX_STD_PIXELS / pixels.clamp_min(MAX_STD_PIXELS))
    s = pixels.clamp(MIN_STD_PIXELS, MAX_STD_PIXELS).unsqueeze(-1)
    distance = _distances(m, n)
    far = distance.abs()
    z = far / (s * math.sqrt(2))
    # s phi - far Phi(-z), with Phi by erfc: in float32 ndtr gives up five stds from the mean
    rest = torch.sub(
        s * math.sqrt(0.5 / math.pi) * torch.exp(-z.square()), far * torch.erfc(z), alpha=0.5
    )
    # Where the mean lies on a token, the rest has a kink that cancels the ramp's: abs has the
    # derivative 0 there, and the ramp one half.
    return _weights(_ramp(distance), rest[..., :-1] - rest[..., 1:]).clamp_min(0)


def _distances(u: Tensor, n: int) -> Tensor:
    """Distances [..., n] of the pixel coordinate u [...] from each of n tokens on its left."""
    return u.unsqueeze(-1) - torch.arange(n, device=u.device, dtype=u.dtype)


def _ramp(distance: Tensor) -> Tensor:
    """distance[..., :-1] clamped to [0, 1], with the derivative one half at 0 and at 1, where
    ``clamp`` has 1; ``maximum`` and ``minimum`` share it between equals."""
    zero = distance.new_zeros(())
    one = distance.new_ones(())
    return torch.minimum(torch.maximum(distance[..., :-1], zero), one)


def _weights(slopes: Tensor, more: Tensor | None = None) -> Tensor:
    """Weights [..., n] of an axis from slopes [..., n-1]: the weight of all keys right of key j.
    ``more`` slopes are added after the differences, so that small ones do not drown."""
    weights = pad(slopes, (1, 0), value=1.0) - pad(slopes, (0, 1))
    if more is not None:
        weights = weights + (pad(more, (1, 0)) - pad(more, (0, 1)))
    return weights


@dataclass
class Geometry:
    """The places of the views of a batch in their images: per axis, position in image = offset +
    scale * position in view.

    offset, scale   [B, 2] float32, (x, y), in coordinates in which -1 and +1 are the outer
                    *borders* of the image and of the view: (0, 1) is the image itself, a scale
                    below 0 mirrors, below 1 in magnitude enlarges
    """

    offset: Tensor
    scale: Tensor


def move(gaussians: Tensor, geometry: Geometry | None, grid: tuple[int, int]) -> Tensor:
    """Gaussians of the untransformed images [B or 1, ..., T, 4] -> Gaussians of their views, with
    which a teacher learns from views, float32.

    Queries are interpolated (:func:`interpolate_queries`), and a Gaussian's coordinates become
    those of the view, mean = (mean - offset) / scale and std = std / abs(scale). Attention that
    lies outside the view reads its border, as everywhere. Differentiable in the Gaussians. Without
    a geometry the same tensor is returned.

    A mirrored or token-aligned view has exactly the mirrored or shifted expected map, as far as
    attention stays inside the view. Between tokens the interpolation of parameters stands in for a
    query that was never learned.
    """
    if geometry is None:
        return gaussians
    # float64 passes untouched through TF32, which would round to three digits
    stored = gaussians.double().reshape(len(gaussians), -1, *gaussians.shape[-2:])
    rows = stored.transpose(1, 2).flatten(2).unsqueeze(1)  # [B or 1, 1, T, M * 4]
    queries = interpolate_queries(rows, geometry, grid, grid).squeeze(1).unflatten(2, (-1, 4))
    taken: Tensor = queries.transpose(1, 2).float()  # [B, M, T, 4]
    scale = geometry.scale.to(taken.device)
    offset = geometry.offset.to(taken.device) * taken.new_tensor(token_stretch(grid))
    shift = torch.cat([offset, torch.zeros_like(offset)], dim=-1).float()[:, None, None]
    factor = torch.cat([scale, scale.abs()], dim=-1).float()[:, None, None]
    taken = (taken - shift) / factor
    return taken.reshape(len(taken), *gaussians.shape[1:-2], -1, 4)


def interpolate_queries(
    rows: Tensor, geometry: Geometry | None, grid: tuple[int, int], new_grid: tuple[int, int]
) -> Tensor:
    """Something of the stored queries [B or 1, H, T, K] -> the same of the view's queries [B, H,
    T', K], float32 or float64.

    The query at position q of the view takes what the image has at position offset + scale * q:
    bilinear interpolation between the four queries around it, clamped to the border, and exactly
    one query's where the position falls on a token.
    """
    if rows.dtype != torch.float64:
        rows = rows.float()
    weights_y = _query_weights(geometry, 1, grid[0], new_grid[0]).to(rows)  # [B or 1, h', h]
    weights_x = _query_weights(geometry, 0, grid[1], new_grid[1]).to(rows)  # [B or 1, w', w]
    images = max(len(rows), len(weights_y))
    weights_y = weights_y.expand(images, -1, -1)
    weights_x = weights_x.expand(images, -1, -1)
    rows = rows.expand(images, -1, -1, -1)
    with torch.autocast(rows.device.type, enabled=False):
        # matmul rather than einsum, which would copy the rows for every axis
        keys = rows.shape[-1]
        rows = weights_y[:, None] @ rows.unflatten(2, grid).flatten(3)  # [B, H, h', w * K]
        rows = weights_x[:, None, None] @ rows.unflatten(3, (grid[1], keys))  # [B, H, h', w', K]
    return rows.flatten(2, 3)


def _query_weights(geometry: Geometry | None, axis: int, old: int, new: int) -> Tensor:
    """Weights [B or 1, new, old] of the stored tokens of an axis for each query of the view."""
    return token_weights(view_pixels(geometry, axis, old, centres(new)), old)


ON_TOKEN = 1e-4
"""Part of a token's width: a query this close to a token is on it. Float32 offsets are good to
about 1e-6."""


def token_weights(u: Tensor, n: int) -> Tensor:
    """Weights [..., n] of an axis's n tokens for what lies at the pixel coordinate u [...]: linear
    interpolation, clamped to the border."""
    u = on_token(u).clamp(0, n - 1)
    return (1 - (u.unsqueeze(-1) - torch.arange(n, device=u.device)).abs()).clamp_min(0)


def on_token(u: Tensor) -> Tensor:
    """Pixel coordinates, those within ``ON_TOKEN`` of a whole number rounded to it."""
    return torch.where((u - u.round()).abs() < ON_TOKEN, u.round(), u)


def centres(n: int) -> Tensor:
    """The centres [n] of n tokens in the border coordinates of an axis."""
    return (2 * torch.arange(n, dtype=torch.float64) + 1) / n - 1


def view_pixels(geometry: Geometry | None, axis: int, n: int, border: Tensor) -> Tensor:
    """The pixel coordinate, on n stored tokens of an axis (0 is x), of positions [m] of the view in
    border coordinates: [B or 1, m] float64, on the geometry's device."""
    position = border.unsqueeze(0)
    if geometry is not None:
        offset = geometry.offset[:, axis, None].double()
        scale = geometry.scale[:, axis, None].double()
        position = offset + scale * border.to(offset.device)
    return (position + 1) * (n / 2) - 0.5
