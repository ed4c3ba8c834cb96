"""A store on object storage, read by zarr-python's own object store (see test_export_s3.py for
the commands)."""

import numpy as np
import pytest
import zarr

import store
from test_export_s3 import CREDENTIALS, pytestmark, server  # noqa: F401  (a fixture, and the reason to skip)
from test_store import (
    assert_stored,
    damaged_images,
    make_arrays,
    make_schema,
    write_pending,
    write_store,
)


@pytest.fixture
def bucket(server, monkeypatch):  # noqa: F811
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    return "s3://maps"


def test_what_was_written_is_read_by_us_and_by_zarr(bucket, server):  # noqa: F811
    s3 = pytest.importorskip(
        "obstore.store", reason="obstore, zarr's access to object storage, is not installed"
    )
    schema = make_schema()
    arrays = make_arrays(schema)
    url = f"{bucket}/a/maps.zarr"
    write_store(url, schema, arrays, shard_bytes=4 * schema.bytes_per_image)
    assert store.verify(url) == []
    assert_stored(store.open(url).gather([22, 3, 3]), arrays, [22, 3, 3])
    there = zarr.storage.ObjectStore(
        s3.S3Store("maps", prefix="a/maps.zarr", client_options={"allow_http": True})
    )
    group = zarr.open_group(there, mode="r")
    assert_stored({name: group[name][...] for name in arrays}, arrays, slice(None))


def test_damage_is_found_and_repaired_there_too(bucket):
    schema = make_schema()
    arrays, url = make_arrays(schema), f"{bucket}/damaged.zarr"
    write_store(url, schema, arrays, shard_bytes=4 * schema.bytes_per_image)
    from store.files import Files

    files = Files(url)
    files.write("gaussians/c/1/0/0/0/0", files.read("gaussians/c/1/0/0/0/0")[:-20])
    files.delete("logits/c/2/0")
    assert set(damaged_images(url)) == {(1, "gaussians", 4, 8), (2, "logits", 8, 12)}
    with pytest.raises(store.CorruptChunk, match="image 5"):
        store.open(url).gather(np.array([0, 5]))
    writer = store.repair(url, schema, shard_bytes=4 * schema.bytes_per_image)
    write_pending(writer, arrays)
    assert store.verify(url) == []
    write_store(url, schema, arrays, overwrite=True)
    assert_stored(store.open(url).gather([0, 5]), arrays, [0, 5])
