"""Files in each other's place: ``verify`` finds them, and repair writes them again."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr

import store
from damage import contents, differing, files_of
from stores import (
    VARIANTS,
    make_arrays,
    make_schema,
    options_of,
    shard_file,
    write_pending,
    write_store,
)

SMALL = dict(num_images=7)
KINDS = VARIANTS | {"views": dict(views=7)}


def write(url: Path, seed: int = 0, **changes) -> Path:
    """A store of 7 images in 3 shards."""
    schema = make_schema(**{**SMALL, **changes})
    write_store(url, schema, make_arrays(schema, seed), **options_of(schema, 3))
    return url


def assert_found_and_repaired(url: Path, sound: dict[str, bytes], shards, arrays) -> None:
    """Exactly these shards of these arrays are refused and, repaired, have their first bytes."""
    assert [(problem.shard, problem.array) for problem in store.verify(url)] == [
        (shard, name) for shard in shards for name in arrays
    ]
    schema = store.open(url).schema
    writer = store.repair(url, schema, **options_of(schema, 3))
    assert [shard.index for shard in writer.pending()] == list(shards)
    write_pending(writer, make_arrays(schema))
    assert differing(contents(url), sound) == []
    assert store.verify(url) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exchanged", ["one array", "all arrays"])
def test_exchanged_shards_are_found(tmp_path, kind, exchanged):
    url = write(tmp_path / "s", **KINDS[kind])
    sound, names = contents(url), list(store.open(url).schema.arrays)
    names = names[:1] if exchanged == "one array" else names
    for name in names:
        left, right = shard_file(url, name, 0), shard_file(url, name, 1)
        first, second = left.read_bytes(), right.read_bytes()
        left.write_bytes(second)
        right.write_bytes(first)
    assert_found_and_repaired(url, sound, (0, 1), names)


def test_shards_of_another_store_are_found(tmp_path):
    """All of them, the labels the same in both."""
    url = write(tmp_path / "s")
    sound, foreign = contents(url), write(tmp_path / "other", seed=1, teacher_sha256="b" * 64)
    for name in ("gaussians", "logits"):
        shutil.rmtree(url / name / "c")
        shutil.copytree(foreign / name / "c", url / name / "c")
    assert_found_and_repaired(url, sound, (0, 1, 2), ("gaussians", "logits"))


def test_the_manifest_of_another_store_is_refused(tmp_path):
    url, foreign = write(tmp_path / "s"), write(tmp_path / "other", teacher_sha256="b" * 64)
    shutil.copy(foreign / "manifest" / "zarr.json", url / "manifest" / "zarr.json")
    with pytest.raises(store.DamagedStore, match=r"zarr\.json is damaged or was edited"):
        store.open(url)
    assert len(store.verify(url)) == 1


def test_numbers_in_shards_of_another_size_are_written_again(tmp_path):
    """A damaged root says no longer how many images a shard has: files of the same name hold other
    images."""
    url = write(tmp_path / "s")
    (url / "zarr.json").write_bytes(b"{")
    schema = make_schema(**SMALL)
    writer = store.repair(url, schema, **options_of(schema, 2))
    assert len(writer.pending()) == 4
    write_pending(writer, make_arrays(schema))
    write_store(tmp_path / "new", schema, make_arrays(schema), **options_of(schema, 2))
    assert differing(contents(url), contents(tmp_path / "new")) == []


def test_unfinished_shards_are_not_read(tmp_path):
    schema = make_schema(**SMALL)
    arrays = make_arrays(schema)
    writer = store.create(tmp_path / "s", schema, **options_of(schema, 3))
    for shard in writer.pending()[1:]:
        part = slice(shard.start, shard.stop)
        writer.write(shard, {name: values[part] for name, values in arrays.items()})
    [entry] = (tmp_path / "s" / "manifest" / "finished").glob("*-2")
    entry.unlink()  # killed before the last file
    maps = store.open(tmp_path / "s", allow_incomplete=True)
    assert np.array_equal(maps.gather([5, 3])["labels"], arrays["labels"][[5, 3]])
    for image in (0, 6):
        with pytest.raises(store.UnfinishedStore, match=f"image {image} is not written yet"):
            maps.gather([4, image])


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_is_that_of_docs_store(tmp_path, kind):
    """It names each file but itself, once."""
    url = write(tmp_path / "s", **KINDS[kind])
    manifest, named = zarr.open_group(url, path="manifest", mode="r").attrs, {}
    for shard, arrays in manifest["shards"].items():
        for name, file in arrays.items():
            path = shard_file(url, name, int(shard))
            named[path] = file["sha256"]
            assert path.stat().st_size == file["bytes"]
    named |= {url / name: digest for name, digest in manifest["metadata"].items()}
    assert named == {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files_of(url)
        if path.parent.name != "manifest"
    }
    assert json.loads((url / "zarr.json").read_bytes())["attributes"]["complete"]
