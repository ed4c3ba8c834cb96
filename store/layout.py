"""A schema as zarr files: shards, codecs, metadata, and the checks that hold them
together.

Root attributes = the schema + `images_per_shard`, `complete`, `files_sha256` (a digest of every
other metadata file and of the decoder's files) and `root_sha256` (of the root file itself, with
this digest as zeros). Arrays of ours stand beside the data, one file a shard for all A data arrays:

    shard_sha256  [S, A, 32] uint8    digest of the shard's file in each data array
    shard_nbytes  [S, A]     uint64   its size in bytes
    image_crc32c  [N, A]     uint32   checksum of each image's stored numbers

The row of `shard_sha256` is written last: it is what marks a shard as finished. Both checksums are
bound to the store, the array and the shard they belong to (`Layout.shard_digest`,
`Layout.image_mask`), so that neither a shard nor its checksums pass for those of another place or
teacher.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import zarr
import zarr.buffer
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore

from store.errors import OtherVersion, StoreError, UnfinishedStore, damaged
from store.files import Files
from store.schema import Schema

FORMAT, FORMAT_VERSION = "gaupipe-maps", 5
"""The name of the format, and the only version that is written and read."""
ROOT = "zarr.json"
FINISHED = "shard_sha256"
"""The record whose file of a shard says, by being there, that the shard is finished."""
SHARD_BYTES = 32 * 2**20
LARGEST_SHARD = 2**32
"""Bytes of a shard before compression, or of the decoder, that anybody is asked to hold in
memory."""
COLUMN_BYTES = 256
"""An array with fewer bytes an image is compressed by whole shards; readers hold it in memory."""
_ZEROS = "0" * 64


class Shard(NamedTuple):
    """The images start <= id < stop; one file in every array."""

    index: int  # type: ignore[assignment]  # the name that readers know, over tuple's method
    start: int
    stop: int


class RecordSpec(NamedTuple):
    """One array of ours: its shape, the rows of a shard, and its dtype."""

    shape: tuple[int, ...]
    rows: int
    dtype: str
    dimension_names: tuple[str, ...]


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
    def records(self) -> dict[str, RecordSpec]:
        """The arrays of ours that stand beside the data."""
        shards, arrays, images = self.num_shards, len(self.names), self.schema.num_images
        axes = ("shard", "array")
        return {
            "shard_sha256": RecordSpec((shards, arrays, 32), 1, "uint8", (*axes, "byte")),
            "shard_nbytes": RecordSpec((shards, arrays), 1, "uint64", axes),
            "image_crc32c": RecordSpec(
                (images, arrays), self.images_per_shard, "uint32", ("image", "array")
            ),
        }

    @property
    def num_shards(self) -> int:
        return -(-self.schema.num_images // self.images_per_shard)

    @property
    def shards(self) -> list[Shard]:
        return [self.shard(index) for index in range(self.num_shards)]

    def shard(self, index: int) -> Shard:
        start = index * self.images_per_shard
        return Shard(index, start, min(start + self.images_per_shard, self.schema.num_images))

    def shard_file(self, name: str, index: int) -> str:
        """The file of one shard of one array, data or record."""
        spec = self.records.get(name) or self.schema.arrays()[name]
        return f"{name}/{shard_key(index, len(spec.shape))}"

    def finished(self, files: Files) -> list[int]:
        """The indices of the finished shards, in order; read from the store at every call."""
        keys = {key: key.split("/")[2] for key in files.list("shard_sha256/c/")}
        indices = [int(index) for index in keys.values() if index.isdecimal()]
        return sorted(
            index
            for index in indices
            if index < self.num_shards and self.shard_file(FINISHED, index) in keys
        )

    def record_rows(self, name: str, shard: Shard) -> Shard:
        """The rows of a record that lie in the shard's file of it."""
        return shard if name == "image_crc32c" else Shard(shard.index, shard.index, shard.index + 1)

    def is_column(self, name: str) -> bool:
        """True for an array with so few bytes an image that a whole shard is one chunk."""
        numbers = math.prod(self.schema.arrays()[name].shape[1:])
        return numbers * self.schema.stored_dtype(name).itemsize < COLUMN_BYTES

    @functools.cached_property
    def identity(self) -> str:
        """sha256, in hex, of what makes this store this store: all attributes of the schema but
        `extra`, and `images_per_shard`."""
        fields = self.schema.to_attributes() | {"images_per_shard": self.images_per_shard}
        del fields["extra"]
        return sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())

    def shard_digest(self, name: str, index: int, data: bytes) -> bytes:
        """The entry of a shard's file in `shard_sha256`: the sha256 of the text
        `IDENTITY/ARRAY/INDEX/SHA256`, with the store's identity and the file's sha256 in hex."""
        text = f"{self.identity}/{name}/{index}/{sha256(data)}"
        return hashlib.sha256(text.encode()).digest()

    def image_mask(self, name: str, index: int) -> int:
        """A number that the crc32c of a shard's images are combined with (exclusive or) in
        `image_crc32c`: the first four bytes, little end first, of the sha256 of the text
        `IDENTITY/ARRAY/INDEX`."""
        digest = hashlib.sha256(f"{self.identity}/{name}/{index}".encode()).digest()
        return int.from_bytes(digest[:4], "little")

    def root_file(self) -> bytes:
        """The bytes of the group's zarr.json."""
        return seal(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                **self.schema.to_attributes(),
                "images_per_shard": self.images_per_shard,
                "complete": self.complete,
                "files_sha256": self.files_sha256,
            }
        )

    @classmethod
    def from_root_file(cls, data: bytes | None, url: str) -> Layout:
        """Reads zarr.json. Raises UnfinishedStore when it is not there, StoreError when it is
        not ours and DamagedStore when any bit of it has changed or it contradicts itself."""
        if data is None:
            raise UnfinishedStore(
                f"{url}: no attention-map store there (no {ROOT}); "
                "export one with gaupipe export-maps"
            )
        broken = damaged(url, f"{ROOT} is damaged or was edited")
        try:
            attributes = json.loads(data)["attributes"]
            ours = attributes.get("format") == FORMAT
            sealed = "root_sha256" in attributes
            attributes.pop("root_sha256", None)
            whole = seal(attributes) == data
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise broken from None
        if not ours and (whole or not sealed):
            raise StoreError(
                f"{url}: a zarr group, but not a store of attention maps "
                f"(attribute format is not {FORMAT!r})"
            )
        if not whole:
            raise broken
        version = attributes.get("format_version")
        if version != FORMAT_VERSION:
            raise OtherVersion(
                f"{url}: format version {str(version)[:20]}, this gaupipe reads {FORMAT_VERSION} "
                "alone; write the store anew with gaupipe export-maps --overwrite"
            )
        try:
            return cls._from_attributes(attributes)
        except StoreError as error:
            raise damaged(url, f"{ROOT} contradicts itself: {error}") from None

    @classmethod
    def _from_attributes(cls, attributes: dict) -> Layout:
        """Raises StoreError for attributes that no writer of ours writes."""
        schema = Schema.from_attributes(attributes)
        files: Any = attributes.get("files_sha256")
        per_shard, complete = (attributes.get(name) for name in ("images_per_shard", "complete"))
        if (
            type(per_shard) is not int
            or not 1 <= per_shard <= schema.num_images
            or (per_shard > 1 and per_shard * schema.bytes_per_image > LARGEST_SHARD)
        ):
            raise StoreError(
                f"images_per_shard is {per_shard!r}; it must be from 1 to {schema.num_images}, and "
                f"a shard of at most {LARGEST_SHARD} bytes"
            )
        if type(complete) is not bool:
            raise StoreError(f"complete is {complete!r}; it must be true or false")
        layout = cls(schema, per_shard, files, complete)
        needed = {f"{name}/{ROOT}" for name in (*layout.names, *layout.records)}
        others = files.keys() - needed if isinstance(files, dict) else {None}
        of_decoder = all(key and key.startswith("decoder/") and ".." not in key for key in others)
        if not of_decoder or not needed <= files.keys():
            raise StoreError(
                f"files_sha256 must name {', '.join(sorted(needed))} and the decoder's files"
            )
        return layout


def shard_key(index: int, dimensions: int) -> str:
    """zarr's name, within an array, for the chunk at `index` along axis 0 that covers all other
    axes."""
    return "/".join(["c", str(index)] + ["0"] * (dimensions - 1))


def plan(
    schema: Schema,
    shard_bytes: int,
    decoder: Mapping[str, np.ndarray] | None,
    per_shard: int | None = None,
) -> tuple[Layout, dict[str, bytes]]:
    """The layout of a new store and, by name, every file of it that does not depend on the images,
    without the root's. ``per_shard`` images go into a shard, or as many as ``shard_bytes`` hold."""
    if shard_bytes > LARGEST_SHARD:
        raise StoreError(f"a shard is too large; at most {LARGEST_SHARD} bytes are possible")
    fitting = max(1, min(schema.num_images, shard_bytes // schema.bytes_per_image))
    layout = Layout(schema, per_shard or fitting, {})
    files = metadata_files(layout, decoder or {})
    digests = {key: sha256(data) for key, data in files.items()}
    return dataclasses.replace(layout, files_sha256=digests), files


def metadata_files(layout: Layout, decoder: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """The files of :func:`plan`; zarr-python writes them."""
    schema, per_shard = layout.schema, layout.images_per_shard
    if schema.kind_class.decoder != bool(decoder):
        needs = "has no decoder" if decoder else "needs its decoder's arrays"
        raise StoreError(f"a store of kind {schema.kind!r} {needs}")
    buffers: dict = {}
    group = zarr.create_group(MemoryStore(buffers))
    checked = [ZstdCodec(level=1, checksum=True), Crc32cCodec()]
    for name, spec in schema.arrays().items():
        rows = per_shard if layout.is_column(name) else 1
        group.create_array(
            name,
            shape=spec.shape,
            dtype=schema.stored_dtype(name),
            chunks=(rows, *spec.shape[1:]),
            shards=(per_shard, *spec.shape[1:]),
            filters=None,
            compressors=checked,
            fill_value=schema.fill_value(name),
            dimension_names=spec.dimension_names,
            attributes=dict(spec.numbers.codes) if schema.has_codes(name) else {},
        )
    for name, record in layout.records.items():
        group.create_array(
            name,
            shape=record.shape,
            chunks=(record.rows, *record.shape[1:]),
            dtype=record.dtype,
            filters=None,
            fill_value=0,
            serializer=BytesCodec(),
            compressors=[Crc32cCodec()],
            dimension_names=record.dimension_names,
            attributes={"arrays": layout.names},
        )
    weights = group.create_group("decoder") if decoder else group
    for name, values in decoder.items():
        if not np.isfinite(values).all():
            raise StoreError(f"decoder array {name!r} is not finite; train the decoder again")
        weights.create_array(
            name,
            data=np.ascontiguousarray(values),
            chunks=values.shape,
            filters=None,
            compressors=checked,
            config={"write_empty_chunks": True},
        )
    return {key: buffer.to_bytes() for key, buffer in buffers.items() if key != ROOT}


def read_metadata(files: Files, layout: Layout, name: str) -> dict:
    """The zarr.json of one array, data or record. Raises DamagedStore when any bit of it has
    changed."""
    return json.loads(read_checked(files, layout, f"{name}/{ROOT}"))


def read_decoder(files: Files, layout: Layout) -> dict[str, np.ndarray]:
    """The decoder's arrays, every file checked against its digest. Raises DamagedStore."""
    keys = [key for key in layout.files_sha256 if key.startswith("decoder/")]
    if not keys:
        return {}
    as_buffer = zarr.buffer.default_buffer_prototype().buffer.from_bytes
    buffers = {key: as_buffer(read_checked(files, layout, key)) for key in keys}
    group = zarr.open_group(MemoryStore(buffers), path="decoder", mode="r")
    arrays: dict[str, Any] = dict(group.arrays())  # zarr says that [...] may be a scalar
    return {name: array[...] for name, array in arrays.items()}


def read_checked(files: Files, layout: Layout, key: str) -> bytes:
    """A metadata or decoder file. Raises DamagedStore when it is missing or any bit has changed."""
    data = files.read(key)
    if data is None or sha256(data) != layout.files_sha256[key]:
        state = "missing" if data is None else "damaged or was edited"
        raise damaged(files.url, f"{key} is {state}")
    return data


def seal(attributes: dict) -> bytes:
    """The root zarr.json with these attributes and `root_sha256`, the digest of the file with
    that digest as zeros."""
    root = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {**attributes, "root_sha256": _ZEROS},
    }
    text = json.dumps(root, indent=2, allow_nan=False)
    head, _, tail = text.rpartition(_ZEROS)
    return (head + sha256(text.encode()) + tail).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
