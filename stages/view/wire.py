"""Numbers on their way to the page: a JSON header and arrays in one message.

    4 bytes    length of the header, little end first
    header     JSON, padded with spaces; its "arrays" has {name: [dtype, shape, offset]}
    arrays     little end first, row by row; offsets count from the header's end

Arrays start at multiples of 8 bytes, so that a page can look at them without a copy.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

ALIGNED = 8


def pack(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """One message. Arrays are float16, float32, uint8 or uint16."""
    parts = []
    entries = {}
    offset = 0
    for name, array in arrays.items():
        content = array.astype(array.dtype.newbyteorder("<"), order="C").tobytes()
        entries[name] = [array.dtype.name, list(array.shape), offset]
        parts.append(content + bytes(-len(content) % ALIGNED))
        offset += len(parts[-1])
    text = json.dumps({**header, "arrays": entries}).encode()
    text += b" " * (-(len(text) + 4) % ALIGNED)
    return b"".join([struct.pack("<I", len(text)), text, *parts])
