"""A schema as zarr files: shards, codecs and metadata.

Root attributes = the schema + `format`, `format_version`, `images_per_shard` and `complete`. The
group `manifest` holds the sha256 of every file (see `store.manifest`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import zarr
import zarr.buffer
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore

from store.errors import OtherVersion, StoreError, UnfinishedStore, damaged
from store.files import Files
from store.manifest import (
    MANIFEST,
    Manifest,
    group_file,
    read_checked,
    read_manifest,
    sha256,
)
from store.schema import Schema

FORMAT = "gaupipe-maps"
FORMAT_VERSION = 7
"""The only version that is written and read."""
ROOT = "zarr.json"
SHARD_BYTES = 32 * 2**20
SHARD_IMAGES = 4096
"""The most images of a shard. Where an image is a few bytes, a shard of 32 MB would be a million
images: a killed export would begin anew, and nothing would be left for other parts."""
COLUMN_BYTES = 256
"""An array with fewer bytes an image is compressed by whole shards; readers hold it in memory."""


class Shard(NamedTuple):
    """The images start <= id < stop; one file in every array."""

    index: int  # type: ignore[assignment]  # the name that readers know, over tuple's method
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """A store's description: all that is needed to name and write its files. ``nodes`` are the
    zarr.json of its arrays, as the root's file repeats them: one request opens a store."""

    schema: Schema
    images_per_shard: int
    complete: bool = False
    nodes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.schema.arrays)

    @property
    def num_shards(self) -> int:
        return -(-self.schema.num_images // self.images_per_shard)

    def num_files(self, decoder: int) -> int:
        """The files of a complete store with its card, and with so many arrays of a decoder."""
        arrays = len(self.names)
        files = arrays * (self.num_shards + 1) + 3  # their metadata; root, manifest, card
        if decoder:
            files += 2 * decoder + 1  # each has metadata and one chunk, in a group of their own
        return files

    @property
    def shards(self) -> list[Shard]:
        return [self.shard(index) for index in range(self.num_shards)]

    def shard(self, index: int) -> Shard:
        start = index * self.images_per_shard
        return Shard(index, start, min(start + self.images_per_shard, self.schema.num_images))

    def shard_file(self, name: str, index: int) -> str:
        """The file of one shard of one array."""
        return f"{name}/{self.shard_key(name, index)}"

    def shard_key(self, name: str, index: int) -> str:
        """zarr's name, within an array, for its chunk of a shard: it covers all other axes."""
        dimensions = len(self.schema.arrays[name].shape)
        return "/".join(["c", str(index)] + ["0"] * (dimensions - 1))

    def is_column(self, name: str) -> bool:
        """True for an array with so few bytes an image that a whole shard is one chunk."""
        numbers = math.prod(self.schema.arrays[name].shape[1:])
        return numbers * self.schema.stored_dtype(name).itemsize < COLUMN_BYTES

    def root_file(self) -> bytes:
        """The bytes of the group's zarr.json."""
        return group_file(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                **self.schema.to_attributes(),
                "images_per_shard": self.images_per_shard,
                "complete": self.complete,
            },
            self.nodes,
        )

    def complete_root_file(self) -> bytes:
        return dataclasses.replace(self, complete=True).root_file()

    @classmethod
    def from_root_file(cls, data: bytes | None, manifest: Manifest | None, url: str) -> Layout:
        """Reads zarr.json. Raises UnfinishedStore when it is not there, StoreError when it is
        not ours, and DamagedStore when it is not what the manifest says.
        ``manifest`` is None in a store that is just being created."""
        if data is None:
            raise no_store(url)
        foreign = f"{url}: not a store of attention maps (attribute format is not {FORMAT!r})"
        broken = damaged(url, f"{ROOT} is damaged or was edited")
        try:
            root = json.loads(data)
            attributes = root["attributes"]
            nodes = root.get("consolidated_metadata", {}).get("metadata")
            complete = group_file({**attributes, "complete": True}, nodes)
            whole = group_file(attributes, nodes) == data
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if manifest is None:  # which every store has soon after its root
                raise StoreError(foreign) from None
            raise broken from None
        if manifest is not None and not (whole and sha256(complete) == manifest.metadata.get(ROOT)):
            raise broken
        if attributes.get("format") != FORMAT:
            raise StoreError(foreign)
        version = attributes.get("format_version")
        if version != FORMAT_VERSION:
            raise OtherVersion(
                f"{url}: format version {str(version)[:20]}, this gaupipe reads {FORMAT_VERSION} "
                "alone; write the store anew with gaupipe export-maps --overwrite"
            )
        schema = Schema.from_attributes(attributes)
        layout = cls(schema, attributes["images_per_shard"], attributes["complete"], nodes)
        if layout.complete and manifest is None:
            raise damaged(url, f"{MANIFEST} is missing")
        return layout


def open_layout(files: Files) -> tuple[Layout, Manifest]:
    """The description and the manifest of a store. Raises UnfinishedStore when there is no store or
    it is just being created, StoreError when it is not ours, and DamagedStore."""
    root = files.read(ROOT)
    manifest = None
    if root is not None:
        manifest = read_manifest(files)
    layout = Layout.from_root_file(root, manifest, files.url)
    if manifest is None:
        raise incomplete(files.url)
    return layout, manifest


def refuse_lost_shards(layout: Layout, manifest: Manifest, url: str) -> None:
    """Raises DamagedStore for a complete store whose manifest does not name a file of every array
    and shard. Names are compared; no file is read."""
    if not layout.complete:
        return
    names = layout.names  # once, as there may be many shards
    for shard in layout.shards:
        named = manifest.shards.get(shard.index, {})
        for name in names:
            if name not in named:
                images = f"images {shard.start} to {shard.stop - 1}"
                raise damaged(url, f"{MANIFEST} does not name the {name} of {images}")


def no_store(url: str) -> UnfinishedStore:
    return UnfinishedStore(
        f"{url}: no attention-map store there (no {ROOT}); "
        "export one with gaupipe export-maps, or name the place where it is now"
    )


def incomplete(url: str, what: str = "the store is incomplete") -> UnfinishedStore:
    remedy = "continue with gaupipe export-maps, or store.create(..., resume=True)"
    return UnfinishedStore(f"{url}: {what}; {remedy}")


def images_fitting(schema: Schema, shard_bytes: int) -> int:
    """The images of a shard that has at most ``shard_bytes``, or one that is larger."""
    fitting = min(shard_bytes // schema.bytes_per_image, SHARD_IMAGES, schema.num_images)
    return max(1, fitting)


def plan(
    schema: Schema,
    shard_bytes: int,
    decoder: Mapping[str, np.ndarray] | None,
    per_shard: int | None = None,
) -> tuple[Layout, dict[str, bytes], Manifest]:
    """The layout of a new store; by name, every file of it that does not depend on the images,
    without the root's; and its manifest before a shard is written. ``per_shard`` images go into a
    shard, or as many as ``shard_bytes`` hold."""
    layout = Layout(schema, per_shard or images_fitting(schema, shard_bytes))
    files = metadata_files(layout, decoder or {})
    end = f"/{ROOT}"
    nodes = {key[: -len(end)]: json.loads(files[key]) for key in files if key.endswith(end)}
    layout = dataclasses.replace(layout, nodes=nodes)
    described = {ROOT: layout.complete_root_file(), **files}
    digests = {key: sha256(data) for key, data in described.items()}
    return layout, files, Manifest(digests, {}, writing=secrets.token_hex(8))


def metadata_files(layout: Layout, decoder: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """The files of :func:`plan`; zarr-python writes them."""
    schema = layout.schema
    per_shard = layout.images_per_shard
    if decoder and not schema.store_kind.decoder:
        raise StoreError(f"a store of kind {schema.kind!r} has no decoder")
    if schema.store_kind.decoder and not decoder:
        raise StoreError(f"a store of kind {schema.kind!r} needs its decoder's arrays")
    buffers: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(buffers))
    checked = [ZstdCodec(level=1, checksum=True), Crc32cCodec()]
    for name, spec in schema.arrays.items():
        rows = 1  # a training reads single images in any order
        if layout.is_column(name):
            rows = per_shard
        attributes: dict[str, Any] = {}
        if schema.has_codes(name):
            attributes = dict(spec.numbers.codes)
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
            attributes=attributes,
        )
    if decoder:
        group = group.create_group("decoder")
    for name, values in decoder.items():
        if not np.isfinite(values).all():
            raise StoreError(f"decoder array {name!r} is not finite; train the decoder again")
        axes = [f"{name}_{axis}" for axis in range(values.ndim)]  # a network's weights' own
        if name == "prior" and values.ndim == 4:
            axes = ["layer", "head", "query", "raw"]
        group.create_array(
            name,
            data=np.ascontiguousarray(values),
            chunks=values.shape,
            filters=None,
            compressors=checked,
            config={"write_empty_chunks": True},
            dimension_names=axes,
        )
    return {key: buffer.to_bytes() for key, buffer in buffers.items() if key != ROOT}


def read_decoder(files: Files, manifest: Manifest) -> dict[str, np.ndarray]:
    """The decoder's arrays, every file checked against its digest. Raises DamagedStore."""
    keys = [key for key in manifest.metadata if key.startswith("decoder/")]
    if not keys:
        return {}
    as_buffer = zarr.buffer.default_buffer_prototype().buffer.from_bytes
    buffers = {key: as_buffer(read_checked(files, manifest, key)) for key in keys}
    group = zarr.open_group(MemoryStore(buffers), path="decoder", mode="r")
    arrays: dict[str, Any] = dict(group.arrays())  # zarr says that [...] may be a scalar
    return {name: array[...] for name, array in arrays.items()}
