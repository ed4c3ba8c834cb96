"""The numbers of an array as they lie on disk.

float16: values are clipped to the finite range, with a relative error of at most 2^-11; a standard
deviation of 0 becomes the smallest normal number, so that a reader may divide by it. Keys are whole
numbers, uint8 or uint16.

uint8 codes: code 0 is "missing". Of Gaussians, codes 1..255 are
    mean = (code - 128) * mean_step            std = exp(log_std_min + (code - 1) * log_std_step)
and of attention weights, whose small values matter as much as their large ones,
    weight = ((code - 1) * sqrt_step)^2
with the constants among the array's attributes. The code of a weight w is off by at most
(2 sqrt(w) + d) d, with d = sqrt_step / 2 = 1/508.
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
SQRT_STEP = 1 / 254
LARGEST_WEIGHT = 1 + 2**-10
"""Rounding may have brought a weight a little above 1."""
BLOCK = 2**14
"""Numbers that are looked up at once: they stay in the processor's cache."""
# float16 as bits: numpy's float16 arithmetic is slow
_SIGN, _INFINITY, _SMALLEST_NORMAL = np.uint16(0x8000), np.uint16(0x7C00), np.int16(0x0400)


def encode(name: str, values: np.ndarray, schema: Schema, first_image: int) -> np.ndarray:
    """What is stored for `values` [n, ...] of the images from `first_image` on.

    Raises StoreError, with the image id, for NaN, for a negative standard deviation or weight, for
    a label or key out of range, for a key that comes twice in a row, for attention weights above 1,
    and for a query whose Gaussians all have the weight 0.
    """
    if name == "labels":
        _refuse(
            (values < 0) | (values >= schema.num_classes),
            name,
            first_image,
            f"out of range; 0 to {schema.num_classes - 1} are right",
        )
        return np.ascontiguousarray(values, np.int64)
    if name == "keys":
        return _encode_keys(values, schema, first_image)
    if name in ("weights", "maps") and schema.has_codes(name):
        return _weight_codes(name, values, first_image)
    half = _to_half(name, values, first_image, copied=name in ("gaussians", "mixtures"))
    bits = half.view(np.uint16)
    if name == "weights":
        _check_range(name, bits, first_image)
    if name == "mixtures":
        _check_mixture_weights(bits[..., 0], first_image)
    if name in ("gaussians", "mixtures"):
        _check_std(name, bits[..., -2:], first_image)
    return _to_codes(half.astype(np.float32)) if schema.has_codes(name) else half


def _to_half(name: str, values: np.ndarray, first_image: int, copied: bool) -> np.ndarray:
    """The numbers as float16, clipped to the finite ones. Without ``copied`` it is `values` itself
    where that is so already."""
    with np.errstate(over="ignore"):
        half = np.array(values, np.float16, copy=copied or None)
    # as signed numbers the positive infinity, as unsigned ones the negative, is below NaN alone
    if (
        half.view(np.int16).max(initial=0) >= _INFINITY
        or half.view(np.uint16).max(initial=0) >= _INFINITY | _SIGN
    ):
        half = half.copy()
        bits = half.view(np.uint16)
        magnitude = bits & ~_SIGN
        _refuse(
            magnitude > _INFINITY, name, first_image, "has NaN; only finite numbers can be stored"
        )
        bits -= magnitude == _INFINITY  # the number below it is the largest finite one
    return half


def _check_std(name: str, std: np.ndarray, first_image: int) -> None:
    """Of float16 as bits, changed in place: at least the smallest normal number."""
    if std.max(initial=0) > _SIGN:  # which is -0
        _refuse(std > _SIGN, name, first_image, "has a negative standard deviation")
    std = std.view(np.int16)
    np.maximum(std, _SMALLEST_NORMAL, out=std)


def _check_mixture_weights(weights: np.ndarray, first_image: int) -> None:
    """Of float16 as bits [n, L, H, T, k]."""
    _refuse(weights > _SIGN, "mixtures", first_image, "has a negative weight")
    nothing = (weights & ~_SIGN).max(axis=-1) == 0
    _refuse(nothing, "mixtures", first_image, "has a query without any weight above 0")


def _check_range(name: str, weights: np.ndarray, first_image: int) -> None:
    """Of float16 as bits, in which negative numbers are above positive ones."""
    most = np.float16(LARGEST_WEIGHT).view(np.uint16)
    if weights.max(initial=0) > most:
        _refuse((weights > most) & (weights != _SIGN), name, first_image, _OUT_OF_RANGE)


_OUT_OF_RANGE = "has weights out of range; attention is from 0 to 1"


def _weight_codes(name: str, values: np.ndarray, first_image: int) -> np.ndarray:
    values = np.asarray(values)
    with np.errstate(invalid="ignore"):
        codes = np.sqrt(values, dtype=np.float32)
    # whatever is wrong with a number makes this comparison fail: the root of a negative one is NaN
    if not codes.max(initial=0) <= math.sqrt(LARGEST_WEIGHT):
        _refuse(np.isnan(values), name, first_image, "has NaN; only finite numbers can be stored")
        _refuse((values < 0) | (values > LARGEST_WEIGHT), name, first_image, _OUT_OF_RANGE)
    codes *= 1 / SQRT_STEP
    codes += 1.5
    return codes.astype(np.uint8)


def _encode_keys(values: np.ndarray, schema: Schema, first_image: int) -> np.ndarray:
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        raise StoreError(f"keys are {values.dtype}; they must be whole numbers")
    if values.min(initial=0) < 0 or values.max(initial=0) >= schema.tokens:
        _refuse(
            (values < 0) | (values >= schema.tokens),
            "keys",
            first_image,
            f"out of range; 0 to {schema.tokens - 1} are right",
        )
    keys = np.ascontiguousarray(values, schema.stored_dtype("keys"))
    in_order = np.sort(keys, axis=-1)
    twice = in_order[..., 1:] == in_order[..., :-1]
    _refuse(twice, "keys", first_image, "has a key twice in one row")
    return keys


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
    """The numbers a reader gets: float16, int64 for labels, uint8 or uint16 for keys."""
    if not schema.has_codes(name):
        return stored
    if name != "gaussians":
        return _look_up(*_weight_tables(), stored)
    values = np.empty(
        (*stored.shape[:-1], 2), np.uint32
    )  # two float16 in each: a pair of codes is looked up at once
    for pair, table in enumerate(_pair_tables()):
        values[..., pair] = table[stored.view("<u2")[..., pair]]
    return values.view(np.float16)


def _look_up(table: np.ndarray, pairs: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """table[codes], float16; `pairs` [65536] uint32 holds what the table says of two codes."""
    flat, values = np.ascontiguousarray(codes).reshape(-1), np.empty(codes.size, np.float16)
    even = codes.size // 2 * 2
    two, both = flat[:even].view("<u2"), values[:even].view(np.uint32)
    for start in range(0, len(two), BLOCK):
        block = slice(start, start + BLOCK)
        pairs.take(two[block], out=both[block], mode="clip")  # the mode that needs no copy
    values[even:] = table[flat[even:]]
    return values.reshape(codes.shape)


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
    return _of_pairs(mean), _of_pairs(std)


@functools.cache
def _weight_tables() -> tuple[np.ndarray, np.ndarray]:
    """The weight that each code stands for, [256] float16, and those of each pair of codes."""
    weights = np.square((np.arange(256) - 1) * SQRT_STEP)
    return weights.astype(np.float16), _of_pairs(weights)


def _of_pairs(table: np.ndarray) -> np.ndarray:
    """What a table [256] says of every pair of codes: [65536] uint32, two float16 in each."""
    codes = np.arange(256)
    x, y = codes[None, :], codes[:, None]
    both = np.stack(np.broadcast_arrays(table[x], table[y]), axis=-1)
    return both.astype(np.float16).view(np.uint32).ravel()


def fill_value(name: str, schema: Schema) -> float:
    """What array `name` holds where nothing was written, and nowhere else: NaN, code 0, label -1
    and the largest key that the dtype has."""
    dtype = schema.stored_dtype(name)
    if name == "keys":
        return int(np.iinfo(dtype).max)
    return {"float16": math.nan, "uint8": 0, "int64": -1}[dtype.name]


def code_attributes(schema: Schema, name: str) -> dict[str, float]:
    """The attributes of array `name` that a reader needs to decode it; empty for plain numbers."""
    if not schema.has_codes(name):
        return {}
    if name != "gaussians":
        return {"sqrt_step": SQRT_STEP}
    return {"mean_step": MEAN_STEP, "log_std_min": LOG_STD_MIN, "log_std_step": LOG_STD_STEP}
