"""Reads the images of a split batch by batch with torch's DataLoader, which decodes in processes of
its own where that is worth it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_convert

from gaupipe.data.augment import Augment
from gaupipe.data.images import FileImages, Source
from gaupipe.data.splits import Split
from gaupipe.system import machine
from gaupipe.system.errors import UserError
from gaupipe.system.signals import kill_readers_at_exit, spare_worker, spared

FEW_IMAGES = 2_000
"""Decoding an epoch of fewer images is not worth starting processes."""

MOST_WORKERS = 16


class BatchRequest(NamedTuple):
    """The images of a batch: their positions in the source and ids; and, for crops that are cut
    from the images themselves, what draws them, by which :meth:`Split.drawn_ids` and in which
    epochs."""

    positions: np.ndarray
    ids: np.ndarray
    augment: Augment | None = None
    drawn_ids: np.ndarray | None = None
    epochs: np.ndarray | None = None


@dataclass
class Loaded:
    """Images uint8 [B, C, height, width], labels [B] and image ids [B]; and where the images lie if
    they are crops, float64 [B, 4] as :meth:`Augment.crops` returns it."""

    images: Tensor
    labels: Tensor
    ids: Tensor
    crop_geometry: Tensor | None = None

    def pin_memory(self, *_device: Any) -> Loaded:
        """For the copy to a GPU; torch's DataLoader calls it."""
        self.images = self.images.pin_memory()
        self.labels = self.labels.pin_memory()
        return self


def requests(
    split: Split,
    batches: Sequence[np.ndarray],
    augment: Augment | None = None,
    epochs: Sequence[np.ndarray] = (),
) -> list[BatchRequest]:
    """The request for each batch of image ids. With crops of full-size images, and with crops for
    another size than they are drawn for, it asks for those that ``augment`` draws in these
    ``epochs``."""
    if augment is None or not cuts_images(augment, split.source):
        return [BatchRequest(split.positions[ids], ids) for ids in batches]
    return [
        BatchRequest(split.positions[ids], ids, augment, split.drawn_ids(ids), epoch)
        for ids, epoch in zip(batches, epochs, strict=True)
    ]


def draws_full_size(augment: Augment, source: Source) -> bool:
    """True where crops are drawn of image files at their full size."""
    return augment.settings.full_size and isinstance(source, FileImages)


def cuts_images(augment: Augment, source: Source) -> bool:
    """True where crops are cut from the images themselves: where they are drawn of image files at
    their full size, or of squares of another size than the source's."""
    if augment.settings.resized_crop is None:
        return False
    return draws_full_size(augment, source) or augment.size not in (None, source.size)


def fetch(source: Source, request: BatchRequest) -> Loaded:
    """The images of a batch; views that follow each other are of an image that is decoded once.
    Raises UserError for an image that cannot be read."""
    positions, ids, augment, drawn_ids, epochs = request
    labels = torch.from_numpy(source.labels[positions])
    if augment is None or drawn_ids is None or epochs is None:
        distinct, numbers = np.unique(positions, return_inverse=True)
        if len(distinct) == len(positions):
            images, _ = source.__getitems__(positions.tolist())
        else:
            decoded, _ = source.__getitems__(distinct.tolist())
            images = decoded[torch.from_numpy(numbers)]
        return Loaded(images, labels, torch.from_numpy(ids))
    pixels = decoded_once(source, positions)
    if draws_full_size(augment, source):
        images, places = augment.crops(pixels, drawn_ids, epochs, source.size)
    else:
        images, places = augment.crops_of_squares(
            pixels, drawn_ids, epochs, source.size, source.interpolation
        )
    return Loaded(images, labels, torch.from_numpy(ids), places)


def decoded_once(source: Source, positions: np.ndarray) -> Iterator[Tensor]:
    """All pixels of the image at each of the ``positions``."""
    for position, views in groupby(positions.tolist()):
        pixels = source.pixels(position)
        for _ in views:
            yield pixels


def view_of(split: Split, image_id: int, augment: Augment, epoch: int) -> np.ndarray:
    """The view that ``augment`` makes of one image in an epoch: uint8 [height, width, C]."""
    ids = np.array([image_id])
    [request] = requests(split, [ids], augment, [np.array([epoch])])
    loaded = fetch(split.source, request)
    views, _ = augment(loaded.images, split.drawn_ids(ids), epoch, loaded.crop_geometry)
    return views[0].permute(1, 2, 0).numpy()


@dataclass
class _Fetching(Dataset[Any]):
    """Whole batches, or in their place the UserError, of which torch would make a traceback."""

    source: Source

    def __getitems__(self, request: BatchRequest) -> Loaded | UserError:
        try:
            return fetch(self.source, request)
        except UserError as error:
            return error


class Loader:
    """Fetches batches of a source, on the CPU; in pinned memory for a GPU.

    ``workers`` processes decode images; ``auto`` is chosen by the machine. The processes live on
    from one call to the next.
    """

    def __init__(
        self, source: Source, device: torch.device, workers: int | Literal["auto"] = 0
    ) -> None:
        self.source = source
        self.workers = workers
        self.pin = device.type == "cuda"
        self._requests: list[BatchRequest] = []
        self._made_for: tuple[int, bool] | None = None
        self._loader: DataLoader[Any] | None = None

    def __call__(self, requests: Sequence[BatchRequest]) -> Iterator[Loaded]:
        """The batches in their order. Raises the UserError of an image that cannot be read."""
        if not requests:
            return
        uncached = isinstance(self.source, FileImages) and not self.source.is_cached
        decodes = requests[0].augment is not None or uncached

        # worker processes take seconds to start, so they live on from epoch to epoch
        workers = self.number_of_workers(decodes)
        if self._loader is None or self._made_for != (workers, decodes):
            self._made_for = workers, decodes
            if workers:
                kill_readers_at_exit()
            self._loader = DataLoader(
                _Fetching(self.source),
                batch_sampler=self._requests,  # type: ignore[arg-type]  # lists of samples to torch
                collate_fn=default_convert,  # leaves batches as they are
                num_workers=workers,
                worker_init_fn=spare_worker,
                generator=torch.Generator(),
                # tensorstore must not be in use before a fork: workers start from a clean process
                multiprocessing_context="forkserver" if workers else None,
                persistent_workers=workers > 0,  # each takes seconds to import torch
                pin_memory=self.pin,
            )
        self._requests[:] = requests  # in place: the DataLoader that lives on looks at this list

        with spared():
            batches = iter(self._loader)
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch

    def number_of_workers(self, decodes: bool) -> int:
        """The processes that read images, which may have to be decoded."""
        if self.workers != "auto":
            return self.workers
        source = self.source
        few = not isinstance(source, FileImages) or len(source.positions) < FEW_IMAGES
        if few or not decodes:
            return 0
        cores = machine.share_of_cores()
        workers = cores // 2  # without a GPU the cores train, too
        if self.pin:
            workers = max(1, cores - 1)
        return min(workers, MOST_WORKERS)
