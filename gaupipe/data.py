"""Data sets whose samples have a stable image id, and the batches made from them.

An image id is the position of a training image in its split's canonical order: the order of the source with the
held-out images left out. Splits do not depend on the seed of a run.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gaupipe.augment import Augment, Mix, mix
from gaupipe.config import DataSettings
from gaupipe.errors import UserError
from gaupipe.gaussians import Geometry

DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


class ArrayImages(Dataset):
    """Images held in memory: ``images`` uint8 [N, C, height, width], ``labels`` int64 [N]."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = torch.from_numpy(np.array(images, order="C"))
        self.labels = np.asarray(labels, dtype=np.int64)

    def resized(self, size: int) -> ArrayImages:
        """The same images at ``size`` x ``size`` pixels, bilinear with antialiasing."""
        if tuple(self.images.shape[-2:]) == (size, size):
            return self
        from torchvision.transforms.v2.functional import resize
        return ArrayImages(resize(self.images, [size, size], antialias=True).numpy(), self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        where = np.asarray(positions)
        return self.images[where], torch.from_numpy(self.labels[where])

    def fingerprint(self) -> bytes:
        return hashlib.sha256(self.images.numpy().tobytes()).digest()


class DecodedImages(Dataset):
    """A timm or torchvision data set of PIL images, decoded when asked for, resized and centre-cropped to a square."""

    def __init__(self, source: Any, labels: np.ndarray, size: int) -> None:
        from torchvision.transforms import v2
        source.transform = v2.Compose([v2.ToImage(), v2.RGB(), v2.Resize(size, antialias=True), v2.CenterCrop(size)])
        self.source = source
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        images = torch.stack([self.source[position][0].as_subclass(Tensor) for position in positions])
        return images, torch.from_numpy(self.labels[np.asarray(positions)])

    def fingerprint(self) -> bytes:
        names = self.source.filenames(basename=True) if hasattr(self.source, "filenames") else len(self.source)
        return hashlib.sha256(repr(names).encode()).digest()


@dataclass
class Split:
    """Some images of a source; image id i is the source's image ``positions[i]``."""

    source: ArrayImages | DecodedImages
    positions: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def labels(self) -> np.ndarray:
        """Labels [N] int64 in the order of the image ids."""
        return self.source.labels[self.positions]

    def evenly_spaced(self, count: int) -> np.ndarray:
        """``count`` image ids from the first to the last, int64; all of them where there are fewer."""
        return np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64)

    def image(self, image_id: int) -> np.ndarray:
        """One image as the model sees it before normalisation: uint8 [height, width, C]."""
        images, _ = self.source.__getitems__([int(self.positions[image_id])])
        return images[0].permute(1, 2, 0).numpy()


class _Batches(Dataset):
    """Makes a DataLoader fetch whole batches: images uint8 [B, C, height, width], labels [B], image ids [B]."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __getitems__(self, image_ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        images, labels = self.split.source.__getitems__(self.split.positions[image_ids].tolist())
        return images, labels, torch.tensor(image_ids)


class _Order:
    """A batch sampler whose order can be changed between epochs while the loader's workers live on."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.image_ids = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return -(-len(self.image_ids) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for image_ids in self.batches():
            yield image_ids.tolist()

    def batches(self) -> list[np.ndarray]:
        """The image ids of each batch."""
        starts = range(0, len(self.image_ids), self.batch_size)
        return [self.image_ids[start:start + self.batch_size] for start in starts]


@dataclass
class Batch:
    """Some images and what belongs to them, all in one order.

    images     float32 [B, C, height, width], normalised, on the model's device
    labels     int64 [B], on the model's device
    ids        int64 [B], the image ids, on the CPU
    geometry   where each view lies in its image; None where nothing moved
    mixed      which images Mixup or CutMix mixed, and where; None where none were
    stored     what a store holds for ``ids``, {array name: [B, ...]}; None where no store is read
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    geometry: Geometry | None = None
    mixed: Mix | None = None
    stored: dict[str, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.ids)


class StoredMaps(Protocol):
    """What :meth:`Batches.epoch` reads stored maps through, such as a :class:`store.Store`."""

    def prefetch(self, batches: Iterable[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """What is stored for each batch of image ids, in order, read ahead."""


class Batches:
    """The images of one split in batches, normalised, on ``device``."""

    def __init__(
        self,
        split: Split,
        data: ImageData,
        device: torch.device,
        batch_size: int,
        workers: int = 0,
    ) -> None:
        self.split, self.device = split, device
        self.order = _Order(batch_size)
        # tensorstore must not be in use before a fork, so workers start from a clean process
        context = {"multiprocessing_context": "forkserver", "persistent_workers": True}
        self.loader = DataLoader(
            _Batches(split),
            batch_sampler=self.order,
            collate_fn=_as_is,
            num_workers=workers,
            generator=torch.Generator(),
            **(context if workers else {}),
        )
        self.mean = torch.tensor(data.mean, device=device).view(-1, 1, 1) * 255
        self.std = torch.tensor(data.std, device=device).view(-1, 1, 1) * 255

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.split) // self.order.batch_size)

    def in_order(self, image_ids: np.ndarray | None = None) -> Iterator[Batch]:
        """The images of ``image_ids``, or all of the split in canonical order, as they are."""
        self.order.image_ids = np.arange(len(self.split)) if image_ids is None else image_ids
        for images, labels, ids in self._fetched():
            yield Batch(self._normalised(images.to(self.device)), labels.to(self.device), ids)

    def epoch(
        self, number: int, augment: Augment, maps: StoredMaps | None = None
    ) -> Iterator[Batch]:
        """One epoch of training, counted from 0: augmented views, with what ``maps`` hold for them.

        (seed of ``augment``, epoch) alone determine the order, and the store is read by the very ids
        of each batch.
        """
        self.order.image_ids = self._shuffled(augment.seed, number)
        stored = itertools.repeat(None) if maps is None else maps.prefetch(self.order.batches())
        for (images, labels, ids), found in zip(self._fetched(), stored):  # noqa: B905
            views, geometry = augment(images.to(self.device), ids, number)
            views, mixed = mix(self._normalised(views), ids, augment.seed, number, augment.settings)
            yield Batch(views, labels.to(self.device), ids, geometry, mixed, found)

    def _shuffled(self, seed: int, epoch: int) -> np.ndarray:
        return np.random.default_rng((seed, epoch)).permutation(len(self.split))

    def _fetched(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(images uint8, labels, ids) in the order that was set. Raises the UserError of an image that
        cannot be read."""
        for batch in self.loader:
            if isinstance(batch, UserError):
                raise batch
            yield batch

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.float() - self.mean) / self.std


def _as_is(batch: Any) -> Any:
    return batch


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

    def write_split(self, path: Path) -> None:
        """Writes which images of the source are in each split."""
        splits = {"train": self.train, "val": self.val} | ({"test": self.test} if self.test else {})
        path.write_text(json.dumps({"dataset": self.name, "sha256": self.sha256} |
                                   {name: split.positions.tolist() for name, split in splits.items()}) + "\n")


def load_data(settings: DataSettings) -> ImageData:
    """Reads the data set that ``settings`` name. Raises UserError saying how to get one that is not there."""
    train, test = _sources(settings)
    labels = train.labels
    val_fraction = 0.2 if settings.name == "digits" else settings.val_fraction
    kept, held_out = _stratified(np.arange(len(labels)), labels, val_fraction)
    if settings.train_images is not None:
        if settings.train_images > len(kept):
            raise UserError(f"data.train_images: {settings.train_images} asked, {settings.name} has {len(kept)} "
                            "training images")
        if settings.train_images < len(kept):
            _, kept = _stratified(kept, labels[kept], settings.train_images)
    split = Split(train, kept)
    if isinstance(train, ArrayImages):
        mean, std = _mean_and_std(train.images[torch.from_numpy(kept)])
    else:
        from timm.data import IMAGENET_DEFAULT_MEAN as mean, IMAGENET_DEFAULT_STD as std
    image_size = settings.image_size or (train.images.shape[-1] if isinstance(train, ArrayImages) else 224)
    digest = hashlib.sha256(train.fingerprint())
    for array in (kept, split.labels):
        digest.update(np.asarray(array, dtype="<i8").tobytes())
    return ImageData(
        name=settings.name, train=split, val=Split(train, held_out),
        test=Split(test, np.arange(len(test))) if test is not None else None,
        num_classes=int(labels.max()) + 1, channels=len(mean), image_size=image_size, mean=tuple(mean), std=tuple(std),
        sha256=digest.hexdigest())


def _mean_and_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of images uint8 [N, C, height, width], as shares of 255, from counts of
    the 256 values: no copy of the images is made."""
    values, means, stds = torch.arange(256, dtype=torch.float64) / 255, [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.flatten(), minlength=256).double()
        mean = (counts * values).sum() / counts.sum()
        means.append(mean.item())
        stds.append(((counts * (values - mean)**2).sum() / (counts.sum() - 1)).sqrt().item())
    return tuple(means), tuple(stds)


def _stratified(positions: np.ndarray, labels: np.ndarray, share: float | int) -> tuple[np.ndarray, np.ndarray]:
    """Splits positions class by class into (rest, share), each sorted; always the same way."""
    from sklearn.model_selection import train_test_split
    try:
        rest, taken = train_test_split(positions, test_size=share, stratify=labels, random_state=0)
    except ValueError as error:
        raise UserError(f"cannot take {share} of {len(positions)} images class by class: {error}") from None
    return np.sort(rest), np.sort(taken)


def _sources(settings: DataSettings) -> tuple[ArrayImages | DecodedImages, ArrayImages | DecodedImages | None]:
    """The training source and the test source."""
    if settings.name == "digits":
        train, test = _digits(), None
    elif settings.name == "fashion_mnist":
        root = settings.root or DEBIAN_FASHION_MNIST
        train, test = _idx_images(root, "train"), _idx_images(root, "t10k")
    elif settings.name == "folder":
        return _folder_sources(settings)
    else:
        return _timm_source(settings, "train"), _timm_source(settings, "validation", "test")
    if settings.image_size:
        train, test = train.resized(settings.image_size), test and test.resized(settings.image_size)
    return train, test


def _digits() -> ArrayImages:
    from sklearn.datasets import load_digits
    digits = load_digits()
    return ArrayImages(np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None], digits.target)


def _idx_images(root: Path, prefix: str) -> ArrayImages:
    """Fashion-MNIST's files, or others of that format: images uint8 [N, height, width] and labels [N]."""
    arrays = []
    for kind, axes in (("images", 3), ("labels", 1)):
        path = root / f"{prefix}-{kind}-idx{axes}-ubyte.gz"
        if not path.is_file():
            raise UserError(f"data set fashion_mnist: {path} is not there; 'apt-get install dataset-fashion-mnist' "
                            "provides it on Debian, data.name=torch/fashion_mnist with data.download=true elsewhere")
        try:
            with gzip.open(path) as file:
                content = file.read()
            if content[:4] != bytes((0, 0, 8, axes)):
                raise ValueError(f"it should begin as one of bytes with {axes} axes does")
            shape = np.frombuffer(content, dtype=">i4", count=axes, offset=4)
            arrays.append(np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes).reshape(shape))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(f"{path}: not readable as an IDX file ({error}); fetch it again") from None
    images, labels = arrays
    if len(images) != len(labels):
        raise UserError(f"{root}: {len(images)} {prefix} images, but {len(labels)} labels")
    if images.shape[1] != images.shape[2]:
        raise UserError(f"{root}: {prefix} images of {images.shape[1]} x {images.shape[2]} pixels; square ones are needed")
    return ArrayImages(images[:, None], labels)


def _folder_sources(settings: DataSettings) -> tuple[DecodedImages, DecodedImages | None]:
    """A folder that holds train/CLASS/* and, where there are test images, val, validation or test/CLASS/*."""
    from timm.data import create_dataset
    root, size = settings.root or Path("data"), settings.image_size or 224
    if not (root / "train").is_dir():
        raise UserError(f"data.root: no folder {str(root / 'train')!r}; it should hold train/CLASS/*.png and, for test "
                        "images, val/CLASS/*.png")
    train = create_dataset("", root=str(root / "train"), search_split=False)
    held_out = next((root / name for name in ("val", "validation", "test") if (root / name).is_dir()), None)
    if held_out is None:
        return DecodedImages(train, _labels(train), size), None
    classes = train.reader.class_to_idx
    unknown = sorted({path.name for path in held_out.iterdir() if path.is_dir()} - set(classes))
    if unknown:
        raise UserError(f"data.root: {held_out} has the class {unknown[0]!r}, which {root / 'train'} lacks")
    test = create_dataset("", root=str(held_out), search_split=False, class_map=classes)
    return DecodedImages(train, _labels(train), size), DecodedImages(test, _labels(test), size)


def _timm_source(settings: DataSettings, *splits: str) -> ArrayImages | DecodedImages:
    """The first of ``splits`` that the data set has."""
    from timm.data import create_dataset
    name, root = settings.name, settings.root or Path("data")
    if not name.startswith(("torch/", "hfds/")):
        raise UserError(f"data.name: unknown data set {name!r}; known: digits, fashion_mnist, folder (with data.root), "
                        "torch/NAME and hfds/NAME as timm's create_dataset names them")
    try:
        source = create_dataset(name, root=str(root), split=splits[0], download=settings.download, is_training=False)
    except (RuntimeError, FileNotFoundError, AssertionError, ImportError, ValueError, OSError) as error:
        if len(splits) > 1:
            return _timm_source(settings, *splits[1:])
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"data set {name} not found under {str(root)!r} ({reason}); put its files there, name their "
                        "folder with data.root, or set data.download=true") from None
    labels = _labels(source)
    pixels = getattr(source, "data", None)
    if isinstance(pixels, (np.ndarray, Tensor)) and str(pixels.dtype).endswith("uint8"):
        pixels = np.asarray(pixels)
        images = ArrayImages(pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2), labels)
        return images.resized(settings.image_size or images.images.shape[-1])
    return DecodedImages(source, labels, settings.image_size or 224)


def _labels(source: Any) -> np.ndarray:
    """Labels of every sample without decoding images where the data set allows it."""
    if hasattr(source, "targets"):
        return np.asarray(source.targets, dtype=np.int64)
    reader = getattr(source, "reader", None)
    if hasattr(reader, "samples"):
        return np.asarray([target for _, target in reader.samples], dtype=np.int64)
    if hasattr(reader, "dataset") and hasattr(reader, "label_key"):
        return np.asarray(reader.dataset[reader.label_key], dtype=np.int64)
    return np.asarray([target for _, target in source], dtype=np.int64)


load = load_data
