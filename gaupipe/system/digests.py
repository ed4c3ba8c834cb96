"""Checkpoint files: flushed to the disk when they are written, and whole when they are read."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import torch

from gaupipe.system.files import flush, naming


def save(state: Any, path: Path) -> None:
    """Writes a file with ``torch.save``. The bytes are on the disk then; :func:`flush` of the
    folder brings the name there."""
    with naming(path), path.open("wb") as file:  # torch's own file has other errors than OSError
        torch.save(state, file)
    flush(path)


def check(path: Path) -> None:
    """Raises ValueError or BadZipFile for a file of ``torch.save`` of which a bit has changed: it
    is a zip archive with a CRC-32 of each tensor, which torch does not compare."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} differs")


def sha256(path: Path) -> str:
    """The digest of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
