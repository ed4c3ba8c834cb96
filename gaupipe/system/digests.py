"""``SHA256SUMS``: the digests of a folder's files, beside them, as ``sha256sum -c SHA256SUMS``
reads them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import torch

from gaupipe.system.errors import UserError
from gaupipe.system.files import flush, naming, write_flushed

SUMS = "SHA256SUMS"


def save(state: Any, path: Path) -> str:
    """Writes a file with ``torch.save`` and returns its digest. The bytes are on the disk then;
    :func:`flush` of the folder brings the name there."""
    with naming(path), path.open("wb") as file:  # torch's own file has other errors than OSError
        torch.save(state, file)
    flush(path)
    return sha256(path)


def sha256(path: Path) -> str:
    """The digest of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace(partial: Path, path: Path, digest: str) -> None:
    """Puts the file ``partial``, whose digest is known, in the place of ``path``.

    A process killed at any moment leaves a file whose digest is listed: while one file replaces the
    other both are. The caller has flushed ``partial`` to the disk.
    """
    folder = path.parent
    sums = read(folder) or {}
    before = sums.get(path.name) or ([sha256(path)] if path.is_file() else [])
    _write(folder, {**sums, path.name: [digest, *before]})
    partial.replace(path)
    flush(folder)
    _write(folder, {**sums, path.name: [digest]})


def write(folder: Path) -> None:
    """Lists the digests of all files of ``folder``."""
    _write(
        folder,
        {path.name: [sha256(path)] for path in sorted(folder.iterdir()) if path.name != SUMS},
    )


def check(path: Path) -> None:
    """Raises UserError if a file is not the one whose digest lies beside it. A folder without
    ``SHA256SUMS``, such as another program writes, is not checked."""
    sums = read(path.parent)
    if sums is not None and sha256(path) not in sums.get(path.name, []):
        raise UserError(
            f"{path} is damaged, or not the file that {SUMS} beside it lists: "
            f"restore both from a copy, or start afresh"
        )


def read(folder: Path) -> dict[str, list[str]] | None:
    """The digests of each file that ``SHA256SUMS`` lists; None where there is none. Raises
    UserError for a damaged one."""
    path = folder / SUMS
    try:
        text = path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return None
    sums: dict[str, list[str]] = {}
    for line in text.splitlines():
        entry = re.fullmatch(r"([0-9a-f]{64})  ([^/]+)", line)
        if not entry:
            raise UserError(
                f"{path} is damaged: a line of it is not 'SHA256  FILE'; restore it from a copy"
            )
        sums.setdefault(entry[2], []).append(entry[1])
    return sums


def _write(folder: Path, sums: dict[str, list[str]]) -> None:
    lines = [f"{digest}  {name}\n" for name, digests in sums.items() for digest in digests]
    write_flushed(folder / SUMS, "".join(lines))
