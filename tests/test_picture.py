"""`gaupipe inspect --png`: the photo in colour where the map is high, grey and dark elsewhere."""

import json

import numpy as np
import pytest
from PIL import Image

import store
from stages.look.colours import top_of
from stages.look.image_maps import images_of
from stages.look.picture import draw
from stores import edit_root

MARK = (255, 45, 111)


def lit(clear: np.ndarray, photo: np.ndarray) -> np.ndarray:
    """Colours [..., 3] of a photo [..., 3] where so much light falls [...]; dark is 0.35 of its
    luminance (ITU-R BT.709)."""
    dark = 0.35 * np.asarray(photo, float) @ [0.2126, 0.7152, 0.0722]
    clear = np.asarray(clear)[..., None]
    return clear * photo + (1 - clear) * dark[..., None]


def test_the_light_falls_on_the_part_that_the_model_sees(tmp_path):
    brown = (128, 100, 60)
    weights = np.array([[0.0, 1.0], [0.5, 0.0]])
    photo = Image.new("RGB", (200, 100), brown), (0.25, 0, 0.75, 1)
    draw(weights, 2, photo, tmp_path / "one.png")
    drawn = np.asarray(Image.open(tmp_path / "one.png")).astype(float)
    assert drawn.shape == (300, 600, 3)
    for unseen in (drawn[:, :150], drawn[:, 450:], drawn[:50, 150:200]):
        assert np.abs(unseen - lit(0, brown)).max() <= 1
    np.testing.assert_allclose(drawn[75, 375], brown, atol=1)  # the brightest 2 % are clear
    share = 0.5 / (0.5 + 0.94 * 0.5)  # of the 98th percentile of four numbers
    np.testing.assert_allclose(drawn[225, 225], lit(share**0.7, brown), atol=2)
    patch = drawn[150:, 150:300]  # the query's
    framed = (patch == MARK).all(-1)
    assert framed[0].all() and framed[-1].all() and framed[:, 0].all() and framed[:, -1].all()
    assert not framed[5:-5, 5:-5].any() and (drawn == MARK).all(-1).sum() == framed.sum()


def test_the_brightest_patches_are_drawn_alike():
    weights = np.ones(100)
    weights[3] = 1000
    assert top_of(weights) == 1
    assert top_of(np.eye(10)[0]) == pytest.approx(0.82)  # of ten numbers: 0.98 * 9 is 8.82
    assert top_of(np.eye(100)[0]) == 1  # where hardly any is above 0: the largest
    assert top_of(np.zeros(4)) == 1


def test_a_part_that_reaches_beyond_the_photo_is_cut(tmp_path):
    photo = Image.new("RGB", (300, 300)), (-0.5, 0, 1.5, 1)
    draw(np.array([[1.0, 0, 0, 1]]), 0, photo, tmp_path / "one.png")
    assert np.asarray(Image.open(tmp_path / "one.png")).shape == (300, 300, 3)


@pytest.mark.parametrize("query", [6, "mean"])
def test_inspect_draws_what_it_prints(small_run, in_process, tmp_path, query):
    url = small_run / "maps.zarr"
    one = ["--image", 3, "--head", 1, "--query", query, "--png", "map.png"]
    code, out, err = in_process("inspect", url, *one, "--json", cwd=tmp_path)
    assert (code, err) == (0, "")
    weights = np.array(json.loads(out)["map"])
    drawn = np.asarray(Image.open(tmp_path / "map.png"))
    assert drawn.shape == (256, 256, 3) and [path.name for path in tmp_path.iterdir()] == [
        "map.png"
    ]
    digit = images_of(store.open(url)).train.image(3)  # [8, 8, 1]
    shares = np.clip(weights / np.quantile(weights, 0.98), 0, 1)
    middles = slice(31, None, 64)  # of patches, where the light is that of the map
    marked_apart = lit(shares**0.7, np.repeat(digit[::2, ::2], 3, -1))
    np.testing.assert_allclose(drawn[middles, middles], marked_apart, atol=4)
    marked = (drawn == MARK).all(-1)
    if query == "mean":
        assert not marked.any()
    else:
        rows, columns = np.nonzero(marked)
        assert (rows.min(), rows.max(), columns.min(), columns.max()) == (64, 127, 128, 191)


def test_without_the_images_nothing_is_drawn(copied_run, in_process, tmp_path):
    url = copied_run() / "maps.zarr"
    edit_root(url, extra={"data": {"name": "folder", "root": "absent"}})
    code, _, err = in_process("inspect", url, "--image", 3, "--png", "a.png", cwd=tmp_path)
    assert code == 2 and "absent" in err and not (tmp_path / "a.png").exists()
