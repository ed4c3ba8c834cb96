"""Data sets split into training, validation and test images, each with a stable image id.

An image id is the position of a training image in its split's canonical order: the order of the
source with the held-out images left out. Splits do not depend on the seed of a run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.folder import check_spelling
from gaupipe.data.images import UNLABELLED, FileImages, Source, are_among
from gaupipe.data.sources import open_sources
from gaupipe.data.stratified import check_pairs, stratified_split
from gaupipe.data.unlabelled import JoinedImages, open_unlabelled, without_copies
from gaupipe.settings import DataSettings
from gaupipe.system.errors import UserError
from gaupipe.system.files import utf8, write_whole
from gaupipe.system.messages import LOG, warn_once

APART = 1 << 62
"""Is added to the ids of images without labels before anything is drawn by them, so that they get
other views than training images, whose number plays no part."""


@dataclass
class Split:
    """Some images of a source; image id i is the source's image ``positions[i]``. Images without
    labels come after those with labels."""

    source: Source
    positions: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def labels(self) -> np.ndarray:
        """Labels [N] int64 in the order of the image ids."""
        return self.source.labels[self.positions]

    @property
    def contents(self) -> np.ndarray:
        """The digest of each image's file, uint8 [N, 32]; [0, 32] where they are in no files."""
        if not isinstance(self.source, FileImages):
            return np.empty((0, 32), np.uint8)
        return self.source.contents[self.positions]

    @cached_property
    def labelled(self) -> int:
        """Images with labels, which have the first ids."""
        return int((self.labels != UNLABELLED).sum())

    def drawn_ids(self, image_ids: np.ndarray) -> np.ndarray:
        """The numbers by which views of these images are drawn: their ids; of images without
        labels those among themselves, far from all others."""
        own = image_ids - self.labelled + APART
        return np.where(image_ids < self.labelled, image_ids, own)

    def evenly_spaced(self, count: int) -> np.ndarray:
        """``count`` image ids from the first to the last, int64; all of them where there are
        fewer."""
        return np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64)

    def names(self) -> list[str] | list[int]:
        """Names of the image files below the folder of their source, by image id; positions in the
        source where the images are in no files."""
        if isinstance(self.source, FileImages):
            return [self.source.names[position] for position in self.positions]
        return self.positions.tolist()

    def file_names(self, image_ids: np.ndarray) -> list[str]:
        """:meth:`names` of some images in files, in UTF-8."""
        assert isinstance(self.source, FileImages)
        return [utf8(self.source.names[position]) for position in self.positions[image_ids]]

    @cached_property
    def name_bytes(self) -> int | None:
        """Bytes of the longest of the :meth:`file_names`; None where the images are in no files."""
        if not isinstance(self.source, FileImages):
            return None
        return max(len(name.encode()) for name in self.file_names(np.arange(len(self))))

    def path(self, image_id: int) -> str:
        """The path of an image's file; the image id where the images are in no files."""
        if isinstance(self.source, FileImages):
            return self.source.path(int(self.positions[image_id]))
        return str(image_id)

    def image(self, image_id: int) -> np.ndarray:
        """One image as the model sees it before normalisation: uint8 [height, width, C]."""
        images, _ = self.source.__getitems__([int(self.positions[image_id])])
        return images[0].permute(1, 2, 0).numpy()


@dataclass
class ImageData:
    """A data set split into training, validation and (where the source has one) test images."""

    name: str
    train: Split
    val: Split
    num_classes: int
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str = ""
    """Names the training images, their order and labels: what stored maps belong to."""
    test: Split | None = None
    interpolation: str = "bilinear"
    """Resizing of the images, by timm's name."""
    val_sha256: str | None = None
    """Names validation images of a source of their own, in the same way; None for others, which
    :attr:`sha256` names too."""
    unlabelled: Split | None = None
    """Images without labels, with ids of their own from 0."""
    unlabelled_sha256: str | None = None
    """Names them, in the same way; "" where there are none, None where nobody has looked."""

    @property
    def both_sha256(self) -> str:
        """Names training and validation images."""
        if self.val_sha256 is None:
            return self.sha256
        return hashlib.sha256(f"{self.sha256} {self.val_sha256}".encode()).hexdigest()

    @cached_property
    def test_sha256(self) -> str | None:
        """Names the test images, in the same way; None where there are none. All of them are read
        when it is first asked for, and copies of training images among them are told of."""
        if self.test is None:
            return None
        say_copies(self.name, "test", self.test, self.train)
        return _digest(self.test)

    @property
    def class_names(self) -> list[str]:
        """Names of the classes, empty where they have none. Bytes that are not UTF-8 become
        ``\\xe9``."""
        return [utf8(name) for name in self.train.source.class_names]

    @property
    def data_config(self) -> dict[str, Any]:
        """How the images are prepared, in timm's words, and the names of the classes, where they
        have some."""
        return {
            "label_names": self.class_names or None,
            "mean": self.mean,
            "std": self.std,
            "interpolation": self.interpolation,
            "crop_pct": 1.0,
            "crop_mode": "center",
        }

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that there are, by name."""
        splits = {
            "train": self.train,
            "val": self.val,
            "test": self.test,
            "unlabelled": self.unlabelled,
        }
        return {name: split for name, split in splits.items() if split is not None}

    def with_unlabelled(self) -> Split:
        """The training images, which keep their ids 0 to N - 1, and those without labels after
        them, with ids from N on."""
        if self.unlabelled is None:
            return self.train
        train = self.train.source
        assert isinstance(train, FileImages)  # else open_unlabelled had refused
        others = self.unlabelled.source
        assert isinstance(others, FileImages)
        positions = np.concatenate([self.train.positions, len(train) + self.unlabelled.positions])
        return Split(JoinedImages(train, others), positions)

    def split(self, name: str) -> Split:
        """A split by its name. Raises UserError where there is none."""
        if name not in self.splits:
            raise UserError(f"data set {self.name} has no split {name!r}: {', '.join(self.splits)}")
        return self.splits[name]

    def keep(self, training: Split | None, epoch: int = 0) -> None:
        """Decodes validation images of a source of their own into the user's cache, and the source
        of the images of an ``epoch`` of ``training``; None leaves it out."""
        val = self.val.source
        if isinstance(val, FileImages) and val is not self.train.source:
            val.keep()
        if training is not None and isinstance(training.source, FileImages):
            training.source.keep(epoch)

    def write_split(self, path: Path) -> None:
        """Writes which images of the source are in each split, files by their names, and the names
        of the classes."""
        images = {name: split.names() for name, split in self.splits.items()}
        facts = {
            "sha256": self.sha256,
            "val_sha256": self.val_sha256,
            "test_sha256": self.test_sha256,
            "unlabelled_sha256": self.unlabelled_sha256,
            "class_names": self.class_names or None,
        }
        known = {name: fact for name, fact in facts.items() if fact is not None}
        write_whole(path, json.dumps({"dataset": self.name, **known, **images}) + "\n")

    def check_split(self, path: Path, test: bool = False) -> None:
        """Raises UserError if :meth:`write_split` wrote ``path`` for other images or other names of
        classes; other test images are refused with ``test`` alone, where they are about to be
        scored. A file that is not there says nothing."""
        if not path.is_file():
            return
        try:
            written = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            written = None
        if not isinstance(written, dict):
            raise UserError(
                f"{path} is damaged: restore it from a copy; or remove it, and 'gaupipe phase-a "
                "--resume' or 'gaupipe train' writes it again, for the images that are there then"
            )
        again = "or start another run with --run-dir"
        before = written.get("class_names", self.class_names)
        if before != self.class_names:  # said first: an image's path has the name of its class
            raise UserError(
                f"{path}: the classes of data set {self.name} are not those that the run began "
                f"with ({_change(before, self.class_names)}): put them back, {again}"
            )
        looked_at = [("training", "train", "sha256"), ("validation", "val", "val_sha256")]
        if self.unlabelled_sha256 is not None:
            looked_at.append(("unlabelled", "unlabelled", "unlabelled_sha256"))
        if test:
            looked_at.append(("test", "test", "test_sha256"))
            again = "or score others with 'gaupipe evaluate --data FOLDER'"
        for what, split, digest in looked_at:
            if digest in written and written[digest] != getattr(self, digest):
                raise UserError(
                    f"{path}: the {what} images of data set {self.name} were others when the run "
                    f"began ({self._change_of(split, written)}): put them back, {again}"
                )

    def _change_of(self, split: str, written: dict[str, list[str]]) -> str:
        """What has changed in a split since it was ``written``."""
        splits = [split]
        if split == "train" and self.val_sha256 is None:
            splits.append("val")  # drawn from the same images: each new one may move others
        before = [name for split in splits for name in written.get(split, [])]
        now = [
            name for split in splits if split in self.splits for name in self.splits[split].names()
        ]
        return _change(before, now)


def load_data(
    settings: DataSettings, download: bool = False, unlabelled: bool = False
) -> ImageData:
    """Reads the data set that ``settings`` name, which ``download`` lets torchvision fetch, and
    with ``unlabelled`` its images without labels. Raises UserError saying how to get one that is
    not there."""
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    train, val, test = open_sources(settings, download)
    others = None
    if unlabelled:  # what can be refused at once is, before any file is read
        others = open_unlabelled(settings, train, download)
    labels = train.labels
    if len(np.unique(labels)) < 2:
        name = labels[0]
        if train.class_names:
            name = train.class_names[0]
        raise UserError(
            f"data set {settings.title}: the training images are all of the class {name!r}; "
            "two or more are needed (in a folder each, if they are files)"
        )
    num_classes = max(int(labels.max()) + 1, len(train.class_names))
    if train.class_names:
        check_spelling(train.class_names, settings.title)
        if len(train.class_names) < num_classes:
            raise UserError(
                f"data set {settings.title}: has {len(train.class_names)} names of classes and "
                f"labels up to {num_classes - 1}: each class should have a name"
            )
    positions = np.arange(len(labels))
    if val is not None:
        held_out = np.arange(len(val))
    else:
        share = settings.val_fraction
        if settings.name == "digits":  # so small that a tenth would say little
            share = 0.2
        positions, held_out = _stratified(train, positions, share, "data.val_fraction")
    if settings.leave_out_copies:
        held = [Split(val or train, held_out)]
        if test is not None:
            held.append(Split(test, np.arange(len(test))))
        positions = _without_copies(Split(train, positions), held)
    count = settings.train_images or len(positions)
    if count > len(positions):
        raise UserError(
            f"data.train_images: {count} asked, "
            f"{settings.title} has {len(positions)} training images"
        )
    if count < len(positions):
        _, positions = _stratified(train, positions, count, "data.train_images")
    split = Split(train, positions)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    if isinstance(train, FileImages):
        train.positions = positions
        if val is None:
            train.positions = np.union1d(positions, held_out)
        image_size = train.size
        mean = IMAGENET_DEFAULT_MEAN
        std = IMAGENET_DEFAULT_STD
    else:
        image_size = train.images.shape[-1]
        mean, std = _mean_and_std(train.images[torch.from_numpy(positions)])
    channels = len(mean)
    data = ImageData(
        name=settings.title,
        train=split,
        val=Split(train if val is None else val, held_out),
        num_classes=num_classes,
        channels=channels,
        image_size=image_size,
        mean=by_channel(settings.scaling.get("mean") or mean, channels, "data.scaling"),
        std=by_channel(settings.scaling.get("std") or std, channels, "data.scaling"),
        interpolation=settings.interpolation,
        sha256=_digest(split),
    )
    if isinstance(train, FileImages):
        say_contradictions(data.name, data.train)
        say_copies(data.name, "validation", data.val, data.train)
    if test is not None:
        data.test = Split(test, np.arange(len(test)))
    if val is not None:
        data.val_sha256 = _digest(data.val)
    if unlabelled:
        data.unlabelled_sha256 = ""
    if others is not None:
        others = without_copies(others, [train, val, test])
        data.unlabelled = Split(others, np.arange(len(others)))
        data.unlabelled_sha256 = _digest(data.unlabelled)
    LOG.debug(f"data set {data.name}: sha256 {data.sha256} of {len(data.train)} training images")
    return data


def _change(before: Sequence[object], now: Sequence[object]) -> str:
    """The first of some names that has gone, and the first that is new."""
    before_all = {*before}
    now_all = {*now}
    gone = [f"{name!r} has gone" for name in before if name not in now_all]
    new = [f"{name!r} is new" for name in now if name not in before_all]
    return ", ".join([*gone[:1], *new[:1]]) or "the same names, but other content or order"


def copies_in(split: Split, others: Sequence[Split]) -> np.ndarray:
    """The ids of the images of a split that are byte for byte among those of ``others``."""
    return np.flatnonzero(are_among(split.contents, [other.contents for other in others]))


def say_contradictions(name: str, split: Split) -> None:
    """Says how many images of a split, which are in files, are in several classes."""
    _, which = np.unique(split.contents, axis=0, return_inverse=True)
    pairs = np.unique(np.stack([which.reshape(-1), split.labels]), axis=1)  # [2, image and class]
    count = int((np.bincount(pairs[0]) > 1)[which].sum())
    if count:
        warn_once(
            f"data set {name}: {count} of {len(split)} training images have copies in another "
            "class, so that at most one of their labels is right: leave them in one class"
        )


def say_copies(name: str, what: str, split: Split, train: Split) -> None:
    """Says how many images of a split, which are ``what``, are training images too."""
    count = len(copies_in(split, [train]))
    if count:
        warn_once(
            f"data set {name}: {count} of {len(split)} {what} images are copies of training "
            "images, so that their accuracy says too much: --set data.leave_out_copies=true "
            "leaves these training images out"
        )


def _without_copies(train: Split, held_out: Sequence[Split]) -> np.ndarray:
    """The positions of the training images of which ``held_out`` has no copy. Raises UserError
    where a class has none of them."""
    copies = copies_in(train, held_out)
    kept = np.delete(train.positions, copies)
    lost = sorted({*train.labels.tolist()} - {*train.source.labels[kept].tolist()})
    if lost:
        names = train.source.class_names
        raise UserError(
            "data.leave_out_copies: all training images of the class "
            f"{names[lost[0]] if names else lost[0]} are copies of validation or test images"
        )
    if len(copies):
        warn_once(
            "data.leave_out_copies: left out training images that are copies of validation or "
            f"test images: {len(copies)} of {len(train)}"
        )
    return kept


def by_channel(values: Sequence[float], channels: int, where: str) -> tuple[float, ...]:
    """The mean or std of each channel; of grey images that of three colours. Raises UserError,
    saying ``where``, for another number of values."""
    if len(values) in (1, 3) and len(values) != channels:
        values = [sum(values) / len(values)] * channels
    if len(values) != channels:
        raise UserError(f"{where}: {list(values)} should have a number for each channel")
    return tuple(map(float, values))  # YAML reads 0 as a whole number


def _digest(split: Split) -> str:
    """Names the images of a split, their order and labels."""
    digest = hashlib.sha256(split.source.fingerprint())
    for array in (split.positions, split.labels):
        digest.update(np.asarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()


def _mean_and_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, as shares of 255. They are
    taken from a histogram, because a floating point copy of a data set may not fit into memory."""
    histograms = [torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]
    counts = torch.stack(histograms).double()  # [C, 256]
    values = torch.arange(256, dtype=torch.float64) / 255
    pixels = counts.sum(1)
    means = (counts * values).sum(1) / pixels
    squares = (counts * (values - means[:, None]) ** 2).sum(1)
    stds = (squares / (pixels - 1)).sqrt()
    return tuple(means.tolist()), tuple(stds.tolist())


def _stratified(
    source: Source, positions: np.ndarray, share: float | int, setting: str
) -> tuple[np.ndarray, np.ndarray]:
    """Splits positions class by class into (rest, share), each sorted; always the same way."""
    labels = source.labels[positions]
    check_pairs(labels, source.class_names, setting)
    classes = np.unique(labels)
    count = math.ceil(share * len(positions)) if isinstance(share, float) else share
    if min(count, len(positions) - count) < len(classes):
        raise UserError(
            f"{setting}: cannot take {share} of {len(positions)} images class by class: both parts "
            f"need an image of each of the {len(classes)} classes"
        )
    rest, taken = stratified_split(labels, count)
    return positions[rest], positions[taken]
