"""Every number that is read is that of its own image, teacher and data set: shards and records
of another place are found by ``verify``, and no reader takes them."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from google_crc32c import value as crc32c

import store
from test_store import (
    VARIANTS,
    damaged_images,
    make_arrays,
    make_schema,
    options_of,
    shard_file,
    write_store,
)

RECORDS = ("shard_sha256", "shard_nbytes", "image_crc32c")
SMALL = dict(num_images=7)
KINDS = VARIANTS | {"views": dict(views=7)}


def write(url: Path, seed: int = 0, **changes) -> Path:
    """A store of 7 images in 3 shards; gaussians, maps and embeddings are not held in memory."""
    schema = make_schema(**{**SMALL, **changes})
    write_store(url, schema, make_arrays(schema, seed), **options_of(schema, 3))
    return url


def exchange(left: Path, right: Path) -> None:
    first, second = left.read_bytes(), right.read_bytes()
    left.write_bytes(second)
    right.write_bytes(first)


def readers(url: Path):
    """All ways to read images 0 to 5, whose shards are exchanged."""
    return (
        lambda: store.open(url).gather([4, 0]),
        lambda: store.open(url, preload_bytes=10**6).gather([0]),
        lambda: list(store.open(url).prefetch([[5], [2]])),
        lambda: [store.open(url).gather([i]) for i in range(6)],
    )


def assert_refused(url: Path, arrays: list[str]) -> None:
    assert {(problem.shard, problem.array) for problem in store.verify(url)} >= {
        (shard, name) for shard in (0, 1) for name in arrays
    }
    for read in readers(url):
        with pytest.raises(store.CorruptChunk, match="needs gaupipe export-maps --repair") as error:
            read()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exchanged", ["one array", "data", "data and records"])
def test_exchanged_shards_are_refused(tmp_path, kind, exchanged):
    url = write(tmp_path / "s", **KINDS[kind])
    names = list(store.open(url).schema.arrays())
    records = RECORDS if exchanged == "data and records" else ()
    for name in (*(names[:1] if exchanged == "one array" else names), *records):
        exchange(shard_file(url, name, 0), shard_file(url, name, 1))
    assert_refused(url, [names[0]])


@pytest.mark.parametrize(
    "other", [dict(teacher_sha256="b" * 64), dict(dataset_sha256="b" * 64), dict(dataset="other")]
)
@pytest.mark.parametrize("with_records", [False, True], ids=["data", "data and records"])
def test_shards_of_another_store_are_refused(tmp_path, other, with_records):
    """All of them, the labels the same in both."""
    url, foreign = write(tmp_path / "s"), write(tmp_path / "other", seed=1, **other)
    for name in ("gaussians", "logits", *(RECORDS if with_records else ())):
        shutil.rmtree(url / name / "c")
        shutil.copytree(foreign / name / "c", url / name / "c")
    assert_refused(url, ["gaussians", "logits"])


def test_an_image_is_refused_whatever_was_read_before(tmp_path):
    """Images are compared the first time they are read: also when others of their batch were
    read before."""
    url = write(tmp_path / "s")
    numbers = zarr.open_array(url / "gaussians")
    numbers[4] = numbers[5]
    maps = store.open(url)
    assert len(maps.gather([0, 5, 3])["labels"]) == 3
    for ids in ([4], [5, 4], [0, 4, 4], [4]):
        with pytest.raises(store.CorruptChunk, match="image 4 .*: it is not what was written"):
            maps.gather(ids)
    assert damaged_images(url) == [(1, "gaussians", 4, 5)]


def test_unfinished_shards_are_not_read(tmp_path):
    schema = make_schema(**SMALL)
    arrays = make_arrays(schema)
    writer = store.create(tmp_path / "s", schema, **options_of(schema, 3))
    for shard in writer.pending()[1:]:
        part = slice(shard.start, shard.stop)
        writer.write(shard, {name: values[part] for name, values in arrays.items()})
    shard_file(tmp_path / "s", "shard_sha256", 2).unlink()  # killed before the last file
    maps = store.open(tmp_path / "s", allow_incomplete=True)
    assert np.array_equal(maps.gather([5, 3])["labels"], arrays["labels"][[5, 3]])
    for image in (0, 6):
        message = f"image {image} cannot be read: it is not there"
        with pytest.raises(store.CorruptChunk, match=message):
            maps.gather([4, image])


@pytest.mark.parametrize("kind", KINDS)
def test_the_checksums_are_those_of_docs_store(tmp_path, kind):
    url = write(tmp_path / "s", **KINDS[kind])
    group = zarr.open_group(url, mode="r")
    notes = {"format", "format_version", "extra", "complete", "files_sha256", "root_sha256"}
    bound = {name: value for name, value in group.attrs.items() if name not in notes}
    text = json.dumps(bound, sort_keys=True, separators=(",", ":"))
    identity = hashlib.sha256(text.encode()).hexdigest()
    for column, name in enumerate(group["shard_sha256"].attrs["arrays"]):
        numbers = group[name][...]
        for image in range(7):
            shard = image // group.attrs["images_per_shard"]
            mask = hashlib.sha256(f"{identity}/{name}/{shard}".encode()).digest()[:4]
            assert int(group["image_crc32c"][image, column]) == (
                crc32c(numbers[image].tobytes()) ^ int.from_bytes(mask, "little")
            )
        for shard in range(3):
            data = shard_file(url, name, shard).read_bytes()
            bound_text = f"{identity}/{name}/{shard}/{hashlib.sha256(data).hexdigest()}"
            digest = hashlib.sha256(bound_text.encode()).digest()
            assert bytes(group["shard_sha256"][shard, column]) == digest
            assert int(group["shard_nbytes"][shard, column]) == len(data)
