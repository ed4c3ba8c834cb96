"""Two exports at one place, of which one begins the store anew: what comes out is whole and of one
of them."""

import pytest

import store
from store.files import Files
from stores import assert_stored, make_arrays, make_schema

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
