"""Image files and the digests of their contents, which the user's cache keeps between commands."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gaupipe.data.decoding import identify, refusing
from gaupipe.system.errors import UserError
from gaupipe.system.progress import EpochProgress

SAMPLE = 64
"""Files that stand for all where a guess is enough."""

READERS = 8
"""Threads that read files at once; what they wait for is the disk or the network."""

SETTLED_NS = 2_000_000_000
"""A file that changed less long ago might change again within the same time stamp: its digest is
not kept."""


def sample(count: int) -> np.ndarray:
    """Numbers of :data:`SAMPLE` files of ``count``, evenly spaced, int64."""
    return np.linspace(0, count - 1, SAMPLE).astype(np.int64)


class ImageFiles:
    """Image files in a fixed order: ``names`` are their paths relative to ``root``.

    Raises UserError, with the first one's name, for files that are not images. Whether an image can
    be decoded to its end shows when it is.
    """

    threads = True
    """Whether several threads may read."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root, self.names = root, names
        self.place = str(root.resolve())
        """Where the files are."""
        digest, contents = hashlib.sha256(), bytearray()
        for name, content in zip(names, content_digests(root, names), strict=True):
            digest.update(os.fsencode(name) + b"\0" + bytes.fromhex(content))
            contents += bytes.fromhex(content)
        self._fingerprint = digest.digest()
        self._contents = np.frombuffer(bytes(contents), dtype=np.uint8).reshape(len(names), 32)

    def name(self, position: int) -> str:
        """What messages call the file."""
        return os.path.join(self.root, self.names[position])

    def open(self, position: int) -> BinaryIO:
        return open(self.name(position), "rb")

    def fingerprint(self) -> bytes:
        """A digest of all names and contents in their order."""
        return self._fingerprint

    def contents(self, positions: np.ndarray) -> bytes:
        """Tells the contents of some files from any others, in their order."""
        return self._contents[positions].tobytes()

    def check(self, position: int, content: bytes) -> None:
        """Raises UserError if this is not the content of the file that the fingerprint is of."""
        if hashlib.sha256(content).digest() != self._contents[position].tobytes():
            raise UserError(
                f"{self.name(position)}: has changed since the data set was opened; start again"
            )

    @functools.cached_property
    def mean_bytes(self) -> float:
        """Of a file, about."""
        size = 0
        for position in sample(len(self.names)).tolist():
            with refusing(self.name(position)):
                size += os.stat(self.name(position)).st_size
        return size / SAMPLE


class HubImages:
    """The images of a Hugging Face data set, as timm's reader hands them out."""

    threads = False
    mean_bytes = 50_000.0

    def __init__(self, data_set: str, reader: Any) -> None:
        self.data_set = self.place = data_set
        self.reader = reader

    def name(self, position: int) -> str:
        """What messages call the image."""
        return f"image {position} of {self.data_set}"

    def open(self, position: int) -> BinaryIO:
        return self.reader[position][0]

    def fingerprint(self) -> bytes:
        """A digest of the library's own fingerprint, which tells where the data came from.

        No content is read for it.
        """
        return hashlib.sha256(self.reader.dataset._fingerprint.encode()).digest()

    def contents(self, _positions: np.ndarray) -> bytes:
        """As of :class:`ImageFiles`, by the fingerprint."""
        return self.fingerprint()

    def check(self, position: int, content: bytes) -> None:
        """Nothing is known of a single image."""


def content_digests(root: Path, names: list[str]) -> list[str]:
    """SHA-256 of each file's content, in hexadecimal digits.

    A file is read only if the cache does not know it with its present size, time stamps and inode.
    The inode counts because files that change places may agree in the rest. Raises UserError when a
    file is not an image.
    """
    now = time.time_ns()
    cache = DigestCache(root)
    paths = [os.path.join(root, name) for name in names]
    stamps = [_stamp(path) for path in paths]
    digests = [cache.digest(name, stamp) for name, stamp in zip(names, stamps, strict=True)]
    known = [digest for digest in digests if digest is not None]
    if len(known) == len(digests):
        return known
    unknown = [position for position, digest in enumerate(digests) if digest is None]
    problems = []
    with (
        ThreadPoolExecutor(READERS) as pool,
        EpochProgress("reading images", len(unknown), 1) as progress,
    ):
        try:
            read = pool.map(_examine, [paths[position] for position in unknown])
            for position, found in zip(unknown, read, strict=True):
                if isinstance(found, UserError):
                    problems.append(found)
                else:
                    digests[position] = found
                progress.advance(1)
        finally:  # after an interrupt, too, nothing is read twice
            cache.save(
                {
                    name: [stamp, digest]
                    for name, stamp, digest in zip(names, stamps, digests, strict=True)
                    if stamp and digest and _changed_ns(stamp) < now - SETTLED_NS
                }
            )
    if problems:
        more = f"; {len(problems)} of {len(names)} files are so" if len(problems) > 1 else ""
        raise UserError(f"{problems[0]}{more}")
    return [digest for digest in digests if digest is not None]  # there are no others left


def _examine(path: str) -> str | UserError:
    """The digest of a file's content, or what is wrong with it."""
    try:
        with refusing(path), open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ValueError("it is empty")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            identify(file, path)
            return digest
    except UserError as error:
        return error


def _stamp(path: str) -> str | None:
    """What changes with a file's content: size, times and inode. None for a link to nothing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


def _changed_ns(stamp: str) -> int:
    """When a file or its entry in its folder changed last, in nanoseconds since 1970."""
    _, modified, changed, _ = map(int, stamp.split())
    return max(modified, changed)


class DigestCache:
    """The digests of the files under one folder, kept in one file.

    A cache that cannot be read counts as empty. One that cannot be written is left as it is.
    """

    def __init__(self, root: Path) -> None:
        name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]
        self._path = cache_folder() / f"contents-1-{name}"
        self._known = self._read()

    def _read(self) -> dict[str, list[str]]:
        """{name: [stamp, digest]}. The file's first line is the digest of the rest."""
        try:
            check, _, text = self._path.read_bytes().partition(b"\n")
        except OSError:
            return {}
        return json.loads(text) if hashlib.sha256(text).hexdigest().encode() == check else {}

    def digest(self, name: str, stamp: str | None) -> str | None:
        """The digest of the file while it had this stamp; None if it is not known."""
        known = self._known.get(name)
        return known[1] if known and known[0] == stamp else None

    def save(self, known: dict[str, list[str]]) -> None:
        """Replaces all that the cache knows, in one step."""
        text = json.dumps(known).encode()
        content = hashlib.sha256(text).hexdigest().encode() + b"\n" + text
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=self._path.parent)
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
                os.replace(partial, self._path)
            except OSError:
                os.unlink(partial)


def cache_folder() -> Path:
    """GAUPIPE_CACHE, or gaupipe's folder in the user's cache folder.

    For a user without a home it is a folder that cannot be there.
    """
    if own := os.environ.get("GAUPIPE_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gaupipe"
    except RuntimeError:
        return Path(os.devnull) / "gaupipe"
