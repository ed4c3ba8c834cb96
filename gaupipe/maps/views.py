"""Attention maps of trained vision transformers: reduced to patches, thinned to their largest keys,
and moved with their image.

A *map* is a float32 tensor [..., T, T] whose rows, one a query, are probabilities over keys and sum
to 1. Tokens are in row-major order on a grid (h, w), as in :mod:`gaupipe.maps.gaussians`. A token
is the image's patch: a *cell* of 1/h by 1/w of the image around the token's centre.

Axis letters: B images, H heads, T tokens (T = h * w), Q chosen queries, P class and register
tokens, k kept keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gaupipe.maps.gaussians import Geometry, on_token, token_weights

LEAST_IN_VIEW = 1e-4
"""A row with less of its attention than this inside a view says nothing about the view: what is
left of it is what the stored numbers' rounding left."""


def take_queries(values: Tensor, queries: Tensor | None) -> Tensor:
    """Of what each query has, [B, H, T, ...], the part of the ``queries`` [B, Q] int64 of each
    image: [B, H, Q, ...]. None takes all."""
    return values if queries is None else values[places_of(queries, values.shape[1])]


def places_of(queries: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The index that takes ``queries`` [B, Q] of every head from values [B, H, T, ...]."""
    images = torch.arange(len(queries), device=queries.device)
    of_heads = torch.arange(heads, device=queries.device)
    return images[:, None, None], of_heads[:, None], queries[:, None]


def top_k(maps: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest keys of each row of maps [..., T], largest first: (keys [..., k] int64, weights
    [..., k] of the maps' dtype)."""
    weights, keys = maps.topk(k, dim=-1)
    return keys, weights


def from_top_k(keys: Tensor, weights: Tensor, tokens: int) -> Tensor:
    """Rows [..., T] of a map from some of their keys [..., k] and the weights [..., k] of these:
    float32, summing to 1.

    What the weights leave of 1 is spread evenly over the other keys. Weights that sum to more than
    1, as rounding can make them, are divided by their sum, and so are those of all T keys.
    """
    weights, others = weights.float(), tokens - keys.shape[-1]
    rest = (1 - weights.sum(-1, keepdim=True)).clamp_min(0)
    rows = (rest / max(others, 1)).expand(*rest.shape[:-1], tokens)
    rows = rows.scatter(-1, keys.long(), weights)
    return rows / rows.sum(-1, keepdim=True)


def without_prefix(maps: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """The part of maps [B, H, P + T, P + T] that lies between patches, its rows summing to 1 again,
    and what they gave up.

    The first ``prefix`` tokens are class and register tokens. Returns maps [B, H, T, T] and the
    attention that patches paid to the prefix [B, H], the mean over queries. A row whose whole
    attention is on the prefix becomes uniform.
    """
    if not prefix:
        return maps, maps.new_zeros(maps.shape[:2])
    rows = maps[..., prefix:, :]
    patches, dropped = rows[..., prefix:], rows[..., :prefix].sum(-1).mean(-1)
    left = patches.sum(-1, keepdim=True)
    tiny = torch.finfo(maps.dtype).tiny
    uniform = patches.new_tensor(1 / patches.shape[-1])
    return torch.where(left > tiny, patches / left.clamp_min(tiny), uniform), dropped


def move_map(
    maps: Tensor,
    geometry: Geometry | None,
    grid: tuple[int, int],
    new_grid: tuple[int, int] | None = None,
) -> Tensor:
    """Maps of the untransformed images [B or 1, H, T, T] -> maps of their views [B, H, T', T'],
    float32, on the grid ``new_grid`` (default: the same grid).

    Queries: the view's query at position q takes the row that the image has at offset + scale * q:
    bilinear interpolation between the four queries around it, clamped to the border, and exactly
    one query's row where the position falls on a token.

    Keys: a key's attention is taken as spread evenly over its cell. A key of the view gets what
    lies in its own cell: of every stored key the part of that key's cell which the view's cell
    covers. Attention outside the view is dropped, and rows that lost some sum to 1 again. A row
    with less than ``LEAST_IN_VIEW`` in the view becomes uniform over the part of the view that
    lies in the image, or over the whole view where no part does.

    A mirrored view has exactly the mirrored map, and a view shifted by whole tokens the shifted
    one, its rows divided by what they have in the view. Without a geometry and a new grid the maps
    are returned as they are.
    """
    if geometry is None and new_grid in (None, grid):
        return maps
    new_grid = new_grid or grid
    return _move_keys(interpolate_queries(maps, geometry, grid, new_grid), geometry, grid, new_grid)


def move_chosen_rows(
    rows: Callable[[Tensor], Tensor],
    queries: Tensor,
    geometry: Geometry | None,
    grid: tuple[int, int],
    new_grid: tuple[int, int] | None = None,
) -> Tensor:
    """The rows [B, H, Q, T'] of :func:`move_map` that belong to the ``queries`` [B, Q] of the
    views, int64.

    ``rows`` gives the rows [B, H, Q, T] of the untransformed images for queries [B, Q] of theirs.
    """
    if geometry is None and new_grid in (None, grid):
        return rows(queries)
    new_grid = new_grid or grid
    taken = interpolate_chosen_queries(rows, queries, geometry, grid, new_grid)
    return _move_keys(taken, geometry, grid, new_grid)


def _move_keys(
    rows: Tensor, geometry: Geometry | None, grid: tuple[int, int], new_grid: tuple[int, int]
) -> Tensor:
    """What :func:`move_map` does to the keys of rows [B, H, Q, T]: [B, H, Q, T']."""
    covers_y, covers_x = (
        _cells_covered(geometry, axis, old, new).to(rows.device, torch.float32)
        for axis, old, new in ((1, grid[0], new_grid[0]), (0, grid[1], new_grid[1]))
    )
    with torch.autocast(rows.device.type, enabled=False):
        # Taken from what is lost, not from what is left: a row that loses nothing is not touched.
        outside = 1 - torch.einsum("bi,bj->bij", covers_y.sum(1), covers_x.sum(1))
        lost = rows @ outside.flatten(1)[:, None, :, None]  # [B, H, T', 1]
        seen = (rows.reshape(len(rows), -1, grid[1]) @ covers_x.mT).reshape(
            *rows.shape[:3], grid[0], new_grid[1]
        )
        seen = torch.einsum("byi,bhqix->bhqyx", covers_y.expand(len(seen), -1, -1), seen)
        seen = seen.flatten(-2)
        area = torch.einsum("by,bx->byx", covers_y.sum(2), covers_x.sum(2)).flatten(1)
    area = torch.where(area.sum(-1, keepdim=True) > 0, area, 1.0)
    uniform = (area / area.sum(-1, keepdim=True))[:, None, None]
    left = seen.sum(-1, keepdim=True)
    whole = torch.where(lost > 0, left.clamp_min(LEAST_IN_VIEW), 1.0)
    return torch.where(left >= LEAST_IN_VIEW, seen / whole, uniform)


def interpolate_queries(
    rows: Tensor,
    geometry: Geometry | None,
    grid: tuple[int, int],
    new_grid: tuple[int, int],
) -> Tensor:
    """Rows of the stored queries [B or 1, H, T, K] -> rows of the view's queries [B, H, T', K],
    float32: what :func:`move_map` does to queries, for keys of any sort."""
    weights_y, weights_x = (
        token_weights(_view_pixels(geometry, axis, old, _centres(new)), old).to(
            rows.device, torch.float32
        )
        for axis, old, new in ((1, grid[0], new_grid[0]), (0, grid[1], new_grid[1]))
    )
    images = max(len(rows), len(weights_y))
    weights_y, weights_x = (w.expand(images, -1, -1) for w in (weights_y, weights_x))
    rows = rows.float().expand(images, -1, -1, -1)
    with torch.autocast(rows.device.type, enabled=False):
        # matmul rather than einsum, which would copy the rows for every axis
        keys = rows.shape[-1]
        rows = weights_y[:, None] @ rows.unflatten(2, grid).flatten(3)  # [B, H, h', w * K]
        rows = weights_x[:, None, None] @ rows.unflatten(3, (grid[1], keys))  # [B, H, h', w', K]
    return rows.flatten(2, 3)


def interpolate_chosen_queries(
    rows: Callable[[Tensor], Tensor],
    queries: Tensor,
    geometry: Geometry | None,
    grid: tuple[int, int],
    new_grid: tuple[int, int],
) -> Tensor:
    """What :func:`interpolate_queries` gives for the ``queries`` [B, Q] of the view: [B, H, Q, K]
    float32. ``rows`` gives the stored rows [B, H, Q, K] of stored queries [B, Q]."""
    columns = new_grid[1]
    (low_y, high_y, share_y), (low_x, high_x, share_x) = (
        [values.to(queries.device).expand(len(queries), -1).gather(1, at) for values in found]
        for found, at in (
            (_neighbours(geometry, 1, grid[0], new_grid[0]), queries // columns),
            (_neighbours(geometry, 0, grid[1], new_grid[1]), queries % columns),
        )
    )
    sides_y = (low_y, 1 - share_y), (high_y, share_y)
    sides_x = (low_x, 1 - share_x), (high_x, share_x)
    parts = (
        (weight_y * weight_x).float()[:, None, :, None] * rows(y * grid[1] + x).float()
        for y, weight_y in sides_y
        for x, weight_x in sides_x
    )
    return sum(parts, torch.zeros((), device=queries.device))


def _neighbours(geometry: Geometry | None, axis: int, old: int, new: int) -> list[Tensor]:
    """Between which of the ``old`` stored tokens of an axis each of the view's ``new`` ones lies:
    the lower, the higher, and the share of the higher, [B or 1, new] int64, int64 and float64."""
    u = on_token(_view_pixels(geometry, axis, old, _centres(new))).clamp(0, old - 1)
    low = u.floor().long()
    return [low, (low + 1).clamp_max(old - 1), u - low]


def _cells_covered(geometry: Geometry | None, axis: int, old: int, new: int) -> Tensor:
    """How much of each of the ``old`` stored cells of an axis each of the ``new`` cells of the view
    covers: parts of a stored cell, [B or 1, new, old] float64."""
    borders = torch.linspace(-1, 1, new + 1, dtype=torch.float64)
    borders = on_token(_view_pixels(geometry, axis, old, borders) + 0.5)
    ends = torch.stack([borders[:, :-1], borders[:, 1:]]).sort(0).values  # a mirror swaps them
    cells = torch.arange(old, device=ends.device)
    low = torch.maximum(ends[0].unsqueeze(-1), cells)
    high = torch.minimum(ends[1].unsqueeze(-1), cells + 1)
    return (high - low).clamp_min(0)


def _centres(n: int) -> Tensor:
    """Where the centres of n tokens lie between the borders of an axis, at -1 and +1: [n]."""
    return (2 * torch.arange(n, dtype=torch.float64) + 1) / n - 1


def _view_pixels(geometry: Geometry | None, axis: int, n: int, border: Tensor) -> Tensor:
    """The pixel coordinate, on n stored tokens of an axis (0 is x), of positions [m] of the view in
    border coordinates: [B or 1, m] float64, on the geometry's device."""
    if geometry is None:
        position = border.unsqueeze(0)
    else:
        offset, scale = (
            values[:, axis, None].double() for values in (geometry.offset, geometry.scale)
        )
        position = offset + scale * border.to(offset.device)
    return (position + 1) * (n / 2) - 0.5
