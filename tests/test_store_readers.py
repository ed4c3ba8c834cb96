"""A store is read by zarr-python and tensorstore without our code; both see the same numbers."""

from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr

import store
from stores import VARIANTS, decoder_for, make_arrays, make_schema, options_of, write_store

LAYOUTS = [*VARIANTS.values(), dict(kind="topk", k=2, grid=(16, 17), layers=1, heads=1)]


def write(url: Path, changes: dict) -> dict[str, np.ndarray]:
    schema = make_schema(num_classes=200, **changes)
    write_store(url, schema, make_arrays(schema), **options_of(schema, 5))
    return store.open(url).gather(np.arange(schema.num_images))


def by_zarr(url: Path) -> dict[str, np.ndarray]:
    return {name: array[...] for name, array in zarr.open_group(url, mode="r").arrays()}


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
@pytest.mark.filterwarnings("error")
def test_zarr_and_tensorstore_agree(tmp_path, changes):
    ours, theirs = write(tmp_path / "s", changes), by_zarr(tmp_path / "s")
    for name, values in theirs.items():
        opened = tensorstore.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/s/{name}/"}}
        ).result()
        read = opened.read().result()
        assert read.dtype == values.dtype and np.array_equal(read, values)
        if name in ours and "encoding" not in changes:
            assert ours[name].dtype == values.dtype and np.array_equal(ours[name], values)
    for name, values in (decoder_for(make_schema(**changes)) or {}).items():
        assert np.array_equal(
            zarr.open_group(tmp_path / "s", mode="r")["decoder"][name][...], values
        )


def test_xarray_opens_a_store_with_its_decoder(tmp_path):
    """By the names of its dimensions, with the metadata that the root repeats."""
    xarray = pytest.importorskip("xarray")
    schema = make_schema(kind="prior", num_images=5, grid=(2, 2), layers=1, heads=2)
    arrays = make_arrays(schema)
    decoder = {"prior": np.ones((1, 2, 4, 5), np.float32)}
    write_store(tmp_path / "s", schema, arrays, decoder=decoder)
    data = xarray.open_zarr(tmp_path / "s", consolidated=True)
    assert dict(data.sizes) == {"image": 5, "class": schema.num_classes}
    assert np.array_equal(data["labels"].sel(image=[4, 0]), arrays["labels"][[4, 0]])
    assert data.attrs["complete"] is True
    tree = xarray.open_datatree(tmp_path / "s", engine="zarr", consolidated=True)
    prior = tree["decoder/prior"]
    assert prior.dims == ("layer", "head", "query", "raw")
    assert np.array_equal(prior, decoder["prior"])


def test_xarray_opens_a_store_of_everything(tmp_path):
    """Axes of the same name have the same length."""
    xarray = pytest.importorskip("xarray")
    schema = make_schema(kind="embedding", embedding_dim=7, features_dim=3, name_bytes=4)
    write_store(tmp_path / "s", schema, make_arrays(schema), **options_of(schema))
    data = xarray.open_zarr(tmp_path / "s", consolidated=True)
    assert (data.sizes["feature"], data.sizes["channel"], data.sizes["byte"]) == (7, 3, 4)


def test_shuffled_reads_keep_nothing_of_what_they_have_read(tmp_path):
    """An epoch reads each image once: memory does not grow with the images read."""
    schema = make_schema(num_images=24_000, grid=(4, 8))  # 1.5 kB an image
    url = tmp_path / "s"
    writer = store.create(url, schema)
    count = writer.shards[0].stop
    rows = make_arrays(make_schema(num_images=count, grid=(4, 8)))
    for shard in writer.shards:
        writer.write(shard, {name: row[: shard.stop - shard.start] for name, row in rows.items()})
    writer.finish()
    maps = store.open(url)
    batches = np.random.default_rng(0).permutation(24_000).reshape(-1, 100)
    resident = []
    for number, batch in enumerate(batches):
        maps.gather(batch)
        if number in (40, 239):
            lines = Path("/proc/self/status").read_text().splitlines()
            [line] = [line for line in lines if line.startswith("RssAnon")]
            resident.append(int(line.split()[1]) / 1000)
    assert resident[1] - resident[0] < 12  # of 31 MB
