"""Images without labels: where they lie, and epochs of images with labels and without."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.folder import (
    WITHOUT_LABELS,
    find_splits,
    folders_in,
    images_below,
    place_of,
    say_left_out,
)
from gaupipe.data.hfds import rows_without_labels
from gaupipe.data.images import UNLABELLED, FileImages, Source, are_among, as_asked, stamp_of
from gaupipe.data.packed import PackedImages
from gaupipe.data.tar import Archive, find_archives, images_without_labels
from gaupipe.settings import DataSettings
from gaupipe.settings.sections import HFDS
from gaupipe.system.errors import UserError
from gaupipe.system.messages import warn_once

MOST_DECODED_FIRST = 100_000
"""Of more images only the bytes are read before the first step, because to decode them takes hours:
a damaged one is refused once it is reached, and the cache is made after the first epoch."""


def open_unlabelled(
    settings: DataSettings, train: Source, download: bool = False
) -> FileImages | None:
    """The images that ``data.unlabelled`` names, or else those in a folder ``unlabelled`` beside
    the folder of the ``train`` images; None where there are neither.

    Raises UserError for a place without images, for one among the training images, and where these
    are in no files.
    """
    beside = folder_beside(settings)
    place = settings.unlabelled
    if place is None and beside is not None:
        place = str(beside)
    if place is None:
        return None
    if beside is not None and os.path.realpath(place) != os.path.realpath(beside):
        warn_once(f"data.unlabelled: {place} is taken, and {beside} left out")
    if not isinstance(train, FileImages):
        raise UserError(
            f"data.unlabelled: {place} cannot join the images of {settings.name}, which are in no "
            "files: take a data set of image files"
        )
    images = _images_at(place, train, settings, download)
    images.decoded_first = len(images) <= MOST_DECODED_FIRST or settings.unreadable == "leave_out"
    return as_asked(images)


def folder_beside(settings: DataSettings) -> Path | None:
    """The folder ``unlabelled`` beside the training images; None where there is none."""
    root = settings.root or Path("data")
    if settings.name != "folder" or root.is_file():
        return None
    if find_archives(root):
        beside = (folder for folder in folders_in(root) if folder.name.lower() in WITHOUT_LABELS)
        return next(beside, None)
    return find_splits(root).unlabelled


def _images_at(place: str, train: FileImages, settings: DataSettings, download: bool) -> FileImages:
    where = place_of(place)
    if where["name"] != "folder":
        named = DataSettings.model_validate({**settings.model_dump(), **where})
        names, rows = rows_without_labels(named, download)
        return PackedImages(Path(named.name), names, rows, settings)
    path = Path(place)
    if path.is_file():
        return _archived(path, [path], settings)
    if not path.is_dir():
        raise UserError(
            f"data.unlabelled: no folder {str(path)!r}; name a folder of images, a .tar or "
            f"{HFDS}NAME"
        )
    if path.resolve().is_relative_to(train.root.resolve()):
        raise UserError(
            f"data.unlabelled: {path} lies among the training images in {train.root}: move it out"
        )
    files, others = images_below(path)
    archives = sorted(path.glob("[!.]*.tar"))
    if not files and archives:
        return _archived(path, archives, settings)
    if not files:
        raise UserError(f"data.unlabelled: {path} holds no image that Pillow reads")
    say_left_out(f"data.unlabelled {path}", others)
    start = len(os.path.join(path, ""))
    names = [file[start:].replace(os.sep, "/") for file in files]
    return FileImages(path, names, np.full(len(names), UNLABELLED), settings)


def _archived(place: Path, paths: Sequence[Path], settings: DataSettings) -> FileImages:
    """The images in .tar files of one place."""
    archives = tuple(Archive(path, None, stamp_of(str(path))) for path in paths)
    names, members = images_without_labels(place, archives)
    return PackedImages(place, names, members, settings)


def without_copies(images: FileImages, others: Iterable[Source | None]) -> FileImages:
    """The images but for byte-identical copies of the images of ``others``, after a line on stderr
    about these. Raises UserError where none is left."""
    files = [other for other in others if isinstance(other, FileImages)]
    is_copy = are_among(images.contents, [other.contents for other in files])
    count = int(is_copy.sum())
    if count == len(images):
        raise UserError(
            f"data.unlabelled: all {count} images in {images.root} are copies of training, "
            "validation or test images: name others"
        )
    if not count:
        return images
    warn_once(
        f"data.unlabelled {images.root}: left out copies of training, validation and test images: "
        f"{count}"
    )
    return images.only(np.flatnonzero(~is_copy))


class JoinedImages(FileImages):
    """The images of one source, then those of another, each of which has its own cache."""

    def __init__(self, first: FileImages, second: FileImages) -> None:
        names = [*first.names, *second.names]
        labels = np.concatenate([first.labels, second.labels])
        super().__init__(first.root, names, labels, first.settings, first.class_names)
        self.positions = np.concatenate([first.positions, len(first) + second.positions])
        self.first = first
        self.second = second

    def at(self, size: int, interpolation: str) -> FileImages:
        return JoinedImages(self.first.at(size, interpolation), self.second.at(size, interpolation))

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        where = np.asarray(positions)
        is_first = where < len(self.first)
        parts = []
        if is_first.any():
            parts.append(self.first.__getitems__(where[is_first].tolist())[0])
        if not is_first.all():
            parts.append(self.second.__getitems__((where[~is_first] - len(self.first)).tolist())[0])
        images = torch.cat(parts)
        # they lie by source now; a stable sort of the sources says where each has come to lie
        places = np.argsort(np.argsort(~is_first, kind="stable"))
        return images[torch.from_numpy(places)], torch.from_numpy(self.labels[where])

    def pixels(self, position: int) -> Tensor:
        if position < len(self.first):
            return self.first.pixels(position)
        return self.second.pixels(position - len(self.first))

    @property
    def is_cached(self) -> bool:
        return self.first.is_cached and self.second.is_cached

    def keep(self, epoch: int = 0) -> None:
        self.first.keep(epoch)
        self.second.keep(epoch)
