"""`gaupipe inspect --png`: the map over its image."""

import json

import numpy as np
import pytest
from PIL import Image

import store
from stages.look.colours import colours
from stages.look.image_maps import images_of
from stages.look.picture import draw
from stores import edit_root

MARK = (255, 45, 111)


def over(weights: np.ndarray, photo: np.ndarray) -> np.ndarray:
    """Colours [..., 3] of shares of the largest weight [...] over a photo's [..., 3]."""
    painted = colours()[np.round(255 * weights).astype(int)].astype(float)
    opaque = painted[..., 3:] / 255
    return opaque * painted[..., :3] + (1 - opaque) * photo


def test_the_map_lies_on_the_part_that_the_model_sees(tmp_path):
    brown = (128, 100, 60)
    weights = np.array([[0.0, 1.0], [0.5, 0.0]])
    photo = Image.new("RGB", (200, 100), brown), (0.25, 0, 0.75, 1)
    draw(weights, 2, photo, tmp_path / "one.png")
    drawn = np.asarray(Image.open(tmp_path / "one.png"))
    assert drawn.shape == (300, 600, 3)
    assert (drawn[:, :150] == brown).all() and (drawn[:, 450:] == brown).all()
    assert (drawn[:150, 150:300] == brown).all()  # no attention: the photo
    np.testing.assert_allclose(
        drawn[:150, 300:450].reshape(-1, 3), [over(1.0, brown)] * 150**2, 0, 1
    )
    patch = drawn[150:, 150:300]  # the query's
    framed = (patch == MARK).all(-1)
    assert framed[0].all() and framed[-1].all() and framed[:, 0].all() and framed[:, -1].all()
    assert not framed[5:-5, 5:-5].any() and (drawn == MARK).all(-1).sum() == framed.sum()
    np.testing.assert_allclose(patch[75, 75], over(0.5, brown), atol=1)


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
    expected = over(np.kron(weights / weights.max(), np.ones((2, 2))), digit)
    np.testing.assert_allclose(drawn[16::32, 16::32], expected, atol=2)
    marked = (drawn == MARK).all(-1)
    if query == "mean":
        assert not marked.any()
    else:
        rows, columns = np.nonzero(marked)
        assert (rows.min(), rows.max(), columns.min(), columns.max()) == (64, 127, 128, 191)


def test_without_the_images_the_map_is_drawn_alone(copied_run, in_process, tmp_path):
    url = copied_run() / "maps.zarr"
    edit_root(url, extra={"data": {"name": "folder", "root": "absent"}})
    code, out, err = in_process(
        "inspect", url, "--image", 3, "--json", "--png", "a.png", cwd=tmp_path
    )
    assert code == 0 and err.count("\n") == 1 and "--png a.png" in err and "absent" in err
    weights = np.array(json.loads(out)["map"])
    drawn = np.asarray(Image.open(tmp_path / "a.png"))
    expected = colours()[np.round(255 * weights / weights.max()).astype(int), :3]
    np.testing.assert_array_equal(drawn[32::64, 32::64], expected)
