"""The user's cache: digests of image files, and decoded images, which every process of the machine
maps. A file of it that is not whole, or of something else, counts as not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from google_crc32c import value as crc32c
from pydantic import Field, TypeAdapter
from torch import Tensor

from gaupipe.system import signals
from gaupipe.system.files import alone_in, partial_prefix, whole_file, write_whole
from gaupipe.system.progress import EpochProgress

UNUSED_DAYS = 60
"""Images that nobody has read for so long are removed when others are kept."""

SHA256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
DIGESTS = TypeAdapter(dict[str, tuple[str, SHA256]])


def cache_folder() -> Path:
    """GAUPIPE_CACHE, or gaupipe's folder in the user's cache folder.

    For a user without a home it is a folder that cannot be there.
    """
    if folder := os.environ.get("GAUPIPE_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gaupipe"
    except RuntimeError:
        return Path(os.devnull) / "gaupipe"


def digests_file(root: Path) -> Path:
    """The cache of the digests of the files under one folder."""
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]
    return cache_folder() / "digests" / name


def read_digests(path: Path) -> dict[str, tuple[str, str]]:
    """{file name: (stamp, SHA-256)}; empty where the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        if path.is_file():  # a pipe would be waited for
            check, _, text = path.read_bytes().partition(b"\n")
            if hashlib.sha256(text).hexdigest().encode() == check:
                return DIGESTS.validate_json(text)
    return {}


def write_digests(path: Path, digests: dict[str, tuple[str, str]]) -> None:
    """Replaces the file, whose first line is the digest of the rest. A cache that cannot be written
    is left as it is."""
    text = json.dumps(digests)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


class ImageCache:
    """Decoded images, uint8 [N, 3, height, width], in one file of the user's cache.

    The file begins with the 32 bytes of ``key``, which says what the images are, and the crc32c of
    each image, uint32 [N]; the pixels follow. It appears whole or not at all. Each process checks
    an image when it reads it for the first time.
    """

    def __init__(self, name: str, key: bytes, shape: tuple[int, int, int, int]) -> None:
        self.path = cache_folder() / "images" / name
        self.key, self.shape = key, shape
        self.images: Tensor | None = None  # where nothing is mapped
        self.sums = np.empty(0, dtype=np.uint32)
        self.unchecked = np.ones(shape[0], dtype=bool)
        self.inode = 0

    @property
    def pixel_bytes(self) -> int:
        """Of all images."""
        return math.prod(self.shape)

    @property
    def _start(self) -> int:
        """Byte of the file at which the pixels begin."""
        return len(self.key) + 4 * self.shape[0]

    def open(self) -> bool:
        """Maps the images; False where the file is not there or holds others."""
        with contextlib.suppress(OSError, ValueError):
            if not self.path.is_file():  # a pipe would be waited for
                return False
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                same_size = status.st_size == self._start + self.pixel_bytes
                if not same_size or file.read(len(self.key)) != self.key:
                    return False
                self.sums = np.fromfile(file, np.uint32, self.shape[0])
                # torch wants memory that it may write to: "c" leaves the file alone
                pixels = np.memmap(file, np.uint8, "c", self._start, self.shape)
            self.images, self.inode = torch.from_numpy(pixels), status.st_ino
            os.utime(self.path)  # for _remove_unused; another user's file is refused here
        return self.images is not None

    def gather(self, numbers: np.ndarray) -> Tensor | None:
        """Copies of the images of these numbers, uint8 [B, 3, height, width]; None where one of
        them is damaged, or none is mapped."""
        if self.images is None:
            return None
        images = self.images[torch.from_numpy(numbers)]
        for position in np.flatnonzero(self.unchecked[numbers]).tolist():
            number = numbers[position]
            if crc32c(images[position].numpy()) != self.sums[number]:
                return None
            self.unchecked[number] = False
        return images

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Waits until no other process makes or removes the file. Raises OSError where the cache
        cannot be written."""
        lock = self.path.with_suffix(".lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
        if not lock.is_file():
            raise OSError(None, "no file", str(lock))
        with alone_in(lock):
            yield

    def make(self, image_of: Callable[[int], Tensor], threads: int) -> None:
        """Writes ``image_of(number)`` of all numbers, computed in as many threads, and maps them.
        Raises what it raises, and OSError where the cache cannot be written. The caller has
        :meth:`locked` the cache."""
        for partial in self.path.parent.glob(f"{partial_prefix(self.path)}*"):  # of killed ones
            partial.unlink()
        _remove_unused(self.path.parent)
        count = self.shape[0]
        sums = np.empty(count, dtype=np.uint32)
        with (
            whole_file(self.path) as partial,
            partial.open("wb") as file,
            EpochProgress("decoding images", count, 1) as progress,
            ThreadPoolExecutor(threads) as pool,
        ):
            file.seek(self._start)
            for numbers in np.array_split(np.arange(count), -(-count // 128)):
                decoded = pool.map(image_of, numbers.tolist())
                for number, image in zip(numbers, decoded, strict=True):
                    content = image.contiguous().numpy().tobytes()
                    sums[number] = crc32c(content)
                    file.write(content)
                progress.advance(len(numbers))
                signals.let_through()  # no step has been taken that could be saved
            file.seek(0)
            file.write(self.key + sums.tobytes())
        self.open()

    def remove(self) -> None:
        """Maps the images no more, and removes the file, unless another process has replaced it.
        Processes that have mapped it keep the images."""
        self.images = None
        with contextlib.suppress(OSError), self.locked():
            if self.path.stat().st_ino == self.inode:
                self.path.unlink()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "images": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Another process maps the file itself."""
        self.__dict__.update(state)
        self.open()


def _remove_unused(folder: Path) -> None:
    """Removes images that no process has opened for :data:`UNUSED_DAYS`, and what killed processes
    left unfinished a day ago or earlier."""
    for path in folder.iterdir():
        days = 1 if ".partial-" in path.name else UNUSED_DAYS
        with contextlib.suppress(OSError):
            if path.suffix != ".lock" and time.time() - path.stat().st_mtime > days * 86400:
                path.unlink()
