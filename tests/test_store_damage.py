"""Nothing wrong is ever read: any changed bit or lost file of a store is found, named, and can
be written again."""

import dataclasses

import numpy as np
import pytest
import zarr

import store
from store import reader
from store.encoding import image_crc32c as crc32c
from test_store import (
    VARIANTS,
    assert_stored,
    contents,
    damaged_images,
    data_files,
    make_arrays,
    make_schema,
    options_of,
    shard_file,
    write_pending,
    write_store,
)


@pytest.fixture(params=["gaussian", "embedding", "uint8", "topk codes", "dense codes"])
def written(request, tmp_path):
    """A complete store of 5 images in 2 shards: (folder, schema, arrays)."""
    changes = VARIANTS[request.param]
    schema = make_schema(num_images=5, grid=(2, 2), layers=1, heads=2, num_classes=130, **changes)
    arrays = make_arrays(schema)
    write_store(tmp_path / "s", schema, arrays, **options_of(schema, 3))
    return tmp_path / "s", schema, arrays


def damages(sound: bytes, others: list[bytes], rng) -> list[bytes | None]:
    """Flipped bits, nothing, a lost, a shortened and a longer file, and others in its place."""
    flipped = []
    for bit in rng.integers(8 * len(sound), size=6).tolist():
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        flipped.append(bytes(data))
    lengths = [None, b"", sound[: len(sound) // 2], sound[:-1], sound + b"\0"]
    return [*flipped, *lengths, *(other for other in others if other != sound)]


def test_damage_of_every_file_is_found_and_none_is_read(written, tmp_path):
    url, schema, arrays = written
    foreign = dataclasses.replace(schema, teacher_sha256="b" * 64)
    write_store(tmp_path / "other", foreign, arrays, **options_of(schema, 3))
    of_other, of_store = contents(tmp_path / "other"), list(contents(url).values())
    rng, ids, found = np.random.default_rng(0), np.arange(5), set()
    truth, weights = store.open(url).gather(ids), store.open(url).decoder()
    for path in data_files(url):
        sound, name = path.read_bytes(), path.relative_to(url).as_posix()
        others = [of_other[name], *(of_store[i] for i in rng.integers(len(of_store), size=3))]
        for damaged in damages(sound, others, rng):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            try:
                problems = store.verify(url)
                assert problems, name
                if "c" in path.parts and "decoder" not in path.parts:
                    shard = int(path.parts[path.parts.index("c") + 1])
                    assert all(problem.shard == shard for problem in problems)
                maps = store.open(url)
                rows, decoder = maps.gather(ids), maps.decoder()
            except store.StoreError as error:
                found.add(type(error))
                assert "\n" not in str(error)  # noqa: PT017  (or nothing was read wrong)
            else:
                assert all(np.array_equal(rows[name], truth[name]) for name in truth)
                assert all(np.array_equal(decoder[name], weights[name]) for name in weights)
            path.write_bytes(sound)
    assert found >= {store.CorruptChunk, store.DamagedStore}
    assert store.verify(url) == []


@pytest.fixture
def gaussian(tmp_path):
    schema = make_schema(num_images=10)
    arrays = make_arrays(schema)
    write_store(tmp_path / "s", schema, arrays, shard_bytes=4 * schema.bytes_per_image)
    return tmp_path / "s", schema, arrays


def test_a_corrupt_chunk_names_its_image(gaussian):
    url, _, arrays = gaussian
    path = shard_file(url, "gaussians", 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 4 // 2] ^= 16  # within the first of four images
    path.write_bytes(data)
    assert damaged_images(url) == [(1, "gaussians", 4, 5)]
    assert "shard 1, gaussians, image 4: " in str(store.verify(url)[0])
    maps = store.open(url)
    assert_stored(maps.gather([5, 6, 0, 9]), arrays, [5, 6, 0, 9])
    for read in (
        lambda: maps.gather([0, 4, 5]),
        lambda: list(maps.prefetch([[1], [4]])),
        lambda: store.open(url, preload_bytes=10**6),
    ):
        with pytest.raises(store.CorruptChunk, match="image 4 ") as error:
            read()
        assert (error.value.image_id, error.value.array) == (4, "gaussians")
        assert "--repair" in str(error.value)
        assert "\n" not in str(error.value)


def test_numbers_written_by_someone_else_are_found(gaussian):
    url, _, _ = gaussian
    zarr.open_array(url / "gaussians")[9, 1, 2, 3, 0] = np.nan
    zarr.open_array(url / "labels")[2] = 4
    assert damaged_images(url) == [(0, "labels", 2, 3), (2, "gaussians", 9, 10)]


def test_an_image_is_compared_when_it_is_read_for_the_first_time(gaussian, monkeypatch):
    url, _, arrays = gaussian
    maps = store.open(url)
    maps.gather([1, 2])
    compared = []
    monkeypatch.setattr(reader, "image_crc32c", lambda a: compared.append(len(a)) or crc32c(a))
    assert_stored(maps.gather([2, 1, 5]), arrays, [2, 1, 5])
    assert compared == [1] * len(arrays)


def test_an_array_that_was_not_read_is_compared_when_it_is(gaussian):
    url, _, arrays = gaussian
    zarr.open_array(url / "gaussians")[9, 1, 2, 3, 0] = 0.5
    maps = store.open(url)
    for read in (maps.gather([9, 1], ["logits"]), *maps.prefetch([[9, 1]], names=["logits"])):
        assert list(read) == ["logits"]
        assert_stored(read, {"logits": arrays["logits"]}, [9, 1])
    with pytest.raises(store.CorruptChunk, match="gaussians of image 9 "):
        maps.gather([9])


def test_repair_writes_only_what_is_damaged(gaussian):
    url, schema, arrays = gaussian
    before = contents(url)
    untouched = shard_file(url, "gaussians", 0)
    written = untouched.stat().st_mtime_ns
    shard_file(url, "gaussians", 1).write_bytes(b"half")
    shard_file(url, "shard_sha256", 2).unlink()
    for damaged in ("zarr.json", "logits/zarr.json", "shard_nbytes/zarr.json"):
        (url / damaged).write_bytes((url / damaged).read_bytes().replace(b"{", b"[", 1))
    writer = store.repair(url, schema, shard_bytes=4 * schema.bytes_per_image)
    assert [shard.index for shard in writer.pending()] == [1, 2]
    with pytest.raises(store.StoreError, match="incomplete"):
        store.open(url)
    write_pending(writer, arrays)
    assert store.verify(url) == [] and contents(url) == before
    assert untouched.stat().st_mtime_ns == written
