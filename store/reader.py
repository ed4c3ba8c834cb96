"""Reading a store by image id, fast enough for training: batched gathers through tensorstore, prefetched on a thread."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from store.encoding import decode
from store.errors import CorruptChunk, StoreError
from store.files import Files, damage, explain, refuse_after_fork
from store.layout import ROOT, Layout, read_checked, read_decoder

INDEX_CACHE_BYTES = 64 * 2**20


def open(url: str | os.PathLike, *, dataset_sha256: str | None = None, teacher_sha256: str | None = None,
         allow_incomplete: bool = False, preload_bytes: int = 0) -> Store:
    """Opens a store for reading.

    A store of at most `preload_bytes` (as numbers, uncompressed) is read into memory whole. Raises StoreError when there
    is no store, when it is incomplete (unless allowed), and when its data set or teacher is not the one asked for;
    DamagedStore when its metadata changed after it was written.
    """
    files = Files(url)
    layout = Layout.from_root_file(files.read(ROOT), files.url)
    if not layout.complete and not allow_incomplete:
        raise StoreError(f"{files.url}: the store is incomplete; continue with gaupipe export-maps")
    for what, stored, asked in (("data set", layout.schema.dataset_sha256, dataset_sha256),
                                ("teacher", layout.schema.teacher_sha256, teacher_sha256)):
        if asked is not None and stored != asked:
            raise StoreError(f"{files.url}: holds maps of another {what} ({stored[:12]}) than asked for ({asked[:12]}); "
                             "export the maps of this run")
    return Store(files, layout, preload_bytes)


class Store:
    """A store opened for reading.

    Attributes: `schema`, `complete`, `url`. Thread-safe. Not usable in a forked process; give a spawned one the URL.
    """

    def __init__(self, files: Files, layout: Layout, preload_bytes: int = 0):
        self.url, self.schema, self.complete = files.url, layout.schema, layout.complete
        self._files, self._layout = files, layout
        for name in layout.names:
            read_checked(files, layout, f"{name}/zarr.json")
        self._arrays = {name: files.open_array(name, INDEX_CACHE_BYTES) for name in layout.names}
        self._in_memory: dict[str, np.ndarray] = {}
        if layout.complete and layout.schema.total_bytes <= preload_bytes:
            self._preload(layout.names)

    def __len__(self) -> int:
        return self.schema.num_images

    def gather(self, image_ids: np.ndarray) -> dict[str, np.ndarray]:
        """The stored numbers of these images: {array name: [len(image_ids), ...]}, rows in the order asked.

        float16, labels int64. Raises StoreError for an id out of range and CorruptChunk, with the image id, when what is
        stored for one of them is damaged or missing.
        """
        refuse_after_fork()
        ids = self._check_ids(image_ids)
        self._preload([name for name in self._layout.names if self._layout.is_column(name)])
        reads = {name: self._arrays[name][ids].read() for name in self._layout.names if name not in self._in_memory}
        rows = {}
        for name in self._layout.names:
            try:
                stored = reads[name].result() if name in reads else self._in_memory[name][ids]
            except ValueError as error:
                raise self._find_damage(name, ids, error) from None
            missing = _is_missing(stored)
            if missing.any():
                raise self._corrupt(name, int(ids[missing.argmax()]), "it is not there")
            rows[name] = decode(name, stored, self.schema)
        return rows

    def prefetch(self, batches: Iterable[np.ndarray], depth: int = 2) -> Iterator[dict[str, np.ndarray]]:
        """`gather` of every batch of image ids, in order, up to `depth` of them read ahead on a thread."""
        waiting: collections.deque = collections.deque()
        with ThreadPoolExecutor(1, "gaupipe-store") as pool:
            try:
                for image_ids in batches:
                    waiting.append(pool.submit(self.gather, image_ids))
                    if len(waiting) > depth:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def decoder(self) -> dict[str, np.ndarray]:
        """The decoder's arrays of a store of kind 'embedding' or 'prior'; empty for other kinds."""
        return read_decoder(self._files, self._layout)

    def size_on_disk(self) -> int:
        """Bytes of the finished shards' files and records, and of the metadata and decoder files."""
        shards = self._files.load(self._files.open_array("shard_nbytes"))
        records = sum(40 * len(row) + 8 for row in shards if row.any())  # 32 + 8 bytes a file, and two checksums
        others = [ROOT, *self._layout.files_sha256]
        return int(shards.sum()) + records + sum(len(self._files.read(key) or b"") for key in others)

    def _check_ids(self, image_ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(image_ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" and ids.size:
            raise StoreError(f"image ids must be a list of whole numbers, not {ids.dtype} of shape {ids.shape}")
        ids = ids.astype(np.int64)
        outside = (ids < 0) | (ids >= len(self))
        if outside.any():
            raise StoreError(f"{self.url}: no image {ids[outside.argmax()]}; the store has images 0 to {len(self) - 1}")
        return ids

    def _preload(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._in_memory:
                try:
                    self._in_memory[name] = self._arrays[name].read().result()
                except ValueError as error:
                    raise self._find_damage(name, np.arange(len(self)), error) from None

    def _find_damage(self, name: str, ids: np.ndarray, error: ValueError) -> StoreError:
        """Which image made a batched read fail."""
        ids = np.unique(ids)
        if self._layout.is_column(name):  # a shard's images are one chunk: the first of them tells
            ids = ids[np.unique(ids // self._layout.images_per_shard, return_index=True)[1]]
        for image_id in ids:
            try:
                self._arrays[name][image_id].read().result()
            except ValueError as found:
                if what := damage(found):
                    return self._corrupt(name, int(image_id), what)
                break
        return StoreError(explain(error, self.url))

    def _corrupt(self, name: str, image_id: int, what: str) -> CorruptChunk:
        shard = self._layout.shards[image_id // self._layout.images_per_shard]
        return CorruptChunk(f"{self.url}: {name} of image {image_id} cannot be read: {what}; shard {shard.index} (images "
                            f"{shard.start} to {shard.stop - 1}) needs gaupipe export-maps --repair", image_id, name)


def _is_missing(stored: np.ndarray) -> np.ndarray:
    """Per image [n], whether its chunk was not there: then all its numbers are the fill value, so the first one is."""
    first = stored.reshape(len(stored), -1)[:, 0] if len(stored) else np.zeros(0)
    return np.isnan(first) if stored.dtype.kind == "f" else first == (0 if stored.dtype == np.uint8 else -1)
