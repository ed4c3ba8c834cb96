"""The store as a user of it alone meets it: what goes in comes out, and every mistake is
answered in one line."""

import contextlib
import os
import pickle
import resource
from functools import partial

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import store
from damage import contents, differing
from store.files import Files
from stores import (
    KINDS,
    NO_MAPS,
    assert_stored,
    decoder_for,
    make_arrays,
    make_schema,
    options_of,
    write_store,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["kind"])
@pytest.mark.parametrize("preload_bytes", [0, 10**6])
def test_gather_returns_the_rows_asked_for(tmp_path, kind, preload_bytes):
    schema = make_schema(**kind)
    arrays = make_arrays(schema)
    write_store(tmp_path / "s", schema, arrays, **options_of(schema))
    maps = store.open(tmp_path / "s", preload_bytes=preload_bytes)
    ids = np.array([22, 0, 0, 7, 8, 3])
    assert list(maps.gather(ids)) == list(schema.arrays)
    assert_stored(maps.gather(ids), arrays, ids)
    assert_stored(maps.gather([]), arrays, [])
    assert_stored(maps.read(6, 21), arrays, range(6, 21))  # parts of shards
    assert_stored(maps.read(22, 23, ["labels"]), {"labels": arrays["labels"]}, [22])
    labels = {"labels": arrays["labels"]}
    assert_stored(maps.gather(ids, iter(["labels"])), labels, ids)
    assert_stored(maps.read(6, 21, iter(["labels"])), labels, range(6, 21))
    for read in maps.prefetch([ids, ids], names=iter(["labels"])):
        assert_stored(read, labels, ids)
    assert (maps.schema, maps.complete) == (schema, True)
    decoder = decoder_for(schema) or {}
    assert maps.decoder().keys() == decoder.keys()
    read = maps.decoder()
    assert [
        name for name, values in decoder.items() if not np.array_equal(read[name], values)
    ] == []
    files = contents(tmp_path / "s").items()
    sizes = [len(data) for key, data in files if key.split("/c/")[0] in schema.arrays]
    assert maps.size_on_disk() == sum(sizes)


SIZES = st.fixed_dictionaries(
    dict(
        num_images=st.integers(1, 16),
        grid=st.tuples(st.integers(1, 3), st.integers(1, 4)),
        layers=st.integers(1, 3),
        heads=st.integers(1, 3),
        num_classes=st.sampled_from([1, 4, 127, 128, 300]),
    )
)


@settings(max_examples=12, deadline=None)
@given(data=st.data(), sizes=SIZES, shard_images=st.floats(1, 20))
def test_any_shape_and_shard_size(tmp_path_factory, data, sizes, shard_images):
    kind = data.draw(st.sampled_from(["gaussian", "dense", "topk"]))
    tokens = sizes["grid"][0] * sizes["grid"][1]
    k = data.draw(st.integers(1, tokens)) if kind == "topk" else None
    schema = make_schema(kind=kind, k=k, **sizes)
    arrays, url = make_arrays(schema), tmp_path_factory.mktemp("any") / "s"
    shard_bytes = int(shard_images * schema.bytes_per_image)
    writer = write_store(url, schema, arrays, shard_bytes=shard_bytes)
    images = [image for shard in writer.shards for image in range(shard.start, shard.stop)]
    assert images == list(range(schema.num_images))
    ids = data.draw(st.lists(st.integers(0, schema.num_images - 1), max_size=30))
    assert_stored(store.open(url).gather(ids), arrays, ids)
    group = zarr.open_group(url, mode="r")
    assert_stored({name: group[name][...] for name in arrays}, arrays, slice(None))
    assert store.verify(url) == []


def test_a_shard_of_small_images_has_a_few_thousand(tmp_path):
    """Its bytes would let it have a million: nothing would be left for other parts of an export."""
    schema = make_schema(**NO_MAPS | dict(num_images=10_000))
    shards = store.create(tmp_path / "s", schema).shards
    assert [shard.stop - shard.start for shard in shards] == [4096, 4096, 1808]


def test_zarr_finds_the_contracted_group(tmp_path):
    schema = make_schema(extra={"label_passes": 4})
    write_store(tmp_path / "s", schema, make_arrays(schema))
    group = zarr.open_group(tmp_path / "s", mode="r")
    expected = dict(format="gaupipe-maps", format_version=7, kind="gaussian", grid=[2, 3])
    expected |= dict(layers=2, heads=3, num_classes=5, dataset="toy", teacher_sha256="a" * 64)
    expected |= dict(parametrisation="loc_scale", complete=True, extra={"label_passes": 4})
    assert {name: group.attrs[name] for name in expected} == expected
    gaussians = group["gaussians"]
    assert (gaussians.shape, gaussians.chunks) == ((23, 2, 3, 6, 4), (1, 2, 3, 6, 4))
    assert gaussians.dtype == np.float16
    assert gaussians.metadata.dimension_names == ("image", "layer", "head", "query", "parameter")
    assert group["labels"].dtype == np.int64 and group["logits"].dtype == np.float16


def test_prefetch_keeps_the_order_and_passes_errors_on(tmp_path):
    schema = make_schema()
    arrays = make_arrays(schema)
    write_store(tmp_path / "s", schema, arrays)
    maps, batches = store.open(tmp_path / "s"), np.random.default_rng(0).integers(0, 23, (9, 4))
    for depth in (0, 2, 50):
        read = list(maps.prefetch(batches, depth))
        assert len(read) == 9
        for ids, rows in zip(batches, read, strict=True):
            assert_stored(rows, arrays, ids)
    stream = maps.prefetch([[1], [2], [99], [3]])
    assert [len(next(stream)["labels"]), len(next(stream)["labels"])] == [1, 1]
    with pytest.raises(store.StoreError, match="no image 99"):
        next(stream)


def test_what_float16_cannot_hold_is_clipped_and_nan_refused(tmp_path):
    schema = make_schema()
    arrays = make_arrays(schema)
    arrays["gaussians"][3, 0, 0, 0] = [1e9, -np.inf, -0.0, np.inf]
    write_store(tmp_path / "s", schema, arrays, shard_bytes=4 * schema.bytes_per_image)
    stored = store.open(tmp_path / "s").gather([3])["gaussians"][0, 0, 0, 0]
    assert stored.tolist() == [65504, -65504, 2**-14, 65504]
    for name, value, message in (
        ("gaussians", np.nan, "image 17: gaussians has NaN"),
        ("logits", np.nan, "image 17: logits has NaN"),
        ("gaussians", -1, "image 17: gaussians has a negative standard deviation"),
        ("labels", 5, "image 17: labels out of range; 0 to 4"),
    ):
        bad = make_arrays(schema)
        bad[name][17].reshape(-1)[-1:] = value
        if name == "labels":
            bad[name][17] = value
        with pytest.raises(store.StoreError, match=message):
            write_store(tmp_path / "bad", schema, bad, overwrite=True, **options_of(schema))
        with pytest.raises(store.StoreError, match="incomplete"):
            store.open(tmp_path / "bad")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_arrays_of_float16_are_checked_and_left_alone(tmp_path, value):
    schema = make_schema()
    arrays = make_arrays(schema)
    arrays["logits"] = arrays["logits"].astype(np.float16)
    arrays["logits"][17, 2] = value
    given = arrays["logits"].copy()
    refused = pytest.raises(store.StoreError, match="image 17: logits has NaN")
    with refused if np.isnan(value) else contextlib.nullcontext():
        write_store(tmp_path / "s", schema, arrays)
        read = store.open(tmp_path / "s").gather(np.arange(23))["logits"]
        assert np.array_equal(read, given.clip(-65504, 65504))
    assert np.array_equal(arrays["logits"], given, equal_nan=True)


def test_uint8_codes_are_read_as_documented(tmp_path):
    schema = make_schema(encoding="uint8")
    arrays = make_arrays(schema)
    write_store(tmp_path / "s", schema, arrays)
    array = zarr.open_group(tmp_path / "s", mode="r")["gaussians"]
    codes, constants = array[...].astype(np.float64), array.attrs
    means = (codes[..., :2] - 128) * constants["mean_step"]
    logs = constants["log_std_min"] + (codes[..., 2:] - 1) * constants["log_std_step"]
    decoded = np.concatenate([means, np.exp(logs)], axis=-1)
    read = store.open(tmp_path / "s").gather(np.arange(23))["gaussians"]
    assert array.dtype == np.uint8 and np.array_equal(read, decoded.astype(np.float16))
    mean, std = np.split(arrays["gaussians"], 2, axis=-1)
    assert np.abs(means - mean.clip(-2, 2)).max() <= 0.55 * constants["mean_step"]
    assert np.abs(logs - np.log(std.clip(2**-9, 8))).max() <= 0.55 * constants["log_std_step"]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(kind="maps"), "choose one of gaussian, embedding, prior, dense, topk, predictions"),
        (dict(heads=True), "heads is True"),
        (dict(grid=(3,)), "grid"),
        (dict(grid=None), "grid is None .* must be .height, width."),
        (dict(layers=None), "layers is None"),
        (
            dict(kind="predictions"),
            r"grid is \(2, 3\) .* None in the kind 'predictions', .* no maps",
        ),
        (NO_MAPS | dict(heads=3), "heads is 3 .* None in the kind 'predictions'"),
        (NO_MAPS | dict(k=3), "k is 3 .* in the kind 'predictions' it must be None"),
        (NO_MAPS | dict(prefix_tokens=1), "prefix_tokens is 1"),
        (NO_MAPS | dict(encoding="uint8"), "kind 'predictions' takes the encoding 'float16' alone"),
        (dict(features_dim=0), "features_dim is 0"),
        (dict(labelled=1), "labelled is 1 .* true or false"),
        (dict(kind="embedding"), "embedding_dim is None"),
        (dict(embedding_dim=8), "embedding_dim is 8"),
        (dict(encoding="int4"), "choose one of float16, uint8"),
        (dict(kind="prior", encoding="uint8"), "kind 'prior' takes the encoding 'float16' alone"),
        (dict(kind="topk"), "k is None .* kind 'topk' it must be a whole number from 1 to 6"),
        (dict(kind="topk", k=7), "from 1 to 6"),
        (dict(kind="topk", k=1, grid=(256, 256)), "at most 65535"),
        (dict(k=3), "k is 3 .* in the kind 'gaussian' it must be None"),
        (dict(views=0), "views is 0"),
        (dict(views=2), "num_images is 23 .* multiple of the 2 views"),
        (dict(extra={"a": {1}}), "plain JSON"),
        (dict(extra={"a": np.nan}), "plain JSON"),
    ],
)
def test_a_schema_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(store.StoreError, match=message) as error:
        make_schema(**changes)
    assert "\n" not in str(error.value)


def test_mistakes_give_one_line(tmp_path):
    schema, arrays = make_schema(), make_arrays(make_schema())
    url = tmp_path / "s"

    def refused(message: str, call) -> None:
        with pytest.raises(store.StoreError, match=message) as error:
            call()
        assert "\n" not in str(error.value)

    refused("no attention-map store there", lambda: store.open(url))
    refused("no attention-map store there", lambda: store.join(url))
    assert not url.exists()
    writer = store.create(url, schema, shard_bytes=4 * schema.bytes_per_image)
    refused("6 of 6 shards are not written yet, first images 0 to 3", writer.finish)
    refused(r"incomplete; .*store.create\(..., resume=True\)", lambda: store.open(url))
    refused(
        "image 0 is not written yet; continue with",
        lambda: store.open(url, allow_incomplete=True).gather([0]),
    )
    refused(r"overwrite=True \(--overwrite\) replaces it", lambda: store.create(url, schema))
    shard = writer.shards[0]
    refused(
        "has the arrays gaussians, logits, labels; given: logits",
        lambda: writer.write(shard, {"logits": arrays["logits"]}),
    )
    refused(
        r"gaussians of shard 0 has shape \(23, 2, 3, 6, 4\); \(4, 2, 3, 6, 4\) is right",
        lambda: writer.write(shard, arrays),
    )
    write_store(url, schema, arrays, resume=True)
    opened = store.open(url)
    refused("layers 3 against 2", lambda: store.create(url, make_schema(layers=3), resume=True))
    refused("another data set", lambda: store.open(url, dataset_sha256="e" * 64))
    refused("another teacher", lambda: store.open(url, teacher_sha256="e" * 64))
    refused("no image 23; the store has images 0 to 22", lambda: store.open(url).gather([1, 23]))
    refused("no image -1", lambda: store.open(url).gather([-1]))
    refused("whole numbers", lambda: store.open(url).gather([0.5]))
    for read in (partial(opened.gather, [0]), partial(opened.read, 0, 1)):
        unknown = "no array 'maps'; there are gaussians, logits, labels"
        refused(unknown, partial(read, names=["maps"]))
        refused(r"a list, such as \['labels'\]", partial(read, names="labels"))
        assert list(read(names=iter(["labels"]))) == ["labels"]
    refused("images 5 to 2: the first comes first", lambda: opened.read(5, 2))
    refused(
        "a store of kind 'gaussian' has no decoder",
        lambda: store.create(tmp_path / "d", schema, decoder={"w": np.ones(1)}),
    )
    refused("needs its decoder", lambda: store.create(tmp_path / "d", make_schema(kind="prior")))
    zarr.create_group(tmp_path / "foreign")
    refused("not a store of attention maps", lambda: store.open(tmp_path / "foreign"))
    (tmp_path / "foreign/zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    refused("not a store of attention maps", lambda: store.open(tmp_path / "foreign"))
    (url / "zarr.json").unlink()
    os.mkfifo(url / "zarr.json")
    refused("zarr.json: is no regular file", lambda: store.open(url))


def test_too_many_open_files_are_no_full_disk(tmp_path):
    files, opened = Files(tmp_path), []
    files.write("first", b"")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(store.StoreError, match="too many open files: raise the limit") as error:
            files.write_all({f"{number}": b"0" for number in range(10)})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in opened:
            os.close(descriptor)
    assert "disk" not in str(error.value)


def test_overwrite_replaces_everything(tmp_path):
    schema, other = make_schema(kind="dense"), make_schema(num_images=12)
    write_store(tmp_path / "s", other, make_arrays(other), shard_bytes=1)
    write_store(tmp_path / "s", schema, make_arrays(schema), overwrite=True)
    write_store(tmp_path / "fresh", schema, make_arrays(schema))
    assert differing(contents(tmp_path / "s"), contents(tmp_path / "fresh")) == []
    assert store.verify(tmp_path / "s") == []


def test_a_forked_process_is_refused(tmp_path):
    schema = make_schema()
    write_store(tmp_path / "s", schema, make_arrays(schema))
    maps = store.open(tmp_path / "s")
    child = os.fork()
    if child == 0:
        try:
            maps.gather([0])
        except store.StoreError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_errors_travel_between_processes():
    error = pickle.loads(pickle.dumps(store.CorruptChunk("gone", 7, "maps")))
    assert (str(error), error.image_id, error.array) == ("gone", 7, "maps")
