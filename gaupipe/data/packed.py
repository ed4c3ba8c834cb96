"""Images whose bytes are read by position, and are not unpacked: of tar archives
(:mod:`gaupipe.data.tar`) and tables (:mod:`gaupipe.data.hfds`)."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from gaupipe.data.folder import check_classes, number_first
from gaupipe.data.images import UNLABELLED, FileImages, as_asked
from gaupipe.settings import DataSettings
from gaupipe.system.errors import UserError


class Reader(Protocol):
    """Gives the bytes of an image; for messages the archive or table that they are in; and their
    stamp, as :meth:`FileImages.stamp` does."""

    def read(self, position: int) -> bytes: ...

    def place(self, position: int) -> str: ...

    def stamp(self, position: int) -> tuple[str, int]: ...


class PackedImages(FileImages):
    """Images whose bytes a ``reader`` gives by position. Ids, digests, decoding and cache are those
    of files with these names."""

    def __init__(
        self,
        place: Path,
        names: list[str],
        reader: Reader,
        settings: DataSettings,
        labels: np.ndarray | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        """All images of a ``reader``. Raises UserError for two of one name: digests are kept by
        it."""
        if not names:
            raise UserError(f"{place}: holds no image")
        [(name, times)] = Counter(names).most_common(1)
        if times > 1:
            raise UserError(f"{place}: {times} images have the name {name}; leave one of them")
        labels = np.full(len(names), UNLABELLED) if labels is None else labels
        super().__init__(place, names, labels, settings, class_names)
        self.reader = reader
        self.places = np.arange(len(names))
        """The reader's position of each image: it has those that were left out, too."""

    def open(self, position: int) -> io.BytesIO:
        return io.BytesIO(self.reader.read(int(self.places[position])))

    def path(self, position: int) -> str:
        return f"{self.reader.place(int(self.places[position]))}/{self.names[position]}"

    def stamp(self, position: int) -> tuple[str, int]:
        return self.reader.stamp(int(self.places[position]))

    def only(self, kept: np.ndarray) -> FileImages:
        other = super().only(kept)
        assert isinstance(other, PackedImages)
        other.places = self.places[kept]
        return other


class Images(NamedTuple):
    """The images of a split: their names and classes, and their bytes. ``classes`` are all classes
    in order; None sorts them, numbers by their value."""

    names: list[str]
    labels: list[str]
    reader: Reader
    classes: list[str] | None = None


def sources_of(
    splits: Mapping[str, Images], settings: DataSettings, training: str = "train"
) -> dict[str, FileImages]:
    """The sources of the ``splits``, without images that :func:`as_asked` leaves out. Raises
    UserError without the ``training`` images, for a class that these lack, and for two images of
    one name."""
    place = Path(settings.name)
    if settings.name == "folder":
        place = settings.root or Path("data")
    if training not in splits:
        raise UserError(f"{place}: has images for {', '.join(splits)}, and none for training")
    train = splits[training]
    classes = train.classes or sorted({*train.labels}, key=number_first)
    numbers = {name: number for number, name in enumerate(classes)}

    sources: dict[str, FileImages] = {}
    for split, images in splits.items():
        check_classes(images.labels, numbers, f"{place}: {split}", training)
        labels = np.array([numbers[label] for label in images.labels])
        source = PackedImages(place / split, images.names, images.reader, settings, labels, classes)
        sources[split] = as_asked(source)
    return sources
