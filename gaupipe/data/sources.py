"""Data sets that ``data.name`` can name: where their images come from.

Labels are known without decoding an image. Images in files are decoded when they are asked for.
"""

from __future__ import annotations

import gzip
import os
import statistics
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gaupipe.data.folder import FolderFacts, check_classes, find_classes, find_splits, place_of
from gaupipe.data.hfds import rows_with_labels
from gaupipe.data.images import ArrayImages, FileImages, Source, are_among, as_asked
from gaupipe.data.packed import Images, sources_of
from gaupipe.data.stratified import check_pairs
from gaupipe.data.tar import find_archives, images_in
from gaupipe.data.unlabelled import open_unlabelled, without_copies
from gaupipe.settings import DataSettings
from gaupipe.settings.sections import HFDS, STREAMS
from gaupipe.system.errors import UserError
from gaupipe.system.messages import warn_once

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package puts the files. The environment variable GAUPIPE_FASHION_MNIST names
another folder."""

SAMPLE = 200
"""Images whose headers are read to see what the images are like."""


def open_sources(
    settings: DataSettings, download: bool = False
) -> tuple[Source, Source | None, Source | None]:
    """The sources of the training images, of validation images that are not among them, and of the
    test images. ``download`` lets torchvision fetch a data set.

    Raises UserError for a data set that is not there or that cannot be read.
    """
    packed = packed_images(settings, download)
    if packed:
        sources = sources_of(packed, settings)
        return sources["train"], sources.get("val"), sources.get("test")
    if settings.name == "folder":
        return _folder_sources(settings.root or Path("data"), settings)
    if settings.name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
        train = ArrayImages(images, digits.target)
        test = None
    elif settings.name == "fashion_mnist":
        usual = os.environ.get("GAUPIPE_FASHION_MNIST") or DEBIAN_FASHION_MNIST
        root = settings.root or Path(usual)
        train = _idx_images(root, "train")
        test = _idx_images(root, "t10k")
    else:
        timm_train, timm_test = _timm_sources(settings, download)
        return timm_train, None, timm_test
    if settings.image_size:
        train = train.resized(settings.image_size, settings.interpolation)
        if test is not None:
            test = test.resized(settings.image_size, settings.interpolation)
    return train, None, test


def facts_of(
    settings: DataSettings, download: bool = False, unlabelled: bool = False
) -> FolderFacts:
    """Looks at images in files, ``unlabelled`` at those without labels too. Copies are not counted:
    of labelled images where these have no labels, and, where ``data.leave_out_copies`` says so, of
    test images and validation images of their own; copies are left out after validation images are
    drawn, so that these are a part of all. Only to find copies are all files read. Otherwise files
    that are no images are passed over, because whoever reads all of them says which these are.
    Raises UserError for a place that cannot be meant, for a class that cannot be split, and where
    none of the sampled files is an image."""
    train, val, test = open_sources(settings, download)
    others = None
    if unlabelled:
        others = open_unlabelled(settings, train, download)
    if others is not None:
        others = without_copies(others, [train, val, test])
    assert isinstance(train, FileImages)
    if val is None:
        check_pairs(train.labels, train.class_names, "data.val_fraction")
    sampled = dict.fromkeys(i * len(train) // SAMPLE for i in range(SAMPLE))
    sizes = []
    refusal = None
    for position in sampled:
        try:
            sizes.append(train.size_of(position))
        except UserError as error:
            refusal = refusal or error
    if refusal and not sizes:
        raise refusal
    widths, heights = zip(*sizes, strict=True)
    labels = train.labels
    if settings.leave_out_copies and val is not None:
        held_out = [images.contents for images in (val, test) if isinstance(images, FileImages)]
        labels = labels[~are_among(train.contents, held_out)]
    counts = np.bincount(labels, minlength=len(train.class_names)).tolist()
    return FolderFacts(
        counts=dict(zip(train.class_names, counts, strict=True)),
        width=round(statistics.median(widths)),
        height=round(statistics.median(heights)),
        val=None if val is None else len(val),
        test=None if test is None else len(test),
        unlabelled=0 if others is None else len(others),
    )


def _idx_images(root: Path, prefix: str) -> ArrayImages:
    """Fashion-MNIST's files, or others of that format. Raises UserError for images that are not
    square, and for more or fewer labels than images."""
    images = _idx_array(root, f"{prefix}-images", 3)
    labels = _idx_array(root, f"{prefix}-labels", 1)
    number, height, width = images.shape
    if number != len(labels) or height != width:
        raise UserError(
            f"{root}: {number} {prefix} images of {height} x {width} pixels and {len(labels)} "
            "labels: should be squares with a label each"
        )
    return ArrayImages(images[:, None], labels)


def _idx_array(root: Path, name: str, axes: int) -> np.ndarray:
    """An IDX file of bytes: images [N, height, width] with three ``axes``, labels [N] with one."""
    path = root / f"{name}-idx{axes}-ubyte.gz"
    if not path.is_file():
        raise UserError(
            f"data set fashion_mnist: {path} is not there; 'apt-get install "
            "dataset-fashion-mnist' provides it on Debian, "
            "data.name=torch/fashion_mnist with download=true elsewhere"
        )
    try:
        with gzip.open(path) as file:
            content = file.read()
        shape = np.frombuffer(content, dtype=">i4", count=axes, offset=4)
        return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path}: not readable as an IDX file ({error}); fetch it again") from None


def packed_images(settings: DataSettings, download: bool = False) -> dict[str, Images]:
    """The images of each split of archives and of hfds/NAME; empty for other data sets. Raises
    UserError for what cannot be read, and for a stream."""
    if settings.name.startswith(STREAMS):
        raise UserError(
            f"data.name: {settings.name} is a stream, and images are read in any order: keep the "
            ".tar files in a folder and name it with --data FOLDER, or take hfds/NAME"
        )
    if settings.name.startswith(HFDS):
        return rows_with_labels(settings, download)
    if settings.name != "folder":
        return {}
    root = settings.root or Path("data")
    archives = find_archives(root)
    return images_in(root, archives) if archives else {}


def _folder_sources(
    root: Path, settings: DataSettings
) -> tuple[FileImages, FileImages | None, FileImages | None]:
    """The images of a folder, as :func:`gaupipe.data.folder.find_splits` finds them."""
    folders = find_splits(root)
    training = find_classes(folders.train, is_split=folders.train != root)

    def held_out(folder: Path | None) -> FileImages | None:
        if folder is None:
            return None
        classes = find_classes(folder, is_split=True)
        check_classes(classes, training, f"data.root: {folder}", folders.train)
        return labelled_images(folder, classes, [*training], settings)

    train = labelled_images(folders.train, training, [*training], settings)
    return train, held_out(folders.val), held_out(folders.test)


def images_with_labels(data: str, settings: DataSettings) -> FileImages:
    """All images of a folder with a folder for each class. Of archives and of hfds/NAME, as
    ``data`` may name them too, those of one split: test rather than val, and val rather than train;
    of several splits one line on stderr says which."""
    settings = DataSettings.model_validate({**settings.model_dump(), **place_of(data)})
    packed = packed_images(settings)
    if not packed:
        folder = settings.root or Path()
        classes = find_classes(folder)
        return labelled_images(folder, classes, [*classes], settings)
    split = next(split for split in ("test", "val", "train") if split in packed)
    if len(packed) > 1:
        warn_once(f"--data {data}: {split} is taken ({', '.join(packed)})")
    return sources_of({split: packed[split]}, settings, training=split)[split]


def labelled_images(
    folder: Path, classes: dict[str, list[str]], names: Sequence[str], settings: DataSettings
) -> FileImages:
    """The images that :func:`find_classes` found in ``folder``; a label is the place of the image's
    class in ``names``."""
    numbers = {name: number for number, name in enumerate(names)}
    files = [file for images in classes.values() for file in images]
    labels = np.asarray([numbers[name] for name, images in classes.items() for _ in images])
    return as_asked(FileImages(folder, files, labels, settings, names))


def _timm_sources(settings: DataSettings, download: bool) -> tuple[Source, Source | None]:
    if not settings.name.startswith("torch/"):
        raise UserError(
            f"data.name: unknown data set {settings.name!r}; known: digits, fashion_mnist, "
            "folder (with data.root), hfds/NAME, torch/NAME as timm's create_dataset names it"
        )
    if settings.name in ("torch/image_folder", "torch/folder"):
        raise UserError(f"data.name: {settings.name}: take data.name=folder, or --data FOLDER")
    train = _timm_data_set(settings, download, "train")
    test = _timm_data_set(settings, download, "validation", "test")
    return _timm_source(train, settings), _timm_source(test, settings)


def _timm_data_set(settings: DataSettings, download: bool, *splits: str) -> Any:
    """timm's data set of the first of ``splits`` that there is."""
    from timm.data import create_dataset

    name = settings.name
    root = str(settings.root or Path("data"))
    try:
        return create_dataset(
            name, root=root, split=splits[0], download=download, is_training=False
        )
    except (RuntimeError, AssertionError, ImportError, ValueError, OSError) as error:
        if len(splits) > 1:
            return _timm_data_set(settings, download, *splits[1:])
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"data set {name} not found under {root!r} ({reason}); put its files "
            "there, name their folder with data.root, or set download=true"
        ) from None


def _timm_source(data_set: Any, settings: DataSettings) -> Source:
    """The images of a data set of torchvision, which keeps them in an array or in files."""
    pixels = getattr(data_set, "data", None)
    class_names = _class_names(data_set)
    if isinstance(pixels, (np.ndarray, Tensor)) and str(pixels.dtype).endswith("uint8"):
        pixels = np.asarray(pixels)
        if pixels.ndim == 3:
            pixels = pixels[..., None]  # [N, height, width, 1]
        pixels = pixels.transpose(0, 3, 1, 2)  # [N, C, height, width]
        labels = np.asarray(data_set.targets)
        if labels.ndim == 2:  # QMNIST's have the writer and more behind the digit
            labels = labels[:, 0]
        array = ArrayImages(pixels, labels, class_names)
        size = settings.image_size or pixels.shape[-1]
        return array.resized(size, settings.interpolation)
    files = _files(data_set)
    start = len(os.path.join(data_set.root, ""))
    names = [str(path)[start:] for path, _ in files]
    labels = np.asarray([label for _, label in files])
    return as_asked(FileImages(Path(data_set.root), names, labels, settings, class_names))


def _class_names(data_set: Any) -> list[str]:
    """A name for each class of a data set of torchvision; none where it has none."""
    classes = getattr(data_set, "classes", [])
    if classes and isinstance(classes[0], tuple):  # ImageNet's, of which two may have one name
        names = [synonyms[0] for synonyms in classes]
        return [
            f"{name} ({number})" if names.count(name) > 1 else name
            for number, name in enumerate(names)
        ]
    numbers = getattr(data_set, "class_to_idx", {})
    return sorted(numbers, key=numbers.__getitem__)


def _files(data_set: Any) -> list[tuple[str, int]]:
    """(path, label) of each image of a torchvision data set that lies in files."""
    if hasattr(data_set, "index"):  # iNaturalist's, in the order of the file system's listing
        folders = [os.path.join(data_set.root, name) for name in data_set.all_categories]
        return sorted((os.path.join(folders[label], name), label) for label, name in data_set.index)
    if hasattr(data_set, "samples"):
        files: list[tuple[str, int]] = data_set.samples
    else:
        files = data_set.imgs
    return files
