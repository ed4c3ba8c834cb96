"""Two exports at one place, of which one begins the store anew: what comes out is whole and of one
of them, however late the other's writes arrive."""

import contextlib
from unittest.mock import patch

import pytest

import store
from store.files import Files
from store.manifest import finished_shards
from stores import assert_stored, make_arrays, make_schema, write_store

EARLIER = make_schema(teacher_sha256="a" * 64)
LATER = make_schema(teacher_sha256="b" * 64)
ARRAYS = {
    schema.teacher_sha256: make_arrays(schema, seed) for seed, schema in enumerate((EARLIER, LATER))
}
SHARDS = dict(shard_bytes=4 * EARLIER.bytes_per_image)  # 6 of 4 images


@pytest.fixture(params=["folder", "bucket"])
def url(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "maps.zarr")
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}/maps.zarr"


def write(writer, shard):
    arrays = ARRAYS[writer.schema.teacher_sha256]
    writer.write(shard, {name: rows[shard.start : shard.stop] for name, rows in arrays.items()})


def replaced(url, schema=LATER):
    return write_store(url, schema, ARRAYS[schema.teacher_sha256], overwrite=True, **SHARDS)


def assert_whole(url, schema):
    assert store.verify(url) == []
    assert store.open(url).schema == schema
    assert_stored(store.open(url).gather(range(23)), ARRAYS[schema.teacher_sha256], slice(None))


def test_an_export_that_was_replaced_stops(url):
    earlier = store.create(url, EARLIER, **SHARDS)
    for shard in earlier.shards[:3]:
        write(earlier, shard)
    later = store.create(url, LATER, overwrite=True, **SHARDS)
    with pytest.raises(store.StoreError, match="another process has begun the store anew"):
        write(earlier, earlier.shards[3])
    with pytest.raises(store.StoreError, match="another process has begun the store anew"):
        earlier.finish()
    assert later.pending() == later.shards
    for shard in later.shards:
        write(later, shard)
    later.finish()
    assert_whole(url, LATER)


@pytest.mark.parametrize("schema", [EARLIER, LATER])
def test_a_write_that_arrives_late_changes_nothing(url, schema):
    """It was under way when the other export began, and that has finished since."""
    earlier = store.create(url, EARLIER, **SHARDS)
    write_all = Files.write_all

    def late(files, contents, *seen):
        late_call.stop()
        replaced(url, schema)
        return write_all(files, contents, *seen)

    late_call = patch.object(Files, "write_all", late)
    late_call.start()
    stops = pytest.raises(store.StoreError, match="another process has begun the store anew")
    if schema == EARLIER:  # all is there that it would have written
        stops = contextlib.nullcontext()
    with stops:
        write(earlier, earlier.shards[0])
    assert_whole(url, schema)


@pytest.mark.parametrize("schema", [EARLIER, LATER])
def test_a_late_finish_completes_nothing(url, schema):
    """The other export has begun between the last look at the store and its last write."""
    earlier = store.create(url, EARLIER, **SHARDS)
    for shard in earlier.shards:
        write(earlier, shard)

    def late(files):
        shards = finished_shards(files)
        late_call.stop()
        store.create(url, schema, overwrite=True, **SHARDS)
        return shards

    late_call = patch("store.writer.finished_shards", late)
    late_call.start()
    with pytest.raises(store.StoreError):
        earlier.finish()
    with pytest.raises(store.StoreError):
        store.open(url)
    write_store(url, schema, ARRAYS[schema.teacher_sha256], resume=True)
    assert_whole(url, schema)


def test_two_of_the_same_export_write_the_same_shards(url):
    """As a part that a scheduler starts twice does: nobody stops, and the bytes are the same."""
    twins = [store.create(url, EARLIER, resume=True, **SHARDS) for _ in range(2)]
    for shard in twins[0].shards:
        for twin in twins:
            write(twin, shard)
    twins[0].finish()
    complete = Files(url).read_all(Files(url).list())
    write(twins[1], twins[1].shards[2])  # once more, late
    twins[1].finish()
    assert Files(url).read_all(Files(url).list()) == complete
    assert_whole(url, EARLIER)
