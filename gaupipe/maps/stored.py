"""The stored attention of a batch, made into maps one block at a time.

Axis letters: B images, L blocks, H heads, T tokens, Q of them as queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gaupipe.maps.gaussians import Geometry, expected_map
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

    @property
    def moves(self) -> bool:
        """Whether rows lie between those that are stored, and are made of several."""
        return self.geometry is not None or self.grid is not None

    def of(self, maps: Tensor, grid: Grid) -> Tensor:
        """The rows [B, H, Q, T'] that are seen of whole maps [B, H, T, T] on a ``grid``."""
        return select_queries(move_map(maps, self.geometry, grid, self.grid), self.queries)


AS_STORED = Seen()


class StoredAttention:
    """The attention of a batch on a ``grid`` (h, w)."""

    grid: Grid

    def rows(self, layer: int) -> Tensor:
        """A block's whole map [B, H, T, T] float32 as it is stored, class and register tokens
        included; rows sum to 1."""
        return self.map(layer)

    def map(self, layer: int, seen: Seen = AS_STORED) -> Tensor:
        """A block's map [B, H, Q, T] float32, from patches to patches; rows sum to 1."""
        raise NotImplementedError


@dataclass(eq=False)
class StoredGaussians(StoredAttention):
    """Gaussians [B, L, H, T, 4], read from a store."""

    gaussians: Tensor
    grid: Grid

    def map(self, layer: int, seen: Seen = AS_STORED) -> Tensor:
        # The map moves with the image, not its Gaussians: one that looks beyond the image counts
        # for the image's border, and would count for that of a view, which may be padding.
        gaussians = select_heads(self.gaussians[:, layer].float(), seen.heads)
        if not seen.moves:
            return expected_map(select_queries(gaussians, seen.queries), self.grid)
        return seen.of(expected_map(gaussians, self.grid), self.grid)


class StoredRows(StoredAttention):
    """Maps, read from a store. ``rows`` gives the map [B, H, P + T, P + T] float32 of a block, or
    of it the rows of some tokens int64 [Q]; P class and register tokens come first."""

    def __init__(
        self, rows: Callable[[int, Tensor | None], Tensor], grid: Grid, prefix: int = 0
    ) -> None:
        self._rows = rows
        self.grid = grid
        self.prefix = prefix

    def rows(self, layer: int) -> Tensor:
        return self._rows(layer, None)

    def map(self, layer: int, seen: Seen = AS_STORED) -> Tensor:
        if seen.queries is None or seen.moves:
            rows = self.rows(layer)[..., self.prefix :, :]
        else:
            rows = self._rows(layer, seen.queries + self.prefix)
        patches, _ = between_patches(select_heads(rows, seen.heads), self.prefix)
        return seen.of(patches, self.grid) if seen.moves else patches


def select_heads(values: Tensor, heads: Sequence[int] | None) -> Tensor:
    """The heads chosen of [B, H, ...]; None is all."""
    return values if heads is None else values[:, list(heads)]


def select_queries(values: Tensor, queries: Tensor | None) -> Tensor:
    """The queries chosen of [..., T, numbers]; None is all."""
    return values if queries is None else values.index_select(-2, queries)
