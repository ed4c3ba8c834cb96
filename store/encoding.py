"""Encodes the numbers of an array for the disk: one class for each sort of numbers. Names of images
are numbers too: the bytes of their UTF-8.

float16: values are clipped to the finite range, with a relative error of at most 2^-11; a standard
deviation of 0 becomes the smallest normal number, so that a reader may divide by it.

uint8 codes: code 0 is "missing". Of Gaussians, codes 1..255 are
    mean = (code - 128) * mean_step            std = exp(log_std_min + (code - 1) * log_std_step)
and of attention weights, whose small values matter as much as their large ones,
    weight = ((code - 1) * sqrt_step)^2
with the constants among the array's attributes. Readers get a code's number as float16. The number
of a weight w is off by at most (2 sqrt(w) + d) d + 2^-11 w, with d = sqrt_step / 2 = 1/508; below
2^-14 float16 rounds to 2^-25 in place of 2^-11 w.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from store.errors import StoreError

MEAN_STEP = 2 / 127
LARGEST_MEAN = 127 * MEAN_STEP
LOG_STD_MIN = math.log(2**-9)
LOG_STD_MAX = math.log(8)
LOG_STD_STEP = (LOG_STD_MAX - LOG_STD_MIN) / 254
SQRT_STEP = 1 / 254
LARGEST_WEIGHT = 1 + 2**-10
"""Rounding may have brought a weight a little above 1."""
BLOCK = 2**14
"""Numbers that are looked up at once: they stay in the processor's cache."""
# float16 as bits: numpy's float16 arithmetic is slow
_SIGN = np.uint16(0x8000)
_INFINITY = np.uint16(0x7C00)
_SMALLEST_NORMAL = np.int16(0x0400)


class BadNumbers(Exception):
    """(index of an image, the fault of its numbers)."""


class Numbers:
    """Finite numbers in float16.

    dtype       of what a reader gets
    codes       the constants of the 8-bit codes; empty where there are none
    fill        the value on disk where nothing was written, and nowhere else; of codes it is 0
    """

    dtype: np.dtype = np.dtype("float16")
    codes: dict[str, float] = {}
    fill: float = math.nan

    def encode(self, values: np.ndarray, coded: bool) -> np.ndarray:
        """Returns what is stored for ``values`` [n, ...]. Raises BadNumbers for NaN and for numbers
        of another sort."""
        return to_half(values)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """The float16 numbers that ``codes`` stand for."""
        raise NotImplementedError


class Gaussians(Numbers):
    """(mean_x, mean_y, std_x, std_y) on the last axis, standard deviations not negative."""

    codes = {"mean_step": MEAN_STEP, "log_std_min": LOG_STD_MIN, "log_std_step": LOG_STD_STEP}

    def encode(self, values: np.ndarray, coded: bool) -> np.ndarray:
        half = to_half(values, copied=True)
        std = half.view(np.uint16)[..., 2:]
        if std.max(initial=0) > _SIGN:  # which is -0
            _refuse(std > _SIGN, "has a negative standard deviation")
        np.maximum(std.view(np.int16), _SMALLEST_NORMAL, out=std.view(np.int16))
        if not coded:
            return half
        numbers = half.astype(np.float32)
        numbers[..., :2] = numbers[..., :2] / MEAN_STEP + 128
        numbers[..., 2:] = (np.log(numbers[..., 2:]) - LOG_STD_MIN) / LOG_STD_STEP + 1
        return np.clip(np.rint(numbers), 1, 255).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        values = np.empty((*codes.shape[:-1], 2), np.uint32)  # two float16 in each
        for pair, table in enumerate(_gaussian_tables()):
            values[..., pair] = table[codes.view("<u2")[..., pair]]
        return values.view(np.float16)


class Weights(Numbers):
    """Attention, from 0 to 1.

    A code's error of a weight w is at most (2 sqrt(w) + d) d + max(2^-11 w, 2^-25): d = 1/508 is
    half a step of the codes, and the second part is the rounding to float16, as which a reader
    returns weights."""

    codes = {"sqrt_step": SQRT_STEP}

    def encode(self, values: np.ndarray, coded: bool) -> np.ndarray:
        if coded:
            return self._codes_of(np.asarray(values))
        half = to_half(values)
        bits = half.view(np.uint16)
        most = np.float16(LARGEST_WEIGHT).view(np.uint16)
        if bits.max(initial=0) > most:  # negative ones are above positive ones
            _refuse((bits > most) & (bits != _SIGN), _OUT_OF_RANGE)
        return half

    def _codes_of(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            roots: np.ndarray = np.sqrt(values, dtype=np.float32)
        # whatever is wrong with a number makes this comparison fail: a negative one's root is NaN
        if not roots.max(initial=0) <= math.sqrt(LARGEST_WEIGHT):
            _refuse(np.isnan(values), _NAN)
            _refuse((values < 0) | (values > LARGEST_WEIGHT), _OUT_OF_RANGE)
        roots *= 1 / SQRT_STEP
        roots += 1.5  # 1 as code 0 is "missing", and a half as astype cuts
        return roots.astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        padded = np.append(codes, codes.flat[: codes.size % 2])  # flat, of whole pairs
        pairs = np.empty(len(padded) // 2, np.uint32)  # two float16 in each
        for start in range(0, len(pairs), BLOCK):
            block = slice(start, start + BLOCK)
            two = padded.view("<u2")[block]
            _weight_table().take(two, out=pairs[block], mode="clip")  # the mode without a copy
        return pairs.view(np.float16)[: codes.size].reshape(codes.shape)


class Keys(Numbers):
    """Tokens of a grid, each at most once on the last axis."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        bits = 8 if tokens <= 255 else 16  # one number is left for what is missing
        self.dtype = np.dtype(f"uint{bits}")
        self.fill = 2**bits - 1

    def encode(self, values: np.ndarray, coded: bool) -> np.ndarray:
        if values.dtype.kind not in "iu":
            raise BadNumbers(0, f"are {values.dtype}; they must be whole numbers")
        _refuse_outside(values, self.tokens)
        keys = np.ascontiguousarray(values, self.dtype)
        in_order = np.sort(keys.astype(np.uint32), axis=-1)  # by vector instructions
        twice = in_order[..., 1:] == in_order[..., :-1]
        _refuse(twice, "has a key twice in one row")
        return keys


class Labels(Numbers):
    """Classes of images."""

    dtype: np.dtype = np.dtype("int64")
    fill = -1

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def encode(self, values: np.ndarray, coded: bool) -> np.ndarray:
        _refuse_outside(values, self.classes)
        return np.ascontiguousarray(values, np.int64)


class Names(Numbers):
    """Names of images, made of text by :func:`pack_names`: no type of text is known to all readers
    of zarr."""

    dtype: np.dtype = np.dtype("uint8")
    fill = 0

    def encode(self, values: np.ndarray, coded: bool) -> np.ndarray:
        if values.dtype != np.uint8:
            raise BadNumbers(0, f"are {values.dtype}; store.pack_names makes them of text")
        for image, name in enumerate(_rows_as_bytes(values)):
            # Bytes that are no UTF-8 are left out by the decoding: a shorter name comes back.
            is_utf8 = name.decode(errors="ignore").encode() == name
            if not name or 0 in name or not is_utf8:
                raise BadNumbers(image, "is no UTF-8 text; store.pack_names makes them of text")
        return values


def pack_names(names: Sequence[str], name_bytes: int) -> np.ndarray:
    """Names of images as they are stored: UTF-8 [n, ``name_bytes``], filled up with 0. A character
    without UTF-8 becomes ``\\udce9``. Raises StoreError for a name that does not fit."""
    packed = []
    for name in names:
        as_bytes = name.encode(errors="backslashreplace")
        if not 0 < len(as_bytes) <= name_bytes or 0 in as_bytes:
            raise StoreError(
                f"{name!r} is no name of an image: it must have 1 to {name_bytes} bytes in UTF-8, "
                "none of them 0"
            )
        packed.append(as_bytes)
    return np.array(packed, f"S{name_bytes}").view(np.uint8).reshape(len(packed), name_bytes)


def unpack_names(packed: np.ndarray) -> list[str]:
    """The inverse of :func:`pack_names`."""
    return [name.decode() for name in _rows_as_bytes(packed)]


def _rows_as_bytes(packed: np.ndarray) -> list[bytes]:
    """Each row of bytes, without the zeros at its end."""
    return np.ascontiguousarray(packed).view(f"S{packed.shape[1]}")[:, 0].tolist()


_NAN = "has NaN; only finite numbers can be stored"
_OUT_OF_RANGE = "has weights out of range; attention is from 0 to 1"


def to_half(values: np.ndarray, copied: bool = False) -> np.ndarray:
    """Rounds numbers to float16, clipped to the finite ones. Without ``copied`` it is ``values``
    itself where that is so already."""
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
        _refuse(magnitude > _INFINITY, _NAN)
        bits -= magnitude == _INFINITY  # the number below it is the largest finite one
    return half


def _refuse_outside(values: np.ndarray, stop: int) -> None:
    outside = (values < 0) | (values >= stop)
    _refuse(outside, f"out of range; 0 to {stop - 1} are right")


def _refuse(bad: np.ndarray, what: str) -> None:
    if bad.any():
        image = int(np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))[0])
        raise BadNumbers(image, what)


@functools.cache
def _gaussian_tables() -> tuple[np.ndarray, np.ndarray]:
    """For (mean_x, mean_y) and (std_x, std_y): the two float16 that each of the 65536 pairs of
    codes stands for."""
    codes = np.arange(256)
    mean = (codes - 128) * MEAN_STEP
    std = np.exp(LOG_STD_MIN + (codes - 1) * LOG_STD_STEP)
    return _pair_table(mean), _pair_table(std)


@functools.cache
def _weight_table() -> np.ndarray:
    """The two weights that each pair of codes stands for."""
    return _pair_table(np.square((np.arange(256) - 1) * SQRT_STEP))


def _pair_table(table: np.ndarray) -> np.ndarray:
    """A table [256] for pairs of codes: [65536] uint32, two float16 in each. Half as many look-ups
    decode an array."""
    first = table[None, :]  # the lower byte of a pair
    second = table[:, None]
    both = np.stack(np.broadcast_arrays(first, second), axis=-1)  # [256, 256, 2]
    return both.astype(np.float16).view(np.uint32).ravel()
