"""The attention-map store: per-image Gaussians, embeddings, largest keys or dense maps in a zarr v3
group, read by image id.

numpy in and out; works without the rest of gaupipe:

    import numpy as np, store

    schema = store.Schema(kind="gaussian", num_images=1000, grid=(8, 8), layers=7, heads=12,
                          num_classes=10, dataset="mine", dataset_sha256="", teacher_sha256="")
    writer = store.create("maps.zarr", schema)
    for shard in writer.pending():
        n = shard.stop - shard.start
        writer.write(shard, {"gaussians": np.ones((n, 7, 12, 64, 4)), "logits": np.zeros((n, 10)),
                             "labels": np.zeros(n, int)})
    writer.finish()

    maps = store.open("maps.zarr")
    maps.gather(np.array([3, 999, 0]))["gaussians"]          # [3, 7, 12, 64, 4] float16
    assert store.verify("maps.zarr") == []
"""

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
    "repair",
    "verify",
]
