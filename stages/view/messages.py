"""The messages that the page of attention maps gets."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

EXACT = 100_000
"""Numbers up to which an array is written as it is in a page that is sent."""
LEVELS = 63
"""Of the root of a weight in such a page: an error of at most 1.6 % of the most of its row, and a
third less to send than with 255."""
Pack = Callable[[dict[str, Any], dict[str, np.ndarray]], bytes]


@dataclass(frozen=True)
class Start:
    """What the page opens with."""

    layer: int
    head: str
    query: int | str
    student: str = ""
    """Whose maps are shown; "" is the store's teacher or, where there is no store, the first."""


@dataclass(frozen=True)
class About:
    """All that does not change while the page is open."""

    title: str
    colours: str
    """Of 0 to the largest weight, four bytes each, in hexadecimal digits."""
    stored: bool
    """Whether there is a store."""
    kind: str
    k: int | None
    start: Start
    adds: bool
    """Whether images can be added."""
    command: str
    views: int
    classes: int
    labelled: bool
    predicts: bool
    """Whether classes of images are predicted, by which they can be put in order."""
    split: str
    """Whose images the page shows first."""
    students: list[str]
    note: str


@dataclass(frozen=True)
class Reading:
    """Progress of reading labels and predictions."""

    done: int
    total: int
    reading: bool
    error: str


@dataclass(frozen=True)
class Pixels:
    """Whether the data set is there, or why it is not."""

    ready: bool
    error: str


@dataclass(frozen=True)
class Status:
    """Progress of reading labels, predictions and the data set."""

    labels: Reading
    pixels: Pixels
    splits: dict[str, int]
    """Images of each split."""
    class_names: list[str]


def pack(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """A message to the page: the length of a JSON header in 4 bytes, little end first; the header,
    whose "arrays" has {name: [dtype, shape, bytes]}; and the arrays, little end first and row by
    row: float16, float32, or uint8, :data:`LEVELS` times the roots of shares of ``NAME.most``, the
    most of each row."""
    entries = {name: [each.dtype.name, each.shape, each.nbytes] for name, each in arrays.items()}
    text = json.dumps(header | {"arrays": entries}).encode()
    contents = [np.ascontiguousarray(array).data for array in arrays.values()]
    return b"".join([struct.pack("<I", len(text)), text, *contents])


def pack_small(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """A message as :func:`pack` makes it, deflated, of maps in 8 bits where they are large: a page
    that is sent has all that it shows of an image."""
    smaller = {}
    for name, array in arrays.items():
        if array.size <= EXACT:
            smaller[name] = array
            continue
        most = array.max(-1, keepdims=True).astype(np.float32)
        shares = array / np.where(most > 0, most, 1)
        smaller[name] = np.round(LEVELS * np.sqrt(shares)).astype(np.uint8)  # most are small
        smaller[f"{name}.most"] = most
    return zlib.compress(pack(header, smaller))
