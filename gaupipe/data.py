"""Data sets whose samples have a stable image id, and the batches made from them.

An image id is the position of a training image in its split's canonical order: the order of the
source with the held-out images left out. Splits do not depend on the seed of a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gaupipe import distributed
from gaupipe.augment import Augment, Mix, mix
from gaupipe.buckets import Buckets, slices
from gaupipe.config import DataSettings
from gaupipe.errors import UserError
from gaupipe.gaussians import Geometry
from gaupipe.image_sources import ArrayImages, Source, open_sources
from gaupipe.interruption import spare_worker, spared

T = TypeVar("T")


@dataclass
class Split:
    """Some images of a source; image id i is the source's image ``positions[i]``."""

    source: Source
    positions: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def labels(self) -> np.ndarray:
        """Labels [N] int64 in the order of the image ids."""
        return self.source.labels[self.positions]

    def evenly_spaced(self, count: int) -> np.ndarray:
        """``count`` image ids from the first to the last, int64; all of them where there are
        fewer."""
        return np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64)

    def image(self, image_id: int) -> np.ndarray:
        """One image as the model sees it before normalisation: uint8 [height, width, C]."""
        images, _ = self.source.__getitems__([int(self.positions[image_id])])
        return images[0].permute(1, 2, 0).numpy()


class _Batches(Dataset):
    """Makes a DataLoader fetch whole batches.

    A batch is images uint8 [B, C, height, width], labels [B] and image ids [B]. In place of a batch
    with an image that cannot be read comes the UserError: raised in a worker, it would arrive as a
    traceback.
    """

    def __init__(self, split: Split) -> None:
        self.split = split

    def __getitems__(self, image_ids: list[int]) -> tuple[Tensor, Tensor, Tensor] | UserError:
        try:
            positions = self.split.positions[image_ids].tolist()
            images, labels = self.split.source.__getitems__(positions)
        except UserError as error:
            return error
        return images, labels, torch.tensor(image_ids)


class _Order:
    """A batch sampler whose batches can be changed between epochs while the loader's workers live
    on."""

    def __init__(self) -> None:
        self.batches: list[np.ndarray] = []
        """The image ids of each batch."""

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for image_ids in self.batches:
            yield image_ids.tolist()


@dataclass
class Batch:
    """Some images and what belongs to them, all in one order.

    images     float32 [B, C, height, width], normalised, on the model's device
    labels     int64 [B], on the model's device
    ids        int64 [B], the image ids, on the CPU
    geometry   where each view lies in its image; None where nothing moved
    mixed      which images Mixup or CutMix mixed, and where; None where none were
    stored     what a store holds for ``ids``, {array name: [B, ...]}; None where no store is read
    parts      (bucket, images): how many of the images, in their order, are of which bucket
    of_world   images of the whole batch, of which other ranks may have some; None where all are
               here
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    geometry: Geometry | None = None
    mixed: Mix | None = None
    stored: dict[str, np.ndarray] | None = None
    parts: Sequence[tuple[int, int]] = ()
    of_world: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def weight(self) -> float:
        """What a mean over these images weighs in the mean of all ranks' means, so that the latter
        is the mean over the images of the whole batch. 1 in a world of one."""
        return 1.0 if self.of_world is None else len(self) * distributed.size() / self.of_world


class StoredMaps(Protocol):
    """What :meth:`Batches.epoch` reads stored maps through, such as a :class:`store.Store`."""

    def prefetch(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """What is stored for each batch of image ids, in order, read ahead."""


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
        workers: int = 0,
        buckets: int = 1,
    ) -> None:
        self.split, self.device, self.batch_size = split, device, batch_size
        self.buckets = Buckets(len(split), buckets)
        self.order = _Order()
        # tensorstore must not be in use before a fork, so workers start from a clean process
        context: dict[str, Any] = {
            "multiprocessing_context": "forkserver",
            "persistent_workers": True,
        }
        self.loader = DataLoader(
            _Batches(split),
            batch_sampler=self.order,
            collate_fn=_as_is,
            num_workers=workers,
            worker_init_fn=spare_worker,
            generator=torch.Generator(),
            **(context if workers else {}),
        )
        self.waited = {"data": 0.0, "maps": 0.0}
        """Seconds that :meth:`epoch` has waited for images, and for stored maps."""
        self.mean = torch.tensor(data.mean, device=device).view(-1, 1, 1) * 255
        self.std = torch.tensor(data.std, device=device).view(-1, 1, 1) * 255

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return self.buckets.steps(self.batch_size)

    @cached_property
    def batch_sizes(self) -> list[int]:
        """Images in each whole batch of an epoch of training, over all ranks."""
        return self.buckets.batch_sizes(self.batch_size)

    def in_order(self, image_ids: np.ndarray | None = None) -> Iterator[Batch]:
        """The images of ``image_ids``, or all of the split in canonical order, as they are."""
        chosen = np.arange(len(self.split)) if image_ids is None else image_ids
        self.order.batches = slices(chosen, self.batch_size)
        for images, labels, ids in self._fetched():
            yield Batch(self._normalised(images.to(self.device)), labels.to(self.device), ids)

    def of_rank(self) -> Iterator[Batch]:
        """The images of this rank's buckets as they are, bucket by bucket, each in canonical order:
        all of the split in a world of one with one bucket."""
        batches = {
            bucket: slices(self.buckets.members(bucket), self.batch_size)
            for bucket in self.buckets.of_rank()
        }
        self.order.batches = [ids for of_bucket in batches.values() for ids in of_bucket]
        of = [bucket for bucket, of_bucket in batches.items() for _ in of_bucket]
        for (images, labels, ids), bucket in zip(self._fetched(), of, strict=True):
            views = self._normalised(images.to(self.device))
            yield Batch(views, labels.to(self.device), ids, parts=[(bucket, len(ids))])

    def epoch(
        self,
        number: int,
        augment: Augment,
        maps: StoredMaps | None = None,
        view: int | None = None,
        first: int = 0,
    ) -> Iterator[Batch]:
        """One epoch of training, counted from 0: augmented views, with what ``maps`` hold for them.
        It begins with batch ``first``; nothing is read of the batches before.

        (seed of ``augment``, epoch) and the number of buckets alone determine the order, and the
        store is read by the very ids of each batch. With a ``view`` the images are drawn as
        :meth:`views` draws it, and ``maps`` are of that view: nothing has moved between them.
        """
        order = self.buckets.epoch(augment.seed, number, self.batch_size)[first:]
        self.order.batches = [np.concatenate([*parts.values()]) for parts in order]
        nothing: Iterator[Any] = itertools.repeat(None)
        stored = nothing if maps is None else maps.prefetch(self.order.batches)
        of_world = self.batch_sizes[first:]
        images_of, stored = self._timed(self._fetched(), "data"), self._timed(stored, "maps")
        fetched = zip(images_of, stored, order, of_world)  # noqa: B905
        for (images, labels, ids), found, parts, whole in fetched:
            drawn = number if view is None else view
            views, geometry = augment(images.to(self.device), ids, drawn)
            geometry = geometry if view is None else None
            sizes = [(bucket, len(of_bucket)) for bucket, of_bucket in parts.items()]
            views, mixed = mix(
                self._normalised(views),
                ids,
                augment.seed,
                number,
                augment.settings,
                [size for _, size in sizes],
            )
            yield Batch(
                views,
                labels.to(self.device),
                ids,
                geometry,
                mixed,
                found,
                sizes,
                None if whole == len(ids) else whole,
            )

    def views(self, entries: np.ndarray, augment: Augment, count: int) -> Iterator[Batch]:
        """Augmented views in the order of ``entries``, each image id * ``count`` + view.

        View v is what ``augment`` makes of an image in epoch v. The ids of a batch are entries.
        """
        self.order.batches = slices(entries // count, self.batch_size)
        first = 0
        for images, labels, ids in self._fetched():
            batch = entries[first : first + len(ids)]
            first += len(ids)
            images = images.to(self.device)
            for view in np.unique(batch % count):
                chosen = torch.from_numpy(np.flatnonzero(batch % count == view))
                places = chosen.to(self.device)
                images[places] = augment(images[places], ids[chosen], int(view))[0]
            yield Batch(
                self._normalised(images), labels.to(self.device), torch.from_numpy(batch.copy())
            )

    def _fetched(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(images uint8, labels, ids) in the order that was set. Raises the UserError of an
        image that cannot be read."""
        with spared() if self.loader.num_workers else contextlib.nullcontext():
            batches = iter(self.loader)
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch

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
        return (images.float() - self.mean) / self.std


def _as_is(batch: Any) -> Any:
    return batch


def train_and_val(
    data: ImageData, settings: DataSettings, device: torch.device
) -> tuple[Batches, Batches]:
    """What a ViT is trained on and scored on: batches of the training and of the validation
    images, of the sizes that the settings say."""
    sizes = {"workers": settings.workers, "buckets": settings.num_buckets}
    return (
        Batches(data.train, data, device, settings.batch_size, **sizes),
        Batches(data.val, data, device, settings.eval_batch_size, **sizes),
    )


@dataclass
class ImageData:
    """A data set split into training, validation and (where the source has one) test images."""

    name: str
    train: Split
    val: Split
    test: Split | None
    num_classes: int
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str
    """Names the training images, their order and labels: what stored maps belong to."""

    @property
    def data_config(self) -> dict[str, Any]:
        """How images become what a model trained on these sees, as timm names it."""
        return {
            "mean": self.mean,
            "std": self.std,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "center",
        }

    def write_split(self, path: Path) -> None:
        """Writes which images of the source are in each split."""
        splits = {"train": self.train, "val": self.val} | ({"test": self.test} if self.test else {})
        path.write_text(
            json.dumps(
                {"dataset": self.name, "sha256": self.sha256}
                | {name: split.positions.tolist() for name, split in splits.items()}
            )
            + "\n"
        )


def load_data(settings: DataSettings) -> ImageData:
    """Reads the data set that ``settings`` name. Raises UserError saying how to get one that is
    not there."""
    train, val, test = open_sources(settings)
    labels = train.labels
    if len(np.unique(labels)) < 2:
        raise UserError(
            f"data set {settings.name}: its training images are all of one class; "
            "two or more are needed"
        )
    if val is not None:
        kept, held_out = np.arange(len(labels)), np.arange(len(val))
    else:
        val_fraction = 0.2 if settings.name == "digits" else settings.val_fraction
        kept, held_out = _stratified(np.arange(len(labels)), labels, val_fraction)
    if settings.train_images is not None:
        if settings.train_images > len(kept):
            raise UserError(
                f"data.train_images: {settings.train_images} asked, "
                f"{settings.name} has {len(kept)} training images"
            )
        if settings.train_images < len(kept):
            _, kept = _stratified(kept, labels[kept], settings.train_images)
    split = Split(train, kept)
    if isinstance(train, ArrayImages):
        mean, std = _mean_and_std(train.images[torch.from_numpy(kept)])
    else:
        from timm.data import IMAGENET_DEFAULT_MEAN as mean
        from timm.data import IMAGENET_DEFAULT_STD as std
    image_size = settings.image_size or (
        train.images.shape[-1] if isinstance(train, ArrayImages) else 224
    )
    digest = hashlib.sha256(train.fingerprint())
    for array in (kept, split.labels):
        digest.update(np.asarray(array, dtype="<i8").tobytes())
    return ImageData(
        name=settings.name,
        train=split,
        val=Split(train if val is None else val, held_out),
        test=Split(test, np.arange(len(test))) if test is not None else None,
        num_classes=int(labels.max()) + 1,
        channels=len(mean),
        image_size=image_size,
        mean=tuple(mean),
        std=tuple(std),
        sha256=digest.hexdigest(),
    )


def _mean_and_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images uint8 [N, C, height, width], as
    shares of 255, from counts of the 256 values: no copy of the images is made."""
    values, means, stds = torch.arange(256, dtype=torch.float64) / 255, [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.flatten(), minlength=256).double()
        mean = (counts * values).sum() / counts.sum()
        means.append(mean.item())
        stds.append(((counts * (values - mean) ** 2).sum() / (counts.sum() - 1)).sqrt().item())
    return tuple(means), tuple(stds)


def _stratified(
    positions: np.ndarray, labels: np.ndarray, share: float | int
) -> tuple[np.ndarray, np.ndarray]:
    """Splits positions class by class into (rest, share), each sorted; always the same way."""
    from sklearn.model_selection import train_test_split

    try:
        rest, taken = train_test_split(positions, test_size=share, stratify=labels, random_state=0)
    except ValueError as error:
        raise UserError(
            f"cannot take {share} of {len(positions)} images class by class: {error}"
        ) from None
    return np.sort(rest), np.sort(taken)
