"""The numbers of an array as they lie on disk.

float16: values are clipped to the finite range; a standard deviation of 0 becomes the smallest normal number, so that
a reader may divide by it. uint8 (Gaussians only): code 0 is "missing", codes 1..255 are
    mean = (code - 128) * mean_step            std = exp(log_std_min + (code - 1) * log_std_step)
with the three constants among the array's attributes.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from google_crc32c import value as crc32c

from store.errors import StoreError
from store.schema import Schema

MEAN_STEP = 2 / 127
LOG_STD_MIN, LOG_STD_MAX = math.log(2**-9), math.log(8)
LOG_STD_STEP = (LOG_STD_MAX - LOG_STD_MIN) / 254
# float16 as bits: numpy's float16 arithmetic is slow
_SIGN, _INFINITY, _SMALLEST_NORMAL = np.uint16(0x8000), np.uint16(0x7C00), np.int16(0x0400)


def encode(name: str, values: np.ndarray, schema: Schema, first_image: int) -> np.ndarray:
    """What is stored for `values` [n, ...] of the images from `first_image` on.

    Raises StoreError, with the image id, for NaN, for a negative standard deviation and for a label
    out of range.
    """
    if name == "labels":
        _refuse(
            (values < 0) | (values >= schema.num_classes),
            name,
            first_image,
            f"out of range; 0 to {schema.num_classes - 1} are right",
        )
        return np.ascontiguousarray(values, np.int64)
    with np.errstate(over="ignore"):
        half = np.array(values, np.float16)
    bits = half.view(np.uint16)
    magnitude = bits & ~_SIGN
    if magnitude.max(initial=0) >= _INFINITY:
        _refuse(
            magnitude > _INFINITY, name, first_image, "has NaN; only finite numbers can be stored"
        )
        bits -= magnitude == _INFINITY  # the number below it is the largest finite one
    if name != "gaussians":
        return half
    std = bits[..., 2:]
    if std.max(initial=0) > _SIGN:  # which is -0
        _refuse(std > _SIGN, name, first_image, "has a negative standard deviation")
    std = std.view(np.int16)
    np.maximum(std, _SMALLEST_NORMAL, out=std)
    return _to_codes(half.astype(np.float32)) if schema.encoding == "uint8" else half


def _refuse(bad: np.ndarray, name: str, first_image: int, what: str) -> None:
    if bad.any():
        image = int(np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))[0])
        raise StoreError(f"image {first_image + image}: {name} {what}")


def _to_codes(gaussians: np.ndarray) -> np.ndarray:
    mean, std = gaussians[..., :2], gaussians[..., 2:]
    codes = np.concatenate(
        [mean / MEAN_STEP + 128, (np.log(std) - LOG_STD_MIN) / LOG_STD_STEP + 1], axis=-1
    )
    return np.clip(np.rint(codes), 1, 255).astype(np.uint8)


def decode(name: str, stored: np.ndarray, schema: Schema) -> np.ndarray:
    """The numbers a reader gets: float16, or int64 for labels."""
    if stored.dtype != np.uint8:
        return stored
    values = np.empty(
        (*stored.shape[:-1], 2), np.uint32
    )  # two float16 in each: a pair of codes is looked up at once
    for pair, table in enumerate(_pair_tables()):
        values[..., pair] = table[stored.view("<u2")[..., pair]]
    return values.view(np.float16)


def image_crc32c(stored: np.ndarray) -> np.ndarray:
    """crc32c [n] uint32 of every image's stored numbers [n, ...]: their bytes on a little-endian
    machine."""
    images = np.ascontiguousarray(stored).reshape(len(stored), math.prod(stored.shape[1:]))
    return np.fromiter((crc32c(image) for image in images), np.uint32, len(images))


@functools.cache
def _pair_tables() -> tuple[np.ndarray, np.ndarray]:
    """For (mean_x, mean_y) and (std_x, std_y): the two float16 that each of the 65536 pairs of
    codes stands for."""
    codes = np.arange(256)
    mean, std = (codes - 128) * MEAN_STEP, np.exp(LOG_STD_MIN + (codes - 1) * LOG_STD_STEP)
    x, y = codes[None, :], codes[:, None]
    return tuple(
        np.stack(np.broadcast_arrays(table[x], table[y]), axis=-1)
        .astype(np.float16)
        .view(np.uint32)
        .ravel()
        for table in (mean, std)
    )


def code_attributes(schema: Schema, name: str) -> dict[str, float]:
    """The attributes of array `name` that a reader needs to decode it; empty for plain numbers."""
    if name != "gaussians" or schema.encoding != "uint8":
        return {}
    return {"mean_step": MEAN_STEP, "log_std_min": LOG_STD_MIN, "log_std_step": LOG_STD_STEP}
