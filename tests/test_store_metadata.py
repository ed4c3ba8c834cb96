"""Metadata without images, and a decoder of another program: each is refused in a line."""

from functools import partial

import numpy as np
import pytest
import torch

import store
from damage import contents
from gaupipe.distillation import kinds
from gaupipe.system.errors import UserError
from store.files import Files
from store.layout import ROOT, plan
from store.manifest import MANIFEST
from stores import make_arrays, make_schema, options_of, write_store


def test_a_whole_store_of_images_that_are_not_there(tmp_path):
    """All metadata as they should be, complete by its own word."""
    url, schema = tmp_path / "maps.zarr", make_schema(num_images=5)
    layout, metadata, manifest = plan(schema, 1, None)
    root = layout.complete_root_file()
    Files(url).write_all({**metadata, MANIFEST: manifest.to_file(), ROOT: root})
    refused = pytest.raises(
        store.DamagedStore, match="does not name the gaussians of images 0 to 0"
    )
    for call in (lambda: store.open(url), lambda: store.create(url, schema, resume=True)):
        with refused as error:
            call()
        assert "--repair" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(store.CorruptChunk, match="image 2 .*nothing is stored"):
        store.open(url, allow_incomplete=True).gather([2])
    (problem,) = store.verify(url)
    assert str(problem) == f"{url}: 5 of 5 shards are not written yet"


@pytest.mark.parametrize("changes", ["another weight", "another layer", "no decoder"])
def test_a_store_goes_on_with_the_decoder_it_began_with(tmp_path, changes):
    """Embeddings from two decoders would be read by one."""
    url, schema = tmp_path / "s", make_schema(kind="embedding", embedding_dim=7)
    options = options_of(schema)
    arrays = make_arrays(schema)
    writer = store.create(url, schema, **options)
    writer.write(writer.shards[0], {name: values[:4] for name, values in arrays.items()})
    before = contents(url)
    decoder = options["decoder"]
    other = {
        "another weight": decoder | {"bias": np.full(3, 1e-6, np.float32)},
        "another layer": decoder | {"1.weight": np.eye(7, dtype=np.float32)},
        "no decoder": None,
    }[changes]
    for call in (partial(store.create, resume=True), store.repair):
        with pytest.raises(store.StoreError, match="another decoder; .*--overwrite") as error:
            call(url, schema, **options | {"decoder": other})
        assert "\n" not in str(error.value)
    assert contents(url) == before
    write_store(url, schema, arrays, **options, resume=True)
    assert store.verify(url) == []


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
        kinds.StoredAttentionReader(maps, torch.device("cpu"))
    assert "\n" not in str(error.value)
