"""Metadata without images, and a decoder of another program: each is refused in a line."""

import numpy as np
import pytest
import torch

import store
from gaupipe.distillation import kinds
from gaupipe.system.errors import UserError
from store.files import Files
from store.layout import ROOT, plan
from store.manifest import MANIFEST
from stores import make_arrays, make_schema, write_store


def test_a_whole_store_of_images_that_are_not_there(tmp_path):
    """All metadata as they should be, complete by its own word."""
    url, schema = tmp_path / "maps.zarr", make_schema(num_images=5)
    layout, metadata, manifest = plan(schema, 1, None)
    root = layout.complete_root_file()
    Files(url).write_all({**metadata, MANIFEST: manifest.to_file(), ROOT: root})
    with pytest.raises(store.CorruptChunk, match="image 2 .*it is not there"):
        store.open(url).gather([2])
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
