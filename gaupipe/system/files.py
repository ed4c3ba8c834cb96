"""Files and folders that are replaced as a whole by a process that may be killed at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gaupipe.system.errors import UserError
from gaupipe.system.messages import LOG


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives the name of the file that is written to an error that has none, such as that of a full
    disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that is there with all of its content or not at all."""
    with whole_file(path) as partial:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
    LOG.debug(f"wrote {path}")


def write_flushed(path: Path, text: str) -> None:
    """As :func:`write_whole`, and the file is on the disk when this returns. Its partial file has
    one name, so that a killed process leaves no more than that: one process alone may write."""
    partial = path.with_name(f"{path.name}.partial")
    with naming(path):
        partial.write_text(text)
    flush(partial)
    partial.replace(path)
    flush(path.parent)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside ``path``, with the same ending and of no other file, for a file that takes its
    place when the block ends without an exception, and is removed otherwise."""
    name = f"{partial_prefix(path)}{secrets.token_hex(8)}{path.suffix}"
    partial = path.with_name(name)
    try:
        with naming(path):
            yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def check_file(option: str, path: Path, *suffixes: str) -> Path:
    """The file that an ``option`` names, links followed. Raises UserError unless a file can be
    written there: nothing but a regular file is replaced."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise UserError(
            f"{option} {path}: should be a file whose name ends in {' or '.join(suffixes)}"
        )
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {target.parent}")
    if target.is_symlink() or (target.exists() and not target.is_file()):
        kind = "a folder" if target.is_dir() else "no regular file"
        raise UserError(f"{option} {path}: {kind} is there; name a file, new or to be replaced")
    return target


def check_new_folder(option: str, path: Path) -> None:
    """Raises UserError for a path where something is already."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{option} {path}: is there already; name a new folder, or remove it")


def from_here(path: str | Path) -> str:
    """A path as one types it: from the current folder, where it lies in that."""
    inside = os.path.relpath(path)
    return str(path) if inside.startswith(os.pardir) else inside


def utf8(name: str) -> str:
    """A file's name, in which bytes that are not UTF-8 become ``\\xe9``."""
    return os.fsencode(name).decode(errors="backslashreplace")


def partial_prefix(path: Path) -> str:
    """The beginning of the names that a killed process may leave behind for a file or folder."""
    return f".{path.name[:100]}.partial-"


def flush(path: Path) -> None:
    """Returns when the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder`` that takes its place, contents and all, when the block ends
    without an exception.

    A process killed between its two renames leaves the earlier folder under the name
    ``.NAME.replaced-*``, and the next call puts it back.
    What killed calls left is removed by the next one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(folder.parent) as alone:
        if alone:
            _clear(folder)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.partial-"))
        try:
            yield fresh
            fresh.chmod(0o755)
            for path in (*fresh.iterdir(), fresh):
                flush(path)
            if folder.exists():
                _replace(fresh, folder)
            else:
                fresh.rename(folder)
            flush(folder.parent)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


@contextlib.contextmanager
def alone_in(folder: Path, busy: str = "", shared: bool = False) -> Iterator[bool]:
    """Locks a file or folder itself, without a file for it; False where the file system knows no
    locks. Waits until no other process holds it, unless both are ``shared``, or, with the text
    ``busy``, raises UserError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        alone = False
        try:  # a killed process no longer holds it
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            if busy:
                kind |= fcntl.LOCK_NB
            fcntl.flock(descriptor, kind)
            alone = True
        except BlockingIOError:
            raise UserError(f"{folder}: {busy}") from None
        except OSError:
            pass
        yield alone
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    """Removes what killed calls left, once the folder itself is in its place."""
    name = glob.escape(folder.name)
    for left in folder.parent.glob(f".{name}.replaced-*"):
        if not folder.exists() and (left / folder.name).is_dir():
            (left / folder.name).rename(folder)
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.parent.glob(f".{name}.partial-*"):
        shutil.rmtree(left, ignore_errors=True)


def _replace(fresh: Path, folder: Path) -> None:
    earlier = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.replaced-"))
    folder.rename(earlier / folder.name)
    fresh.rename(folder)
    shutil.rmtree(earlier)
