"""Reading single images from files on this machine, where their numbers lie uncompressed.

tensorstore takes about 20 us for a chunk, however small: it opens the file anew and hands the
chunk from thread to thread. Of a store of embeddings that is most of the time. Here files stay
open, and an image takes one system call.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from pathlib import Path

import numpy as np

from store.encoding import image_crc32c
from store.layout import Layout

MOST_OPEN = 128
"""Files that an array keeps open; others are opened for each batch."""
PROBES = 8
"""After so many images in a row that were not in the page cache, the rest of a batch is taken to
be on the disk too."""
_NO_WAIT = getattr(os, "RWF_NOWAIT", None)
_ENTRY = np.dtype([("offset", "<u8"), ("size", "<u8")])


class OpenChunks:
    """One array of a store in a folder, whose chunks are single images with a crc32c and no other
    codec.

    Thread-safe: no file is closed while somebody reads it.
    """

    def __init__(self, folder: Path, layout: Layout, name: str):
        self._folder, self._layout, self._name = folder, layout, name
        self._shape = layout.schema.arrays()[name].shape[1:]
        self._dtype = layout.schema.stored_dtype(name)
        self._size = math.prod(self._shape) * self._dtype.itemsize
        self._files: dict[int, _File] = {}
        self._offsets: dict[int, np.ndarray] = {}
        self._opening = threading.Lock()

    @staticmethod
    def can_read(layout: Layout, name: str) -> bool:
        """Whether array `name` is such an array, on a machine that can read so."""
        able = hasattr(os, "preadv") and sys.byteorder == "little"
        compressed = layout.schema.arrays()[name].numbers.compressed
        return able and not compressed and not layout.is_column(name)

    def read(self, image_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """The stored numbers [n, ...] of images and their crc32c [n] uint32. None where anything is
        not as it should be: tensorstore finds out what."""
        shards, places = np.divmod(image_ids, self._layout.images_per_shard)
        try:
            files = {shard: self._open(shard) for shard in np.unique(shards).tolist()}
            offsets = [
                int(self._offsets[shard][place])
                for shard, place in zip(shards.tolist(), places.tolist(), strict=True)
            ]
            numbers = np.empty((len(image_ids), self._size), np.uint8)
            checksums = np.empty((len(image_ids), 4), np.uint8)
            descriptors = [files[shard].descriptor for shard in shards.tolist()]
            buffers = list(zip(numbers, checksums, strict=True))
            whole = _fill(buffers, descriptors, offsets, self._size + 4)
        except OSError:
            return None
        crc32c = checksums.view("<u4")[:, 0]
        if not whole or not np.array_equal(image_crc32c(numbers), crc32c):
            return None
        return numbers.view(self._dtype).reshape(len(numbers), *self._shape), crc32c

    def _open(self, shard: int) -> _File:
        """The shard's file, whose index has been read. Raises OSError for a damaged one."""
        with self._opening:
            file = self._files.get(shard)
            if file is None:
                file = _File(self._folder / self._layout.shard_file(self._name, shard))
                if shard not in self._offsets:
                    self._offsets[shard] = self._read_index(file)
                if len(self._files) < MOST_OPEN:
                    self._files[shard] = file
            return file

    def _read_index(self, file: _File) -> np.ndarray:
        """Where the images of a shard begin in its file: [images_per_shard]."""
        size = self._layout.images_per_shard * _ENTRY.itemsize
        start = os.fstat(file.descriptor).st_size - size - 4
        index = os.pread(file.descriptor, size + 4, start)  # refuses a start below 0
        if len(index) != size + 4:
            raise OSError("the file is too short")
        bytes_ = np.frombuffer(index, np.uint8)
        if image_crc32c(bytes_[None, :size])[0] != bytes_[size:].view("<u4")[0]:
            raise OSError("the index is damaged")
        entries = bytes_[:size].view(_ENTRY)
        there = entries["size"] == self._size + 4
        return np.where(there, entries["offset"], np.iinfo(np.int64).max).astype(np.int64)


class _File:
    """A file, open as long as the object lives."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def _fill(buffers: list, descriptors: list[int], offsets: list[int], size: int) -> bool:
    """Reads ``size`` bytes into each pair of buffers; False where a file ends before.

    What is in the page cache is read first. The rest is asked for before any of it is waited for.
    """
    waiting = list(range(len(buffers)))
    if _NO_WAIT is not None:
        waiting, misses = [], 0
        for index, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
            if misses < PROBES and _read_cached(descriptors[index], buffer, offset, size, _NO_WAIT):
                misses = 0
            else:
                misses += 1
                waiting.append(index)
        for index in waiting:
            os.posix_fadvise(descriptors[index], offsets[index], size, os.POSIX_FADV_WILLNEED)
    return all(
        os.preadv(descriptors[index], buffers[index], offsets[index]) == size for index in waiting
    )


def _read_cached(descriptor: int, buffers: tuple, offset: int, size: int, no_wait: int) -> bool:
    """Whether all of it lies in the page cache and was read."""
    try:
        return os.preadv(descriptor, buffers, offset, no_wait) == size
    except OSError:  # not there, or a file system that cannot say
        return False
