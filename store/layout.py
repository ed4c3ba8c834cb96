"""How a schema becomes zarr files: shards, codecs, metadata, and the checks that hold them together.

Root attributes = the schema + `images_per_shard`, `complete`, `files_sha256` (a digest of every other metadata file and
of the decoder's files) and `root_sha256` (of the root file itself, with this digest as zeros). Two arrays of ours stand
beside the data, one row per shard: `shard_sha256` [S,A,32] uint8 and `shard_nbytes` [S,A] uint64 describe the shard's
file in each of the A data arrays. The row of `shard_sha256` is written last: it is what marks a shard as finished.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import zarr
import zarr.buffer
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore

from store.encoding import code_attributes
from store.errors import DamagedStore, StoreError
from store.files import Files
from store.schema import WITH_DECODER, Schema

FORMAT, FORMAT_VERSION = "gaupipe-maps", 1
ROOT = "zarr.json"
RECORDS = ("shard_sha256", "shard_nbytes")  # arrays of ours, one row a shard
SHARD_BYTES = 32 * 2**20
COLUMN_BYTES = 256  # an array with fewer bytes an image is compressed by whole shards and held in memory by readers
MISSING = {"float16": float("nan"), "uint8": 0, "int64": -1}  # fill values; no image is ever stored with them
_ZEROS = "0" * 64


class Shard(NamedTuple):
    """The images start <= id < stop; one file in every array."""

    index: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """A store's description: all that is needed to name, write and check its files."""

    schema: Schema
    images_per_shard: int
    files_sha256: dict[str, str]
    complete: bool = False

    @property
    def names(self) -> list[str]:
        return list(self.schema.arrays())

    @property
    def shards(self) -> list[Shard]:
        n, step = self.schema.num_images, self.images_per_shard
        return [Shard(index, start, min(start + step, n)) for index, start in enumerate(range(0, n, step))]

    def shard_file(self, name: str, index: int) -> str:
        """The file of one shard of one array."""
        return f"{name}/{shard_key(index, len(self.schema.arrays()[name].shape))}"

    def record_file(self, index: int) -> str:
        """The file that says, by being there, that a shard is finished."""
        return f"shard_sha256/{shard_key(index, 3)}"

    def is_column(self, name: str) -> bool:
        return is_column(self.schema, name)

    def root_file(self) -> bytes:
        """The bytes of the group's zarr.json."""
        return seal({"format": FORMAT, "format_version": FORMAT_VERSION, **self.schema.to_attributes(),
                     "images_per_shard": self.images_per_shard, "complete": self.complete,
                     "files_sha256": self.files_sha256})

    @classmethod
    def from_root_file(cls, data: bytes | None, url: str) -> Layout:
        """Reads zarr.json. Raises StoreError when it is not ours and DamagedStore when any bit of it has changed."""
        if data is None:
            raise StoreError(f"{url}: no attention-map store there (no {ROOT}); export one with gaupipe export-maps")
        damaged = f"{url}: {ROOT} is damaged or was edited; repair it with gaupipe export-maps --repair"
        try:
            root = json.loads(data)
            attributes = root["attributes"]
            ours = attributes.get("format") == FORMAT
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedStore(damaged) from None
        if not ours and "root_sha256" not in attributes:
            raise StoreError(f"{url}: a zarr group, but not a store of attention maps (attribute format is not {FORMAT!r})")
        attributes.pop("root_sha256", None)
        if seal(attributes) != data:
            raise DamagedStore(damaged)
        if attributes["format_version"] > FORMAT_VERSION:
            raise StoreError(f"{url}: format version {attributes['format_version']}, this gaupipe reads up to "
                             f"{FORMAT_VERSION}; a newer gaupipe reads it")
        return cls(Schema.from_attributes(attributes), attributes["images_per_shard"], attributes["files_sha256"],
                   attributes["complete"])


def shard_key(index: int, dimensions: int) -> str:
    """zarr's name, within an array, for the chunk at `index` along axis 0 that covers all other axes."""
    return "/".join(["c", str(index)] + ["0"] * (dimensions - 1))


def is_column(schema: Schema, name: str) -> bool:
    """Whether an image's part of the array is so small that the whole shard is one chunk."""
    return math.prod(schema.arrays()[name].shape[1:]) * schema.stored_dtype(name).itemsize < COLUMN_BYTES


def plan(schema: Schema, shard_bytes: int, decoder: Mapping[str, np.ndarray] | None) -> tuple[Layout, dict[str, bytes]]:
    """The layout of a new store and its metadata files (root excluded) with the decoder's files, by name."""
    per_shard = max(1, min(schema.num_images, shard_bytes // schema.bytes_per_image))
    files = metadata_files(schema, per_shard, decoder)
    return Layout(schema, per_shard, {key: sha256(data) for key, data in files.items()}), files


def metadata_files(schema: Schema, per_shard: int, decoder: Mapping[str, np.ndarray] | None) -> dict[str, bytes]:
    """Every file of the store that does not depend on the images, without the root's: zarr-python writes them."""
    if (schema.kind in WITH_DECODER) != bool(decoder):
        raise StoreError(f"a store of kind {schema.kind!r} needs its decoder's arrays" if not decoder
                         else f"a store of kind {schema.kind!r} has no decoder")
    buffers: dict = {}
    group = zarr.create_group(MemoryStore(buffers))
    checked = [ZstdCodec(level=1, checksum=True), Crc32cCodec()]
    for name, spec in schema.arrays().items():
        rows = per_shard if is_column(schema, name) else 1
        dtype = schema.stored_dtype(name)
        group.create_array(name, shape=spec.shape, dtype=dtype, chunks=(rows, *spec.shape[1:]),
                           shards=(per_shard, *spec.shape[1:]), filters=None, compressors=checked,
                           fill_value=MISSING[dtype.name], dimension_names=spec.dimension_names,
                           attributes=code_attributes(schema, name))
    num_shards, num_arrays = -(-schema.num_images // per_shard), len(schema.arrays())
    for name, dtype, tail, dimensions in (("shard_sha256", "uint8", (num_arrays, 32), ("shard", "array", "byte")),
                                          ("shard_nbytes", "uint64", (num_arrays,), ("shard", "array"))):
        group.create_array(name, shape=(num_shards, *tail), chunks=(1, *tail), dtype=dtype, filters=None, fill_value=0,
                           serializer=BytesCodec(), compressors=[Crc32cCodec()], dimension_names=dimensions,
                           attributes={"arrays": list(schema.arrays())})
    if decoder:
        weights = group.create_group("decoder")
        for name, values in decoder.items():
            if "/" in name or not np.isfinite(values).all():
                raise StoreError(f"decoder array {name!r}: " + ("a name has no '/'" if "/" in name
                                 else "it has values that are not finite; train the decoder again"))
            weights.create_array(name, data=np.ascontiguousarray(values), chunks=values.shape, filters=None,
                                 compressors=checked, config={"write_empty_chunks": True})
    return {key: buffer.to_bytes() for key, buffer in buffers.items() if key != ROOT}


def read_decoder(files: Files, layout: Layout) -> dict[str, np.ndarray]:
    """The decoder's arrays, every file checked against its digest. Raises DamagedStore."""
    keys = [key for key in layout.files_sha256 if key.startswith("decoder/")]
    if not keys:
        return {}
    buffers = {key: zarr.buffer.default_buffer_prototype().buffer.from_bytes(read_checked(files, layout, key))
               for key in keys}
    group = zarr.open_group(MemoryStore(buffers), path="decoder", mode="r")
    return {name: array[...] for name, array in group.arrays()}


def read_checked(files: Files, layout: Layout, key: str) -> bytes:
    """A metadata or decoder file. Raises DamagedStore when it is missing or any bit has changed."""
    data = files.read(key)
    if data is None or sha256(data) != layout.files_sha256[key]:
        raise DamagedStore(f"{files.url}: {key} is {'missing' if data is None else 'damaged or was edited'}; "
                           "repair it with gaupipe export-maps --repair")
    return data


def seal(attributes: dict) -> bytes:
    """The root zarr.json with these attributes and `root_sha256`, the digest of the file with that digest as zeros."""
    root = {"zarr_format": 3, "node_type": "group", "attributes": {**attributes, "root_sha256": _ZEROS}}
    text = json.dumps(root, indent=2, allow_nan=False)
    head, _, tail = text.rpartition(_ZEROS)
    return (head + sha256(text.encode()) + tail).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
