"""Writing a store: whole shards, in any order, by any number of processes that never share a
shard."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from store.errors import DamagedStore, OtherVersion, StoreError
from store.files import Files
from store.layout import (
    ROOT,
    SHARD_BYTES,
    Layout,
    Shard,
    open_layout,
    plan,
    read_decoder,
    refuse_lost_shards,
)
from store.manifest import (
    FINISHED,
    MANIFEST,
    Manifest,
    finished_shards,
    read_checked,
    read_manifest,
    write_entry,
)
from store.schema import Schema

CARD = "README.md"
LONGEST_WRITE = 600.0
"""Seconds between two writes to one file, at the most."""


class Writer:
    """Writes shards of one store; made by `create`, `join` or `repair`.

    A shard is finished once its files are safely on the disk and its entry of the manifest is as
    well. What a killed process had begun is pending again, and is replaced whole. Once another
    process has begun the store anew, every method that writes raises StoreError, and no write that
    is still under way arrives.
    """

    def __init__(self, files: Files, layout: Layout, manifest: Manifest):
        self._files = files
        self._layout = layout
        self._manifest = manifest
        self._metadata = {
            name: json.loads(read_checked(files, manifest, f"{name}/{ROOT}"))
            for name in layout.names
        }

    @property
    def url(self) -> str:
        return self._files.url

    @property
    def schema(self) -> Schema:
        return self._layout.schema

    @property
    def complete(self) -> bool:
        return self._layout.complete and self._manifest.writing is None

    @property
    def shards(self) -> list[Shard]:
        """All shards, in order of image ids."""
        return self._layout.shards

    def pending(self) -> list[Shard]:
        """The shards that are not finished, whoever writes them; read from the store at every
        call."""
        finished = finished_shards(self._files)
        self._check_same()
        return [shard for shard in self.shards if shard.index not in finished]

    def write(self, shard: Shard, arrays: Mapping[str, np.ndarray]) -> None:
        """Stores one shard: for every array of the schema the rows of images shard.start ..
        shard.stop-1.

        Values of any float dtype (labels: any integer; names: what `pack_names` makes of them).
        When it returns, the shard survives a power cut; in a store that has become complete it
        stays as it is. Raises StoreError for a wrong name or shape, for NaN (with the image id),
        and when the storage fails.
        """
        specs = self.schema.arrays
        if set(arrays) != set(specs):
            raise StoreError(
                f"a shard of this store has the arrays {', '.join(specs)}; "
                f"given: {', '.join(arrays)}"
            )
        encoded = {}
        for name, spec in specs.items():
            values = np.asarray(arrays[name])
            shape = (shard.stop - shard.start, *spec.shape[1:])
            if values.shape != shape:
                raise StoreError(
                    f"{name} of shard {shard.index} has shape {values.shape}; {shape} is right"
                )
            stored = self.schema.encode(name, values, shard.start)
            key = self._layout.shard_key(name, shard.index)
            encoded[name] = encode_shard(self._metadata[name], key, shard, stored)
        files = {self._layout.shard_file(name, shard.index): data for name, data in encoded.items()}
        # Another process may begin the store anew between the look whose store it is and the write.
        # No lock is held meanwhile, as object stores have none; but a write arrives only where the
        # files are as they were before the look. Where they are not, both are repeated.
        while True:
            seen = self._files.generations(files)
            writing = self._check_same().writing
            if writing is None:  # the store has become complete, with this shard in it
                return
            if self._files.write_all(files, seen):
                break
        # last: from now on the shard is finished
        write_entry(self._files, writing, shard.index, encoded)

    def reopen(self, shards: Iterable[int]) -> None:
        """Makes finished shards (by index) pending again; the store counts as incomplete from
        now on."""
        kept = finished_shards(self._files)
        writing = self._check_same().writing or secrets.token_hex(8)
        self._layout = dataclasses.replace(self._layout, complete=False)
        # first: no reader may take the store for whole from here on
        self._files.write(ROOT, self._layout.root_file())
        for index in shards:
            kept.pop(index, None)
        self._manifest = dataclasses.replace(self._manifest, shards=kept, writing=writing)
        self._files.write(MANIFEST, self._manifest.to_file())
        self.drop_entries()

    def finish(self, alone: bool = False) -> None:
        """Declares the store complete, and removes what killed writes have left; if this process is
        not `alone` with the store, what is older than :data:`LONGEST_WRITE`. Raises StoreError
        while a shard is pending."""
        while True:  # again where another process of this export was quicker
            seen = self._files.generations([MANIFEST, ROOT])
            finished = finished_shards(self._files)
            self._check_same()
            pending = [shard for shard in self.shards if shard.index not in finished]
            if pending:
                raise StoreError(
                    f"{self.url}: {len(pending)} of {len(self.shards)} shards are not written yet, "
                    f"first images {pending[0].start} to {pending[0].stop - 1}; continue the export"
                )
            manifest = dataclasses.replace(self._manifest, shards=finished, writing=None)
            layout = dataclasses.replace(self._layout, complete=True)
            written = self._files.write_all({MANIFEST: manifest.to_file()}, seen)
            if written and self._files.write_all({ROOT: layout.root_file()}, seen):
                break
        self._manifest = manifest
        self._layout = layout
        self.drop_entries()
        self._files.remove_locks(0 if alone else LONGEST_WRITE)

    def add_card(self, text: str) -> None:
        """Adds README.md. The manifest does not name it, and one that is there stays: people edit
        it."""
        self._check_same()
        self._files.create(CARD, text.encode())

    def drop_entries(self) -> None:
        """Removes the entries that the manifest has taken in, or that are of a store before."""
        self._files.delete_all(self._files.list(FINISHED))

    def _check_same(self) -> Manifest:
        """The manifest as it is now. Raises StoreError where it is of a store that another process
        has begun."""
        manifest = read_manifest(self._files)
        if (
            manifest is None
            or manifest.metadata != self._manifest.metadata
            or manifest.writing not in (self._manifest.writing, None)
        ):
            raise begun_anew(self.url)
        return manifest


def encode_shard(metadata: dict[str, Any], key: str, shard: Shard, values: np.ndarray) -> bytes:
    """The bytes of a shard's file, made in memory so that they can be hashed. `metadata` is the
    array's zarr.json, `key` the file's name within the array."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}
    array: Any = ts.open(spec, create=True, context=ts.Context()).result()
    array[shard.start : shard.stop].write(values).result()
    return array.kvstore.read(key).result().value


def create(
    url: str | os.PathLike[str],
    schema: Schema,
    *,
    overwrite: bool = False,
    resume: bool = False,
    shard_bytes: int = SHARD_BYTES,
    decoder: Mapping[str, np.ndarray] | None = None,
) -> Writer:
    """A new store at `url`, or with `resume` the one that is there, its finished shards kept.

    `shard_bytes` is the size of a shard before compression. `decoder`: the arrays that turn
    embeddings into Gaussians, for kind 'embedding', or those that all images share, for kind
    'prior'. Raises StoreError when a store is there already and neither `overwrite` nor `resume` is
    given, when `resume` meets another schema or decoder, and when something else is there.
    """
    files = Files(url)
    root = read_root(files)
    if root is not None:
        if resume:
            return _resume(files, root, schema, decoder)
        if not overwrite:
            raise StoreError(
                f"{files.url}: a store is there already; overwrite=True (--overwrite) replaces it"
            )
        _clear(files, root)
    layout, metadata, manifest = plan(schema, shard_bytes, decoder)
    if root is not None:
        files.write(ROOT, layout.root_file())
    else:
        files.create(ROOT, layout.root_file())
        first = files.read(ROOT)
        if first != layout.root_file():  # of a process that was quicker
            return _resume(files, first, schema, decoder)
    return _write_metadata(files, layout, metadata, manifest)


def _write_metadata(
    files: Files, layout: Layout, metadata: Mapping[str, bytes], manifest: Manifest
) -> Writer:
    """Writes what a new store has beside its root before a shard is written; returns its writer."""
    files.write_all(metadata)
    # last, as from now on shards can be written; another process may have finished them by now
    files.create(MANIFEST, manifest.to_file())
    first = read_manifest(files)  # of a process that was quicker, under the name that it gave
    if first is None or first.metadata != manifest.metadata:
        raise begun_anew(files.url)
    return Writer(files, layout, first)


def check_place(url: str | os.PathLike[str]) -> None:
    """Raises StoreError where neither a store is nor nothing at all."""
    read_root(Files(url))


def read_root(files: Files) -> bytes | None:
    """The root's metadata file; None where nothing is there. Raises StoreError where something else
    than a store is."""
    root = files.read(ROOT)
    if root is None and files.has_files():
        root = files.read(ROOT)  # again, as another process may just have created the store
        if root is None:
            raise StoreError(f"{files.url}: is not empty and not a store; choose another place")
    return root


def join(url: str | os.PathLike[str]) -> Writer:
    """A writer for a store that another process created, to write other shards of it."""
    files = Files(url)
    return Writer(files, *open_layout(files))


def _resume(
    files: Files, root: bytes | None, schema: Schema, decoder: Mapping[str, np.ndarray] | None
) -> Writer:
    manifest = read_manifest(files)
    layout = Layout.from_root_file(root, manifest, files.url)
    refuse_another(files.url, schema, layout.schema)
    if manifest is None:  # the process was killed while it created the store
        return _write_metadata(files, *plan(schema, 0, decoder, layout.images_per_shard))
    refuse_lost_shards(layout, manifest, files.url)
    refuse_another_decoder(files, manifest, decoder)
    return Writer(files, layout, manifest)


def refuse_another(url: str, schema: Schema, stored: Schema) -> None:
    """Raises StoreError where the store at ``url`` is of another schema."""
    difference = schema.difference(stored)
    if difference:
        raise another_export(url, difference)


def refuse_another_decoder(
    files: Files, manifest: Manifest, decoder: Mapping[str, np.ndarray] | None
) -> None:
    """Raises StoreError where the store has another decoder, with which the embeddings of this
    export would be other Gaussians."""
    stored = read_decoder(files, manifest)
    given = decoder or {}
    same_names = stored.keys() == given.keys()
    if not same_names or not all(np.array_equal(stored[name], given[name]) for name in given):
        raise another_export(files.url, "another decoder")


def another_export(url: str, difference: str) -> StoreError:
    """The error for an export that cannot go on with the store of another."""
    remedy = "overwrite=True (--overwrite) replaces it"
    return StoreError(f"{url}: another export is there, with {difference}; {remedy}")


def begun_anew(url: str) -> StoreError:
    """The error for a process whose store is no longer there."""
    return StoreError(
        f"{url}: another process has begun the store anew, with --overwrite or --repair; wait for "
        "it to end, or choose another place"
    )


def _clear(files: Files, root: bytes) -> None:
    try:
        layout = Layout.from_root_file(root, read_manifest(files), files.url)
        files.write(ROOT, dataclasses.replace(layout, complete=False).root_file())
    except (DamagedStore, OtherVersion):
        pass  # no reader takes it for whole
    # the manifest first: it must not name shards that are gone
    files.delete_all(files.list("manifest/"))
    files.delete_all(key for key in files.list() if key != ROOT)
