"""Small stores of attention maps: what they are made of, and what is found in them."""

import json
from pathlib import Path

import numpy as np

import store
from damage import files_of
from store.layout import ROOT
from store.manifest import MANIFEST, group_file, sha256


def make_schema(**changes) -> store.Schema:
    return store.Schema(
        **dict(kind="gaussian", num_images=23, grid=(2, 3), layers=2, heads=3, num_classes=5)
        | dict(dataset="toy", dataset_sha256="d" * 64, teacher_sha256="a" * 64)
        | changes
    )


def make_arrays(schema: store.Schema, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.normal(size=spec.shape).astype(np.float32) for name, spec in schema.arrays.items()
    }
    if "gaussians" in arrays:
        arrays["gaussians"][..., 2:] = np.exp(arrays["gaussians"][..., 2:])
    if "maps" in arrays:
        arrays["maps"] = random_maps(rng, arrays["maps"].shape)
    if "keys" in arrays:
        maps = random_maps(rng, (*arrays["keys"].shape[:-1], schema.tokens))
        arrays["keys"] = np.argsort(-maps, axis=-1, kind="stable")[..., : schema.k]
        arrays["weights"] = np.take_along_axis(maps, arrays["keys"], axis=-1)
    if schema.name_bytes is not None:
        longest = "ß" * (schema.name_bytes // 2)  # of two bytes each
        names = [longest[: 1 + image % len(longest)] for image in range(schema.num_images)]
        arrays["names"] = store.pack_names(names, schema.name_bytes)
    if schema.labelled:
        arrays["labels"] = rng.integers(0, schema.num_classes, schema.num_images)
    return arrays


def random_maps(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    rows = np.exp(2 * rng.normal(size=shape)).astype(np.float32)
    return rows / rows.sum(-1, keepdims=True)


def write_store(
    url, schema: store.Schema, arrays: dict[str, np.ndarray], **options
) -> store.Writer:
    writer = store.create(url, schema, **options)
    write_pending(writer, arrays)
    return writer


def write_pending(writer: store.Writer, arrays: dict[str, np.ndarray]) -> None:
    for shard in writer.pending():
        part = slice(shard.start, shard.stop)
        writer.write(shard, {name: values[part] for name, values in arrays.items()})
    writer.finish()


def shard_file(url: Path, name: str, index: int) -> Path:
    [path] = files_of(url / name / "c" / str(index)) or [url / name / "c" / str(index)]
    return path


def edit_root(url: Path, **changes) -> None:
    """Changes attributes of a store, None takes one out; its manifest names what it is now."""
    root = json.loads((url / ROOT).read_bytes())
    attributes = root["attributes"] | changes
    nodes = root["consolidated_metadata"]["metadata"]
    for name in [name for name, value in changes.items() if value is None]:
        del attributes[name]
    manifest = json.loads((url / MANIFEST).read_bytes())["attributes"]
    manifest["metadata"][ROOT] = sha256(group_file(attributes | {"complete": True}, nodes))
    for name, content in ((ROOT, group_file(attributes, nodes)), (MANIFEST, group_file(manifest))):
        (url / name).unlink()  # it may be a link to another store's
        (url / name).write_bytes(content)


def damaged_images(url) -> list[tuple]:
    """(shard, array, first image, end) of every problem that verify finds."""
    return [(p.shard, p.array, p.start, p.stop) for p in store.verify(url)]


def assert_stored(read: dict[str, np.ndarray], written: dict[str, np.ndarray], ids) -> None:
    for name, values in written.items():
        dtype = {"labels": np.int64, "keys": np.uint8, "names": np.uint8}.get(name, np.float16)
        expected = values[ids].astype(dtype)
        assert read[name].dtype == expected.dtype and np.array_equal(read[name], expected), name


NO_MAPS = dict(kind="predictions", grid=None, layers=None, heads=None)
KINDS = [
    dict(kind="gaussian"),
    dict(kind="embedding", embedding_dim=7),
    dict(kind="dense"),
    dict(kind="prior"),
    dict(kind="topk", k=3),
    NO_MAPS,
]


VARIANTS = {kind["kind"]: kind for kind in KINDS} | {
    "embedding": dict(kind="embedding", embedding_dim=70),
    "uint8": dict(encoding="uint8"),
    "topk codes": dict(kind="topk", k=3, encoding="uint8"),
    "dense codes": dict(kind="dense", encoding="uint8"),
    "features": NO_MAPS | dict(features_dim=200, labelled=False),
    "unlabelled prior": dict(kind="prior", labelled=False),
    "names": NO_MAPS | dict(name_bytes=300),
}
"""Schemas of every array and encoding."""


def options_of(schema: store.Schema, images: int = 4) -> dict:
    """Shards of so many images, and the decoder of kinds that need one."""
    return dict(shard_bytes=images * schema.bytes_per_image, decoder=decoder_for(schema))


def decoder_for(schema: store.Schema) -> dict[str, np.ndarray] | None:
    return {
        "embedding": {"0.weight": np.eye(7, dtype=np.float32), "bias": np.zeros(3, np.float32)},
        "prior": {"prior": np.ones((2, 3, 6, 4), np.float32)},
    }.get(schema.kind)
