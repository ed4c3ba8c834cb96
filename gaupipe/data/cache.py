"""Decoded images that are kept: in memory, or in the user's cache, from where every process of the
machine maps them.

A folder of the cache holds

    pixels      the images one after the other, uint8
    index       a line with the digest of the rest, then an npz: ``key``, which says what the images
                are; ``shapes`` int64 [N, 3]; ``sums`` uint32 [N], the crc32c of each image's pixels

The folder appears whole or not at all (:func:`gaupipe.system.files.replaced`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google_crc32c import value as crc32c
from torch import Tensor

from gaupipe.system.files import alone_in, replaced

UNUSED_DAYS = 60
"""Images that nobody has read for so long are removed when others are kept."""


class Damaged(Exception):
    """An image is not the one that was kept."""


class KeptImages:
    """N decoded images, uint8, of any shapes. With a ``folder`` they are checked when they are
    first read, and a copy in another process maps the folder's files anew."""

    def __init__(
        self,
        pixels: Tensor,
        shapes: np.ndarray,
        sums: np.ndarray | None = None,
        folder: Path | None = None,
        key: str = "",
        inode: int = 0,
    ) -> None:
        self.pixels: Tensor | None = pixels
        self.shapes, self.folder, self.key, self.inode = shapes, folder, key, inode
        self.starts = np.concatenate([[0], np.cumsum(shapes.prod(1))])
        self.sums = sums
        self.unchecked = np.full(len(shapes), sums is not None)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, number: int) -> Tensor:
        """One image. Raises Damaged."""
        first, last = self.starts[number : number + 2]
        image = self._all()[first:last]
        if self.sums is not None and self.unchecked[number]:
            if crc32c(image.numpy()) != self.sums[number]:
                raise Damaged(f"{self.folder}: image {number} is damaged")
            self.unchecked[number] = False
        return image.view(*self.shapes[number].tolist())

    def gather(self, numbers: np.ndarray) -> Tensor:
        """Images of one shape, copied: [B, *shape]. Raises Damaged."""
        for number in numbers[self.unchecked[numbers]].tolist():
            self[number]
        images = self._all().view(len(self), *self.shapes[0].tolist())
        return images[torch.from_numpy(numbers)]

    def _all(self) -> Tensor:
        if self.pixels is None:
            raise Damaged(f"{self.folder} has gone")
        return self.pixels

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pixels": None} if self.folder else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.folder and (found := read(self.folder, self.key)):
            self.__dict__.update(found.__dict__)


def in_memory(images: Iterable[Tensor], count: int, size: int) -> KeptImages:
    """``count`` images, of about ``size`` bytes together."""
    shapes = np.empty((count, 3), dtype=np.int64)
    pixels, end = np.empty(size, dtype=np.uint8), 0
    for number, image in enumerate(images):
        shapes[number] = image.shape
        if end + image.numel() > len(pixels):
            pixels = np.resize(pixels, max(end + image.numel(), 5 * len(pixels) // 4))
        pixels[end : end + image.numel()] = image.reshape(-1).numpy()
        end += image.numel()
    return KeptImages(torch.from_numpy(pixels[:end]), shapes)


def is_begun(folder: Path) -> bool:
    """Whether some process has been :func:`one_at_a_time`: it may be writing."""
    return (folder.parent / "lock").exists()


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits until no other process decides about ``folder`` or writes it. Raises OSError where
    nothing can be written beside it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / "lock"
    lock.touch()
    with alone_in(lock):
        yield


def in_folder(images: Iterable[Tensor], count: int, folder: Path, key: str) -> KeptImages:
    """``count`` images, which ``folder`` keeps from now on. Raises OSError where it cannot be
    written."""
    remove_unused(folder.parent.parent)
    with replaced(folder) as fresh:
        _write(images, count, fresh, key)
    kept = read(folder, key)
    if kept is None:
        raise OSError(None, "the images that were just written cannot be read", str(folder))
    return kept


def _write(images: Iterable[Tensor], count: int, folder: Path, key: str) -> None:
    shapes, sums = np.empty((count, 3), dtype=np.int64), np.empty(count, dtype=np.uint32)
    with (folder / "pixels").open("wb") as file:
        for number, image in enumerate(images):
            content = image.contiguous().numpy().tobytes()
            shapes[number], sums[number] = image.shape, crc32c(content)
            file.write(content)
    table = io.BytesIO()
    np.savez(table, key=np.array(key), shapes=shapes, sums=sums)
    text = table.getvalue()
    (folder / "index").write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def read(folder: Path, key: str) -> KeptImages | None:
    """The images that a folder keeps under this key; None where it has others, or where its index
    is damaged or does not fit its pixels."""
    try:
        check, _, text = (folder / "index").read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != check:
            return None
        with np.load(io.BytesIO(text)) as table:
            found, shapes, sums = str(table["key"]), table["shapes"], table["sums"]
        size = int(shapes.prod(1).sum())
        with (folder / "pixels").open("rb") as file:
            if found != key or os.fstat(file.fileno()).st_size != size:
                return None
            pixels = np.memmap(file, dtype=np.uint8, mode="c")  # torch wants to be able to write
            inode = os.fstat(file.fileno()).st_ino
        with contextlib.suppress(OSError):  # another user's, or a file system to read from
            os.utime(folder)  # for remove_unused
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return KeptImages(torch.from_numpy(pixels), shapes, sums, folder, key, inode)


def remove(damaged: KeptImages) -> None:
    """Removes damaged images from their folder, unless another process has mended them; processes
    that have mapped them keep them."""
    if damaged.folder is None:
        return
    with contextlib.suppress(OSError), one_at_a_time(damaged.folder):
        if (damaged.folder / "pixels").stat().st_ino == damaged.inode:
            shutil.rmtree(damaged.folder)


def remove_unused(cache: Path) -> None:
    """Removes all images of a cache that no process has opened for :data:`UNUSED_DAYS`, and what
    killed processes left unfinished a day ago or earlier."""
    for name, days in (("*/images", UNUSED_DAYS), ("*/.images.partial-*", 1)):
        for folder in cache.glob(name):
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > days * 86400:
                    shutil.rmtree(folder)
