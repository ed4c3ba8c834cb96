"""Images of files, prepared as timm prepares them for a model."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset
from torch import Tensor

from gaupipe.data.decoding import read_rgb, refusing
from gaupipe.data.folder import images_below, say_left_out
from gaupipe.data.images import UNLABELLED, FileImages, without_ends
from gaupipe.settings import DataSettings
from gaupipe.settings.places import check_images
from gaupipe.system.errors import UserError


class PreparedImages(FileImages):
    """Image files, resized and cropped by the ``transform`` that timm gives a
    model: keywords of ``timm.data.create_transform``."""

    def __init__(self, paths: Sequence[Path], transform: dict[str, Any]) -> None:
        settings = DataSettings(image_size=transform["input_size"][-1], cache="none")
        whole = [path.absolute() for path in paths]  # a link's folder may have a class's name
        root = Path(os.path.commonpath([path.parent for path in whole]))
        names = [str(path.relative_to(root)) for path in whole]
        super().__init__(root, names, np.zeros(len(paths), np.int64), settings)
        self.transform = transform
        self._read = reader(transform, normalize=False)

    def at(self, size: int, interpolation: str) -> PreparedImages:
        """The same images: they are prepared for one model."""
        return self

    def fingerprint(self) -> bytes:
        transform = json.dumps(self.transform, sort_keys=True)
        return hashlib.sha256(super().fingerprint() + transform.encode()).digest()

    def crop(self, width: int, height: int) -> tuple[float, float, float, float]:
        """As :meth:`FileImages.crop`, by the rules of timm's ``create_transform``: an image is made
        a little larger than the model's input, and its middle is kept. With the crop mode border
        the part may be larger than the image."""
        size = self.transform["input_size"][-1]
        larger = math.floor(size / self.transform.get("crop_pct", 1.0))
        mode = self.transform.get("crop_mode", "center")
        resized_width: float = larger  # as with the mode squash, which keeps no ratio of the sides
        resized_height: float = larger
        if mode in ("center", "border"):
            side = min(width, height) if mode == "center" else max(width, height)
            resized_width = width * (larger / side)
            resized_height = height * (larger / side)
        across = size / resized_width / 2
        down = size / resized_height / 2
        return 0.5 - across, 0.5 - down, 0.5 + across, 0.5 + down

    def _square(self, position: int) -> Tensor:
        return self._read(Path(self.path(position)))


def folder_labels(paths: Sequence[Path], class_names: Sequence[str]) -> np.ndarray:
    """The class int64 [N] of each image whose folder is called like one, or like one of its names
    (``tabby, tabby cat``), or by ImageNet's number of it (``n02123045``), with ``_`` for blanks,
    and in any case where none is written alike; :data:`UNLABELLED` of other images."""
    numbers: Sequence[str] = ()
    subset = infer_imagenet_subset({"num_classes": len(class_names)})
    if subset is not None:
        numbers = ImageNetInfo(subset).label_names()
    known: dict[str, int] = {}
    spelled_alike: dict[str, int] = {}
    parts = [name.split(", ") for name in class_names]
    for names in ([[name] for name in class_names], parts, [[number] for number in numbers]):
        for label, synonyms in enumerate(names):
            for synonym in synonyms:
                known.setdefault(synonym, label)
                spelled_alike.setdefault(_spelling(synonym), label)
    folders = [os.path.basename(os.path.dirname(os.path.abspath(path))) for path in paths]
    labels = [known.get(name, spelled_alike.get(_spelling(name), UNLABELLED)) for name in folders]
    return np.array(labels, np.int64)


def _spelling(name: str) -> str:
    return name.replace("_", " ").lower()


def image_files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files of ``paths``, and of each folder the images that
    :func:`gaupipe.data.folder.images_below` finds; a line on stderr tells of others. Raises
    UserError for a path that is no file and no folder, and for a folder without an image; OSError
    for a folder that may not be read."""
    for path in paths:
        check_images([path])
        if path.is_file():
            yield path
        elif path.is_dir():
            files, others = images_below(path)
            say_left_out(str(path), others)
            if not files:
                raise UserError(f"{path}: no image files in this folder")
            yield from map(Path, files)
        else:
            raise UserError(f"{path}: is neither a file nor a folder; give images, or folders")


def reader(transform: dict[str, Any], normalize: bool = True) -> Callable[[Path], Tensor]:
    """A function from an image file to a model's input [channels, height, width]. It raises
    UserError for a file that cannot be read. ``transform`` has keywords of timm's
    ``create_transform``, as ``resolve_model_data_config`` gives them for a model."""
    to_tensor: Any = create_transform(**transform, normalize=normalize)
    grey = transform["input_size"][0] == 1
    keeps_middle = transform.get("crop_mode", "center") == "center"
    return partial(_read, to_tensor, grey, keeps_middle)  # unlike a closure it goes to a worker


def _read(to_tensor: Any, grey: bool, keeps_middle: bool, path: Path) -> Tensor:
    with refusing(str(path)):
        with path.open("rb") as file:
            image = read_rgb(file)
        if keeps_middle:
            image = without_ends(image)
        if grey:
            image = image.convert("L")
        tensor: Tensor = to_tensor(image)
    return tensor
