"""The stored attention of a batch, made into maps one block at a time.

Axis letters: B images, L blocks, H heads, T tokens, Q of them as queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gaupipe.maps.gaussians import Geometry, expected_axes, move, outer
from gaupipe.maps.views import between_patches, move_map

Grid = tuple[int, int]


@dataclass(frozen=True)
class Seen:
    """What a student sees of a stored block: some ``heads`` (all for None), in views of the images
    (``geometry``), on another ``grid`` (h, w); None leaves each as it is stored. Of that the rows
    of the ``queries`` int64 [Q], or of all T."""

    heads: Sequence[int] | None = None
    geometry: Geometry | None = None
    grid: Grid | None = None
    queries: Tensor | None = None


AS_STORED = Seen()


@dataclass(eq=False)
class StoredGaussians:
    """Gaussians [B, L, H, T, 4] of a batch on a ``grid`` (h, w), read from a store."""

    gaussians: Tensor
    grid: Grid

    def rows(self, layer: int) -> Tensor:
        """A block's whole map [B, H, T, T] float32 as it is stored; rows sum to 1."""
        return self.map(layer)

    def axes(self, layer: int, seen: Seen = AS_STORED) -> tuple[Tensor, Tensor]:
        """The two factors ([B, H, Q, h], [B, H, Q, w]) of a block's :meth:`map`."""
        gaussians = select_heads(self.gaussians[:, layer].float(), seen.heads)
        moved = move(gaussians, seen.geometry, self.grid, seen.grid)
        moved = select_queries(moved, seen.queries)
        return expected_axes(moved, seen.grid or self.grid)

    def map(self, layer: int, seen: Seen = AS_STORED) -> Tensor:
        """A block's map [B, H, Q, T] float32; rows sum to 1."""
        return outer(*self.axes(layer, seen))


class StoredRows:
    """Maps of a batch on a ``grid`` (h, w), read from a store. ``rows`` gives the map [B, H, P + T,
    P + T] float32 of a block, or of it the rows of some tokens int64 [Q]; P class and register
    tokens come first."""

    def __init__(
        self, rows: Callable[[int, Tensor | None], Tensor], grid: Grid, prefix: int = 0
    ) -> None:
        self._rows = rows
        self.grid = grid
        self.prefix = prefix

    def rows(self, layer: int) -> Tensor:
        """As :meth:`StoredGaussians.rows`, of all tokens."""
        return self._rows(layer, None)

    def map(self, layer: int, seen: Seen = AS_STORED) -> Tensor:
        """As :meth:`StoredGaussians.map`: from patches to patches, renormalised."""
        moves = seen.geometry is not None or seen.grid is not None
        if seen.queries is None or moves:  # a row between tokens is made of its neighbours'
            rows = self.rows(layer)[..., self.prefix :, :]
        else:
            rows = self._rows(layer, seen.queries + self.prefix)
        patches, _ = between_patches(select_heads(rows, seen.heads), self.prefix)
        if not moves:
            return patches
        return select_queries(move_map(patches, seen.geometry, self.grid, seen.grid), seen.queries)


StoredAttention = StoredGaussians | StoredRows


def select_heads(values: Tensor, heads: Sequence[int] | None) -> Tensor:
    """The heads chosen of [B, H, ...]; None is all."""
    return values if heads is None else values[:, list(heads)]


def select_queries(values: Tensor, queries: Tensor | None) -> Tensor:
    """The queries chosen of [..., T, numbers]; None is all."""
    return values if queries is None else values.index_select(-2, queries)
