"""The kinds that hold maps of trained teachers: largest keys, maps in 8 bits, and views of the
images."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import zarr

import store
from store.encoding import Weights
from stores import (
    NO_MAPS,
    VARIANTS,
    assert_stored,
    damaged_images,
    decoder_for,
    edit_root,
    make_arrays,
    make_schema,
    options_of,
    write_pending,
    write_store,
)

D = 1 / 508


def coded(kind: str) -> tuple[store.Schema, str]:
    """A schema with codes of weights, and the array that holds them."""
    changes = dict(k=3) if kind == "topk" else {}
    name = "weights" if kind == "topk" else "maps"
    return make_schema(kind=kind, encoding="uint8", **changes), name


@pytest.mark.parametrize("kind", ["topk", "dense"])
def test_codes_of_weights_are_read_as_documented(tmp_path, kind):
    schema, name = coded(kind)
    arrays = make_arrays(schema)
    arrays[name][4, 0, 0, 0, :3] = [1.0009, 0, 1e-7]
    write_store(tmp_path / "s", schema, arrays)
    array = zarr.open_group(tmp_path / "s", mode="r")[name]
    codes, step = array[...], array.attrs["sqrt_step"]
    assert codes.dtype == np.uint8 and codes.min() == 1 and codes.max() == 255
    decoded = ((codes.astype(np.float64) - 1) * step) ** 2
    read = store.open(tmp_path / "s").gather(np.arange(23))[name]
    assert read.dtype == np.float16 and np.array_equal(read, decoded.astype(np.float16))
    weights = arrays[name].astype(np.float64).clip(0, 1)
    assert (np.abs(decoded - weights) <= (2 * np.sqrt(weights) + D) * D + 1e-6).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_error_of_a_code(dtype):
    """The bound of ``Weights``, for what a reader gets. Without float16's part it fails."""
    weights = np.linspace(0, 1, 200_001).astype(dtype)
    numbers = Weights()
    codes = numbers.encode(weights[None], coded=True)[0]
    assert codes.min() == 1 and codes.max() == 255
    exact = weights.astype(np.float64)
    error = np.abs(numbers.decode(codes).astype(np.float64) - exact)
    code_error, half_error = (2 * np.sqrt(exact) + D) * D, np.maximum(2**-11 * exact, 2**-25)
    rounding = 1e-7 * (1 + exact)  # the root is taken in float32
    assert (error <= code_error + half_error + rounding).all()
    assert (error > code_error + rounding).any()


@pytest.mark.parametrize("tokens, dtype", [(255, np.uint8), (256, np.uint16)])
def test_the_first_and_the_last_key_are_keys(tmp_path, tokens, dtype):
    """Key 0 is not taken for missing, nor is the last key."""
    schema = make_schema(kind="topk", k=1, grid=(1, tokens), layers=1, heads=1, num_images=4)
    arrays = make_arrays(schema)
    arrays["keys"][:2] = 0
    arrays["keys"][2:] = tokens - 1
    write_store(tmp_path / "s", schema, arrays, shard_bytes=2 * schema.bytes_per_image)
    read = store.open(tmp_path / "s").gather([0, 3, 2, 1])
    assert read["keys"].dtype == dtype
    assert np.array_equal(read["keys"], arrays["keys"][[0, 3, 2, 1]])
    assert store.verify(tmp_path / "s") == []
    metadata = zarr.open_group(tmp_path / "s", mode="r")["keys"].metadata
    assert metadata.fill_value == np.iinfo(dtype).max
    assert metadata.dimension_names == ("image", "layer", "head", "query", "rank")


@pytest.mark.parametrize("kind", [*VARIANTS, "views"])
@pytest.mark.parametrize("preload_bytes", [0, 10**7])
def test_what_is_lost_is_missing(tmp_path, kind, preload_bytes):
    """A shard's file that is not there is read as fill values by zarr, and as missing by us."""
    schema = make_schema(**(VARIANTS | {"views": dict(views=23)})[kind])
    arrays = make_arrays(schema)
    options = dict(shard_bytes=4 * schema.bytes_per_image, decoder=decoder_for(schema))
    write_store(tmp_path / "s", schema, arrays, **options)
    name = next(iter(schema.arrays))
    (lost,) = (path for path in (tmp_path / "s" / name / "c" / "1").rglob("*") if path.is_file())
    lost.unlink()
    assert damaged_images(tmp_path / "s") == [(1, name, 4, 8)]
    maps = store.open(tmp_path / "s", preload_bytes=preload_bytes)
    with pytest.raises(store.CorruptChunk, match=f"{name} of images? [45] .*nothing is stored"):
        maps.gather([3, 5])
    assert len(maps.gather([3, 8])["logits"]) == 2
    writer = store.repair(tmp_path / "s", schema, **options)
    assert [shard.index for shard in writer.pending()] == [1]
    write_pending(writer, arrays)
    assert store.verify(tmp_path / "s") == []


TOPK = dict(kind="topk", k=3)
CODES = dict(encoding="uint8")
ROW = (17, 1, 2, 5)
REFUSED = [
    (TOPK, "keys", [0, 1, 6], "keys out of range; 0 to 5 are right"),
    (TOPK, "keys", [0, -1, 2], "keys out of range; 0 to 5 are right"),
    (TOPK, "keys", [4, 1, 4], "keys has a key twice in one row"),
    (TOPK, "weights", [0.5, np.nan, 0], "weights has NaN"),
    (TOPK, "weights", [1.01, 0, 0], "weights has weights out of range"),
    (TOPK, "weights", [0.5, -1e-3, 0], "weights has weights out of range"),
    (TOPK, "weights", [np.inf, 0, 0], "weights has weights out of range"),
    (TOPK | CODES, "weights", [0.5, np.nan, 0], "weights has NaN"),
    (TOPK | CODES, "weights", [1.01, 0, 0], "weights has weights out of range"),
    (TOPK | CODES, "weights", [0.5, -1e-3, 0], "weights has weights out of range"),
    (TOPK | CODES, "weights", [-np.inf, 0, 0], "weights has weights out of range"),
    (dict(kind="dense"), "maps", [-1.8] * 6, "maps has weights out of range"),
    (dict(kind="dense"), "maps", [7] * 6, "maps has weights out of range"),
    (dict(kind="dense") | CODES, "maps", [0, 0, 2, 0, 0, 0], "maps has weights out of range"),
    (dict(kind="dense") | CODES, "maps", [np.nan] * 6, "maps has NaN"),
]


@pytest.mark.parametrize("changes, name, row, message", REFUSED)
def test_numbers_that_are_no_attention_are_refused(tmp_path, changes, name, row, message):
    schema = make_schema(**changes)
    arrays = make_arrays(schema)
    arrays[name][ROW] = row
    with pytest.raises(store.StoreError, match=f"image 17: {message}") as error:
        write_store(tmp_path / "s", schema, arrays, shard_bytes=4 * schema.bytes_per_image)
    assert "\n" not in str(error.value)
    with pytest.raises(store.UnfinishedStore):
        store.open(tmp_path / "s")


def test_numbers_at_the_edge_of_what_is_attention(tmp_path):
    schema = make_schema(**TOPK)
    arrays = make_arrays(schema)
    arrays["weights"][0, 0, 0, 0] = [1.0009, -0.0, 1e-9]
    write_store(tmp_path / "s", schema, arrays)
    assert_stored(store.open(tmp_path / "s").gather([0]), arrays, [0])


@pytest.mark.parametrize("version", [1, 6, 8, None, "6", 10**4000])
def test_another_format_version_is_refused_and_can_be_replaced(tmp_path, version):
    url, schema = tmp_path / "s", make_schema()
    write_store(url, schema, make_arrays(schema))
    edit_root(url, format_version=version)
    for call in (
        lambda: store.open(url),
        lambda: store.verify(url),
        lambda: store.create(url, schema, resume=True),
        lambda: store.repair(url, schema),
    ):
        with pytest.raises(store.StoreError, match="this gaupipe reads 7 alone") as error:
            call()
        assert "\n" not in str(error.value)
    write_store(url, schema, make_arrays(schema), overwrite=True)
    assert store.verify(url) == []


def test_views_of_images(tmp_path):
    """Entry image * views + view holds a view."""
    schema = make_schema(num_images=24, views=4)
    assert schema.images == 6
    arrays = make_arrays(schema)
    write_store(tmp_path / "s", schema, arrays, shard_bytes=5 * schema.bytes_per_image)
    maps, images, view = store.open(tmp_path / "s"), np.array([5, 0, 2]), 3
    assert len(maps) == 24 and maps.schema.images == 6
    assert_stored(maps.gather(images * 4 + view), arrays, images * 4 + view)
    assert store.verify(tmp_path / "s") == []
    assert make_schema().images == 23


TINY = dict(layers=8, heads=12, grid=(14, 14), num_classes=1000)
"""The paper's Tiny on ImageNet."""
ROWS = {
    "`gaussian`": dict(kind="gaussian"),
    "`topk`, k 8": dict(kind="topk", k=8),
    "`dense`": dict(kind="dense"),
    "`predictions`": NO_MAPS,
}


@pytest.mark.parametrize(
    "row, encoding",
    [
        ("`gaussian`", "float16"),
        ("`topk`, k 8", "uint8"),
        ("`dense`", "float16"),
        ("`dense`", "uint8"),
        ("`predictions`", "float16"),
    ],
)
def test_the_sizes_in_the_documentation(row, encoding):
    """docs/store.md: | kind | encoding | bytes a query | bytes an image |."""
    text = (Path(__file__).parents[1] / "docs/store.md").read_text()
    (line,) = re.findall(rf"^\| {re.escape(row)} \| {encoding} \|(.*)\|$", text, re.MULTILINE)
    cells = [int(cell.replace(",", "")) for cell in line.split("|")]
    schema = make_schema(**TINY | ROWS[row], encoding=encoding)
    queries = TINY["layers"] * TINY["heads"] * math.prod(TINY["grid"])
    whole = schema.bytes_per_image
    predictions_and_label = 2 * schema.num_classes + 8
    assert cells == [(whole - predictions_and_label) / queries, whole]


def test_gaussians_are_decoded_with_numpy_alone(tmp_path, example):
    torch = pytest.importorskip("torch")
    from gaupipe.maps.gaussians import expected_map

    schema = make_schema()
    arrays, draw = make_arrays(schema), np.random.default_rng(0)
    numbers = np.abs(draw.normal(size=arrays["gaussians"].shape)).astype(np.float16) + 0.01
    numbers[..., :2] *= draw.choice([-1, 1], (*numbers.shape[:-1], 2))
    write_store(tmp_path / "s", schema, arrays | {"gaussians": numbers})
    group = zarr.open_group(tmp_path / "s", mode="r")
    ours = expected_map(torch.from_numpy(group["gaussians"][4]), schema.grid)
    np.testing.assert_allclose(example("read_store")[0].read_map(group, 4), ours, atol=1e-6)


@pytest.mark.parametrize(
    "changes,raw_numbers",
    [
        (dict(kind="prior"), 4),
        (dict(kind="prior", parametrisation="paper"), 8),
        (dict(kind="embedding", embedding_dim=7), 4),
        (dict(kind="embedding", embedding_dim=7, parametrisation="paper"), 8),
        (dict(kind="gaussian", encoding="uint8"), 0),
    ],
)
def test_a_decoder_and_codes_of_gaussians_are_read_with_numpy_alone(
    tmp_path, example, changes, raw_numbers
):
    torch = pytest.importorskip("torch")
    from gaupipe.distillation.kinds import StoredAttentionReader

    schema, draw = make_schema(**changes), np.random.default_rng(0)
    raw, layers = schema.heads * schema.tokens * raw_numbers, schema.layers
    shapes = {"weight1": (layers, 7, 5), "bias1": (layers, 5), "weight2": (layers, 5, raw)}
    shape = (layers, schema.heads, schema.tokens, raw_numbers)
    decoder = {"prior": draw.uniform(0.5, 1.5, shape).astype(np.float32)}
    if schema.kind == "embedding":
        for name, shape in shapes.items():
            decoder[name] = draw.uniform(-0.5, 0.5, shape).astype(np.float32)
    options = dict(decoder=decoder) if raw_numbers else {}
    write_store(tmp_path / "s", schema, make_arrays(schema), **options)
    maps = store.open(tmp_path / "s")
    attention = StoredAttentionReader(maps, torch.device("cpu")).attention(maps.gather([4]))
    ours = torch.stack([attention.map(layer)[0] for layer in range(schema.layers)])
    read = example("read_store")[0].read_map(zarr.open_group(tmp_path / "s", mode="r"), 4)
    np.testing.assert_allclose(read, ours, atol=5e-4)  # our codes are decoded to float16
    assert np.ptp(read) > 0.1


@pytest.mark.parametrize("encoding", ["float16", "uint8"])
@pytest.mark.parametrize("k", [3, 6])
def test_keys_are_decoded_with_numpy_alone(tmp_path, example, encoding, k):
    """Image 5 has rows of which rounding leaves the other keys nothing."""
    torch = pytest.importorskip("torch")
    from gaupipe.distillation.kinds import StoredAttentionReader

    schema = make_schema(kind="topk", k=k, encoding=encoding)
    arrays = make_arrays(schema)
    arrays["weights"][5] = 0
    arrays["weights"][5, ..., 0] = 1
    write_store(tmp_path / "s", schema, arrays)
    group = zarr.open_group(tmp_path / "s", mode="r")
    maps = store.open(tmp_path / "s")
    attention = StoredAttentionReader(maps, torch.device("cpu")).attention(maps.gather([4, 5]))
    ours = torch.stack([attention.map(layer) for layer in range(schema.layers)], dim=1)
    read_map = example("read_store")[0].read_map
    np.testing.assert_allclose(read_map(group, 4), ours[0], atol=5e-4)
    np.testing.assert_allclose(read_map(group, 5), ours[1], atol=5e-4)


@pytest.mark.parametrize("encoding", ["float16", "uint8"])
def test_whole_maps_are_decoded_with_numpy_alone(tmp_path, example, encoding):
    schema = make_schema(kind="dense", encoding=encoding)
    arrays = make_arrays(schema)
    write_store(tmp_path / "s", schema, arrays)
    group = zarr.open_group(tmp_path / "s", mode="r")
    read = example("read_store")[0].read_map(group, 4)
    np.testing.assert_allclose(read, arrays["maps"][4], atol=5e-3)


NAMES = ["cat/a b.png", "cat/ü.png", "犬/" + "x" * 26, "1", "cat/a b.png"]


@pytest.mark.parametrize("preload_bytes", [0, 10**6])
def test_names_of_images_are_read_by_zarr_alone(tmp_path, preload_bytes):
    """Those of other alphabets, one that fills its row, and two that are the same."""
    longest = max(len(name.encode()) for name in NAMES)
    schema = make_schema(**NO_MAPS | dict(num_images=5, name_bytes=longest))
    arrays = make_arrays(schema) | {"names": store.pack_names(NAMES, longest)}
    write_store(tmp_path / "s", schema, arrays, shard_bytes=2 * schema.bytes_per_image)
    array = zarr.open_group(tmp_path / "s", mode="r")["names"]
    assert (array.shape, array.dtype) == ((5, longest), np.uint8)
    assert [row.tobytes().rstrip(b"\0").decode() for row in array[...]] == NAMES
    maps = store.open(tmp_path / "s", preload_bytes=preload_bytes)
    read = maps.gather([4, 2, 1], ["names"])["names"]
    assert store.unpack_names(read) == [NAMES[image] for image in (4, 2, 1)]
    assert store.unpack_names(maps.read(0, 0)["names"]) == []


@pytest.mark.parametrize("name", ["", "a\0b", "abcdef", "äöü"])
def test_a_name_that_does_not_fit_is_refused(name):
    with pytest.raises(store.StoreError, match="must have 1 to 5 bytes") as error:
        store.pack_names(["fine", name], 5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("row", [b"\0\0\0", b"a\0b", b"\xfc\0\0"], ids=str)
def test_bytes_that_are_no_name_are_refused(tmp_path, row):
    schema = make_schema(name_bytes=3)
    arrays = make_arrays(schema)
    arrays["names"][17] = np.frombuffer(row, np.uint8)
    with pytest.raises(store.StoreError, match="image 17: names is no UTF-8 text"):
        write_store(tmp_path / "s", schema, arrays, **options_of(schema))
    with pytest.raises(store.StoreError, match="image 0: names are float64; store.pack_names"):
        write_store(tmp_path / "t", schema, arrays | {"names": np.ones((23, 3))})
