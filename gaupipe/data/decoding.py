"""The pixels of an image file, in RGB. A file that cannot be read to its end is refused by name.

Pillow decodes, and says what is wrong with a file. Most JPEGs go past it to torchvision's decoder,
which takes two thirds of the time and gives the same pixels: both are libjpeg-turbo. torchvision
0.29 calls its decoders deprecated; without them Pillow reads every file.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

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
    own = suffixes().get(suffix_of(name))
    formats = [known for known in (own, *COMMON) if known in Image.OPEN]
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
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode == "F" or image.mode.startswith("I"):
            image = Image.fromarray(_eight_bits(np.asarray(image)))
        return image.convert("RGB")


def read_pixels(content: bytes, name: str) -> Tensor:
    """The pixels of :func:`read_rgb` of a file with this content: uint8 [3, height, width], one
    pixel's colours side by side in memory. Raises what :func:`read_rgb` raises."""
    if suffixes().get(suffix_of(name), "JPEG") in COMMON and _is_plain_jpeg(content):
        with contextlib.suppress(RuntimeError, ValueError):  # Pillow says what is wrong
            return decode_jpeg()(content)
    return torch.from_numpy(np.array(read_rgb(io.BytesIO(content), name))).permute(2, 0, 1)


@functools.cache
def decode_jpeg() -> Callable[[bytes], Tensor]:
    """The decoder for JPEGs that Pillow need not read. It raises RuntimeError or ValueError."""
    with contextlib.suppress(ImportError, AttributeError):
        from torchvision.io import ImageReadMode

        rgb, decode = ImageReadMode.RGB.value, torch.ops.image.decode_jpeg.default
        return lambda content: decode(torch.frombuffer(bytearray(content), dtype=torch.uint8), rgb)
    return _leave_to_pillow


def _leave_to_pillow(_content: bytes) -> Tensor:
    raise RuntimeError("no decoder but Pillow")


def _is_plain_jpeg(content: bytes) -> bool:
    """Whether Pillow, too, would do no more with a JPEG than let libjpeg make RGB of it: grey or
    three colours of 8 bits, not to be turned, of no more pixels than Pillow reads."""
    if content[:2] != b"\xff\xd8":
        return False
    at, plain, described = 2, False, False
    while content[at : at + 1] == b"\xff" and at + 10 <= len(content):
        marker = content[at + 1]
        if marker == START_OF_SCAN:
            return plain and not (described and _is_turned(content))
        described |= marker == APP1
        if marker in FRAMES:
            bits, components = content[at + 4], content[at + 9]
            height = int.from_bytes(content[at + 5 : at + 7])
            pixels = height * int.from_bytes(content[at + 7 : at + 9])
            most = Image.MAX_IMAGE_PIXELS or pixels
            plain = bits == 8 and components in (1, 3) and 0 < pixels <= most
        at += 2 + int.from_bytes(content[at + 2 : at + 4])
    return False


START_OF_SCAN, APP1, FRAMES = 0xDA, 0xE1, (0xC0, 0xC1, 0xC2)
"""Markers in a JPEG: where its header ends, EXIF or XMP, and what begins a baseline, an extended
or a progressive frame."""


def _is_turned(content: bytes) -> bool:
    """Whether EXIF or XMP may say that a JPEG is shown turned."""
    try:
        quiet()
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            return image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except Exception:  # what Pillow's parsers raise of damaged metadata
        return True


def image_size(content: BinaryIO, name: str) -> tuple[int, int]:
    """(height, width) of an image as it is stored, from its header. Raises what Pillow raises."""
    with identify(content, name) as image:
        return image.height, image.width


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
