"""The attention-map store: per-image Gaussians, embeddings, largest keys, dense maps or predictions
alone in a zarr v3 group, read by image id.

numpy in and out; works without the rest of gaupipe:

    maps = store.open("maps.zarr")
    maps.gather(np.array([3, 999, 0]))["gaussians"]          # [3, L, H, T, 4] float16
    assert store.verify("maps.zarr") == []

docs/store.md describes the format, and writes a store.
"""

from store.encoding import pack_names, unpack_names
from store.errors import CorruptChunk, DamagedStore, StoreError, UnfinishedStore
from store.files import local_folder
from store.kinds import KINDS, ArraySpec, Kind
from store.layout import Shard
from store.reader import Store, check_exists, open
from store.schema import Schema
from store.verify import Problem, repair, verify
from store.writer import Writer, check_place, create, join

__all__ = [
    "KINDS",
    "ArraySpec",
    "CorruptChunk",
    "DamagedStore",
    "Kind",
    "Problem",
    "Schema",
    "Shard",
    "Store",
    "StoreError",
    "UnfinishedStore",
    "Writer",
    "check_exists",
    "check_place",
    "create",
    "join",
    "local_folder",
    "open",
    "pack_names",
    "repair",
    "unpack_names",
    "verify",
]
