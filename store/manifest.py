"""Manifest of a store: the sha256 of each of its files.

It is the zarr group `manifest`, without arrays. Its attributes are

    metadata   {file: sha256} of the zarr.json of the root (as it is in a complete store) and of the
               arrays, and of the decoder's files
    shards     {shard: {array: {"sha256": ..., "bytes": ...}}} of the images' files
    writing    a name that nobody has used, while the store is written

While a store is written, several processes add to it. So each finished shard has its entry in a
file of its own, `manifest/finished/WRITING-SHARD`, which is written last and marks the shard as
finished. `Writer.finish` gathers these files into the manifest and deletes them. A store that is
begun anew is written under a new name; so whatever a process still does for the store that was
there before does not count, on object storage as well, which knows no locks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from store.errors import damaged
from store.files import Files

MANIFEST = "manifest/zarr.json"
FINISHED = "manifest/finished/"


class StoredFile(NamedTuple):
    """A shard's file of one array."""

    sha256: str
    bytes: int


Shards = dict[int, dict[str, StoredFile]]
"""By index of the shard and name of the array."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    metadata: dict[str, str]
    shards: Shards
    writing: str | None = None
    """None once the store is complete."""

    def to_file(self) -> bytes:
        # sorted, as from_file compares bytes, and processes finish shards in any order
        shards = {str(index): _to_json(self.shards[index]) for index in sorted(self.shards)}
        attributes: dict[str, Any] = {"metadata": self.metadata, "shards": shards}
        if self.writing is not None:
            attributes["writing"] = self.writing
        return group_file(attributes)

    @classmethod
    def from_file(cls, data: bytes, url: str) -> Manifest:
        """Raises DamagedStore unless `to_file` writes these bytes."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            attributes = json.loads(data)["attributes"]
            entries = attributes["shards"].items()
            shards = {int(index): _from_json(entry) for index, entry in entries}
            manifest = cls(dict(attributes["metadata"]), shards, attributes.get("writing"))
            if manifest.to_file() == data:
                return manifest
        raise damaged(url, f"{MANIFEST} is damaged or was edited")


def read_manifest(files: Files) -> Manifest | None:
    """None where there is no manifest. Raises DamagedStore."""
    data = files.read(MANIFEST)
    if data is None:
        return None
    return Manifest.from_file(data, files.url)


def read_checked(files: Files, manifest: Manifest, key: str) -> bytes:
    """A metadata or decoder file. Raises DamagedStore when it is missing or any bit has changed."""
    data = files.read(key)
    if data is None:
        raise damaged(files.url, f"{key} is missing")
    if sha256(data) != manifest.metadata.get(key):
        raise damaged(files.url, f"{key} is damaged or was edited")
    return data


def finished_shards(files: Files) -> Shards:
    """All finished shards, also those that are not in the manifest yet; read at every call."""
    entries = files.read_all(files.list(FINISHED))
    # the manifest last: another process may write it and then delete the single entries
    manifest = read_manifest(files)
    if manifest is None:
        return {}
    shards = dict(manifest.shards)
    start = f"{FINISHED}{manifest.writing}-"
    for key, data in entries.items():
        # one that is damaged, or was deleted since it was listed, counts as none
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
            if key.startswith(start):
                shards[int(key.removeprefix(start))] = _from_json(json.loads(data or b""))
    return shards


def write_entry(files: Files, writing: str, index: int, written: Mapping[str, bytes]) -> None:
    """Marks a shard as finished, whose files, by array, are safe already."""
    entry = {name: StoredFile(sha256(data), len(data)) for name, data in written.items()}
    files.write(f"{FINISHED}{writing}-{index}", json.dumps(_to_json(entry)).encode())


def _to_json(shard: dict[str, StoredFile]) -> dict[str, dict[str, object]]:
    return {name: file._asdict() for name, file in shard.items()}


def _from_json(shard: dict[str, dict[str, Any]]) -> dict[str, StoredFile]:
    return {name: StoredFile(**file) for name, file in shard.items()}


def group_file(attributes: dict[str, Any], nodes: dict[str, Any] | None = None) -> bytes:
    """The zarr.json of a group with these attributes; with ``nodes`` it repeats the zarr.json of
    the arrays and groups below it, by their paths: zarr's consolidated metadata."""
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    if nodes is not None:
        inline = {"kind": "inline", "must_understand": False, "metadata": nodes}
        group["consolidated_metadata"] = inline
    # Python would write NaN, which is no JSON: other readers of zarr refuse it
    return json.dumps(group, indent=2, allow_nan=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
