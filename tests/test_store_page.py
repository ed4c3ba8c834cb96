"""The code of docs/store.md that reads with zarr alone, on a store of each kind."""

import re
from pathlib import Path

import pytest

from stores import KINDS, make_arrays, make_schema, options_of, write_store

PAGE = Path(__file__).parent.parent / "docs" / "store.md"
NAMES = {
    "gaussian": ["gaussians"],
    "topk": ["keys", "weights"],
    "dense": ["attention"],
    "prior": ["raw"],
    "embedding": ["embeddings"],
    "predictions": ["logits"],
}


@pytest.mark.parametrize("changes", KINDS, ids=lambda changes: changes["kind"])
def test_the_code_of_the_page_reads_every_kind_with_zarr_alone(tmp_path, monkeypatch, changes):
    schema = make_schema(**changes)
    write_store(tmp_path / "runs/mine/maps.zarr", schema, make_arrays(schema), **options_of(schema))
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().split("## Read it with zarr alone")[1]
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], names := {})
    assert "store" not in names and "gaupipe" not in names
    for name in NAMES[schema.kind]:
        assert names[name].shape[0] == (schema.layers or schema.num_classes)
