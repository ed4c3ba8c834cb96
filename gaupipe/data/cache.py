"""The user's cache: digests of image files, and decoded images, which every process of the machine
maps. A file of it that is not whole, or of something else, counts as not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
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
from gaupipe.system.files import alone_in
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


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """A descriptor of a new file that takes the place of ``path`` when the block ends without an
    exception, and goes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".partial-{path.name}-")
    try:
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _write(descriptor: int, content: bytes, offset: int = 0) -> None:
    """Writes all of the content. Raises OSError where the disk is full."""
    rest = memoryview(content)
    while rest:
        count = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count


class DigestCache:
    """The digests of the files under one folder, in one file, whose first line is the digest of the
    rest. A cache that cannot be written is left as it is."""

    def __init__(self, root: Path) -> None:
        name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]
        self._path = cache_folder() / "digests" / name
        self._digests = self._read()

    def _read(self) -> dict[str, tuple[str, str]]:
        """{name: (stamp, digest)}."""
        with contextlib.suppress(OSError, ValueError):
            if self._path.is_file():  # a pipe would be waited for
                check, _, text = self._path.read_bytes().partition(b"\n")
                if hashlib.sha256(text).hexdigest().encode() == check:
                    return DIGESTS.validate_json(text)
        return {}

    def digest(self, name: str, stamp: str | None) -> str | None:
        """The digest of the file while it had this stamp; None if it is not known."""
        before, digest = self._digests.get(name, (None, None))
        return digest if stamp is not None and stamp == before else None

    def save(self, digests: dict[str, list[str]]) -> None:
        """Replaces all that the cache knows, in one step."""
        text = json.dumps(digests).encode()
        with contextlib.suppress(OSError), _replacing(self._path) as descriptor:
            _write(descriptor, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


class ImageCache:
    """Decoded images, uint8 [N, 3, height, width], in one file of the user's cache.

    The file begins with the 32 bytes of ``key``, which says what the images are, and the crc32c of
    each image, uint32 [N]; the pixels follow. It appears whole or not at all. Each process checks
    an image when it reads it for the first time.
    """

    def __init__(self, name: str, key: bytes, shape: tuple[int, int, int, int]) -> None:
        self.path = cache_folder() / "images" / name
        self.key, self.shape = key, shape
        self.images: Tensor | None = None
        """None where nothing is mapped."""
        self.sums = np.empty(0, dtype=np.uint32)
        self.unchecked = np.ones(shape[0], dtype=bool)
        self.inode = 0

    @property
    def pixel_bytes(self) -> int:
        """Of all images."""
        return math.prod(self.shape)

    @property
    def _start(self) -> int:
        """Where the pixels begin in the file."""
        return len(self.key) + 4 * self.shape[0]

    def open(self) -> bool:
        """Maps the images; False where the file is not there or holds others."""
        try:
            if not self.path.is_file():
                return False
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size != self._start + self.pixel_bytes:
                    return False
                if file.read(len(self.key)) != self.key:
                    return False
                self.sums = np.fromfile(file, np.uint32, self.shape[0])
                # torch wants memory that it may write to: "c" leaves the file alone
                pixels = np.memmap(file, np.uint8, "c", self._start, self.shape)
        except OSError:
            return False
        self.images, self.inode = torch.from_numpy(pixels), status.st_ino
        with contextlib.suppress(OSError):  # another user's, or a file system to read from
            os.utime(self.path)  # for _remove_unused
        return True

    def gather(self, numbers: np.ndarray) -> tuple[Tensor, list[int]]:
        """(copies of the images of these numbers, uint8 [B, 3, height, width], and the places among
        them of images that are damaged)."""
        assert self.images is not None
        images = self.images[torch.from_numpy(numbers)]
        damaged = []
        for place in np.flatnonzero(self.unchecked[numbers]).tolist():
            number = numbers[place]
            if crc32c(images[place].numpy()) == self.sums[number]:
                self.unchecked[number] = False
            else:
                damaged.append(place)
        return images, damaged

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
        for left in self.path.parent.glob(f".partial-{self.path.name}-*"):  # by a killed process
            left.unlink()
        count, size = self.shape[0], math.prod(self.shape[1:])
        sums = np.empty(count, dtype=np.uint32)
        _remove_unused(self.path.parent)
        with (
            _replacing(self.path) as descriptor,
            EpochProgress("decoding images", count, 1) as progress,
            ThreadPoolExecutor(threads) as pool,
        ):

            def write(numbers: np.ndarray) -> int:
                for number in numbers.tolist():
                    content = image_of(number).contiguous().numpy().tobytes()
                    sums[number] = crc32c(content)
                    _write(descriptor, content, self._start + number * size)
                return len(numbers)

            try:
                for written in pool.map(write, np.array_split(np.arange(count), -(-count // 16))):
                    progress.advance(written)
                    signals.let_through()  # no step has been taken that could be saved
            finally:
                pool.shutdown(cancel_futures=True)
            _write(descriptor, self.key + sums.tobytes())
        self.open()

    def remove(self) -> None:
        """Removes the file, unless another process has replaced it. Processes that have mapped it
        keep the images."""
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
        days = 1 if path.name.startswith(".partial-") else UNUSED_DAYS
        with contextlib.suppress(OSError):
            if path.suffix != ".lock" and time.time() - path.stat().st_mtime > days * 86400:
                path.unlink()
