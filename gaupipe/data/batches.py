"""Data sets whose samples have a stable image id, and the batches made from them.

An image id is the position of a training image in its split's canonical order: the order of the
source with the held-out images left out. Splits do not depend on the seed of a run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from gaupipe.system import distributed
from gaupipe.data.augment import Augment, Crops, Mix, mix
from gaupipe.data.buckets import Buckets, slices
from gaupipe.settings import FILE_IMAGE_SIZE, DataSettings
from gaupipe.data.decoded_images import DecodedImages
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.maps.gaussians import Geometry
from gaupipe.data.sources import ArrayImages, Source, open_sources
from gaupipe.data.loader import Loaded, Loader, Request, fetch

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

    def view(self, image_id: int, augment: Augment, epoch: int) -> np.ndarray:
        """What ``augment`` makes of one image in an epoch: uint8 [height, width, C]."""
        ids = np.array([image_id])
        [request] = requests(self, [ids], augment, [np.array([epoch])])
        loaded = fetch(self.source, request)
        views, _ = augment(loaded.images, loaded.ids, epoch, loaded.places)
        return views[0].permute(1, 2, 0).numpy()

    def trial(self, count: int) -> Split:
        """The first ``count`` images, on which a training is tried."""
        positions = self.positions[:count]
        source = self.source
        if isinstance(source, DecodedImages):
            source = source.trial(positions)
        return Split(source, positions)


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
        return 1.0 if self.of_world is None else len(self) * distributed.world_size() / self.of_world


class StoredMaps(Protocol):
    """What :meth:`Batches.epoch` reads stored maps through, such as a :class:`store.Store`."""

    def prefetch(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """What is stored for each batch of image ids, in order, read ahead."""


class Batches:
    """The images of one split in batches, normalised, on ``device``.

    In a world of several processes a rank has the images of its buckets: a batch of training is
    this rank's part of the whole batch. ``batch_size`` is that of the whole batch. ``keep`` is for
    images that :meth:`of_rank` reads after every epoch: those of a source of their own are kept,
    decoded, as :meth:`epoch` keeps those that it reads.
    """

    def __init__(
        self,
        split: Split,
        data: ImageData,
        device: torch.device,
        batch_size: int,
        workers: int | Literal["auto"] = 0,
        buckets: int = 1,
        keep: bool = False,
    ) -> None:
        self.split, self.device, self.batch_size = split, device, batch_size
        self.buckets = Buckets(len(split), buckets)
        self.loader = Loader(split.source, device, workers)
        self.keeps = keep and split.source is not data.train.source
        """Whether :meth:`of_rank`, too, keeps the images, decoded."""
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
        for loaded in self.loader(requests(self.split, slices(chosen, self.batch_size))):
            yield self._unchanged(loaded)

    def of_rank(self) -> Iterator[Batch]:
        """The images of this rank's buckets as they are, bucket by bucket, each in canonical order:
        all of the split in a world of one with one bucket."""
        batches = {
            bucket: slices(self.buckets.members(bucket), self.batch_size)
            for bucket in self.buckets.of_rank()
        }
        wanted = requests(self.split, [ids for of_bucket in batches.values() for ids in of_bucket])
        of = [bucket for bucket, of_bucket in batches.items() for _ in of_bucket]
        if self.keeps:
            self._keep(wanted)
        for loaded, bucket in zip(self.loader(wanted), of, strict=True):
            yield self._unchanged(loaded, [(bucket, len(loaded.ids))])

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
        drawn = number if view is None else view
        batches = [np.concatenate([*parts.values()]) for parts in order]
        wanted = requests(
            self.split, batches, augment, [np.full(len(ids), drawn) for ids in batches]
        )
        self._keep(wanted)
        nothing: Iterator[Any] = itertools.repeat(None)
        stored = nothing if maps is None else maps.prefetch(batches)
        of_world = self.batch_sizes[first:]
        images_of, stored = self._timed(self.loader(wanted), "data"), self._timed(stored, "maps")
        fetched = zip(images_of, stored, order, of_world)  # noqa: B905
        for loaded, found, parts, whole in fetched:
            ids = loaded.ids
            views, geometry = augment(self._on_device(loaded.images), ids, drawn, loaded.places)
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
                self._on_device(loaded.labels),
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
        batches = slices(entries, self.batch_size)
        wanted = requests(
            self.split,
            [batch // count for batch in batches],
            augment,
            [batch % count for batch in batches],
        )
        for loaded, batch in zip(self.loader(wanted), batches, strict=True):
            images = self._on_device(loaded.images)
            for view in np.unique(batch % count):
                chosen = torch.from_numpy(np.flatnonzero(batch % count == view))
                at, cropped = chosen.to(self.device), loaded.places
                of_view = None if cropped is None else cropped[chosen]
                images[at] = augment(images[at], loaded.ids[chosen], int(view), of_view)[0]
            labels = self._on_device(loaded.labels)
            yield Batch(self._normalised(images), labels, torch.from_numpy(batch.copy()))

    def _keep(self, wanted: Sequence[Request]) -> None:
        """Keeps the images, decoded, for this epoch and later ones."""
        if wanted and isinstance(self.split.source, DecodedImages):
            self.split.source.keep(wanted[0].kind)

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


def requests(
    split: Split,
    batches: Sequence[np.ndarray],
    augment: Augment | None = None,
    views: Sequence[np.ndarray] = (),
) -> list[Request]:
    """For each batch of image ids what a loader is asked for. With crops of full-size images those
    that ``augment`` draws for these ``views``."""
    crop = augment.settings.resized_crop if augment else None
    if augment and crop and crop.full_size and isinstance(split.source, DecodedImages):
        return [
            Request(split.positions[ids], ids, Crops(crop, augment.seed, ids, drawn))
            for ids, drawn in zip(batches, views, strict=True)
        ]
    return [Request(split.positions[ids], ids) for ids in batches]


def train_and_val(
    data: ImageData, settings: DataSettings, device: torch.device
) -> tuple[Batches, Batches]:
    """What a ViT is trained on and scored on: batches of the training and of the validation
    images, of the sizes that the settings say."""
    size, eval_size, workers = settings.batch_size, settings.eval_batch_size, settings.workers
    return (
        Batches(data.train, data, device, size, workers, settings.num_buckets),
        Batches(data.val, data, device, eval_size, workers, settings.num_buckets, keep=True),
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
    val_sha256: str | None = None
    """Names validation images of a source of their own, in the same way; None for others, which
    :attr:`sha256` names too."""

    @property
    def both_sha256(self) -> str:
        """Names training and validation images."""
        if self.val_sha256 is None:
            return self.sha256
        return hashlib.sha256(f"{self.sha256} {self.val_sha256}".encode()).hexdigest()

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
        digests = {"sha256": self.sha256}
        if self.val_sha256:
            digests["val_sha256"] = self.val_sha256
        positions = {name: split.positions.tolist() for name, split in splits.items()}
        write_whole(path, json.dumps({"dataset": self.name, **digests, **positions}) + "\n")

    def check_split(self, path: Path) -> None:
        """Raises UserError if :meth:`write_split` wrote ``path`` for other images. A file that is
        not there or that lacks a digest, as those of earlier versions do, says nothing."""
        try:
            written = json.loads(path.read_bytes()) if path.is_file() else {}
        except (ValueError, RecursionError):
            written = None
        if not isinstance(written, dict):
            raise UserError(
                f"{path} is damaged: restore it from a copy; or remove it, and 'gaupipe phase-a "
                "--resume' or 'gaupipe train' writes it again, for the images that are there then"
            )
        for what, name in (("training", "sha256"), ("validation", "val_sha256")):
            if name in written and written[name] != getattr(self, name):
                raise UserError(
                    f"{path}: the {what} images of data set {self.name} were others when the run "
                    "began: put them back, or start another run with --run-dir"
                )


def load_data(settings: DataSettings, download: bool = False) -> ImageData:
    """Reads the data set that ``settings`` name, which ``download`` lets torchvision fetch. Raises
    UserError saying how to get one that is not there."""
    train, val, test = open_sources(settings, download)
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
    if isinstance(train, DecodedImages):
        train.chosen = np.union1d(kept, held_out)
    if isinstance(train, ArrayImages):
        mean, std = _mean_and_std(train.images[torch.from_numpy(kept)])
    else:
        from timm.data import IMAGENET_DEFAULT_MEAN as mean
        from timm.data import IMAGENET_DEFAULT_STD as std
    image_size = settings.image_size or (
        train.images.shape[-1] if isinstance(train, ArrayImages) else FILE_IMAGE_SIZE
    )
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
        sha256=_digest(split),
        val_sha256=None if val is None else _digest(Split(val, held_out)),
    )


def _digest(split: Split) -> str:
    """Names the images of a split, their order and labels."""
    digest = hashlib.sha256(split.source.fingerprint())
    for array in (split.positions, split.labels):
        digest.update(np.asarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()


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
