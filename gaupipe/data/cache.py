"""The user's cache: digests of image files, and decoded images, which every process of the machine
maps. A file of it that is not whole counts as not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaupipe.system import machine, signals
from gaupipe.system.files import alone_in, flush, partial_prefix, whole_file, write_whole
from gaupipe.system.messages import LOG
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
    except RuntimeError:  # without a home nothing is kept: there is no folder below a device
        return Path(os.devnull) / "gaupipe"


def digests_file(root: Path, decoded: bool = True) -> Path:
    """The cache of the digests of the files under one folder, which were ``decoded`` too, or not
    yet."""
    # of the whole path: two data sets may both end in images/
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]
    return cache_folder() / "digests" / (name if decoded else f"{name}-bytes")


def read_digests(path: Path) -> dict[str, tuple[str, str]]:
    """{file name: (stamp, SHA-256)}; empty where the file is missing or damaged."""
    digests: dict[str, tuple[str, str]] = {}
    with contextlib.suppress(OSError, ValueError):
        digests = json.loads(path.read_bytes())
    return digests


def write_digests(path: Path, digests: dict[str, tuple[str, str]]) -> None:
    """Replaces the file. A cache that cannot be written is left as it is."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(digests))


class ImageCache:
    """Decoded images, uint8 [N, 3, height, width], in one .npy file of the user's cache.

    ``digest``, of all that makes the pixels, names the file. It appears whole or not at all, and
    every process maps it. Nothing is kept unless ``enabled``.
    """

    def __init__(self, digest: str, shape: tuple[int, int, int, int], enabled: bool = True) -> None:
        self.path = cache_folder() / "images" / f"{digest}.npy"
        self.shape = shape
        self.enabled = enabled
        self.images: Tensor | None = None  # where nothing is mapped

    def fits(self) -> bool:
        """True where :meth:`keep` keeps the images."""
        most = min(MOST_BYTES, machine.free_disk(cache_folder()) / 2)
        return self.enabled and math.prod(self.shape) < most

    def open(self) -> bool:
        """Maps the images; False where the file is not there or not whole."""
        with contextlib.suppress(OSError, ValueError):
            if not self.enabled:
                return False
            # torch wants memory that it may write to: "c" leaves the file alone
            pixels = np.lib.format.open_memmap(self.path, mode="c")
            if pixels.shape != self.shape or pixels.dtype != np.uint8:
                return False
            self.images = torch.from_numpy(pixels)
            os.utime(self.path)  # for _remove_unused; another user's file is refused here
        return self.images is not None

    def gather(self, numbers: np.ndarray) -> Tensor | None:
        """Copies of the images of these numbers, uint8 [B, 3, height, width]; None where none is
        mapped."""
        return None if self.images is None else self.images[torch.from_numpy(numbers)]

    def keep(self, image_of: Callable[[int], Tensor]) -> None:
        """Writes ``image_of(number)`` of all numbers, if there is room for them, and maps them. The
        first of several processes does so, and the others wait. Raises what ``image_of`` raises."""
        if self.images is not None or not self.fits():
            return
        lock = self.path.with_suffix(".lock")
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
            with alone_in(lock):
                # while this one waited, another may have made the file, or filled the disk
                if not self.open() and self.fits():
                    self._make(image_of)
        except OSError as error:
            LOG.warning(
                f"data.cache: decoded images cannot be kept in {self.path.parent} "
                f"({error.strerror}): they are decoded in every epoch; GAUPIPE_CACHE names "
                "another folder"
            )
            self.enabled = False  # else each epoch would try, and say so, again

    def _make(self, image_of: Callable[[int], Tensor]) -> None:
        for partial in self.path.parent.glob(f"{partial_prefix(self.path)}*"):  # of killed ones
            partial.unlink()
        _remove_unused(self.path.parent)
        count = self.shape[0]
        header = {"descr": "|u1", "fortran_order": False, "shape": self.shape}
        with whole_file(self.path) as partial:
            with (
                partial.open("wb") as file,
                EpochProgress("decoding images", count, 1) as progress,
                ThreadPoolExecutor(max(1, machine.share_of_cores())) as pool,
            ):
                # written, not mapped: on a full disk that would end the process
                np.lib.format.write_array_header_1_0(file, header)
                # in parts, as the pool would decode all images ahead of the disk, into memory
                for numbers in np.array_split(np.arange(count), -(-count // 128)):
                    for image in pool.map(image_of, numbers.tolist()):
                        file.write(image.contiguous().numpy().tobytes())
                    progress.advance(len(numbers))
                    signals.let_through()  # no step has been taken that could be saved
            flush(partial)  # a power cut must not leave a name without its pixels
        self.open()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "images": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Another process maps the file itself."""
        self.__dict__.update(state)
        self.open()


def _remove_unused(folder: Path) -> None:
    """Removes images that no process opened for long, and unfinished ones of killed processes."""
    for path in folder.iterdir():
        days = 1 if ".partial-" in path.name else UNUSED_DAYS  # a younger one may be at work
        with contextlib.suppress(OSError):
            # a lock stays: who waits for the removed file and who makes a new one would both go on
            if path.suffix != ".lock" and time.time() - path.stat().st_mtime > days * 86400:
                path.unlink()
