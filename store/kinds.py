"""Kinds of stores: which arrays each kind has for an image, and what numbers are in them.

A new kind is a class here and an entry of :data:`KINDS`. Everything else asks the class: schema and
files, settings and command line, sizes, and the page of ``gaupipe view``. What a teacher puts into
the arrays, and what phase B reads from them, is in ``gaupipe.distillation.kinds``.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from store.encoding import Gaussians, Keys, Numbers, Weights
from store.errors import StoreError

MOST_KEYED_TOKENS = 2**16 - 1
"""Tokens whose keys fit into 16 bits, one number left for what is missing."""


class ArraySpec(NamedTuple):
    """One array as a reader sees it: axis 0 is the image id, or the view of an image."""

    shape: tuple[int, ...]
    dtype: np.dtype
    dimension_names: tuple[str, ...]
    numbers: Numbers


class MapSizes(NamedTuple):
    """The tokens (h, w) of the maps of an image, their layers and their heads."""

    grid: tuple[int, int]
    layers: int
    heads: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySizes:
    """The part of a schema that a kind's arrays depend on."""

    num_images: int
    grid: tuple[int, int] | None = None
    layers: int | None = None
    heads: int | None = None
    embedding_dim: int | None = None
    features_dim: int | None = None
    labelled: bool = True
    name_bytes: int | None = None
    encoding: str = "float16"
    k: int | None = None
    prefix_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a row: class and register tokens, then those of the grid."""
        grid, _, _ = self.maps
        return self.prefix_tokens + grid[0] * grid[1]

    @property
    def maps(self) -> MapSizes:
        """The sizes of the maps. Raises StoreError for a store without maps."""
        if self.grid is None or self.layers is None or self.heads is None:
            raise StoreError("a store of predictions has no attention maps")
        return MapSizes(self.grid, self.layers, self.heads)


class Kind:
    """The arrays that stand for the attention maps of an image.

    name              as in ``Schema.kind`` and ``--kind``
    has_maps          whether there are any; without, grid, layers and heads are None
    decoder           whether arrays that all images share lie beside those of the images
    default_k         ``Schema.k`` where none is asked for; None for a kind without k
    default_encoding  the encoding where none is asked for
    has_prefix        whether maps may have class and register tokens beside the grid
    """

    name: str
    has_maps = True
    decoder = False
    default_k: int | None = None
    default_encoding = "float16"
    has_prefix = False

    def arrays(self, sizes: ArraySizes) -> dict[str, ArraySpec]:
        """The arrays of the images, by name."""
        return {}

    def refused_k(self, sizes: ArraySizes) -> str | None:
        """Why a store of these sizes cannot have this ``k``; None where it can."""
        if sizes.k is not None:
            return "it must be None"
        return None


class Gaussian(Kind):
    """One Gaussian a query: (mean_x, mean_y, std_x, std_y)."""

    name = "gaussian"

    def arrays(self, sizes: ArraySizes) -> dict[str, ArraySpec]:
        return {"gaussians": query_array(sizes, Gaussians(), parameter=4)}


class Embedding(Kind):
    """An embedding for each block, which the decoder turns into Gaussians."""

    name = "embedding"
    decoder = True

    def arrays(self, sizes: ArraySizes) -> dict[str, ArraySpec]:
        numbers = Numbers()
        shape = (sizes.num_images, sizes.maps.layers, sizes.embedding_dim or 0)
        names = ("image", "layer", "feature")
        return {"embeddings": ArraySpec(shape, numbers.dtype, names, numbers)}


class Prior(Kind):
    """Nothing for an image: the Gaussians that all images share, in the decoder."""

    name = "prior"
    decoder = True


class Dense(Kind):
    """Whole maps."""

    name = "dense"
    has_prefix = True

    def arrays(self, sizes: ArraySizes) -> dict[str, ArraySpec]:
        return {"maps": query_array(sizes, Weights(), key=sizes.tokens)}


class TopK(Kind):
    """The k largest keys of a query and their weights."""

    name = "topk"
    has_prefix = True
    default_k = 8
    default_encoding = "uint8"

    def arrays(self, sizes: ArraySizes) -> dict[str, ArraySpec]:
        k = sizes.k or 0
        return {
            "keys": query_array(sizes, Keys(sizes.tokens), rank=k),
            "weights": query_array(sizes, Weights(), rank=k),
        }

    def refused_k(self, sizes: ArraySizes) -> str | None:
        if sizes.tokens > MOST_KEYED_TOKENS:
            return f"a map has at most {MOST_KEYED_TOKENS} tokens in this kind, not {sizes.tokens}"
        if type(sizes.k) is int and 1 <= sizes.k <= sizes.tokens:
            return None
        return f"it must be a whole number from 1 to {sizes.tokens}"


class Predictions(Kind):
    """No maps: what every store has of an image, the teacher's predictions."""

    name = "predictions"
    has_maps = False


KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (Gaussian(), Embedding(), Prior(), Dense(), TopK(), Predictions())
}


def query_array(sizes: ArraySizes, numbers: Numbers, **axes: int) -> ArraySpec:
    """An array with the ``axes`` (name and length) for each query of each image."""
    _, layers, heads = sizes.maps
    shape = (sizes.num_images, layers, heads, sizes.tokens, *axes.values())
    names = ("image", "layer", "head", "query", *axes)
    return ArraySpec(shape, numbers.dtype, names, numbers)
