"""Attention maps of trained vision transformers: reduced to patches, thinned to their largest keys,
and moved with their image.

A *map* is a float32 tensor [..., T, T] whose rows, one a query, are probabilities over keys and sum
to 1. Tokens are in row-major order on a grid (h, w), as in :mod:`gaupipe.maps.gaussians`. A token
is the image's patch: a *cell* of 1/h by 1/w of the image around the token's centre.

Axis letters: B images, H heads, T tokens (T = h * w), P class and register tokens, k kept keys.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gaupipe.maps.gaussians import Geometry, interpolate_queries, on_token, view_pixels

FAINTEST = 2**-25
"""What float16 rounds to 0: stores of maps hold no smaller weight, and cannot tell it from none."""

LEAST_IN_VIEW = 1e-4
"""A row with less of its attention than this inside a view says nothing about the view: what is
left of it is what the stored numbers' rounding left."""


def top_k(maps: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest keys of each row of maps [..., T] float32 or narrower, largest first, and of
    equal ones the first: (keys [..., k], whole numbers, weights [..., k] of the maps' dtype).

    On a CPU the last bits of a float32 number, as many as T - 1 has, are cut off and play no part:
    8 of 24 for 196 tokens, where float16 keeps 11. On a GPU torch chooses among equal ones.
    """
    if maps.device.type != "cpu":
        weights, keys = maps.topk(k, dim=-1)
        return keys, weights
    # numpy sorts whole rows by vector instructions, in a tenth of the time that torch takes to find
    # k numbers. The key takes the place of the last bits; the bits of numbers that are not negative
    # are in the order of the numbers.
    last = maps.shape[-1] - 1
    key_bits = (1 << last.bit_length()) - 1
    bits = maps.float().numpy().view(np.int32) & ~key_bits
    bits |= np.arange(last, -1, -1, dtype=np.int32)
    bits = np.sort(bits, axis=-1)[..., : -k - 1 : -1]
    keys = torch.from_numpy(last - (bits & key_bits))
    weights = torch.from_numpy((bits & ~key_bits).view(np.float32))
    return keys, weights.to(maps.dtype)


def from_top_k(keys: Tensor, weights: Tensor, tokens: int) -> Tensor:
    """Rows [..., T] of a map from some of their keys [..., k] and the weights [..., k] of these:
    float32, summing to 1.

    What the weights leave of 1 is spread evenly over the other keys. Rounding may leave nothing, of
    small weights too: a key gets :data:`FAINTEST` at least, which a temperature can raise as it
    does in other rows. Rows that then sum to more than 1 are divided by their sum, and so are those
    of all T keys.
    """
    weights = weights.float().clamp_min(FAINTEST)
    others = tokens - keys.shape[-1]
    total = weights.sum(-1, keepdim=True)
    rest = ((1 - total) / max(others, 1)).clamp_min(FAINTEST)  # of each other key
    total = total + others * rest
    rest = (rest / total).expand(*total.shape[:-1], tokens)
    return rest.scatter(-1, keys.long(), weights / total)


def without_prefix(maps: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """The part of maps [B, H, P + T, P + T] that lies between patches, its rows summing to 1 again,
    and what they gave up.

    The first ``prefix`` tokens are class and register tokens. Returns maps [B, H, T, T] and the
    attention that patches paid to the prefix [B, H], the mean over queries. A row whose whole
    attention is on the prefix becomes uniform.
    """
    return between_patches(maps[..., prefix:, :], prefix)


def between_patches(rows: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """As :func:`without_prefix`, of some patches' rows [B, H, Q, P + T]."""
    if not prefix:
        return rows, rows.new_zeros(rows.shape[:2])
    patches = rows[..., prefix:]
    dropped = rows[..., :prefix].sum(-1).mean(-1)
    left = patches.sum(-1, keepdim=True)
    tiny = torch.finfo(rows.dtype).tiny
    uniform = patches.new_tensor(1 / patches.shape[-1])
    return torch.where(left > tiny, patches / left.clamp_min(tiny), uniform), dropped


def pool_map(maps: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """Maps [..., T', T'] of maps [..., T, T] on a coarser grid: the mean over the queries that lie
    in a new token and the sum over such keys, both by area. Rows that sum to 1 still do."""
    axes = list(zip(grid, new_grid, strict=True))
    along_y, along_x = (shares_of_cells(old, new).to(maps) for old, new in axes)
    keys = torch.kron(along_y, along_x)  # [T', T], the share of each old token in a new one
    queries = keys / keys.sum(-1, keepdim=True)
    return queries @ maps @ keys.mT


def shares_of_cells(old: int, new: int) -> Tensor:
    """[new, old] float64: the share of each of ``old`` equal parts of a line in ``new`` ones."""
    edges, new_edges = (
        torch.linspace(0, 1, count + 1, dtype=torch.float64) for count in (old, new)
    )
    right = torch.minimum(edges[1:], new_edges[1:, None])
    left = torch.maximum(edges[:-1], new_edges[:-1, None])
    return (right - left).clamp_min(0) * old


def move_map(
    maps: Tensor,
    geometry: Geometry | None,
    grid: tuple[int, int],
    new_grid: tuple[int, int] | None = None,
) -> Tensor:
    """Maps of the untransformed images [B or 1, H, T, T] -> maps of their views [B, H, T', T'],
    float32, on the grid ``new_grid`` (default: the same grid).

    Queries: rows are interpolated (:func:`~gaupipe.maps.gaussians.interpolate_queries`).

    Keys: a key's attention is taken as spread evenly over its cell. A key of the view gets what
    lies in its own cell: of every stored key the part of that key's cell which the view's cell
    covers. Attention outside the view is dropped, and rows that lost some sum to 1 again. A row
    with less than ``LEAST_IN_VIEW`` in the view becomes uniform over the part of the view that
    lies in the image, or over the whole view where no part does.

    A mirrored view has exactly the mirrored map, and a view shifted by whole tokens the shifted
    one, its rows divided by what they have in the view. Without a geometry and a new grid the same
    tensor is returned.
    """
    if geometry is None and new_grid in (None, grid):
        return maps
    new_grid = new_grid or grid
    rows = interpolate_queries(maps, geometry, grid, new_grid)  # [B, H, T', T]
    covers_y = _cells_covered(geometry, 1, grid[0], new_grid[0])  # [B or 1, h', h]
    covers_y = covers_y.to(rows.device, torch.float32)
    covers_x = _cells_covered(geometry, 0, grid[1], new_grid[1])  # [B or 1, w', w]
    covers_x = covers_x.to(rows.device, torch.float32)
    with torch.autocast(rows.device.type, enabled=False):
        # Taken from what is lost, not from what is left: a row that loses nothing is not touched.
        outside = 1 - torch.einsum("bi,bj->bij", covers_y.sum(1), covers_x.sum(1))
        lost = rows @ outside.flatten(1)[:, None, :, None]  # [B, H, T', 1]
        seen = rows.reshape(len(rows), -1, grid[1]) @ covers_x.mT
        seen = seen.reshape(*rows.shape[:3], grid[0], new_grid[1])  # [B, H, T', h, w']
        seen = torch.einsum("byi,bhqix->bhqyx", covers_y.expand(len(seen), -1, -1), seen)
        seen = seen.flatten(-2)  # [B, H, T', T']
        area = torch.einsum("by,bx->byx", covers_y.sum(2), covers_x.sum(2)).flatten(1)
    area = torch.where(area.sum(-1, keepdim=True) > 0, area, 1.0)
    uniform = (area / area.sum(-1, keepdim=True))[:, None, None]
    left = seen.sum(-1, keepdim=True)
    whole = torch.where(lost > 0, left.clamp_min(LEAST_IN_VIEW), 1.0)
    return torch.where(left >= LEAST_IN_VIEW, seen / whole, uniform)


def _cells_covered(geometry: Geometry | None, axis: int, old: int, new: int) -> Tensor:
    """The parts of the ``old`` stored cells of an axis that the ``new`` cells of the view cover,
    [B or 1, new, old] float64."""
    borders = torch.linspace(-1, 1, new + 1, dtype=torch.float64)
    borders = on_token(view_pixels(geometry, axis, old, borders) + 0.5)
    ends = torch.stack([borders[:, :-1], borders[:, 1:]]).sort(0).values  # a mirror swaps them
    cells = torch.arange(old, device=ends.device)
    low = torch.maximum(ends[0].unsqueeze(-1), cells)
    high = torch.minimum(ends[1].unsqueeze(-1), cells + 1)
    return (high - low).clamp_min(0)
