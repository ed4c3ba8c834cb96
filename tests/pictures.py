"""Files of images, and batches of them that nothing changes."""

import gzip
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from gaupipe.data.augment import Augment
from gaupipe.data.folder import FolderFacts
from gaupipe.settings.augment import AugmentSettings


def write_idx(path: Path, array: np.ndarray) -> None:
    """A gzipped IDX file of bytes, the format of Fashion-MNIST's files."""
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">i4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


def write_png(path: Path, values: np.ndarray, chunks: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """A PNG with 16 bits a value, [height, width] or [height, width, C], which Pillow writes of
    grey images alone."""
    height, width, channels = (*values.shape, 1)[:3]
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = values.astype(">u2").reshape(height, -1).view(np.uint8)
    lines = np.pad(rows, ((0, 0), (1, 0)))  # a 0: no filter
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in (
        (b"IHDR", struct.pack(">2I5B", width, height, 16, colour, 0, 0, 0)),
        *chunks,
        (b"IDAT", zlib.compress(lines.tobytes())),
        (b"IEND", b""),
    ):
        content += struct.pack(">I", len(data)) + kind + data
        content += struct.pack(">I", zlib.crc32(kind + data))
    path.write_bytes(content)


def photos(folder, classes=("cat", "dog"), count=12, size=(10, 8), mode="RGB"):
    """Images of noise, a folder for each class."""
    draw = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(256, size=(*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{number}.png")
    return folder


def more_photos(folder, count=7, seed=1):
    """Images of noise at several depths, other ones than :func:`photos` makes."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        place = folder / "/".join("ab"[: number % 3])
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(256, size=(8, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


def facts(images=3000, size=(400, 300), classes=("cat", "dog"), **more) -> FolderFacts:
    """What a folder is like, by numbers alone."""
    counts = {name: images // len(classes) for name in classes}
    return FolderFacts(counts, *size, **more)


class NumberedMaps:
    """A store whose maps are the ids they belong to."""

    view = None

    def prefetch(self, batches):
        for image_ids in batches:
            yield {"maps": np.asarray(image_ids) * 10}


UNCHANGED = Augment(AugmentSettings(), seed=0)
