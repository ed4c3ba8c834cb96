"""The attention-map store: numpy in, numpy out, zarr format 3 on disk."""

from store.reader import Store, open  # noqa: A004
from store.schema import CorruptChunk, Schema, Shard, StoreError
from store.verify import Problem, verify
from store.writer import Writer, create

__all__ = ["CorruptChunk", "Problem", "Schema", "Shard", "Store", "StoreError", "Writer", "create", "open", "verify"]
