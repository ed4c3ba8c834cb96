"""Batches of images: read ahead by a DataLoader, augmented and normalised on the device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.augment import Augment
from gaupipe.data.buckets import Buckets, slices
from gaupipe.data.loader import Loaded, Loader, requests
from gaupipe.data.mixing import Mix, mix
from gaupipe.data.splits import ImageData, Split
from gaupipe.maps.gaussians import Geometry
from gaupipe.settings import DataSettings
from gaupipe.system import distributed

T = TypeVar("T")


class StoredOfImages(Protocol):
    """What a teacher says of the images of an epoch, in a store."""

    view: int | None
    """The view of the images that it was said of; None for the images themselves."""

    def prefetch(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """The stored arrays of each batch of image ids."""


@dataclass
class Batch:
    """Some images with their labels, ids and stored maps, all in one order.

    images     float32 [B, C, height, width], normalised, on the model's device
    labels     int64 [B], on the model's device
    ids        int64 [B], the image ids, on the CPU
    geometry   where each view lies in its image; None where nothing moved
    mixed      which images Mixup or CutMix mixed, and where; None where none were
    stored     what was read from a store for ``ids``, {array name: [B, ...]}; None for no store
    parts      (bucket, images): how many of the images, in their order, are of which bucket
    whole_size images of the whole batch, of which other ranks may have some; None where all are
               here
    whole_labelled
               those of the whole batch that have a label; None where all have, else it may be 0
    labelled_here
               the images, of those here, that have a label; None where all have
    place      (seed, epoch, number in the epoch) of the whole batch in a training: what is drawn
               for all its images, on all ranks alike, depends on it alone
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    geometry: Geometry | None = None
    mixed: Mix | None = None
    stored: dict[str, np.ndarray] | None = None
    parts: Sequence[tuple[int, int]] = ()
    whole_size: int | None = None
    whole_labelled: int | None = None
    labelled_here: int | None = None
    place: tuple[int, int, int] = (0, 0, 0)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def weight(self) -> float:
        """Weight of a mean over these images in the mean of all ranks' means, so that the latter
        is the mean over the images of the whole batch. 1 in a world of one."""
        if self.whole_size is None:
            return 1.0
        return len(self) * distributed.world_size() / self.whole_size

    @property
    def labelled(self) -> float:
        """The number of images with a label that would be here if every part of the whole batch
        had the same share of them. The sum over those that are here, divided by it, with the
        :attr:`weight` of the batch becomes the mean over those of the whole batch."""
        if self.whole_labelled is None:
            return len(self)
        return self.whole_labelled * len(self) / (self.whole_size or len(self))


class Batches:
    """The images of one split in batches, normalised, on ``device``.

    In a world of several processes a rank has the images of its buckets: a batch of training is
    this rank's part of the whole batch. ``batch_size`` is that of the whole batch.
    """

    def __init__(
        self,
        split: Split,
        data: ImageData,
        device: torch.device,
        batch_size: int,
        workers: int | Literal["auto"] = 0,
        buckets: int = 1,
    ) -> None:
        self.split = split
        self.data = data
        self.device = device
        self.batch_size = batch_size
        self.buckets = Buckets(len(split), buckets)
        self.loader = Loader(split.source, device, workers)
        self.waited = {"data": 0.0, "maps": 0.0}
        """Seconds that :meth:`epoch` has waited for images, and for stored maps."""
        self.mean = torch.tensor(data.mean, device=device).view(-1, 1, 1) * 255
        self.std = torch.tensor(data.std, device=device).view(-1, 1, 1) * 255

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return self.buckets.steps(self.batch_size)

    def in_order(self, image_ids: np.ndarray | None = None) -> Iterator[Batch]:
        """The images of ``image_ids``, or all of the split in canonical order, as they are."""
        if image_ids is None:
            image_ids = np.arange(len(self.split))
        for loaded in self.loader(requests(self.split, slices(image_ids, self.batch_size))):
            yield self._unchanged(loaded)

    def rank_batches(self) -> Iterator[Batch]:
        """The images of this rank's buckets as they are, bucket by bucket, each in canonical order:
        all of the split in a world of one with one bucket."""
        batches = [
            (bucket, ids)
            for bucket in self.buckets.rank_buckets()
            for ids in slices(self.buckets.members(bucket), self.batch_size)
        ]
        images_of = self.loader(requests(self.split, [ids for _, ids in batches]))
        for loaded, (bucket, ids) in zip(images_of, batches, strict=True):
            yield self._unchanged(loaded, [(bucket, len(ids))])

    def keep(self, number: int, augment: Augment) -> None:
        """Decodes the images of an epoch into the user's cache, and those of validation: a training
        does so before its clock starts. Crops of the full files are drawn anew in each epoch, so
        nothing is kept for them."""
        self.data.keep(None if augment.settings.full_size else self.split, number)

    def epoch(
        self,
        number: int,
        augment: Augment,
        stored: StoredOfImages | None = None,
        first: int = 0,
    ) -> Iterator[Batch]:
        """One epoch of training, counted from 0: augmented views, with what is ``stored`` of
        them. It begins with batch ``first``; nothing is read of the batches before.

        (seed of ``augment``, epoch) and the number of buckets alone determine the order, and the
        store is read by the very ids of each batch. Images of which a view is ``stored`` are drawn
        as :meth:`views` draws it: nothing has moved between them.
        """
        seed = augment.seed
        order = self.buckets.epoch(seed, number, self.batch_size)
        whole_sizes = self.buckets.batch_sizes(self.batch_size)  # over all ranks
        labelled: Sequence[int | None] = [None] * len(order)
        if self.split.labelled < len(self.split):
            labelled = self.buckets.counts_below(self.split.labelled, seed, number, self.batch_size)
        view = None if stored is None else stored.view
        # a stored view is drawn as it was for the store, whatever the epoch
        drawn_epoch = number if view is None else view
        batches = [np.concatenate([*members.values()]) for members in order[first:]]
        draws = [np.full(len(ids), drawn_epoch) for ids in batches]
        self.keep(number, augment)
        loads = self._timed(self.loader(requests(self.split, batches, augment, draws)), "data")
        reads: Iterable[dict[str, np.ndarray] | None] = [None] * len(batches)
        if stored is not None:
            reads = self._timed(stored.prefetch(batches), "maps")
        steps = range(first, len(order))
        for step, ids, loaded, arrays in zip(steps, batches, loads, reads, strict=True):
            drawn_ids = self.split.drawn_ids(ids)
            pixels = self._on_device(loaded.images)
            views, geometry = augment(pixels, drawn_ids, drawn_epoch, loaded.crop_geometry)
            if view is not None:
                geometry = None  # the stored maps are of this very view
            # a partner of another bucket would depend on the world size, and of one that has no
            # label half of a target says nothing
            kinds = np.stack([self.buckets.of(ids), ids < self.split.labelled], axis=1)
            images, mixed = mix(
                self._normalised(views), drawn_ids, seed, number, augment.settings, kinds
            )
            yield Batch(
                images,
                self._on_device(loaded.labels),
                loaded.ids,
                geometry=geometry,
                mixed=mixed,
                stored=arrays,
                parts=[(bucket, len(members)) for bucket, members in order[step].items()],
                whole_size=whole_sizes[step],
                whole_labelled=labelled[step],
                labelled_here=int(np.sum(ids < self.split.labelled)),
                place=(seed, number, step),
            )

    def views(self, entries: np.ndarray, augment: Augment, count: int) -> Iterator[Batch]:
        """Augmented views in the order of ``entries``, each image id * ``count`` + view.

        View v is what ``augment`` makes of an image in epoch v. The ids of a batch are entries.
        """
        batches = slices(entries, self.batch_size)
        ids = [batch // count for batch in batches]
        views = [batch % count for batch in batches]
        images_of = self.loader(requests(self.split, ids, augment, views))
        for step, loaded in enumerate(images_of):
            images = self._on_device(loaded.images)
            drawn_ids = self.split.drawn_ids(ids[step])
            images, _ = augment(images, drawn_ids, views[step], loaded.crop_geometry)
            labels = self._on_device(loaded.labels)
            yield Batch(self._normalised(images), labels, torch.from_numpy(batches[step].copy()))

    def _unchanged(self, loaded: Loaded, parts: Sequence[tuple[int, int]] = ()) -> Batch:
        images = self._normalised(self._on_device(loaded.images))
        return Batch(images, self._on_device(loaded.labels), loaded.ids, parts=parts)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _timed(self, items: Iterable[T], what: str) -> Iterator[T]:
        """The same items; the time until each is there goes into :attr:`waited`."""
        iterator = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.waited[what] += time.perf_counter() - began
            yield item

    def _normalised(self, images: Tensor) -> Tensor:
        return torch.sub(images, self.mean).div_(self.std)


def train_and_val(
    data: ImageData, settings: DataSettings, device: torch.device, images: Split | None = None
) -> tuple[Batches, Batches]:
    """Batches of the training images, or of the ``images`` that a training sees, and of the
    validation images, of the sizes that the settings say."""
    workers = settings.workers
    buckets = settings.num_buckets
    images = images or data.train
    training = Batches(images, data, device, settings.batch_size, workers, buckets)
    validation = Batches(data.val, data, device, settings.eval_batch_size, workers, buckets)
    return training, validation
