"""Data sets split into training, validation and test images, each with a stable image id.

An image id is the position of a training image in its split's canonical order: the order of the
source with the held-out images left out. Splits do not depend on the seed of a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gaupipe.data.images import UNLABELLED, FileImages, Source, are_among
from gaupipe.data.unlabelled import JoinedImages
from gaupipe.system.errors import UserError
from gaupipe.system.files import utf8, write_whole
from gaupipe.system.messages import warn_once

APART = 1 << 62
"""Is added to the ids of images without labels before anything is drawn by them, so that they get
other views than training images, whose number plays no part."""


@dataclass
class Split:
    """Some images of a source; image id i is the source's image ``positions[i]``. Images without
    labels come after those with labels."""

    source: Source
    positions: np.ndarray

    @classmethod
    def of_all(cls, source: Source) -> Split:
        """All images of a source."""
        return cls(source, np.arange(len(source)))

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

    def sha256(self) -> str:
        """Names the images, their order and labels."""
        digest = hashlib.sha256(self.source.fingerprint())
        for array in (self.positions, self.labels):
            digest.update(np.asarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()

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
        self.say_copies("test", self.test)
        return self.test.sha256()

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
        if isinstance(val, FileImages) and self.val_sha256 is not None:
            val.keep()
        if training is not None and isinstance(training.source, FileImages):
            training.source.keep(epoch)

    def say_copies(self, what: str, split: Split) -> None:
        """Says how many images of a split, which are ``what``, are training images too."""
        count = int(are_among(split.contents, [self.train.contents]).sum())
        if count:
            warn_once(
                f"data set {self.name}: {count} of {len(split)} {what} images are copies of "
                "training images, so that their accuracy says too much: set "
                "data.leave_out_copies=true to leave these training images out"
            )

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
        written = json.loads(path.read_bytes()) if path.is_file() else {}
        # check_split has not looked at these: others than the run began with are still refused
        test = {name: fact for name, fact in written.items() if name in ("test", "test_sha256")}
        write_whole(path, json.dumps({"dataset": self.name, **known, **images, **test}) + "\n")

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


def _change(before: Sequence[object], now: Sequence[object]) -> str:
    """The first of some names that has gone, and the first that is new."""
    before_all = {*before}
    now_all = {*now}
    gone = [f"{name!r} has gone" for name in before if name not in now_all]
    new = [f"{name!r} is new" for name in now if name not in before_all]
    return ", ".join([*gone[:1], *new[:1]]) or "the same names, but other content or order"
