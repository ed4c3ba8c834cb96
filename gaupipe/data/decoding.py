"""The pixels of an image file, in sRGB, by Pillow. A file that cannot be read to its end is refused
by name."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import threading
import warnings
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms, ImageFile, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from gaupipe.system.errors import UserError
from gaupipe.system.messages import LOG

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF", "JPEG2000")
"""Pillow's formats whose signatures are strong: no damaged file passes for one of them."""

RULES = 2
"""Another number than before once the same file gives other pixels: kept ones are made anew."""

DARK = 0.25
"""Share of white: an image of 16 bits without a higher value may have its white at 14 bits, or at
12, 10 or 8."""

MANY = 1000
"""Of so many values one may be higher."""

SAID = threading.Event()
"""Set once a process has told of an image that is almost black."""

BITS = 258
PHOTOMETRIC = 262
PLANES = 284
SAMPLE_FORMAT = 339
"""TIFF's tags: bits of each sample; 0 where white is 0; 2 where each colour lies apart; and 2 where
numbers have signs."""

warnings.filterwarnings("ignore", module=r"PIL\.")  # of odd metadata, which nobody reads here


def is_image(name: str) -> bool:
    """True if a file's name ends as that of an image."""
    suffix = os.path.splitext(name)[1].lower()
    return Image.registered_extensions().get(suffix) in FORMATS


def identify(file: BinaryIO) -> ImageFile.ImageFile:
    """An image of which the header has been read and no pixels yet. Raises what Pillow raises."""
    Image.init()
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])


def read_rgb(file: BinaryIO) -> Image.Image:
    """The first frame of an image in sRGB with 8 bits, as a viewer shows it on a white page.

    It is turned as its EXIF orientation says. Pillow's ImageCms converts colours by the profile
    that the file holds; without one, and with one that does not fit, they become RGB as Pillow
    converts them. What is transparent is laid on white. Values of 16 bits are scaled to 8 bits,
    and so are grey values that are fractions from 0 to 1; one line on stderr tells of the first
    image whose white seems to be less. Raises what Pillow raises, and ValueError for grey values of
    another range, and for a PNG or TIFF that Pillow misreads.
    """
    with identify(file) as image:
        return _rgb(image, name_of(file))


def check(file: BinaryIO) -> None:
    """Reads an image to its end, without the fine detail that some formats can leave out. Raises
    what :func:`read_rgb` raises."""
    with identify(file) as image:
        image.draft(None, (1, 1))
        _rgb(image, name_of(file))


def name_of(file: BinaryIO) -> str:
    """An open file's path; what stands for it in an archive."""
    return str(getattr(file, "name", "an image"))


def _rgb(opened: ImageFile.ImageFile, name: str) -> Image.Image:
    profile = opened.info.get("icc_profile")
    image = _of_8_bits(opened, name)
    alpha = None
    if image.has_transparency_data:
        image = image.convert("LA" if image.mode[0] in "1L" else "RGBA")
        alpha = image.getchannel("A")
        image = image.convert(image.mode.removesuffix("A"))
    if image.mode not in ("L", "RGB", "CMYK"):  # those that profiles are of
        image = image.convert("RGB")
    if profile:
        image = _in_srgb(image, profile)
    if image.mode != "RGB":
        image = image.convert("RGB")
    if alpha is not None:
        image = Image.composite(image, Image.new("RGB", image.size, "white"), alpha)
    return image


def _of_8_bits(opened: ImageFile.ImageFile, name: str) -> Image.Image:
    """The pixels, turned as EXIF says."""
    _refuse_misread(opened)
    is_deep = opened.format in ("PNG", "TIFF") and ";16" in str(opened.tile)
    image = ImageOps.exif_transpose(opened)
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_eight_bits(np.asarray(image), name))
    if is_deep:  # Pillow has kept the upper 8 bits
        _say_if_dark(np.asarray(image.convert("RGB")), 255, name)
    return image


def _refuse_misread(opened: ImageFile.ImageFile) -> None:
    """Raises ValueError for a PNG or TIFF of which Pillow gives other colours than it holds."""
    is_packed = ";" in str(opened.tile)  # of other than 8 bits
    if is_packed and opened.mode != "P" and "transparency" in opened.info:
        raise ValueError(
            "Pillow finds a transparent colour among those of 8 bits only; give it an alpha channel"
        )
    if not isinstance(opened, TiffImageFile):
        return
    tags = opened.tag_v2
    bits = max(tags.get(BITS, (1,)))
    white_is_zero = tags.get(PHOTOMETRIC) == 0
    if bits == 8 and tags.get(SAMPLE_FORMAT, (1,))[0] == 2:
        raise ValueError("its bytes have signs, which Pillow passes over; save a PNG")
    if bits > 8 and white_is_zero:
        raise ValueError("its white is 0, which Pillow passes over; save a PNG")
    is_raw = opened.tile[0][0] == "raw"
    is_odd = opened.mode in ("LA", "La") or (is_raw and (bits != 8 or white_is_zero))
    if is_odd and tags.get(PLANES) == 2:
        raise ValueError("Pillow may misread its planes; save a PNG")


def _eight_bits(values: np.ndarray, name: str) -> np.ndarray:
    top = 65535 if np.issubdtype(values.dtype, np.integer) else 1
    if not ((values >= 0) & (values <= top)).all():  # NaN is not in the range either
        raise ValueError(
            f"its values go from {values.min()} to {values.max()}; "
            f"0 to {top} can be scaled to 8 bits"
        )
    _say_if_dark(values, top, name)
    return np.rint(values * (255 / top)).astype(np.uint8)


def _in_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """The image in sRGB. A profile that is damaged, or not of the image's mode, changes nothing, as
    in browsers."""
    with contextlib.suppress(ImageCms.PyCMSError):
        transform = _to_srgb(profile, image.mode)
        if transform is not None:
            return transform.apply(image)
    return image


@functools.lru_cache(maxsize=16)  # a camera writes one profile into all of its images
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The transform of a mode's pixels to sRGB; None where they are in sRGB already, because a
    transform takes longer than decoding a JPEG. Raises PyCMSError for a profile that does not
    fit."""
    srgb = ImageCms.createProfile("sRGB")
    transform = ImageCms.buildTransform(io.BytesIO(profile), srgb, mode, "RGB")
    if mode == "RGB":
        steps = np.arange(0, 256, 15, dtype=np.uint8)
        colours = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(-1, 18, 3)
        converted = np.asarray(transform.apply(Image.fromarray(colours)), int)
        if np.abs(converted - colours).max() <= 1:
            return None
    return transform


def _say_if_dark(values: np.ndarray, white: int, name: str) -> None:
    """Tells of the first image of a process that is dark but for single pixels, which may be
    hot."""
    few = 1 + values.size // MANY
    if np.partition(values, -few, axis=None)[-few] >= DARK * white or SAID.is_set():
        return
    SAID.set()
    LOG.warning(
        f"gaupipe: {name}: has more than 8 bits and hardly a value above a quarter of the largest, "
        "so it is almost black: if its white is less than 65535, as of 10, 12 or 14 bits, scale "
        "such images to 8 bits first"
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
