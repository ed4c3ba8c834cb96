"""The pixels of an image file, in RGB, by Pillow. A file that cannot be read to its end is refused
by name."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from gaupipe.system.errors import UserError

COMMON = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF", "JPEG2000")
"""Formats that a file may have whatever its suffix says. The signatures of other formats are weak:
a damaged file may pass for one of them."""

NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
"""Formats that Pillow only recognises, or that another program would have to draw."""

OF_PILLOW = re.compile(r"PIL\.")
"""Modules whose warnings :func:`quiet` silences."""


@functools.cache
def suffixes() -> dict[str, str]:
    """{".png": "PNG", ...} of the formats that Pillow decodes."""
    formats = {
        suffix: "JPEG" if name == "MPO" else name  # an MPO is several JPEGs in a file
        for suffix, name in Image.registered_extensions().items()
    }
    return {
        suffix: name
        for suffix, name in formats.items()
        if name in Image.OPEN and name not in NOT_DECODED
    }


def suffix_of(name: str) -> str:
    """'.png' of 'a.PNG'."""
    return os.path.splitext(name)[1].lower()


def identify(file: BinaryIO, name: str) -> Image.Image:
    """An image of which the header has been read and no pixels yet. Raises what Pillow raises."""
    of_suffix = suffixes().get(suffix_of(name))
    formats = [known for known in (of_suffix, *COMMON) if known in Image.OPEN]
    quiet()
    image = Image.open(file, formats=formats)
    if Image.MAX_IMAGE_PIXELS and image.width * image.height > Image.MAX_IMAGE_PIXELS:
        raise Image.DecompressionBombError  # where Pillow itself may only warn
    return image


def read_rgb(file: BinaryIO, name: str) -> Image.Image:
    """The first frame of an image in RGB, turned as its EXIF orientation says.

    Colours become RGB as Pillow converts them. Transparency is dropped. Grey values of 16 bits are
    scaled to 8 bits, and so are fractions from 0 to 1. Raises what Pillow raises, and ValueError
    for grey values of another range.
    """
    with identify(file, name) as image:
        return _rgb(image)


def check(file: BinaryIO, name: str) -> None:
    """Reads an image to its end, without the fine detail that some formats can leave out. Raises
    what :func:`read_rgb` raises."""
    with identify(file, name) as image:
        image.draft(None, (1, 1))
        _rgb(image)


def _rgb(image: Image.Image) -> Image.Image:
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        image = Image.fromarray(_eight_bits(np.asarray(image)))
    return image.convert("RGB")


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
        raise UserError(
            f"{name}: not readable as an image ({_reason(error)}); replace it or take it out"
        ) from None


def quiet() -> None:
    """Silences Pillow's warnings of odd metadata, which nobody reads here, and no others.

    Filters of warnings belong to the whole process, where other threads work meanwhile. So this
    filter stays: taken away after each image, it would take along what others changed."""
    if not warnings.filters or warnings.filters[0][3] != OF_PILLOW:
        warnings.filterwarnings("ignore", module=OF_PILLOW.pattern)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "of no format that Pillow reads"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {Image.MAX_IMAGE_PIXELS:,} pixels"
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()) or type(error).__name__
