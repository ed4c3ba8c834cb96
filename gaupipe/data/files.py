"""Images in files: decoded when they are asked for, or once and then read from the user's cache."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import PIL
import torch
import torchvision
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from gaupipe.data.augment import Augment
from gaupipe.data.cache import (
    ImageCache,
    cache_folder,
    digests_file,
    read_digests,
    write_digests,
)
from gaupipe.data.decoding import check, read_rgb, refusing
from gaupipe.data.folder import status_of
from gaupipe.settings import FILE_IMAGE_SIZE, DataSettings
from gaupipe.system import machine
from gaupipe.system.errors import UserError
from gaupipe.system.progress import EpochProgress

READERS = 8
"""Threads that read files at once; what they wait for is the disk or the network."""

SETTLED_NS = 2_000_000_000
"""A file that changed less long ago might change again within the same time stamp: its digest is
not kept."""

MOST_BYTES = 20e9
"""More bytes of decoded images are not kept; nor is what fills half of the free disk."""

SECONDS, SECONDS_PER_BYTE = 1e-4, 3e-8
"""What one core takes to decode an image, roughly: at least, and for each byte of the file."""


class ImageFiles:
    """Image files in a fixed order: ``names`` are their paths relative to ``root``.

    Raises UserError, with the first one's name, for files that cannot be read to their end as
    images. A file that is known from an earlier time is not read for that.
    """

    threads = True  # may read at once

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root, self.names = root, names
        self.place = str(root.resolve())
        digests, self.total_bytes = content_digests(root, names)
        self._contents = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, 32)

    def name(self, position: int) -> str:
        """The file's path, for messages too."""
        return os.path.join(self.root, self.names[position])

    def open(self, position: int) -> BinaryIO:
        return open(self.name(position), "rb")

    def fingerprint(self) -> bytes:
        """A digest of all names and contents in their order."""
        digest = hashlib.sha256()
        for name, content in zip(self.names, self._contents, strict=True):
            digest.update(os.fsencode(name) + b"\0" + content.tobytes())
        return digest.digest()

    def contents(self, positions: np.ndarray) -> bytes:
        """Tells the contents of some files from any others, in their order."""
        return self._contents[positions].tobytes()

    def check(self, position: int) -> None:
        """Raises UserError for a file that has changed since its digest was taken."""
        with refusing(self.name(position)), open(self.name(position), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        if digest != self._contents[position].tobytes():
            raise UserError(
                f"{self.name(position)}: has changed since the data set was opened; start again"
            )


class HubImages:
    """The images of a Hugging Face data set, as timm's reader hands them out."""

    threads = False

    def __init__(self, data_set: str, reader: Any) -> None:
        self.data_set = self.place = data_set
        self.reader = reader
        self.total_bytes = 50_000 * len(reader.dataset)  # a guess

    def name(self, position: int) -> str:
        """The image's name, for messages."""
        return f"image {position} of {self.data_set}"

    def open(self, position: int) -> BinaryIO:
        return self.reader[position][0]

    def fingerprint(self) -> bytes:
        """A digest of the library's own fingerprint of where the data came from."""
        return hashlib.sha256(self.reader.dataset._fingerprint.encode()).digest()

    def contents(self, _positions: np.ndarray) -> bytes:
        return self.fingerprint()

    def check(self, position: int) -> None:
        """Nothing is known of a single image."""


def content_digests(root: Path, names: list[str]) -> tuple[list[str], int]:
    """(SHA-256 of each file's content, in hexadecimal digits; the bytes of all files).

    A file is read only if the cache does not know it with its present size, time stamps and inode.
    The inode counts because files that change places may agree in the rest. Raises UserError when a
    file cannot be read to its end as an image.
    """
    settled_ns = time.time_ns() - SETTLED_NS
    paths = {name: os.path.join(root, name) for name in names}
    stats = {name: status_of(path) for name, path in paths.items()}
    stamps = {name: _stamp(status) for name, status in stats.items()}
    cached = digests_file(root)
    known = {
        name: (stamp, digest)
        for name, (stamp, digest) in read_digests(cached).items()
        if stamp == stamps.get(name)
    }
    digests = {name: digest for name, (_, digest) in known.items()}
    unknown = [name for name in names if name not in known]
    problems = []
    if unknown:
        with (
            ThreadPoolExecutor(READERS) as pool,
            EpochProgress("reading images", len(unknown), 1) as progress,
        ):
            try:
                answers = pool.map(_examine, [paths[name] for name in unknown])
                for name, answer in zip(unknown, answers, strict=True):
                    status = stats[name]
                    if isinstance(answer, UserError):
                        problems.append(answer)
                    else:
                        digests[name] = answer
                        if status and max(status.st_mtime_ns, status.st_ctime_ns) < settled_ns:
                            known[name] = stamps[name], answer
                    progress.advance(1)
            finally:  # after an interrupt, too, nothing is read twice
                pool.shutdown(cancel_futures=True)
                write_digests(cached, known)
    if problems:
        more = f"; {len(problems)} of {len(names)} files are so" if len(problems) > 1 else ""
        raise UserError(f"{problems[0]}{more}")
    total_bytes = sum(status.st_size for status in stats.values() if status)
    return [digests[name] for name in names], total_bytes


def _examine(path: str) -> str | UserError:
    """The digest of a file's content, or what is wrong with it."""
    try:
        with refusing(path), open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ValueError("it is empty")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            check(file, path)
            return digest
    except UserError as error:
        return error


def _stamp(status: os.stat_result | None) -> str:
    """Size, times and inode: they change with a file's content."""
    if status is None:
        return ""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


class FileImages(Dataset):
    """Images in files, and their labels int64 [N].

    They are resized so that the shorter side is ``size``, with antialiasing, and cropped
    to the square in the middle. An image that cannot be decoded raises UserError. ``class_names``
    are as those of :class:`ArrayImages`.
    """

    def __init__(
        self,
        files: ImageFiles | HubImages,
        labels: np.ndarray,
        settings: DataSettings,
        class_names: Sequence[str] = (),
    ) -> None:
        self.class_names = tuple(class_names)
        self.files, self.settings = files, settings
        self.size = settings.image_size or FILE_IMAGE_SIZE
        self.labels = np.asarray(labels, dtype=np.int64)
        self.positions = np.arange(len(labels))
        """Positions of the images that a training reads, ascending: those that may be kept."""
        self._cache: ImageCache | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        where = np.asarray(positions)
        numbers = np.searchsorted(self.positions, where)
        images = None
        if self.is_kept and (self.positions.take(numbers, mode="clip") == where).all():
            images = self.cache.gather(numbers)
            if images is None:
                _say(f"{self.cache.path}: damaged; its images are decoded again")
                self.cache.remove()
        if images is None:
            images = torch.stack([self._square(position) for position in positions]).contiguous()
        return images, torch.from_numpy(self.labels[where])

    def cropped(
        self, positions: np.ndarray, augment: Augment, image_ids: np.ndarray, epochs: np.ndarray
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(crops of full-size images uint8 [B, 3, size, size], labels, places as
        :meth:`Augment.crops` returns them)."""
        images = map(self._pixels, positions.tolist())
        crops, places = augment.crops(images, image_ids, epochs, self.size)
        return crops, torch.from_numpy(self.labels[positions]), places

    def fingerprint(self) -> bytes:
        return self.files.fingerprint()

    def trial(self, positions: np.ndarray) -> FileImages:
        """The same images, of which only those at ``positions`` will be read: in memory if a
        training would keep them all."""
        few = copy.copy(self)
        few.settings = self.settings.model_copy(update={"cache": "none"})
        few.positions = np.unique(positions)
        few._cache = few._named_cache()
        if self.kept_bytes():
            few._cache.images = torch.stack([self._square(p) for p in few.positions.tolist()])
            few._cache.unchecked[:] = False
        return few

    def seconds(self) -> float:
        """About how long one core takes for the images of an epoch, in the sense of
        :data:`SECONDS`."""
        bytes_per_image = self.files.total_bytes / max(1, len(self))
        return len(self.positions) * (SECONDS + bytes_per_image * SECONDS_PER_BYTE)

    def _pixels(self, position: int) -> Tensor:
        """All pixels of an image: uint8 [3, height, width], one pixel's colours side by side in
        memory."""
        name = self.files.name(position)
        with refusing(name), self.files.open(position) as file:
            return torch.from_numpy(np.array(read_rgb(file, name))).permute(2, 0, 1)

    def _square(self, position: int) -> Tensor:
        """uint8 [3, size, size]."""
        image = self._pixels(position)
        if image.shape[1:] == (self.size, self.size):
            return image
        with refusing(self.files.name(position)):
            interpolation = InterpolationMode(self.settings.interpolation)
            resized = F.resize_image(image, [self.size], interpolation, antialias=True)
            return F.center_crop_image(resized, [self.size, self.size])

    @property
    def cache(self) -> ImageCache:
        if self._cache is None:
            self._cache = self._named_cache()
            if self.settings.cache == "auto":
                self._cache.open()
        return self._cache

    @property
    def is_kept(self) -> bool:
        """True where the squares need not be decoded."""
        return self.cache.images is not None

    def kept_bytes(self) -> int:
        """Bytes that the decoded images take in the cache; 0 where :meth:`keep` keeps none."""
        if self.settings.cache == "none":
            return 0
        size, free = self.cache.pixel_bytes, machine.free_disk(cache_folder())
        return size if self.is_kept or size < min(MOST_BYTES, free / 2) else 0

    def keep(self) -> None:
        """Decodes the images that a training reads into the cache, if ``data.cache`` and the disk
        let it. The first of several processes does so, and the others wait. Raises UserError for an
        image that cannot be decoded, or that the data set's digest is not of.
        """
        if self.settings.cache == "none" or self.is_kept:
            return

        def square(number: int) -> Tensor:
            position = int(self.positions[number])
            self.files.check(position)
            return self._square(position)

        threads = max(1, machine.share_of_cores()) if self.files.threads else 1
        try:
            with self.cache.locked():
                if not self.cache.open() and self.kept_bytes():
                    self.cache.make(square, threads)
        except OSError as error:
            _say(
                f"decoded images cannot be kept in {self.cache.path.parent} ({error.strerror}): "
                "they are decoded in every epoch; GAUPIPE_CACHE names another folder"
            )
            self.settings = self.settings.model_copy(update={"cache": "none"})

    def _named_cache(self) -> ImageCache:
        """One file for each folder and choice of images. Its key says which images, with which
        content, are decoded and resized by what."""
        settings = self.settings
        resizing = (self.size, settings.interpolation)
        words = (self.files.place, *resizing, settings.train_images, settings.val_fraction)
        name = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:32]
        key = hashlib.sha256(self.files.contents(self.positions))
        key.update(np.asarray(self.positions, dtype="<i8").tobytes())
        libraries = [PIL.__version__, torch.__version__, torchvision.__version__]
        libraries.append(torch.backends.cpu.get_cpu_capability())  # it resizes in its own way
        key.update(json.dumps([*resizing, *libraries]).encode())
        return ImageCache(name, key.digest(), (len(self.positions), 3, self.size, self.size))


def _say(line: str) -> None:
    print(f"data.cache: {line}", file=sys.stderr)
