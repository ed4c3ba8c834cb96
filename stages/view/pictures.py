"""Pictures as a page takes them."""

from __future__ import annotations

import io

from PIL import Image

SMALL = 256
"""Pixels a side up to which a picture is sent as it is."""
QUALITY = 88


def encoded(picture: Image.Image, side: int) -> tuple[bytes, str]:
    """A picture at no more than ``side`` pixels a side, and its media type: PNG, but JPEG where it
    is larger than :data:`SMALL`."""
    file = io.BytesIO()
    if max(picture.size) <= SMALL:
        picture.save(file, "PNG")
        return file.getvalue(), "image/png"
    picture = picture.convert("RGB")  # a copy, as thumbnail changes it
    picture.thumbnail((side, side))
    picture.save(file, "JPEG", quality=QUALITY)
    return file.getvalue(), "image/jpeg"
