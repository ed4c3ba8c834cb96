"""Metadata that contradicts itself: it is refused in a line, and no memory is taken for what is
not there."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import store
from gaupipe.distillation import kinds
from gaupipe.system.errors import UserError
from store.files import Files
from store.layout import ROOT, plan
from store.manifest import MANIFEST
from stores import VARIANTS, edit_root, make_arrays, make_schema, write_store

KINDS = VARIANTS | {"views": dict(views=5)}
DECODER = {
    "embedding": {"0.weight": np.eye(7, dtype=np.float32)},
    "prior": {"prior": np.ones((1, 2, 4, 4))},
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    for name, changes in KINDS.items():
        sizes = dict(num_images=5, grid=(2, 2), layers=1, heads=2, num_classes=130)
        schema = make_schema(**sizes, **changes)
        options = dict(shard_bytes=3 * schema.bytes_per_image, decoder=DECODER.get(schema.kind))
        write_store(folder / name, schema, make_arrays(schema), **options)
    return {name: folder / name for name in KINDS}


@pytest.mark.parametrize(
    "kind, name, value",
    [
        ("gaussian", "num_images", 2**31),
        ("gaussian", "layers", 10**9),
        ("gaussian", "grid", [10**6, 10**6]),
        ("gaussian", "extra", [1]),
        ("gaussian", "images_per_shard", 0),
        ("gaussian", "images_per_shard", 10**12),
        ("gaussian", "complete", 1),
        ("gaussian", "views", 2),
        ("topk", "kind", "gaussian"),
        ("views", "views", 10**30),
    ],
)
def test_a_root_that_contradicts_itself_or_its_arrays(stores, tmp_path, kind, name, value):
    url = Path(shutil.copytree(stores[kind], tmp_path / "maps.zarr"))
    edit_root(url, **{name: value})
    expected = f"contradicts itself: .*({name.partition('_')[0]}|k is|an image takes)"
    with pytest.raises(store.DamagedStore, match=expected) as error:
        store.open(url)
    assert "\n" not in str(error.value)
    assert store.verify(url)


def test_a_whole_store_of_images_that_are_not_there(tmp_path):
    """All metadata as they should be, complete by its own word."""
    url, schema = tmp_path / "maps.zarr", make_schema(num_images=5)
    layout, metadata, manifest = plan(schema, 1, None)
    root = layout.complete_root_file()
    Files(url).write_all({**metadata, MANIFEST: manifest.to_file(), ROOT: root})
    with pytest.raises(store.DamagedStore, match="names 0 of 5 shards"):
        store.open(url)
    assert {problem.what for problem in store.verify(url)} == {"not written yet"}


@pytest.mark.parametrize(
    "array, message",
    [
        (dict(prior=np.ones((1, 2, 4, 3))), "expanded size"),
        (dict(other=np.ones(3)), "'prior'"),
    ],
)
def test_the_decoder_of_someone_else(tmp_path, array, message):
    schema = make_schema(kind="prior", grid=(2, 2), layers=1)
    write_store(tmp_path / "s", schema, make_arrays(schema), decoder=array)
    maps = store.open(tmp_path / "s")
    with pytest.raises(UserError, match=message) as error:
        kinds.MAP_KINDS["prior"].reader(maps, torch.device("cpu"))
    assert "\n" not in str(error.value)
