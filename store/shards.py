"""One shard's file, encoded and decoded in memory by tensorstore: whole files are hashed,
written and checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorstore as ts

from store.files import damage
from store.layout import Shard


def encode_shard(metadata: dict, key: str, shard: Shard, values: np.ndarray) -> bytes:
    """The bytes of the shard's file. `metadata` is the array's zarr.json, `key` the file's name
    within the array."""
    array = in_memory(metadata)
    array[shard.start : shard.stop].write(values).result()
    return array.kvstore.read(key).result().value


def decode_shard(metadata: dict, key: str, shard: Shard, data: bytes) -> list[np.ndarray | str]:
    """Each image's stored numbers, or what is wrong with them (one line)."""
    array = in_memory(metadata)
    array.kvstore.write(key, data).result()
    images = array[shard.start : shard.stop]
    try:
        return list(images.read().result())
    except ValueError:
        return [_read_one(images[image : image + 1]) for image in range(shard.start, shard.stop)]


def _read_one(image: ts.TensorStore) -> np.ndarray | str:
    try:
        return image.read().result()[0]
    except ValueError as error:
        return damage(error) or str(error)


def in_memory(metadata: dict) -> Any:
    """An empty array with this zarr.json, in memory: a tensorstore, with files."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}
    return ts.open(spec, create=True, context=ts.Context()).result()
