"""A data set as its settings name it, split into training, validation and test images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.folder import check_spelling
from gaupipe.data.images import FileImages, Source, are_among
from gaupipe.data.sources import open_sources
from gaupipe.data.splits import ImageData, Split
from gaupipe.data.stratified import check_pairs, stratified_split
from gaupipe.data.unlabelled import open_unlabelled, without_copies
from gaupipe.settings import DataSettings
from gaupipe.system.errors import UserError
from gaupipe.system.messages import LOG, warn_once


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
    num_classes = _num_classes(settings, train)
    positions, held_out = _choose_images(settings, train, val, test)
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
    split = Split(train, positions)
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
        sha256=split.sha256(),
    )
    if isinstance(train, FileImages):
        _say_contradictions(data.name, data.train)
        data.say_copies("validation", data.val)
    if test is not None:
        data.test = Split.of_all(test)
    if val is not None:
        data.val_sha256 = data.val.sha256()
    if unlabelled:
        data.unlabelled_sha256 = ""
    if others is not None:
        data.unlabelled = Split.of_all(without_copies(others, [train, val, test]))
        data.unlabelled_sha256 = data.unlabelled.sha256()
    LOG.debug(f"data set {data.name}: sha256 {data.sha256} of {len(data.train)} training images")
    return data


def _num_classes(settings: DataSettings, train: Source) -> int:
    """C. Raises UserError for fewer than two, and for names of classes that do not fit."""
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
    return num_classes


def _choose_images(
    settings: DataSettings, train: Source, val: Source | None, test: Source | None
) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the training images in ``train``, and of the validation images in ``val`` or
    else in ``train``. Raises UserError where a class would be left without images."""
    positions = np.arange(len(train))
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
            held.append(Split.of_all(test))
        positions = _without_copies(Split(train, positions), held)
    count = settings.train_images or len(positions)
    if count > len(positions):
        raise UserError(
            f"data.train_images: {count} asked, "
            f"{settings.title} has {len(positions)} training images"
        )
    if count < len(positions):
        _, positions = _stratified(train, positions, count, "data.train_images")
    lost = np.setdiff1d(train.labels, train.labels[positions])
    if len(lost):
        name = train.class_names[lost[0]] if train.class_names else lost[0]
        raise UserError(
            f"data set {settings.title}: no training image of the class {str(name)!r} is left: "
            "another data.val_fraction, data.train_images or data.leave_out_copies leaves some"
        )
    return positions, held_out


def _say_contradictions(name: str, split: Split) -> None:
    """Says how many images of a split, which are in files, are in several classes."""
    _, which = np.unique(split.contents, axis=0, return_inverse=True)
    pairs = np.unique(np.stack([which.reshape(-1), split.labels]), axis=1)  # [2, image and class]
    count = int((np.bincount(pairs[0]) > 1)[which].sum())
    if count:
        warn_once(
            f"data set {name}: {count} of {len(split)} training images have copies in another "
            "class, so that at most one of their labels is right: leave them in one class"
        )


def _without_copies(train: Split, held_out: Sequence[Split]) -> np.ndarray:
    """The positions of the training images of which ``held_out`` has no copy."""
    is_copy = are_among(train.contents, [split.contents for split in held_out])
    kept = np.delete(train.positions, np.flatnonzero(is_copy))  # images in no files have none
    if is_copy.any():
        warn_once(
            "data.leave_out_copies: left out training images that are copies of validation or "
            f"test images: {is_copy.sum()} of {len(train)}"
        )
    return kept


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


def by_channel(values: Sequence[float], channels: int, where: str) -> tuple[float, ...]:
    """The mean or std of each channel; of grey images that of three colours. Raises UserError,
    saying ``where``, for another number of values."""
    if len(values) in (1, 3) and len(values) != channels:
        values = [sum(values) / len(values)] * channels
    if len(values) != channels:
        raise UserError(f"{where}: {list(values)} should have a number for each channel")
    return tuple(map(float, values))  # YAML reads 0 as a whole number
