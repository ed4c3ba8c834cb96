"""Writing a store: whole shards, each by one owner, recorded as finished only when they are safely stored."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import tensorstore as ts

from store.schema import Schema, Shard, StoreError, array_metadata
from store.urls import first_line, open_kvstore, read

SHARD_BYTES = 32 * 2**20
FLOAT16_MAX = float(np.finfo(np.float16).max)


def create(url: str, schema: Schema, *, overwrite: bool = False, resume: bool = False,
           shard_bytes: int = SHARD_BYTES) -> Writer:
    """Starts a store at a path or URL, or with ``resume`` continues one of the same schema.

    Raises StoreError, having written nothing, where a store is in the way: ``overwrite`` replaces it, and ``resume``
    keeps its finished shards unless it is complete or of another schema.
    """
    kv = open_kvstore(url)
    schema = schema if schema.images_per_shard else schema.sized(shard_bytes)
    existing = read(kv, "zarr.json", url)
    if existing and not overwrite:
        attributes = json.loads(existing)["attributes"]
        if not resume or attributes.get("complete"):
            raise StoreError(f"{url} already holds a {'complete ' if attributes.get('complete') else ''}store: "
                             "--overwrite replaces it")
        old = Schema.from_attributes(attributes, url)
        if old != schema:
            name = next(name for name in schema.__dict__ if getattr(old, name) != getattr(schema, name))
            raise StoreError(f"{url} holds an unfinished store with another {name} ({getattr(old, name)}, now "
                             f"{getattr(schema, name)}): --overwrite replaces it")
        return Writer(url, kv, schema)
    if not existing and kv.list().result():
        raise StoreError(f"{url} exists and is not a store: choose another place")
    try:
        if existing:
            kv.write("zarr.json", None).result()
            kv.delete_range(ts.KvStore.KeyRange()).result()
        for key, contents in sorted(schema.metadata(complete=False).items(), reverse=True):  # the group's comes last
            kv.write(key, contents).result()
    except (ValueError, OSError) as error:
        raise StoreError(f"{url}: cannot be written: {first_line(error)}") from None
    return Writer(url, kv, schema)


class Writer:
    """Writes shards of a store that :func:`create` made. Several processes may write different shards at once."""

    def __init__(self, url: str, kv: ts.KvStore, schema: Schema) -> None:
        self.url, self.schema, self.shards = url, schema, schema.shards()
        self._kv = kv
        self._metadata = schema.metadata(complete=False)

    def pending(self) -> list[Shard]:
        """Shards that are not recorded as finished."""
        finished = set(self._kv.list().result())
        return [shard for shard in self.shards if record_key(shard).encode() not in finished]

    def write(self, shard: Shard, arrays: dict[str, np.ndarray]) -> None:
        """Stores one shard: ``arrays`` {name: [stop - start, ...]} for every array of the schema.

        Floats are clipped to float16's finite range. Raises StoreError naming the image for NaN, and for wrong names or
        shapes.
        """
        record = {"start": shard.start, "stop": shard.stop, "files": {}}
        encoded = {}
        if set(arrays) != set(self.schema.arrays()):
            raise StoreError(f"{self.url}: a shard needs the arrays {sorted(self.schema.arrays())}, got {sorted(arrays)}")
        for name, (shape, dtype, _) in self.schema.arrays().items():
            values = self._checked(shard, name, arrays[name], (shard.stop - shard.start, *shape[1:]), dtype)
            key, contents = encode(array_metadata(self._metadata, name), shard, values)
            encoded[f"{name}/{key}"] = contents
            record["files"][f"{name}/{key}"] = {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
        try:
            for key, contents in encoded.items():
                self._kv.write(key, contents).result()
            self._kv.write(record_key(shard), sealed(record)).result()
        except (ValueError, OSError) as error:
            raise StoreError(f"{self.url}: shard {shard.index} cannot be written: {first_line(error)}") from None

    def finish(self) -> None:
        """Marks the store complete. Raises StoreError if a shard is missing."""
        pending = self.pending()
        if pending:
            raise StoreError(f"{self.url}: {len(pending)} of {len(self.shards)} shards are not written yet")
        self._kv.write("zarr.json", self.schema.metadata(complete=True)["zarr.json"]).result()

    def _checked(self, shard: Shard, name: str, values: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if values.shape != shape:
            raise StoreError(f"{self.url}: {name} of shard {shard.index} should have shape {shape}, got {values.shape}")
        if dtype != "float16":
            return values.astype(dtype)
        if np.isnan(values).any():
            image = shard.start + int(np.isnan(values).reshape(len(values), -1).any(1).argmax())
            raise StoreError(f"{self.url}: {name} of image {image} is not a number")
        return np.clip(values, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16)


def encode(metadata: dict[str, Any], shard: Shard, values: np.ndarray) -> tuple[str, bytes]:
    """(key, contents) of the one file that holds a shard of an array."""
    array = ts.open({"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}, create=True,
                    context=ts.Context()).result()
    array[shard.start:shard.stop].write(values).result()
    key = next(key for key in array.kvstore.list().result() if key.startswith(b"c/"))
    return key.decode(), array.kvstore.read(key).result().value


def record_key(shard: Shard) -> str:
    """Where a finished shard is recorded. Zarr readers pass over it."""
    return f"shards/{shard.index:06d}.json"


def sealed(record: dict[str, Any]) -> bytes:
    """JSON of a record with its own digest."""
    body = json.dumps(record, sort_keys=True)
    return json.dumps({"record": record, "sha256": hashlib.sha256(body.encode()).hexdigest()}, sort_keys=True).encode()
