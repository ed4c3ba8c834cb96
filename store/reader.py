"""Reading a store by image id, fast enough for training: batched gathers through tensorstore,
prefetched on a thread."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from store.errors import CorruptChunk, StoreError
from store.files import Files, explain, is_damage, local_folder, refuse_after_fork
from store.layout import (
    ROOT,
    Layout,
    Shard,
    incomplete,
    no_store,
    open_layout,
    read_decoder,
    refuse_lost_shards,
)
from store.manifest import Manifest, finished_shards, read_checked

INDEX_BYTES = 16
"""Of an image, in the index of its shard."""
MOST_INDEX_BYTES = 64 * 2**20
"""Of each array, that a reader keeps of the shards' indices."""


def open(
    url: str | os.PathLike[str],
    *,
    dataset_sha256: str | None = None,
    teacher_sha256: str | None = None,
    allow_incomplete: bool = False,
    preload_bytes: int = 0,
) -> Store:
    """Opens a store for reading.

    A store of at most `preload_bytes` (as numbers, uncompressed) is read into memory whole. Raises
    UnfinishedStore when there is no store or it is incomplete (unless allowed), StoreError when its
    data set or teacher is not the one asked for, and DamagedStore when its metadata changed after
    it was written, or does not name all of its shards.
    """
    files = Files(url)
    layout, manifest = open_layout(files)
    if not allow_incomplete:
        if not layout.complete:
            raise incomplete(files.url)
        refuse_lost_shards(layout, manifest, files.url)
    for what, stored, expected in (
        ("data set", layout.schema.dataset_sha256, dataset_sha256),
        ("teacher", layout.schema.teacher_sha256, teacher_sha256),
    ):
        if expected is not None and stored != expected:
            labels = "" if layout.schema.labelled else ", it has no labels"
            raise StoreError(
                f"{files.url}: is of another {what} ({stored[:16] or 'none'}{labels}) than asked "
                f"for ({expected[:16]}); export the maps of this run"
            )
    return Store(files, layout, manifest, preload_bytes)


def check_exists(url: str | os.PathLike[str]) -> None:
    """Raises UnfinishedStore for a folder without a store. Nothing is opened, and an object store,
    which may take long to answer, is not asked."""
    folder = local_folder(url)
    if folder is None or (folder / ROOT).is_file() or (folder / "manifest").is_dir():
        return
    raise no_store(str(url))


class Store:
    """A store opened for reading.

    Attributes: `schema`, `complete`, `url`. Thread-safe. Not usable in a forked process; give a
    spawned one the URL.

    zarr's checksum finds every flipped bit of an image's numbers when they are read. Files in each
    other's place are found by `verify`.
    """

    def __init__(self, files: Files, layout: Layout, manifest: Manifest, preload_bytes: int = 0):
        self.url = files.url
        self.schema = layout.schema
        self.complete = layout.complete
        self._files = files
        self._layout = layout
        self._manifest = manifest
        for name in layout.names:  # tensorstore would read by a zarr.json that was edited
            read_checked(files, manifest, f"{name}/{ROOT}")
        # no more than the indices need: the rest would fill with images that an epoch reads once
        indices = INDEX_BYTES * layout.num_shards * layout.images_per_shard + 2**20
        self._arrays = {}
        for name in layout.names:
            cached = 0  # of a column, which is read whole and kept in memory
            if not layout.is_column(name):
                cached = min(indices, MOST_INDEX_BYTES)
            self._arrays[name] = files.open_array(name, cached)
        self._in_memory: dict[str, np.ndarray] = {}
        if layout.complete and layout.schema.total_bytes <= preload_bytes:
            self._preload(layout.names)

    def __len__(self) -> int:
        return self.schema.num_images

    def gather(
        self, image_ids: np.ndarray, names: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        """The arrays `names`, by default all, of these images: {name: [len(image_ids), ...]}, rows
        in the order asked.

        float16, labels int64, keys uint8 or uint16, names uint8 (see `unpack_names`). Raises
        StoreError for an id out of range, UnfinishedStore for an image that is not written yet, and
        CorruptChunk, with the image id, when what is stored for one of them is damaged or missing.
        """
        ids = self._check_ids(image_ids)
        names = self._check_names(names)
        # one chunk holds a column of a whole shard, too much to decode again for each batch
        self._preload(filter(self._layout.is_column, names))
        return self._rows(names, ids, ids)

    def read(
        self, start: int, stop: int, names: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        """The arrays `names`, by default all, of the images start <= id < stop, as `gather` returns
        them.

        Nothing else is read and nothing is kept, where `gather` holds the labels of all images in
        memory: a look into a store of any size costs what is looked at. Raises what
        `gather` raises.
        """
        if start > stop:
            raise StoreError(f"{self.url}: images {start} to {stop}: the first comes first")
        ids = self._check_ids(np.arange(start, stop))
        return self._rows(self._check_names(names), ids, slice(start, stop))

    @property
    def shards(self) -> list[Shard]:
        """The ranges of images that lie in one file of each array."""
        return self._layout.shards

    def prefetch(
        self, batches: Iterable[np.ndarray], depth: int = 2, names: Iterable[str] | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """`gather` of every batch of image ids, in order, up to `depth` of them read ahead on a
        thread."""
        if names is not None:
            names = list(names)  # it is read once for each batch
        return read_ahead(functools.partial(self.gather, names=names), batches, depth)

    def decoder(self) -> dict[str, np.ndarray]:
        """The decoder's arrays of a store of kind 'embedding' or 'prior'; empty for other kinds."""
        return read_decoder(self._files, self._manifest)

    def size_on_disk(self) -> int:
        """Bytes of the finished shards' files in all arrays."""
        shards = finished_shards(self._files).values()
        return sum(file.bytes for shard in shards for file in shard.values())

    def _check_ids(self, image_ids: np.ndarray) -> np.ndarray:
        """Returns the ids as int64 [n]. Raises StoreError for ids that are not stored."""
        refuse_after_fork()
        ids = np.asarray(image_ids)
        # an empty list is float64 to numpy
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise StoreError(
                f"image ids must be a list of whole numbers, not {ids.dtype} of shape {ids.shape}"
            )
        ids = ids.astype(np.int64)
        outside = (ids < 0) | (ids >= len(self))
        if outside.any():
            raise StoreError(
                f"{self.url}: no image {ids[outside.argmax()]}; "
                f"the store has images 0 to {len(self) - 1}"
            )
        if not self.complete:
            unwritten = ~self._finished[ids]
            if unwritten.any():
                raise incomplete(self.url, f"image {ids[unwritten.argmax()]} is not written yet")
        return ids

    def _check_names(self, names: Iterable[str] | None) -> list[str]:
        """The names of arrays that were asked for, by default those of all."""
        if names is None:
            return self._layout.names
        if isinstance(names, str):
            raise StoreError(f"{self.url}: names should be a list, such as [{names!r}]")
        names = list(names)
        for name in names:
            if name not in self._layout.names:
                known = ", ".join(self._layout.names)
                raise StoreError(f"{self.url}: no array {name!r}; there are {known}")
        return names

    def _rows(
        self, names: list[str], ids: np.ndarray, where: np.ndarray | slice
    ) -> dict[str, np.ndarray]:
        """The arrays of the images ``ids``, which lie ``where``."""
        # all begin before one is waited for
        reads = {
            name: self._arrays[name][where].read() for name in names if name not in self._in_memory
        }
        rows = {}
        for name in names:
            if name in reads:
                stored = self._wait(name, ids, reads[name])
            else:
                stored = self._in_memory[name][ids]  # a copy; a slice would show the cache itself
            self._refuse_missing(name, ids, stored)
            rows[name] = self.schema.decode(name, stored)
        return rows

    def _preload(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._in_memory:
                whole = self._arrays[name].read()
                self._in_memory[name] = self._wait(name, np.arange(len(self)), whole)

    def _wait(self, name: str, ids: np.ndarray, future: Any) -> np.ndarray:
        """Waits for a read of these images of an array."""
        try:
            return future.result()
        except ValueError as error:
            raise self._find_damage(name, ids, error) from None

    @functools.cached_property
    def _finished(self) -> np.ndarray:
        """True for images of finished shards: [N] bool."""
        finished = np.zeros(self._layout.num_shards, bool)
        finished[list(finished_shards(self._files))] = True
        return finished.repeat(self._layout.images_per_shard)[: len(self)]

    def _refuse_missing(self, name: str, ids: np.ndarray, stored: np.ndarray) -> None:
        """Raises CorruptChunk for an image without a chunk. zarr gives the fill value in place of
        all its numbers, in silence, and a training would learn from it."""
        if not len(stored):
            return
        fill = self.schema.fill_value(name)
        # one number tells: a chunk has all numbers of an image, or none
        first = stored.reshape(len(stored), -1)[:, 0]
        absent = first == fill
        if np.isnan(fill):
            absent = np.isnan(first)
        if absent.any():
            raise self._corrupt(name, int(ids[absent.argmax()]), "nothing is stored")

    def _find_damage(self, name: str, ids: np.ndarray, error: ValueError) -> StoreError:
        """Reads image by image after a batched read failed; the error names the image."""
        if self._layout.is_column(name):  # a shard's images are one chunk: the first of them tells
            ids = ids - ids % self._layout.images_per_shard
        for image_id in np.unique(ids):
            try:
                self._arrays[name][image_id].read().result()
            except ValueError as cause:
                if is_damage(cause):
                    return self._corrupt(name, int(image_id), "the stored bytes are damaged")
                break  # the storage does not answer, for other images either
        return StoreError(explain(error, self.url))

    def _corrupt(self, name: str, image_id: int, what: str) -> CorruptChunk:
        shard = self._layout.shard(image_id // self._layout.images_per_shard)
        images = f"images {shard.start} to {shard.stop - 1}"
        lost = f"image {image_id}"
        needs_repair = f"shard {shard.index} ({images})"
        if self._layout.is_column(name):  # the whole shard is one chunk
            lost = images
            needs_repair = f"shard {shard.index}"
        return CorruptChunk(
            f"{self.url}: {name} of {lost} cannot be read: {what}; {needs_repair} needs gaupipe "
            "export-maps --repair, or store.repair",
            image_id,
            name,
        )


def read_ahead(
    gather: Callable[[np.ndarray], dict[str, np.ndarray]],
    batches: Iterable[np.ndarray],
    depth: int = 2,
) -> Iterator[dict[str, np.ndarray]]:
    """`gather` of every batch of image ids, in order, up to `depth` of them read ahead on a
    thread."""
    waiting: collections.deque[Any] = collections.deque()
    with ThreadPoolExecutor(1, "gaupipe-store") as pool:
        try:
            for image_ids in batches:
                waiting.append(pool.submit(gather, image_ids))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # a caller that stops early waits for no read but the one that runs
            pool.shutdown(wait=False, cancel_futures=True)
