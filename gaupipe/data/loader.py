"""Reads the images of a split batch by batch, ahead of what uses them: in processes of their own,
or in a thread."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gaupipe.system import machine
from gaupipe.data.augment import Crops
from gaupipe.data.decoded_images import DecodedImages, Kind
from gaupipe.system.errors import UserError
from gaupipe.data.sources import ArrayImages, Source
from gaupipe.system.signals import spare_worker, spared

AHEAD = 2
"""Batches that are read while one is used."""

FEW_SECONDS = 5.0
"""Decoding an epoch that takes less is not worth starting processes."""

MOST_WORKERS = 16
SMALL_BATCH = 2**20
"""Bytes of a batch in memory that is copied before a thread could be told to."""


@dataclass(frozen=True)
class Request:
    """The images of a batch: their positions in the source and ids, and the crops of full-size
    images that are asked for."""

    positions: np.ndarray
    ids: np.ndarray
    crops: Crops | None = None

    @property
    def kind(self) -> Kind:
        return "full" if self.crops else "square"


@dataclass
class Loaded:
    """Images uint8 [B, C, height, width], labels [B] and image ids [B]; and where the images lie if
    they are crops, float64 [B, 4] as :meth:`Crops.of` returns it."""

    images: Tensor
    labels: Tensor
    ids: Tensor
    places: Tensor | None = None

    def pin_memory(self, *_device: Any) -> Loaded:
        """For the copy to a GPU; torch's DataLoader calls it."""
        self.images, self.labels = self.images.pin_memory(), self.labels.pin_memory()
        return self


def fetch(source: Source, request: Request) -> Loaded:
    """The images of a batch. Raises UserError for one that cannot be read."""
    positions, ids = request.positions.tolist(), torch.from_numpy(request.ids)
    if request.crops and isinstance(source, DecodedImages):
        images, labels, places = source.cropped(positions, request.crops)
        return Loaded(images, labels, ids, places)
    return Loaded(*source.__getitems__(positions), ids)


class _Fetching(Dataset):
    """Makes a DataLoader fetch whole batches.

    In place of a batch with an image that cannot be read comes the UserError: raised in a worker,
    it would arrive as a traceback.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitems__(self, request: Request) -> Loaded | UserError:
        try:
            return fetch(self.source, request)
        except UserError as error:
            return error


class Loader:
    """Fetches batches of a source, on the CPU; in pinned memory for a GPU.

    ``workers`` processes decode images, or with 0 a thread; ``auto`` is chosen by the machine. The
    processes live on from one call to the next.
    """

    def __init__(
        self, source: Source, device: torch.device, workers: int | Literal["auto"] = 0
    ) -> None:
        self.source, self.workers = source, workers
        self.pin = device.type == "cuda"
        self._requests: list[Request] = []
        self._made_for: tuple[int, tuple[Kind, ...]] | None = None
        self._loader: DataLoader | None = None

    def __call__(self, requests: Sequence[Request]) -> Iterator[Loaded]:
        """The batches in their order. Raises the UserError of an image that cannot be read."""
        if not requests:
            return
        kind = requests[0].kind
        if isinstance(self.source, DecodedImages):
            self.source.find(kind)
        workers = self.number_of_workers(kind)
        read = self._from_processes if workers else self._ahead
        with contextlib.closing(read(requests, workers)) as batches:
            yield from batches

    def number_of_workers(self, kind: Kind = "square") -> int:
        """The processes that read images of this kind."""
        kept = self.source.kept.get(kind) if isinstance(self.source, DecodedImages) else None
        if kept is not None and kept.folder is None:
            return 0  # they lie in the memory of this process, and nothing has to be decoded
        if self.workers != "auto":
            return self.workers
        if isinstance(self.source, ArrayImages) or self.source.seconds(kind) < FEW_SECONDS:
            return 0
        cores = machine.share_of_cores()
        if not self.pin:  # the cores train, too
            return min(cores // 2, MOST_WORKERS)
        return min(max(1, cores - 1), MOST_WORKERS)

    def _ahead(self, requests: Sequence[Request], _workers: int) -> Generator[Loaded, None, None]:
        """Reads in a thread, but small batches in memory at once."""

        def read(request: Request) -> Loaded:
            batch = fetch(self.source, request)
            return batch.pin_memory() if self.pin else batch

        if isinstance(self.source, ArrayImages) and not self.pin:
            largest = max(len(request.ids) for request in requests)
            if largest * self.source.images[:1].nbytes < SMALL_BATCH:
                yield from map(read, requests)
                return
        pool, waiting = ThreadPoolExecutor(1), deque[Future[Loaded]]()
        try:
            for request in requests:
                waiting.append(pool.submit(read, request))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _from_processes(
        self, requests: Sequence[Request], workers: int
    ) -> Generator[Loaded, None, None]:
        kept = tuple(self.source.kept) if isinstance(self.source, DecodedImages) else ()
        if self._loader is None or self._made_for != (workers, kept):
            self._made_for = (workers, kept)
            # tensorstore must not be in use before a fork, so workers start from a clean process
            self._loader = DataLoader(
                _Fetching(self.source),
                batch_sampler=self._requests,  # type: ignore[arg-type]  # lists of samples to torch
                collate_fn=_as_is,
                num_workers=workers,
                worker_init_fn=spare_worker,
                generator=torch.Generator(),
                multiprocessing_context="forkserver",
                persistent_workers=True,
                pin_memory=self.pin,
            )
        self._requests[:] = requests
        with spared():
            batches = iter(self._loader)
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch


def _as_is(batch: Any) -> Any:
    return batch
