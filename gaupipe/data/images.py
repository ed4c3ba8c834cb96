"""Images in memory, and images in files: decoded when they are asked for, or once and then read
from the user's cache."""

from __future__ import annotations

import copy
import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from io import BufferedReader, BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL.Image
import torch
import torchvision
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from gaupipe.data.cache import ImageCache, digests_file, read_digests, write_digests
from gaupipe.data.decoding import RULES, check, identify, read_rgb, refusing
from gaupipe.settings import FILE_IMAGE_SIZE, DataSettings
from gaupipe.system.errors import UserError
from gaupipe.system.messages import LOG, warn_once
from gaupipe.system.progress import EpochProgress

UNLABELLED = -1
"""In place of the label of an image that has none."""

READERS = 8
"""Threads that read files at once; what they wait for is the disk or the network."""

LONGEST = 16
"""A longer side than so many times the shorter one is cut at its ends."""

PART = 1_000
"""Files that wait to be read."""

SETTLED_NS = 2_000_000_000
"""A file that changed less long ago might change again within the same time stamp: its digest is
not kept."""


AnyImage = TypeVar("AnyImage", Tensor, PIL.Image.Image)


def are_among(contents: np.ndarray, others: Iterable[np.ndarray]) -> np.ndarray:
    """[N] bool: which of the digests ``contents``, uint8 [N, 32], are among those of ``others``."""
    known = {content.tobytes() for each in others for content in each}
    return np.array([content.tobytes() in known for content in contents], dtype=bool)


def say_lines(lines: Iterable[str]) -> None:
    """Prints lines on stderr, in the first process alone."""
    if multiprocessing.parent_process() is None:
        for line in lines:
            LOG.warning(line)


def as_asked(images: FileImages) -> FileImages:
    """The images, or where ``data.unreadable`` says so those that can be read to their end, after
    lines on stderr about the others, once in a process. Raises UserError where of a class none is
    left."""
    if images.settings.unreadable != "leave_out":
        return images
    _, problems = examine(images)
    if not problems:
        return images
    for problem in problems.values():
        warn_once(problem)
    warn_once(f"{images.root}: goes on without these images: {len(problems)}")
    kept = images.only(np.flatnonzero([name not in problems for name in images.names]))
    if not len(kept):
        raise UserError(f"{images.root}: none of its images can be read")
    for label in sorted({*images.labels.tolist()} - {*kept.labels.tolist()}):
        name = images.class_names[label] if images.class_names else label
        raise UserError(f"{images.root}: no image of the class {str(name)!r} can be read")
    return kept


def examine(images: FileImages) -> tuple[dict[str, str], dict[str, str]]:
    """By name the SHA-256 of each file that can be read to its end as an image, and of the others
    why they cannot, in the order of the images; without :attr:`FileImages.decoded_first` that of
    each file that can be read.

    A file is read only if the cache does not know it with its present size, time stamps and inode.
    The inode counts because files that change places may agree in the rest.
    """
    settled_ns = time.time_ns() - SETTLED_NS
    names = images.names
    positions = {name: position for position, name in enumerate(names)}
    stamps = {name: images.stamp(position) for name, position in positions.items()}
    cached = digests_file(images.root, images.decoded_first)
    known = {
        name: (stamp, digest)
        for name, (stamp, digest) in read_digests(cached).items()
        if name in stamps and stamp == stamps[name][0]
    }
    digests = {name: digest for name, (_, digest) in known.items()}
    problems = {}
    unknown = [name for name in names if name not in known]
    if unknown:
        with (
            ThreadPoolExecutor(READERS) as pool,
            EpochProgress("reading images", len(unknown), 1) as progress,
        ):
            try:
                # in parts, because what a pool keeps of a million files would fill the memory
                parts = (unknown[start : start + PART] for start in range(0, len(unknown), PART))
                answers = chain.from_iterable(
                    pool.map(images.examine, [positions[name] for name in part]) for part in parts
                )
                for name, (digest, problem) in zip(unknown, answers, strict=True):
                    stamp, changed_ns = stamps[name]
                    if problem:
                        problems[name] = problem
                    else:
                        digests[name] = digest
                        if changed_ns < settled_ns:
                            known[name] = stamp, digest
                    progress.advance(1)
            finally:  # so that nothing is read twice after an interrupt
                pool.shutdown(cancel_futures=True)
                write_digests(cached, known)
    return digests, problems


def stamp_of(path: str) -> tuple[str, int]:
    """Size, times and inode of a file, which change with its content, and the latest time in ns."""
    try:
        status = os.stat(path)
    except OSError:  # a link to nothing: it is refused when it is read
        return "", 0
    modified = status.st_mtime_ns
    changed = status.st_ctime_ns
    return f"{status.st_size} {modified} {changed} {status.st_ino}", max(modified, changed)


def without_ends(image: AnyImage) -> AnyImage:
    """The middle of a long image, a PIL image or a tensor [C, height, width]. Its middle square is
    the image's; but with the shorter side resized to a model's size the whole image might fill the
    memory."""
    height, width = F.get_size(image)
    longest = LONGEST * min(height, width)
    middle: AnyImage = F.center_crop(image, [min(height, longest), min(width, longest)])
    return middle


class ArrayImages(Dataset[Any]):
    """Images held in memory: ``images`` uint8 [N, C, height, width], ``labels`` int64 [N], and the
    names of the classes, none where they have none. ``size`` is the side in pixels of the squares
    that are read."""

    interpolation = "bilinear"

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, class_names: Sequence[str] = ()
    ) -> None:
        self.class_names = tuple(class_names)
        self.images = torch.from_numpy(np.array(images, order="C"))
        self.labels = np.asarray(labels, dtype=np.int64)
        self.size: int = self.images.shape[-1]

    def at(self, size: int, interpolation: str) -> ArrayImages:
        """The same images, each resized as it is read: all of them might not fit into memory."""
        other = copy.copy(self)
        other.size = size
        other.interpolation = interpolation
        return other

    def resized(self, size: int, interpolation: str = "bilinear") -> ArrayImages:
        """The same images at ``size`` x ``size`` pixels, with antialiasing."""
        if tuple(self.images.shape[-2:]) == (size, size):
            return self
        mode = InterpolationMode(interpolation)
        images = F.resize(self.images, [size, size], mode, antialias=True)
        return ArrayImages(images.numpy(), self.labels, self.class_names)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        where = np.asarray(positions)
        images = self.images[where]
        if images.shape[-1] != self.size:
            mode = InterpolationMode(self.interpolation)
            images = F.resize(images, [self.size, self.size], mode, antialias=True)
        return images, torch.from_numpy(self.labels[where])

    def pixels(self, position: int) -> Tensor:
        """An image as it is held: uint8 [C, height, width]."""
        return self.images[position]

    def fingerprint(self) -> bytes:
        return hashlib.sha256(self.images.numpy().tobytes()).digest()


class FileImages(Dataset[Any]):
    """Images in files, ``names`` relative to ``root``, and their labels int64 [N].

    They are resized so that the shorter side is ``size``, with antialiasing, and cropped
    to the square in the middle. An image that cannot be decoded raises UserError. ``class_names``
    are as those of :class:`ArrayImages`.
    """

    def __init__(
        self,
        root: Path,
        names: list[str],
        labels: np.ndarray,
        settings: DataSettings,
        class_names: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.names = names
        self.settings = settings
        self.class_names = tuple(class_names)
        self.size = settings.image_size or FILE_IMAGE_SIZE
        self.interpolation = settings.interpolation
        self.labels = np.asarray(labels, dtype=np.int64)
        self.positions = np.arange(len(labels))
        """Positions of the images that a training reads, ascending: those that may be kept."""
        self.decoded_first = True
        """Files are read to their end as images before anything is done with them, not their bytes
        alone."""

    def at(self, size: int, interpolation: str) -> FileImages:
        """The same images as squares of another size."""
        if (size, interpolation) == (self.size, self.interpolation):
            return self
        scaling = {**self.settings.scaling, "interpolation": interpolation}
        settings = self.settings.model_copy(update={"image_size": size, "scaling": scaling})
        other = copy.copy(self)
        other.__dict__.pop("cache", None)  # of squares of this size
        other.settings = settings
        other.size = size
        other.interpolation = interpolation
        return other

    def only(self, kept: np.ndarray) -> FileImages:
        """The images at some ascending positions, which are counted anew."""
        other = copy.copy(self)
        other.__dict__.pop("cache", None)
        if "contents" in other.__dict__:
            other.contents = self.contents[kept]
        other.names = [self.names[position] for position in kept]
        other.labels = self.labels[kept]
        other.positions = np.arange(len(kept))
        return other

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        where = np.asarray(positions)
        numbers = np.searchsorted(self.positions, where)
        images = None
        if (self.positions.take(numbers, mode="clip") == where).all():  # all may be in the cache
            images = self.cache.gather(numbers)
        if images is None:
            images = torch.stack([self._square(position) for position in positions]).contiguous()
        return images, torch.from_numpy(self.labels[where])

    def path(self, position: int) -> str:
        return os.path.join(self.root, self.names[position])

    def open(self, position: int) -> BufferedReader | BytesIO:
        """The file of an image, opened for reading."""
        return open(self.path(position), "rb")

    def stamp(self, position: int) -> tuple[str, int]:
        """What changes with an image's content, and the latest time in ns at which it did."""
        return stamp_of(self.path(position))

    def examine(self, position: int) -> tuple[str, str]:
        """The digest of a file's content, and why the file is no image that can be read, "" for
        one that can."""
        try:
            with refusing(self.path(position)), self.open(position) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
                if self.decoded_first:
                    check(file)
        except UserError as error:
            return "", str(error)
        return digest, ""

    def size_of(self, position: int) -> tuple[int, int]:
        """(width, height) of an image in pixels, of which its header alone is decoded."""
        with refusing(self.path(position)), self.open(position) as file, identify(file) as image:
            return image.size

    def pixels(self, position: int) -> Tensor:
        """All pixels of an image: uint8 [3, height, width], one pixel's colours side by side in
        memory."""
        with refusing(self.path(position)), self.open(position) as file:
            return torch.from_numpy(np.array(read_rgb(file))).permute(2, 0, 1)

    def crop(self, width: int, height: int) -> tuple[float, float, float, float]:
        """The part that is kept of an image of so many pixels: left, top, right and bottom in
        shares of its width and height."""
        side = min(width, height)
        across = side / width / 2
        down = side / height / 2
        return 0.5 - across, 0.5 - down, 0.5 + across, 0.5 + down

    def _square(self, position: int) -> Tensor:
        """uint8 [3, size, size]."""
        image = self.pixels(position)
        if image.shape[1:] == (self.size, self.size):
            return image
        with refusing(self.path(position)):
            interpolation = InterpolationMode(self.interpolation)
            middle = without_ends(image)
            resized = F.resize_image(middle, [self.size], interpolation, antialias=True)
            cropped: Tensor = F.center_crop_image(resized, [self.size, self.size])
        return cropped

    @cached_property
    def contents(self) -> np.ndarray:
        """The SHA-256 of each file's content, uint8 [N, 32]. Raises UserError where files cannot be
        read to their end as images, after a line for each of several on stderr."""
        digests, problems = examine(self)
        if problems:
            first, *others = problems.values()
            remedy = "set data.unreadable=leave_out to go on without"
            if not others:
                raise UserError(f"{first}; {remedy} it")
            say_lines(problems.values())
            raise UserError(
                f"{first}; the {len(problems)} of {len(self)} images that are not are listed "
                f"above; {remedy} them"
            )
        in_hex = "".join(digests[name] for name in self.names)
        return np.frombuffer(bytes.fromhex(in_hex), np.uint8).reshape(-1, 32)

    def fingerprint(self) -> bytes:
        """A digest of all names and contents in their order."""
        digest = hashlib.sha256()
        for name, content in zip(self.names, self.contents, strict=True):
            digest.update(os.fsencode(name) + b"\0" + content.tobytes())
        return digest.digest()

    @cached_property
    def cache(self) -> ImageCache:
        """The kept squares of the images at :attr:`positions`."""
        enabled = self.settings.cache == "auto"
        digest = "none"
        if enabled:  # else no file need be read for it
            # of all that makes the squares
            made_by = hashlib.sha256(self.contents[self.positions].tobytes())
            libraries = [RULES, PIL.__version__, torch.__version__, torchvision.__version__]
            libraries.append(torch.backends.cpu.get_cpu_capability())  # it resizes in its own way
            made_by.update(json.dumps([self.size, self.interpolation, *libraries]).encode())
            digest = made_by.hexdigest()[:32]
        cache = ImageCache(digest, (len(self.positions), 3, self.size, self.size), enabled)
        cache.open()
        return cache

    @property
    def is_cached(self) -> bool:
        """True where the images at :attr:`positions` are read from the cache."""
        return self.cache.images is not None

    def keep(self, epoch: int = 0) -> None:
        """Decodes the images that a training reads into the cache, if ``data.cache`` and the disk
        let it; without :attr:`decoded_first` not before the first ``epoch``, counted from 0. The
        first of several processes does so, and the others wait. Raises UserError for an image that
        cannot be decoded, or that the data set's digest is not of.
        """
        if epoch == 0 and not self.decoded_first:
            return
        self.cache.keep(lambda number: self._unchanged(int(self.positions[number])))

    def _unchanged(self, position: int) -> Tensor:
        """The square of a file that has not changed since its digest was taken."""
        path = self.path(position)
        with refusing(path), self.open(position) as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        if digest != self.contents[position].tobytes():
            raise UserError(f"{path}: has changed since the data set was opened; start again")
        return self._square(position)


Source = ArrayImages | FileImages
