"""`gaupipe view --model`: a model's attention on image files, without a run or a store."""

import base64
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from stages.view.model_viewer import ModelViewer, open_model

import gaupipe.models  # noqa: F401
from gaupipe.models import save_student
from gaupipe.system.errors import UserError
from test_capture import eager_maps, randomised
from test_view import serving
from test_view_browser import CHROMIUM, Page, browser  # noqa: F401  (a fixture)

SIZES = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=3)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two pictures of 32 pixels."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def viewer(pictures, tmp_path_factory):
    """A random ViT with a class token and two registers, opened on the pictures."""
    torch.manual_seed(0)
    # the folder is read back, so that what the page shows comes from its files alone
    folder = tmp_path_factory.mktemp("model")
    model = randomised(timm.create_model("vit_tiny_patch16_224", reg_tokens=2, **SIZES))
    save_student(model, folder, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
    return open_model(f"local-dir:{folder}", [pictures])


def test_maps_are_those_of_eager_attention_on_the_prepared_image(viewer, pictures):
    message = viewer.image(1)
    length = int.from_bytes(message[:4], "little")
    header = json.loads(message[4 : 4 + length])
    pixels = np.asarray(Image.open(pictures / "b.png")).transpose(2, 0, 1) / 127.5 - 1
    images = torch.tensor(pixels, dtype=torch.float32)[None]
    expected = torch.cat(eager_maps(viewer.model, images))  # [L, H, N, N]
    dtype, shape, offset = header["arrays"]["maps"]
    start = 4 + length + offset
    maps = np.frombuffer(message[start : start + 4 * expected.numel()], dtype).reshape(shape)
    np.testing.assert_allclose(maps, expected, atol=1e-5)
    assert header["extra"] == ["class", "register 1", "register 2"] and header["grid"] == [4, 4]
    assert header["predicted"] == viewer.model(images).argmax().item()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_shows_class_and_register_tokens(viewer, browser):  # noqa: F811
    with serving(viewer) as address:
        page = Page(browser, f"{address}/")
        page.open("image=0&layer=1&head=1")
        page.press("c")
        page.until("document.querySelector('#facts').innerText.includes('class')")
        saved = json.loads(page.saved("#json"))
        assert page.text("#title") == "a.png" and page.page.is_hidden("#banner")
        page.press("Escape", "m", ".")
        assert page.state()["head"] == "0"
        page.open("image=1&query=x9")
        assert "query" not in page.state()
        assert page.complaints == []
        page.page.close()
    maps = torch.cat(eager_maps(viewer.model, viewer._input(0)[None]))  # [L, H, N, N]
    row = maps[1, 1, 0]
    assert saved["query"] == "x0"
    np.testing.assert_allclose(np.ravel(saved["map"]), row[3:], atol=1e-5)
    np.testing.assert_allclose(list(saved["extra"].values()), row[:3], atol=1e-5)


def test_a_page_without_a_server_holds_the_maps(pictures, viewer, tmp_path):
    from stages.view.page import write_page

    write_page(viewer, tmp_path / "page.html", [0, 1], {"image": 0})
    text = (tmp_path / "page.html").read_text()
    embedded = json.loads(text.partition('id="embedded">')[2].partition("</script>")[0])
    assert base64.b64decode(embedded["images"]["1"]["views"][0]) == viewer.image(1)
    assert embedded["images"]["0"]["pixels"][0]


def test_without_weights_the_page_says_that_they_are_random(pictures):
    opened = open_model("vit_tiny_patch16_224.augreg_in21k", [pictures], image_size=32)
    assert "Random weights" in opened.about()["note"] and "--download" in opened.about()["note"]
    assert opened.about()["grid"] == [2, 2]


def test_a_large_model_is_shown_at_fewer_pixels_and_says_so(pictures):
    model = timm.create_model("vit_tiny_patch16_224", **SIZES | dict(img_size=256))
    from stages.view.model_viewer import fitted

    assert fitted("it", model, None) == (160, "Shown at 160 pixels, of the model's 256: "
                                              "--image-size 256 shows all.")  # fmt: skip
    assert ModelViewer("it", model, [pictures / "a.png"], "", 160).image(0)


@pytest.mark.parametrize(
    "source,arguments,message",
    [
        ("swin_tiny_patch4_window7_224", {}, "does not attend over all patches"),
        ("resnet18", {}, "no attention"),
        ("no_such_model", {}, "timm has no weights"),
        ("vit_tiny_patch16_224", dict(image_size=33), "--image-size 33"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(pictures, source, arguments, message):
    with pytest.raises(UserError, match=message):
        open_model(source, [pictures], **arguments)


def test_a_file_that_is_no_image_is_refused_by_name(tmp_path, viewer):
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"broken\.png: not readable"):
        ModelViewer("it", viewer.model, [tmp_path / "broken.png"]).image(0)
