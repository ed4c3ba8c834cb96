"""The pixels of an image file, in RGB, by Pillow. A file that cannot be read to its end is refused
by name."""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from gaupipe.system.errors import UserError

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF", "JPEG2000")
"""Pillow's formats whose signatures are strong: no damaged file passes for one of them."""

warnings.filterwarnings("ignore", module=r"PIL\.")  # of odd metadata, which nobody reads here


@functools.cache
def _suffixes() -> set[str]:
    return {suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS}


def is_image(name: str) -> bool:
    """True if a file's name ends as that of an image."""
    return os.path.splitext(name)[1].lower() in _suffixes()


def identify(file: BinaryIO) -> Image.Image:
    """An image of which the header has been read and no pixels yet. Raises what Pillow raises."""
    Image.init()
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])


PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""First column, first row and the steps of each pass of an interlaced PNG."""

PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Channels by a PNG's colour type."""


def read_rgb(file: BinaryIO) -> Image.Image:
    """The first frame of an image in RGB, turned as its EXIF orientation says.

    Colours become RGB as Pillow converts them. Transparency is dropped. Grey values of 16 bits are
    scaled to 8 bits, and so are fractions from 0 to 1. Raises what Pillow raises, and ValueError
    for grey values of another range.
    """
    with identify(file) as image:
        return _rgb(image, file)


def check(file: BinaryIO) -> None:
    """Reads an image to its end, without the fine detail that some formats can leave out. Raises
    what :func:`read_rgb` raises."""
    with identify(file) as image:
        image.draft(None, (1, 1))
        _rgb(image, file)


def _rgb(image: Image.Image, file: BinaryIO) -> Image.Image:
    image.load()
    if image.format == "PNG" and _ends_black(image):
        _check_rows(file)
    image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        image = Image.fromarray(_eight_bits(np.asarray(image)))
    return image.convert("RGB")


def _ends_black(image: Image.Image) -> bool:
    """True where rows may be missing from a PNG: Pillow leaves them black without an error. The
    last row of an interlaced one may have come before others."""
    width, height = image.size
    last_row = image.crop((0, height - 1, width, height))
    return bool(image.info.get("interlace")) or last_row.getbbox() is None


def _check_rows(file: BinaryIO) -> None:
    """Raises ValueError for a PNG that holds fewer bytes of pixels than its header says."""
    file.seek(8)
    expected = 0
    found = 0
    inflate = zlib.decompressobj()
    while len(start := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", start)
        content = file.read(length)
        file.seek(4, os.SEEK_CUR)  # a chunk's checksum, which Pillow has compared
        if kind == b"IHDR":
            expected = _bytes_of_rows(*struct.unpack(">IIBBBBB", content))
        if kind == b"IDAT":
            found += len(inflate.decompress(content, expected - found))
            if found == expected:
                return
    raise ValueError(f"it has {found} of the {expected} bytes of its pixels")


def _bytes_of_rows(
    width: int, height: int, bits: int, colour: int, _method: int, _filter: int, interlaced: int
) -> int:
    """Bytes of a PNG's rows before compression, each with the byte that names its filter."""
    total = 0
    for left, top, across, down in PASSES if interlaced else ((0, 0, 1, 1),):
        columns = -(-(width - left) // across)
        rows = -(-(height - top) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * bits * PNG_CHANNELS[colour] // 8))
    return total


def _eight_bits(values: np.ndarray) -> np.ndarray:
    top = 65535 if np.issubdtype(values.dtype, np.integer) else 1
    if not ((values >= 0) & (values <= top)).all():  # NaN is not in the range either
        raise ValueError(
            f"its values go from {values.min()} to {values.max()}; "
            f"0 to {top} can be scaled to 8 bits"
        )
    return np.rint(values * (255 / top)).astype(np.uint8)


@contextlib.contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turns whatever goes wrong while an image is read into UserError with the file's ``name``."""
    try:
        yield
    except Exception as error:  # Pillow's decoders raise whatever their input makes them raise
        text = getattr(error, "strerror", None) or str(error)
        reason = " ".join(text.split()) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "of no format that Pillow reads"
        raise UserError(
            f"{name}: not readable as an image ({reason}); replace it or take it out"
        ) from None
