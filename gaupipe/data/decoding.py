"""The pixels of an image file, in RGB, by Pillow. A file that cannot be read to its end is refused
by name."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from gaupipe.system.errors import UserError

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF", "JPEG2000")
"""Pillow's formats whose signatures are strong: no damaged file passes for one of them."""

DARK = 4096
"""An image of 16 bits without a higher value may have white at 12 bits, or at 8."""

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


def read_rgb(file: BinaryIO) -> Image.Image:
    """The first frame of an image in RGB, turned as its EXIF orientation says.

    Colours become RGB as Pillow converts them. Transparency is dropped. Grey values of 16 bits are
    scaled to 8 bits, and so are fractions from 0 to 1. Raises what Pillow raises, and ValueError
    for grey values of another range.
    """
    with identify(file) as image:
        return _rgb(image)


def check(file: BinaryIO) -> None:
    """Reads an image to its end, without the fine detail that some formats can leave out. Raises
    what :func:`read_rgb` raises."""
    with identify(file) as image:
        image.draft(None, (1, 1))
        _rgb(image)


def _rgb(image: Image.Image) -> Image.Image:
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
    if top > 1 and 0 < values.max() < DARK:
        _say_dark()
    return np.rint(values * (255 / top)).astype(np.uint8)


@functools.cache
def _say_dark() -> None:
    """Says once, in each process that reads images, what the white of an image may be."""
    print(
        f"gaupipe: an image of 16 bits has no value above {DARK} of 65535, so it is almost black: "
        "if its white is less than 65535, scale such images to 8 bits first",
        file=sys.stderr,
    )


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
