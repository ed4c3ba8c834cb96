"""What a store holds: its kind, its sizes, and the zarr metadata that follow from them.

Axis letters: N images, L encoder blocks, H heads, T query tokens on a grid (h, w), T = h * w, C classes, E embedding.
Axis 0 is the image id in every array.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

FORMAT, FORMAT_VERSION = "gaupipe-maps", 1
KINDS = ("gaussian", "embedding", "dense")


class StoreError(ValueError):
    """A mistake or damage, in one line: what, where, what would be right."""


class CorruptChunk(StoreError):
    """Stored data of an image cannot be read back; ``image_ids`` names the images."""

    def __init__(self, message: str, image_ids: list[int]) -> None:
        super().__init__(message)
        self.image_ids = image_ids


@dataclass(frozen=True)
class Shard:
    """Images ``start`` to ``stop`` (exclusive): one file in every array, written once by one owner."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Schema:
    """Sizes and origin of a store. ``kind`` is ``gaussian``, ``embedding`` or ``dense``."""

    kind: str
    num_images: int
    grid: tuple[int, int]
    layers: int
    heads: int
    num_classes: int
    dataset: str
    dataset_sha256: str
    teacher_sha256: str
    parametrisation: str
    embedding_dim: int | None = None
    images_per_shard: int | None = None
    """Null lets :meth:`sized` choose."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further attributes, as JSON."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise StoreError(f"unknown kind of store {self.kind!r}; known: {', '.join(KINDS)}")
        object.__setattr__(self, "grid", tuple(self.grid))

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    def arrays(self) -> dict[str, tuple[tuple[int, ...], str, tuple[str, ...]]]:
        """{name: (shape, dtype, dimension names)} of every array."""
        N, L, H, T = self.num_images, self.layers, self.heads, self.tokens
        main = {
            "gaussian": ("gaussians", (N, L, H, T, 4), ("image", "layer", "head", "query", "parameter")),
            "embedding": ("embeddings", (N, L, self.embedding_dim), ("image", "layer", "embedding")),
            "dense": ("maps", (N, L, H, T, T), ("image", "layer", "head", "query", "key")),
        }[self.kind]
        return {main[0]: (main[1], "float16", main[2]),
                "logits": ((N, self.num_classes), "float16", ("image", "class")),
                "labels": ((N,), "int64", ("image",))}

    @property
    def bytes_per_image(self) -> int:
        """Bytes of one image before compression."""
        return sum(math.prod(shape[1:]) * np.dtype(dtype).itemsize for shape, dtype, _ in self.arrays().values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all images before compression."""
        return self.bytes_per_image * self.num_images

    def sized(self, shard_bytes: int) -> Schema:
        """The schema with shards of about ``shard_bytes``."""
        images = max(1, min(self.num_images, shard_bytes // self.bytes_per_image))
        return Schema(**{**self.__dict__, "images_per_shard": images})

    def shards(self) -> list[Shard]:
        step = self.images_per_shard
        return [Shard(index, start, min(start + step, self.num_images))
                for index, start in enumerate(range(0, self.num_images, step))]

    def attributes(self, complete: bool) -> dict[str, Any]:
        """Attributes of the store's group."""
        own = {name: value for name, value in self.__dict__.items() if name not in ("extra", "num_images")}
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **own, "grid": list(self.grid),
                "num_images": self.num_images, "extra": self.extra, "complete": complete}

    @classmethod
    def from_attributes(cls, attributes: dict[str, Any], url: str) -> Schema:
        """Raises StoreError for attributes that no version of this format wrote."""
        if attributes.get("format") != FORMAT:
            raise StoreError(f"{url} is not a {FORMAT} store")
        if attributes.get("format_version") != FORMAT_VERSION:
            raise StoreError(f"{url}: format_version {attributes.get('format_version')}, this program reads "
                             f"{FORMAT_VERSION}")
        try:
            return cls(**{name: attributes[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError) as error:
            raise StoreError(f"{url}: damaged attributes: {error}") from None

    def metadata(self, complete: bool) -> dict[str, bytes]:
        """{key: contents} of every zarr.json of the store."""
        files: dict[str, Any] = {}
        group = zarr.create_group(zarr.storage.MemoryStore(files), attributes=self.attributes(complete))
        for name, (shape, dtype, dimensions) in self.arrays().items():
            shard = (self.images_per_shard, *shape[1:])
            chunk = (1, *shape[1:]) if name not in ("logits", "labels") else shard
            group.create_array(name, shape=shape, dtype=dtype, chunks=chunk, shards=shard, dimension_names=dimensions,
                               compressors=[ZstdCodec(level=3, checksum=True), Crc32cCodec()], fill_value=0)
        return {key: value.to_bytes() for key, value in files.items()}


def array_metadata(files: dict[str, bytes], name: str) -> dict[str, Any]:
    return json.loads(files[f"{name}/zarr.json"])
