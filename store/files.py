"""Reading and writing whole files in a folder, on s3:// or on gs://, all through tensorstore's
key-value stores.

A write is atomic (other readers see the old file or the new one) and, in a folder, flushed to the
disk before it returns. tensorstore runs threads that do not survive a fork, so a process forked
after the first use is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from store.errors import StoreError

SCHEMES = ("file", "s3", "gs")
LOCK = ".__lock"
"""The end of the name under which tensorstore writes a file before it moves it into place."""
_first_process: int | None = None  # the process whose tensorstore threads exist


def refuse_after_fork() -> None:
    """Raises StoreError in a process forked after tensorstore was used: its threads are gone and
    reads would hang."""
    global _first_process
    if _first_process is None:
        _first_process = os.getpid()
    elif _first_process != os.getpid():
        raise StoreError(
            "the store cannot be used in a forked process, where its reader threads are missing; "
            "start the process with the 'spawn' method and open the store there"
        )


class Files:
    """The files under `url`: a path, file://, s3://bucket/path or gs://bucket/path.

    Object stores take credentials and endpoint from the environment (AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, AWS_REGION; GOOGLE_APPLICATION_CREDENTIALS). Every
    method raises StoreError, one line, when the storage refuses or does not answer.
    """

    def __init__(self, url: str | os.PathLike[str]):
        refuse_after_fork()
        self.url = str(url)
        self.folder = local_folder(url)
        self._spec, self._context = _kvstore_spec(self.url)
        self._flushed: set[Path] = set()  # folders whose own entry is known to be on the disk
        try:
            self._kvstore = ts.KvStore.open(self._spec, context=ts.Context(self._context)).result()
        except ValueError as error:
            raise StoreError(explain(error, self.url)) from None

    def read(self, key: str) -> bytes | None:
        """The file's bytes; None when it is not there."""
        return self.read_all([key])[key]

    def read_all(self, keys: Iterable[str]) -> dict[str, bytes | None]:
        """Reads several files at once."""
        keys = list(keys)
        if self.folder is not None:
            for path in map(self.folder.joinpath, keys):
                if path.exists() and not path.is_file():  # nobody may ever write to a pipe
                    raise StoreError(f"{path}: is no regular file, as a store's files are")
        reads = {key: self._kvstore.read(key) for key in keys}  # all begin before one is waited for
        contents: dict[str, bytes | None] = {}
        for key, read in reads.items():
            result = self.wait(read)
            contents[key] = None
            if result.state == "value":
                contents[key] = result.value
        return contents

    def write(self, key: str, data: bytes) -> None:
        self.write_all({key: data})

    def write_all(
        self, files: Mapping[str, bytes], seen: Mapping[str, bytes | None] | None = None
    ) -> bool:
        """Writes several files at once; returns when all of them are safe. A file that is no longer
        as it was `seen` by :meth:`generations` is left alone, and the answer is False."""
        seen = seen or {}
        writes = [
            self._kvstore.write(key, data, if_equal=seen.get(key)) for key, data in files.items()
        ]
        written = [bool(self.wait(write).generation) for write in writes]
        if self.folder is not None:
            self._flush_folders(self.folder, files)
        return all(written)

    def generations(self, keys: Iterable[str]) -> dict[str, bytes | None]:
        """What changes with each file, whether it is there or not; no content is read."""
        reads = {key: self._kvstore.read(key, byte_range=slice(0, 0)) for key in keys}
        return {key: self.wait(read).stamp.generation for key, read in reads.items()}

    def create(self, key: str, data: bytes) -> None:
        """Writes a file unless there is one: of several processes the first one does."""
        seen = self.generations([key])
        if self.read(key) is None:
            self.write_all({key: data}, seen)

    def list(self, prefix: str = "") -> list[str]:
        """The names of all files whose name starts with `prefix`, sorted."""
        end = prefix and prefix[:-1] + chr(ord(prefix[-1]) + 1)
        keys = self.wait(self._kvstore.list(ts.KvStore.KeyRange(prefix, end)))
        return sorted(key.decode() for key in keys)

    def has_files(self) -> bool:
        """True where there is a file; in a folder, the first one answers. A write that was killed
        leaves NAME.__lock, which `list` does not show either."""
        if self.folder is None:
            return bool(self.list())
        names = (name for _, _, files in os.walk(self.folder) for name in files)
        return not all(name.endswith(LOCK) for name in names)

    def remove_locks(self, seconds: float) -> None:
        """Removes what killed writes left in a folder, where nothing was written to it for so many
        ``seconds``: another process may be writing."""
        if self.folder is None:
            return
        for path in self.folder.rglob(f"*{LOCK}"):
            with contextlib.suppress(FileNotFoundError):  # its write has just ended
                if time.time() - path.stat().st_mtime >= seconds:
                    path.unlink()

    def delete_all(self, keys: Iterable[str]) -> None:
        """Deletes several files at once; one that is not there is no error."""
        writes = [self._kvstore.write(key, None) for key in keys]
        for write in writes:
            self.wait(write)

    def open_array(self, name: str, cache_bytes: int = 0) -> ts.TensorStore:
        """The zarr array called `name`."""
        spec = {
            "driver": "zarr3",
            "kvstore": {**self._spec, "path": self._spec["path"] + name + "/"},
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }
        context = ts.Context({**self._context, "cache_pool": {"total_bytes_limit": cache_bytes}})
        return self.wait(ts.open(spec, open=True, context=context))

    def _flush_folders(self, top: Path, keys: Iterable[str]) -> None:
        """tensorstore flushes a file and the entry in its folder; the folders above may be new
        and unflushed as well."""
        folders = {folder for key in keys for folder in (top / key).parents}
        new = {folder for folder in folders if folder.is_relative_to(top)} - self._flushed
        for parent in {folder.parent for folder in new}:
            descriptor = os.open(parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._flushed |= new

    def wait(self, future: Any) -> Any:
        """Waits for a read or a write, and returns its result."""
        try:
            return future.result()
        except (ValueError, OSError) as error:
            raise StoreError(explain(error, self.url)) from None


def local_folder(url: str | os.PathLike[str]) -> Path | None:
    """The folder that a path or a file:// URL names; None for an object store. Raises StoreError
    for a URL that names no place for a store."""
    url = os.fspath(url)
    scheme, colon, rest = url.partition(":")
    if "://" not in url and not (colon and scheme in SCHEMES):
        path = os.path.expanduser(url)
        if path.startswith("~"):
            raise StoreError(f"{url}: there is no such user; ./{url} is a folder here")
        return Path(os.path.abspath(path))
    if scheme in ("s3", "gs") and rest.startswith("//") and rest[2:].partition("/")[0]:
        return None
    host, _, path = rest.removeprefix("//").partition("/")
    if scheme == "file" and path and (not host or host == "localhost"):
        return Path("/", unquote(path))
    raise StoreError(
        f"{url}: not a place for a store; give a folder, file:///folder, s3://bucket/path or "
        "gs://bucket/path"
    )


def _kvstore_spec(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """tensorstore's name for the place, and its settings for reaching it."""
    folder = local_folder(url)
    if folder is not None:
        return {"driver": "file", "path": f"{folder}/".replace("//", "/")}, {}
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if path:
        path = path.rstrip("/") + "/"
    retries = {"max_retries": 4, "initial_delay": "0.2s", "max_delay": "2s"}
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": path}, {"gcs_request_retries": retries}
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        spec["endpoint"] = endpoint
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region:
        spec["aws_region"] = region
    # tensorstore's own search would print about files it does not find
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}
    return spec, {"s3_request_retries": retries}


_NO_ACCESS = {
    "NOT_FOUND": "it does not exist; check the bucket and the path",
    "PERMISSION_DENIED": "access refused; check the credentials and the permissions",
    "UNAUTHENTICATED": "access refused; check the credentials in the environment",
    **dict.fromkeys(
        ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED"),
        "the storage does not answer; check the address and the connection",
    ),
    "RESOURCE_EXHAUSTED": "the disk is full",
}


def explain(error: Exception, url: str) -> str:
    """tensorstore's error as one line a user can act on."""
    text = _one_line(error)
    if "Too many open files" in text:  # of which tensorstore says the same as of a full disk
        return f"{url}: too many open files: raise the limit with ulimit -n ({text})"
    usual = "the storage reports an error; check the bucket and the path"
    return f"{url}: {_NO_ACCESS.get(text.split(':')[0], usual)} ({text})"


def is_damage(error: Exception) -> bool:
    """False for a failed read of a storage that could not be reached at all."""
    return _one_line(error).split(":")[0] not in _NO_ACCESS


def _one_line(error: Exception) -> str:
    """Cuts tensorstore's message to its readable part, without its list of source lines."""
    return re.sub(r"\s*\[[a-z_ ]+='.*", "", " ".join(str(error).split()))
