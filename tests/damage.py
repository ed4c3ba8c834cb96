"""Damage to files, and what a folder holds before and after."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files_of(folder)}


def times(folder: Path) -> dict[str, int]:
    """When each file was written, in ns, by name."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in files_of(folder)
    }


def differing(first: dict, second: dict) -> list[str]:
    """Names whose values are not the same in both."""
    return sorted(
        name
        for name in first.keys() | second.keys()
        if name not in first or name not in second or first[name] != second[name]
    )


def put(path: Path, content: bytes) -> None:
    """Writes a new file. The old one may be linked to from elsewhere, and stays."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def flipped(content: bytes, at: int, bit: int = 2) -> bytes:
    """A bit of the byte ``at`` is another."""
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def flip(path: Path, share: float = 0.5, bit: int = 2) -> None:
    """Flips a bit of a file, at a share of its length."""
    content = path.read_bytes()
    put(path, flipped(content, int(share * (len(content) - 1)), bit))


def cut(path: Path) -> None:
    """Keeps the first half of a file."""
    content = path.read_bytes()
    put(path, content[: len(content) // 2])


def damages(path: Path, draw: np.random.Generator, flips: int = 6) -> Iterator[str]:
    """Damages a file in turn by flipped bits, by its loss, by an empty, a shortened and a longer
    file: yields what was done, and puts the sound file back in the end."""
    sound = path.read_bytes()
    broken = {"half of it": sound[: len(sound) // 2], "no last byte": sound[:-1]}
    broken |= {"lost": None, "empty": b"", "longer": sound + b"\0"}
    for bit in draw.integers(8 * len(sound), size=flips).tolist():
        broken[f"bit {bit} flipped"] = flipped(sound, bit // 8, bit % 8)
    for what, content in broken.items():
        with damaged(path, content):
            yield f"{path.name}: {what}"


@contextlib.contextmanager
def damaged(path: Path, content: bytes | None) -> Iterator[None]:
    """A file with other content, or without the file, and then with its own again."""
    sound = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(sound)
