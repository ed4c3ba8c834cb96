"""Images in files: decoded when they are asked for, or once and then kept."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import PIL
import torch
import torchvision
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from gaupipe.system import signals as interruption, machine
from gaupipe.data import cache as kept_images
from gaupipe.data.augment import Crops
from gaupipe.settings import FILE_IMAGE_SIZE, DataSettings
from gaupipe.data.decoding import image_size, read_pixels, refusing
from gaupipe.system.errors import UserError
from gaupipe.data.files import SAMPLE, HubImages, ImageFiles, cache_folder, sample
from gaupipe.data.cache import Damaged, KeptImages
from gaupipe.system.progress import EpochProgress

Kind = Literal["square", "full"]
"""What is kept of an image: the square that a model sees, uint8 [3, size, size], or all of its
pixels, uint8 [height, width, 3]."""

FORMAT = 1
"""Of what is kept. Another number for other pixels."""

SECONDS, SECONDS_PER_BYTE, SECONDS_PER_PIXEL = 1e-4, 3e-8, 4e-9
"""What one core takes to decode an image, roughly: at least, for each byte of the file, and for
each pixel that the model sees."""


class DecodedImages(Dataset):
    """Images in files, and their labels int64 [N].

    They are resized so that the shorter side is ``size``, bilinear with antialiasing, and cropped
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
        self.chosen = np.arange(len(labels))
        """Positions of the images that a training reads, ascending: those that may be kept."""
        self.kept: dict[Kind, KeptImages] = {}
        self._full_bytes: int | None = None
        self.has_folder = True
        """Whether the folder of decoded images can be written to, as far as is known."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        where = np.asarray(positions)
        labels = torch.from_numpy(self.labels[where])
        if "square" in self.kept and (numbers := self._numbers(where)) is not None:
            try:
                return self.kept["square"].gather(numbers), labels
            except Damaged as damage:
                self._forget("square", damage)
        squares = [self._square(self._pixels(position), position) for position in where.tolist()]
        return torch.stack(squares).contiguous(), labels

    def cropped(self, positions: list[int], crops: Crops) -> tuple[Tensor, Tensor, Tensor]:
        """(crops of full-size images uint8 [B, 3, size, size], labels, places as
        :meth:`Crops.of` returns them)."""
        images, places = crops.of(map(self._pixels, positions), self.size)
        return images, torch.from_numpy(self.labels[np.asarray(positions)]), places

    def fingerprint(self) -> bytes:
        return self.files.fingerprint()

    def trial(self, positions: np.ndarray) -> DecodedImages:
        """The same images, of which only those at ``positions`` will be read: kept in memory if all
        would be kept."""
        few = copy.copy(self)
        keeps = self.would_keep("square")[0] != "none"
        changes = {"cache": "memory" if keeps else "none"}
        few.settings = self.settings.model_copy(update=changes)
        few.chosen, few.kept, few._full_bytes = np.unique(positions), {}, None
        return few

    def seconds(self, kind: Kind) -> float:
        """About how long one core takes for the images of an epoch, in the sense of
        :data:`SECONDS`."""
        per_image = SECONDS + SECONDS_PER_PIXEL * 3 * self.size**2
        if kind in self.kept:
            return 0.0 if kind == "square" else len(self.chosen) * per_image
        return len(self.chosen) * (per_image + SECONDS_PER_BYTE * self.files.mean_bytes)

    # ---- pixels -----------------------------------------------------------------------------

    def _pixels(self, position: int) -> Tensor:
        """All pixels of an image: uint8 [3, height, width]."""
        if "full" in self.kept and (numbers := self._numbers(np.array([position]))) is not None:
            try:
                return self.kept["full"][numbers[0]].permute(2, 0, 1)
            except Damaged as damage:
                self._forget("full", damage)
        return self._decode(position)

    def _decode(self, position: int, check: bool = False) -> Tensor:
        name = self.files.name(position)
        with refusing(name), self.files.open(position) as file:
            content = file.read()
        if check:
            self.files.check(position, content)
        with refusing(name):
            return read_pixels(content, name)

    def _square(self, image: Tensor, position: int) -> Tensor:
        """uint8 [3, size, size]."""
        if image.shape[1:] == (self.size, self.size):
            return image
        with refusing(self.files.name(position)):
            resized = F.resize_image(image, [self.size], antialias=True)
            return F.center_crop_image(resized, [self.size, self.size])

    def _numbers(self, positions: np.ndarray) -> np.ndarray | None:
        """The places of images among the chosen ones; None if some are not."""
        numbers = np.searchsorted(self.chosen, positions)
        inside = numbers < len(self.chosen)
        found = inside.all() and (self.chosen[numbers] == positions).all()
        return numbers if found else None

    # ---- what is kept -----------------------------------------------------------------------

    def find(self, kind: Kind) -> None:
        """Opens what an earlier training kept."""
        if kind not in self.kept and self.settings.cache in ("auto", "file"):
            found = kept_images.read(self._folder(kind), self._key(kind))
            if found is not None:
                self.kept[kind] = found

    def keep(self, kind: Kind) -> None:
        """Decodes the chosen images and keeps them, if the settings say so and if they are not kept
        yet. Raises UserError for an image that cannot be decoded, and where ``data.cache`` asks for
        what cannot be."""
        self.find(kind)
        if kind in self.kept or not self._wanted(kind):
            return
        if self.settings.cache != "memory" and self.has_folder:
            self._keep_in_folder(kind)
        if kind in self.kept:
            return
        place, size = self.would_keep(kind)
        if place == "memory":
            count = len(self.chosen)
            self.kept[kind] = kept_images.in_memory(self._decoded(kind), count, size)

    def _keep_in_folder(self, kind: Kind) -> None:
        """Keeps the images in the cache if the disk has space. Several processes that want the same
        decide one after the other: the later ones find what the first one has kept, and need no
        space for it."""
        folder = self._folder(kind)
        if not kept_images.is_begun(folder) and self.would_keep(kind)[0] != "file":
            return
        try:
            with kept_images.one_at_a_time(folder):
                self.find(kind)
                if kind not in self.kept and self.would_keep(kind)[0] == "file":
                    images, count = self._decoded(kind), len(self.chosen)
                    self.kept[kind] = kept_images.in_folder(images, count, folder, self._key(kind))
        except OSError as error:
            reason = f"decoded images cannot be kept in {folder.parent} ({error.strerror})"
            if self.settings.cache == "file":
                raise UserError(
                    f"data.cache: {reason}; GAUPIPE_CACHE names another folder, and "
                    "data.cache=none decodes in every epoch"
                ) from None
            _say(reason)
            self.has_folder = False

    def _wanted(self, kind: Kind) -> bool:
        """Whether ``data.cache`` and ``data.cache_gb`` let the images be kept, if there is room."""
        settings = self.settings
        fits = settings.cache != "auto" or self._bytes(kind) <= settings.cache_gb * 1e9
        return settings.cache != "none" and fits

    def would_keep(self, kind: Kind) -> tuple[str, int]:
        """Where :meth:`keep` keeps the images, ``file``, ``memory`` or ``none``, and about how many
        bytes they take. Raises UserError where ``data.cache`` asks for what cannot be."""
        size, cache = self._bytes(kind), self.settings.cache
        memory, shared = machine.available_memory(), machine.processes()
        fits_memory = memory is None or shared * size < memory / 2
        if not self._wanted(kind):
            return "none", size
        on_disk = machine.free_disk(cache_folder())
        if cache in ("auto", "file") and self.has_folder and size < on_disk / 2:
            return "file", size
        if cache in ("auto", "memory") and fits_memory:
            return "memory", size
        if cache == "auto":
            return "none", size
        what, free = ("memory", memory or 0) if cache == "memory" else ("disk", on_disk)
        raise UserError(
            f"data.cache: {len(self.chosen):,} decoded images take {size / 1e9:,.1f} GB of {what}, "
            f"and no more than half of what is free is used, {free / 2e9:,.1f} GB; "
            "data.cache=none decodes in every epoch"
        )

    def _bytes(self, kind: Kind) -> int:
        """About how many bytes the chosen images take."""
        if kind == "square":
            return len(self.chosen) * 3 * self.size**2
        if self._full_bytes is None:
            self._full_bytes = self._sampled_bytes()
        return self._full_bytes

    def _sampled_bytes(self) -> int:
        pixels = 0
        for position in self.chosen[sample(len(self.chosen))].tolist():
            name = self.files.name(position)
            with refusing(name), self.files.open(position) as file:
                height, width = image_size(file, name)
            pixels += height * width
        return 3 * pixels * len(self.chosen) // SAMPLE

    def _decoded(self, kind: Kind) -> Iterator[Tensor]:
        """The chosen images in their order, as they are kept. Decoded in as many threads as there
        are processor cores for this rank. Raises UserError for an image that is not the one that
        the data set's digest is of."""

        def decoded(position: int) -> Tensor:
            image = self._decode(position, check=True)
            return self._square(image, position) if kind == "square" else image.permute(1, 2, 0)

        threads, count = 1, len(self.chosen)
        if self.files.threads:
            threads = max(1, machine.share_of_cores())
        waiting: deque[Future[Tensor]] = deque()
        with (
            ThreadPoolExecutor(threads) as pool,
            EpochProgress("decoding images", count, 1) as progress,
        ):
            try:
                for position in self.chosen.tolist():
                    waiting.append(pool.submit(decoded, position))
                    interruption.let_through()
                    if len(waiting) > 4 * threads:
                        yield waiting.popleft().result()
                        progress.advance(1)
                while waiting:
                    yield waiting.popleft().result()
                    progress.advance(1)
            finally:
                pool.shutdown(cancel_futures=True)

    def _forget(self, kind: Kind, damage: Damaged) -> None:
        kept = self.kept.pop(kind)
        kept_images.remove(kept)
        _say(f"{damage}; images are decoded again, and kept again by the next training")

    def _folder(self, kind: Kind) -> Path:
        """One for each place of the images and each choice among them."""
        settings = self.settings
        words = (self.files.place, kind, self.size, settings.train_images, settings.val_fraction)
        name = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:32]
        return cache_folder() / "images-1" / name / "images"

    def _key(self, kind: Kind) -> str:
        """Says what is kept: which images, with which content, decoded and resized by what."""
        digest = hashlib.sha256(self.files.contents(self.chosen))
        digest.update(np.asarray(self.chosen, dtype="<i8").tobytes())
        libraries = [PIL.__version__, torch.__version__, torchvision.__version__]
        libraries.append(torch.backends.cpu.get_cpu_capability())  # it resizes in its own way
        words = (FORMAT, kind, self.size, digest.hexdigest(), *libraries)
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _say(line: str) -> None:
    print(f"data.cache: {line}", file=sys.stderr)
