"""Nothing wrong is ever read: any changed bit or lost file of a store is found, named, and can
be written again."""

import dataclasses

import numpy as np
import pytest
import zarr

import store
from damage import contents, damaged, damages, differing, files_of, flip
from stores import (
    VARIANTS,
    assert_stored,
    damaged_images,
    make_arrays,
    make_schema,
    options_of,
    shard_file,
    write_pending,
    write_store,
)


@pytest.fixture(params=["gaussian", "embedding", "uint8", "topk codes", "dense codes", "features"])
def written(request, tmp_path):
    """A complete store of 5 images in 2 shards: (folder, schema, arrays)."""
    changes = VARIANTS[request.param]
    sizes = dict(num_images=5, grid=(2, 2), layers=1, heads=2, num_classes=130)
    schema = make_schema(**sizes | changes)
    arrays = make_arrays(schema)
    write_store(tmp_path / "s", schema, arrays, **options_of(schema, 3))
    return tmp_path / "s", schema, arrays


def test_damage_of_every_file_is_found_and_none_is_read(written):
    url, _, _ = written
    rng, ids, found = np.random.default_rng(0), np.arange(5), set()
    truth, weights = store.open(url).gather(ids), store.open(url).decoder()
    for path in files_of(url):
        for damage in damages(path, rng):
            try:
                problems = store.verify(url)
                assert problems, f"verify finds nothing wrong with {damage}"
                if "c" in path.parts and "decoder" not in path.parts:
                    shard = int(path.parts[path.parts.index("c") + 1])
                    assert {problem.shard for problem in problems} == {shard}, damage
                maps = store.open(url)
                rows, decoder = maps.gather(ids), maps.decoder()
            except store.StoreError as error:
                found.add(type(error))
                assert "\n" not in str(error)  # noqa: PT017  (or nothing was read wrong)
            else:
                for read, right in ((rows, truth), (decoder, weights)):
                    wrong = [name for name in right if not np.array_equal(read[name], right[name])]
                    assert not wrong, f"{damage}: {wrong} are read, and are not what was written"
    assert found >= {store.CorruptChunk, store.DamagedStore}
    assert store.verify(url) == []


def test_a_file_in_the_place_of_any_other_is_found(written, tmp_path):
    """Files of the same store, and the same file of another teacher's."""
    url, schema, _ = written
    foreign = dataclasses.replace(schema, teacher_sha256="b" * 64)
    foreign_arrays = make_arrays(schema, seed=1)
    write_store(tmp_path / "other", foreign, foreign_arrays, **options_of(schema, 3))
    other, own = contents(tmp_path / "other"), contents(url)
    files, rng = list(own.values()), np.random.default_rng(0)
    for path in files_of(url):
        name = path.relative_to(url).as_posix()
        for replacement in (other[name], *(files[i] for i in rng.integers(len(files), size=3))):
            with damaged(path, replacement):
                assert bool(store.verify(url)) == (replacement != own[name]), name


@pytest.fixture
def gaussian(tmp_path):
    schema = make_schema(num_images=10)
    arrays = make_arrays(schema)
    write_store(tmp_path / "s", schema, arrays, shard_bytes=4 * schema.bytes_per_image)
    return tmp_path / "s", schema, arrays


def test_a_corrupt_chunk_names_its_image(gaussian):
    url, _, arrays = gaussian
    path = shard_file(url, "gaussians", 1)
    flip(path, share=1 / 8)  # within the first of four images
    assert damaged_images(url) == [(1, "gaussians", 4, 8)]
    assert "shard 1, gaussians, images 4 to 7: " in str(store.verify(url)[0])
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
        assert str(error.value).endswith("--repair, or store.repair")
        assert "\n" not in str(error.value)


def test_damage_of_a_column_names_all_images_of_its_shard(gaussian):
    url, _, _ = gaussian
    flip(shard_file(url, "labels", 1), share=1 / 2)
    with pytest.raises(
        store.CorruptChunk, match="labels of images 4 to 7 cannot .*; shard 1 needs"
    ):
        store.open(url).gather([6])


def test_numbers_written_by_someone_else_are_found(gaussian):
    url, _, _ = gaussian
    zarr.open_array(url / "gaussians")[9, 1, 2, 3, 0] = np.nan
    zarr.open_array(url / "labels")[2] = 4
    assert damaged_images(url) == [(0, "labels", 0, 4), (2, "gaussians", 8, 10)]


def test_an_array_that_was_not_asked_for_is_not_read(gaussian):
    url, _, arrays = gaussian
    shard_file(url, "gaussians", 2).write_bytes(b"half")
    maps = store.open(url)
    for read in (maps.gather([9, 1], ["logits"]), *maps.prefetch([[9, 1]], names=["logits"])):
        assert list(read) == ["logits"]
        assert_stored(read, {"logits": arrays["logits"]}, [9, 1])
    with pytest.raises(store.CorruptChunk, match="gaussians of image 9 "):
        maps.gather([9])


def test_repair_without_a_readable_manifest_writes_everything(gaussian):
    url, schema, arrays = gaussian
    before = contents(url)
    (url / "manifest" / "zarr.json").write_bytes(b"{")
    writer = store.repair(url, schema, shard_bytes=4 * schema.bytes_per_image)
    assert len(writer.pending()) == 3
    write_pending(writer, arrays)
    assert store.verify(url) == []
    assert differing(contents(url), before) == []

    # in shards of another size none of the old ones is left
    (url / "manifest" / "zarr.json").write_bytes(b"{")
    writer = store.repair(url, schema)
    assert len(writer.pending()) == 1
    write_pending(writer, arrays)
    assert store.verify(url) == []
    assert not files_of(url / "gaussians" / "c" / "1")
