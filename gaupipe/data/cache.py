"""The user's cache: digests of image files, and decoded images, which every process of the machine
maps. A file of it that is not whole, or of something else, counts as not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google_crc32c import value as crc32c
from torch import Tensor

from gaupipe.system import machine, signals
from gaupipe.system.files import alone_in, partial_prefix, whole_file, write_whole
from gaupipe.system.progress import EpochProgress

UNUSED_DAYS = 60
"""Images that nobody has read for so long are removed when others are kept."""

MOST_BYTES = 20e9
"""More bytes of decoded images are not kept; nor is what fills half of the free disk."""


def cache_folder() -> Path:
    """GAUPIPE_CACHE, or gaupipe's folder in the user's cache folder. Needs a home."""
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
        check, _, text = path.read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() == check:
            return json.loads(text)
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
    an image when it reads it for the first time. Nothing is kept unless ``enabled``.
    """

    def __init__(
        self, name: str, key: bytes, shape: tuple[int, int, int, int], enabled: bool = True
    ) -> None:
        self.path = cache_folder() / "images" / name
        self.key, self.shape, self.enabled = key, shape, enabled
        self.images: Tensor | None = None  # where nothing is mapped
        self.sums = np.empty(0, dtype=np.uint32)
        self.unchecked = np.ones(shape[0], dtype=bool)

    @property
    def bytes(self) -> int:
        """Bytes that the images take in the cache; 0 where :meth:`keep` keeps none."""
        size, free = math.prod(self.shape), machine.free_disk(cache_folder())
        fits = self.images is not None or size < min(MOST_BYTES, free / 2)
        return size if self.enabled and fits else 0

    @property
    def _start(self) -> int:
        """Byte of the file at which the pixels begin."""
        return len(self.key) + 4 * self.shape[0]

    def open(self) -> bool:
        """Maps the images; False where the file is not there or holds others."""
        with contextlib.suppress(OSError, ValueError):
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                same_size = size == self._start + math.prod(self.shape)
                if not (self.enabled and same_size and file.read(len(self.key)) == self.key):
                    return False
                self.sums = np.fromfile(file, np.uint32, self.shape[0])
                # torch wants memory that it may write to: "c" leaves the file alone
                pixels = np.memmap(file, np.uint8, "c", self._start, self.shape)
            self.images = torch.from_numpy(pixels)
            os.utime(self.path)  # for _remove_unused; another user's file is refused here
        return self.images is not None

    def gather(self, numbers: np.ndarray) -> Tensor | None:
        """Copies of the images of these numbers, uint8 [B, 3, height, width]; None where none is
        mapped, or one of them is damaged, which removes the file."""
        if self.images is None:
            return None
        images = self.images[torch.from_numpy(numbers)]
        for position in np.flatnonzero(self.unchecked[numbers]).tolist():
            number = numbers[position]
            if crc32c(images[position].numpy()) != self.sums[number]:
                _say(f"{self.path}: damaged; its images are decoded again")
                self.images = None  # processes that have mapped the file keep theirs
                with contextlib.suppress(OSError):
                    self.path.unlink()
                return None
            self.unchecked[number] = False
        return images

    def keep(self, image_of: Callable[[int], Tensor]) -> None:
        """Writes ``image_of(number)`` of all numbers, if there is room for them, and maps them. The
        first of several processes does so, and the others wait. Raises what ``image_of`` raises."""
        if self.images is not None or not self.bytes:
            return
        lock = self.path.with_suffix(".lock")
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
            with alone_in(lock):
                if not self.open() and self.bytes:
                    self._make(image_of)
        except OSError as error:
            _say(
                f"decoded images cannot be kept in {self.path.parent} ({error.strerror}): "
                "they are decoded in every epoch; GAUPIPE_CACHE names another folder"
            )
            self.enabled = False

    def _make(self, image_of: Callable[[int], Tensor]) -> None:
        for partial in self.path.parent.glob(f"{partial_prefix(self.path)}*"):  # of killed ones
            partial.unlink()
        _remove_unused(self.path.parent)
        count = self.shape[0]
        sums = np.empty(count, dtype=np.uint32)
        with (
            whole_file(self.path) as partial,
            partial.open("wb") as file,
            EpochProgress("decoding images", count, 1) as progress,
            ThreadPoolExecutor(max(1, machine.share_of_cores())) as pool,
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "images": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Another process maps the file itself."""
        self.__dict__.update(state)
        self.open()


def _say(line: str) -> None:
    print(f"data.cache: {line}", file=sys.stderr)


def _remove_unused(folder: Path) -> None:
    """Removes images that no process opened for long, and unfinished ones of killed processes."""
    for path in folder.iterdir():
        days = 1 if ".partial-" in path.name else UNUSED_DAYS
        with contextlib.suppress(OSError):
            if path.suffix != ".lock" and time.time() - path.stat().st_mtime > days * 86400:
                path.unlink()
