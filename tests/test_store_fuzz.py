"""Metadata that nobody of ours wrote, sealed as if they had: every command answers in a line,
and no memory is taken for what is not there."""

import contextlib
import copy
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import store
from gaupipe.distillation import kinds
from gaupipe.system.errors import UserError
from store.files import Files
from store.layout import ROOT, Layout, plan, seal
from test_store import VARIANTS, make_arrays, make_schema, write_store

KINDS = VARIANTS | {"views": dict(views=5)}
DECODER = {
    "embedding": {"0.weight": np.eye(7, dtype=np.float32)},
    "prior": {"prior": np.ones((1, 2, 4, 4))},
}
ODD = [
    None, True, False, 0, 1, -1, 2, 10**12, 10**30, 2**31, 2**63, 1.5, float("nan"), float("inf"),
    "", "x", "../../x", [], [1], {}, {"a": 1}, [[[]]], [10**12] * 5, [-1] * 5, [0] * 5,
]  # fmt: skip
REMOVED = object()
BROKEN = b"[" * 100_000 + b"]" * 100_000, b'{"a": NaN}', b"", b"null", b"9" * 5000, b"\xff\xfe{}"
"""What is no description of an array or of a store."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    for name, changes in KINDS.items():
        sizes = dict(num_images=5, grid=(2, 2), layers=1, heads=2, num_classes=130)
        schema = make_schema(**sizes, **changes)
        options = dict(shard_bytes=3 * schema.bytes_per_image, decoder=DECODER.get(schema.kind))
        write_store(folder / name, schema, make_arrays(schema), **options)
    return {name: folder / name for name in KINDS}


def places(tree: Any, at: tuple = ()) -> Iterator[tuple]:
    """The way to every value in nested lists and dicts."""
    if at:
        yield at
    keys = range(len(tree)) if isinstance(tree, list) else tree
    for key in keys if isinstance(tree, list | dict) else ():
        yield from places(tree[key], (*at, key))


def changed(tree: Any, at: tuple, value: Any) -> Any:
    tree = copy.deepcopy(tree)
    node = tree
    for key in at[:-1]:
        node = node[key]
    if value is REMOVED:
        del node[at[-1]]
    else:
        node[at[-1]] = value
    return tree


def seal_again(url: Path, key: str) -> None:
    """Lists the file `key` as it is now in the root, and seals the root."""
    attributes = json.loads((url / ROOT).read_text())["attributes"]
    del attributes["root_sha256"]
    if key != ROOT:
        attributes["files_sha256"][key] = hashlib.sha256((url / key).read_bytes()).hexdigest()
    (url / ROOT).write_bytes(seal(attributes))


def assert_answers(url: Path, truth: dict[str, np.ndarray]) -> None:
    """Every function returns what is right or raises StoreError, in one line."""
    calls = {
        "gather": lambda: store.open(url).gather(np.arange(5)),
        "verify": lambda: store.verify(url),
        "preload": lambda: store.open(url, preload_bytes=10**9).gather(np.arange(5)),
        "size": lambda: store.open(url, allow_incomplete=True).size_on_disk(),
        "decoder": lambda: store.open(url).decoder(),
        "join": lambda: store.join(url).pending(),
    }
    for name, call in calls.items():
        try:
            result = call()
        except store.StoreError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, name  # noqa: PT017
            continue
        if name in ("gather", "preload"):
            assert all(np.array_equal(result[array], values) for array, values in truth.items())
        if name == "verify":
            assert all("\n" not in str(problem) for problem in result) and len(result) < 100


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_value_of_the_metadata_may_be_anything(stores, data):
    url = stores[data.draw(st.sampled_from(list(KINDS)))]
    key = data.draw(st.sampled_from(sorted(str(path.relative_to(url)) for path in url.rglob(ROOT))))
    sound, root = (url / key).read_bytes(), (url / ROOT).read_bytes()
    truth = store.open(url).gather(np.arange(5))
    tree = json.loads(sound)
    at = data.draw(st.sampled_from(list(places(tree))))
    try:
        if data.draw(st.integers(0, 4)):
            value = data.draw(st.sampled_from([*ODD, REMOVED]))
            (url / key).write_text(json.dumps(changed(tree, at, value)))
        else:
            (url / key).write_bytes(data.draw(st.sampled_from(BROKEN)))
        # where the seal cannot be made again, the change is found by its digest
        with contextlib.suppress(AttributeError, KeyError, RecursionError, TypeError, ValueError):
            seal_again(url, key)
        assert_answers(url, truth)
    finally:
        (url / key).write_bytes(sound)
        (url / ROOT).write_bytes(root)


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
        ("gaussian", "files_sha256", {"../x": "0"}),
        ("gaussian", "views", 2),
        ("topk", "k", 1),  # where the arrays hold three keys
        ("topk", "kind", "gaussian"),
        ("dense codes", "encoding", "float16"),
        ("views", "views", 10**30),
    ],
)
def test_a_root_that_contradicts_itself_or_its_arrays(stores, tmp_path, kind, name, value):
    url = Path(shutil.copytree(stores[kind], tmp_path / "maps.zarr"))
    attributes = json.loads((url / ROOT).read_text())["attributes"]
    del attributes["root_sha256"]
    (url / ROOT).write_bytes(seal(attributes | {name: value}))
    expected = f"contradicts itself: .*({name.partition('_')[0]}|an image takes)|does not describe"
    with pytest.raises(store.DamagedStore, match=expected) as error:
        store.open(url)
    assert "\n" not in str(error.value)
    assert store.verify(url)


def test_a_whole_store_of_images_that_are_not_there(tmp_path):
    """Two billion shards, all metadata as they should be, complete by its own word."""
    url, schema = tmp_path / "maps.zarr", make_schema(num_images=2**31 - 1)
    layout, metadata = plan(schema, 1, None)
    root = Layout(schema, 1, layout.files_sha256, complete=True).root_file()
    Files(url).write_all({**metadata, ROOT: root})
    message = "the last of its 2147483647 shards was never finished"
    with pytest.raises(store.DamagedStore, match=message):
        store.open(url)
    assert [str(problem) for problem in store.verify(url)] == [
        "2147483647 of 2147483647 shards are not written yet, or the records of them are lost"
    ]


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
        kinds.KINDS["prior"].reader(maps, torch.device("cpu"))
    assert "\n" not in str(error.value)
