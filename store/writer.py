"""Writing a store: whole shards, in any order, by any number of processes that never share a
shard."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping

import numpy as np

from store.encoding import image_crc32c
from store.errors import DamagedStore, OtherVersion, StoreError
from store.files import Files
from store.layout import (
    FINISHED,
    ROOT,
    SHARD_BYTES,
    Layout,
    Shard,
    plan,
    read_decoder,
    read_metadata,
    shard_key,
)
from store.schema import Schema
from store.shards import encode_shard


class Writer:
    """Writes shards of one store; made by `create`, `join` or `repair`.

    A shard is finished once its files are safely on the disk and its row in `shard_sha256` says so.
    What a killed process had begun is pending again, and is replaced whole.
    """

    def __init__(self, files: Files, layout: Layout):
        self._files, self._layout = files, layout
        self._metadata = {
            name: read_metadata(files, layout, name) for name in (*layout.names, *layout.records)
        }

    @property
    def url(self) -> str:
        return self._files.url

    @property
    def schema(self) -> Schema:
        return self._layout.schema

    @property
    def shards(self) -> list[Shard]:
        """All shards, in order of image ids."""
        return self._layout.shards

    def pending(self) -> list[Shard]:
        """The shards that are not finished, whoever writes them; read from the store at every
        call."""
        finished = set(self._layout.finished(self._files))
        return [shard for shard in self.shards if shard.index not in finished]

    def write(self, shard: Shard, arrays: Mapping[str, np.ndarray]) -> None:
        """Stores one shard: for every array of the schema the rows of images shard.start ..
        shard.stop-1.

        Values of any float dtype (labels: any integer). When it returns, the shard survives a power
        cut. Raises StoreError for a wrong name or shape, for NaN (with the image id), and when the
        storage fails.
        """
        specs = self.schema.arrays()
        if set(arrays) != set(specs):
            raise StoreError(
                f"a shard of this store has the arrays {', '.join(specs)}; "
                f"given: {', '.join(arrays)}"
            )
        files, checksums = {}, []
        for name, spec in specs.items():
            values, shape = np.asarray(arrays[name]), (shard.stop - shard.start, *spec.shape[1:])
            if values.shape != shape:
                raise StoreError(
                    f"{name} of shard {shard.index} has shape {values.shape}; {shape} is right"
                )
            stored = self.schema.encode(name, values, shard.start)
            files[name] = self._encode(name, shard, stored)
            checksums.append(
                image_crc32c(stored) ^ np.uint32(self._layout.image_mask(name, shard.index))
            )
        self._write(shard, files)
        digests = [
            list(self._layout.shard_digest(name, shard.index, data)) for name, data in files.items()
        ]
        records = {
            "shard_nbytes": np.array([[len(data) for data in files.values()]], np.uint64),
            "image_crc32c": np.stack(checksums, axis=1),
            "shard_sha256": np.array([digests], np.uint8),
        }
        encoded = {
            name: self._encode(name, self._layout.record_rows(name, shard), records[name])
            for name in self._layout.records
        }
        finished = {"shard_sha256": encoded.pop("shard_sha256")}
        self._write(shard, encoded)
        self._write(shard, finished)

    def reopen(self, shards: Iterable[int]) -> None:
        """Makes finished shards (by index) pending again; the store counts as incomplete from
        now on."""
        self._set_complete(False)
        for index in set(shards):
            self._files.delete(self._layout.shard_file(FINISHED, index))

    def finish(self) -> None:
        """Declares the store complete. Raises StoreError while a shard is pending."""
        pending = self.pending()
        if pending:
            raise StoreError(
                f"{self.url}: {len(pending)} of {len(self.shards)} shards are not written yet, "
                f"first images {pending[0].start} to {pending[0].stop - 1}; continue the export"
            )
        self._set_complete(True)

    def _encode(self, name: str, rows: Shard, values: np.ndarray) -> bytes:
        return encode_shard(self._metadata[name], shard_key(rows.index, values.ndim), rows, values)

    def _write(self, shard: Shard, files: Mapping[str, bytes]) -> None:
        """Writes the shard's file of several arrays; returns when they are safe."""
        self._files.write_all(
            {self._layout.shard_file(name, shard.index): data for name, data in files.items()}
        )

    def _set_complete(self, complete: bool) -> None:
        self._layout = dataclasses.replace(self._layout, complete=complete)
        self._files.write(ROOT, self._layout.root_file())


def create(
    url: str | os.PathLike,
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
    given, when `resume` meets another schema, and when something else is there.
    """
    files = Files(url)
    root = read_root(files)
    if root is not None and not overwrite and not resume:
        raise StoreError(f"{files.url}: there is a store already; --overwrite replaces it")
    if root is not None and resume:
        return _resume(files, Layout.from_root_file(root, files.url), schema, decoder)
    layout, metadata = plan(schema, shard_bytes, decoder)
    if root is not None:
        _clear(files, root)
    files.write(ROOT, layout.root_file())
    files.write_all(metadata)
    return Writer(files, layout)


def check_place(url: str | os.PathLike) -> None:
    """Raises StoreError where neither a store is nor nothing at all."""
    read_root(Files(url))


def read_root(files: Files) -> bytes | None:
    """The root's metadata file; None where nothing is there. Raises StoreError where something else
    than a store is."""
    root = files.read(ROOT)
    if root is None and files.has_files() and (root := files.read(ROOT)) is None:
        # read again, as another process may create it
        raise StoreError(f"{files.url}: is not empty and not a store; choose another place")
    return root


def join(url: str | os.PathLike) -> Writer:
    """A writer for a store that another process created, to write other shards of it."""
    files = Files(url)
    return Writer(files, Layout.from_root_file(files.read(ROOT), files.url))


def _resume(
    files: Files, layout: Layout, schema: Schema, decoder: Mapping[str, np.ndarray] | None
) -> Writer:
    refuse_another(files.url, schema, layout.schema)
    missing = layout.files_sha256.keys() - set(files.list())
    if missing:  # the process was killed while it created the store
        _, metadata = plan(schema, 0, decoder, layout.images_per_shard)
        files.write_all({key: metadata[key] for key in missing})
    stored = read_decoder(files, layout) if decoder else {}
    if decoder and not (
        decoder.keys() == stored.keys()
        and all(np.array_equal(decoder[name], stored[name]) for name in stored)
    ):
        raise _another(files.url, "another decoder")
    return Writer(files, layout)


def refuse_another(url: str, schema: Schema, stored: Schema) -> None:
    """Raises StoreError where the store at ``url`` is of another schema."""
    if difference := schema.difference(stored):
        raise _another(url, difference)


def _another(url: str, difference: str) -> StoreError:
    what = f"another export is there, with {difference}"
    return StoreError(f"{url}: {what}; --overwrite replaces it")


def _clear(files: Files, root: bytes) -> None:
    try:
        layout = Layout.from_root_file(root, files.url)
        files.write(ROOT, dataclasses.replace(layout, complete=False).root_file())
    except (DamagedStore, OtherVersion):
        pass  # no reader takes it for whole
    for key in files.list():
        if key != ROOT:
            files.delete(key)
