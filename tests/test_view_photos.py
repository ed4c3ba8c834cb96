"""`gaupipe view` over photos: the photo as it is, photos that are added, names of classes, numbers
of heads, and `gaupipe.show`."""

import contextlib
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from scipy.ndimage import maximum_filter

import gaupipe
from gaupipe.data.prepared import PreparedImages, folder_labels
from gaupipe.models import save_student
from gaupipe.system.errors import UserError
from gaupipe.teachers.files import open_model
from gaupipe.vit.saving import class_names
from stages.look.colours import colours, top_of
from stages.look.measures import numbers, with_mean_and_rollout
from stages.look.picture import light
from stages.view import app
from stages.view.messages import Start
from stages.view.notebook import as_files
from stages.view.page import write_page
from stages.view.serve import model_viewer, open_viewer
from viewing import Page, get, serving, unpacked
from vits import randomised

SIZES = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=3)


def ramps(width: int, height: int) -> Image.Image:
    """Red grows from left to right, green from top to bottom."""
    red, green = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([red, green, 0 * red], -1).round().astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A wide photo and a high one, and a model."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "photos").mkdir()
    ramps(300, 160).save(folder / "photos" / "wide.png")
    ramps(90, 200).save(folder / "photos" / "high.png")
    torch.manual_seed(0)
    model = randomised(timm.create_model("vit_tiny_patch16_224", **SIZES))
    save_student(model, folder / "model", mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.8)
    return folder


@pytest.fixture
def viewer(folder):
    job, note = open_model(str(folder / "model"), [folder / "photos"], to_look=True)
    return model_viewer(job, note)


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(300, 160), (90, 200), (64, 64)])
def test_the_part_of_a_photo_is_what_the_model_gets(tmp_path, mode, size):
    """A ramp's colours at the borders of what timm's transform keeps say where these lie."""
    ramps(*size).save(tmp_path / "photo.png")
    transform = {"input_size": (3, 48, 48), "crop_pct": 0.8, "crop_mode": mode}
    source = PreparedImages([tmp_path / "photo.png"], transform)
    (kept,), _ = source.__getitems__([0])
    left, top, right, bottom = source.crop(*size)
    half = 0.5 * (right - left) / 48, 0.5 * (bottom - top) / 48  # a pixel's middle
    across = kept[0, 24].float() / 255
    down = kept[1, :, 24].float() / 255
    pixel = max(right - left, bottom - top) / 48  # timm rounds where it cuts
    inside = slice(12, 36)  # with the mode border the outermost pixels are not of the photo
    places = torch.linspace(left + half[0], right - half[0], 48)
    np.testing.assert_allclose(across[inside], places[inside], atol=0.75 * pixel)
    places = torch.linspace(top + half[1], bottom - half[1], 48)
    np.testing.assert_allclose(down[inside], places[inside], atol=0.75 * pixel)


def test_the_photo_has_all_its_pixels_and_its_name(viewer):
    header, _ = unpacked(viewer.image(1), "maps")
    assert header["title"] == "wide.png"
    across, down = 0.5 * 32 / 40 * 160 / 300, 0.5 * 32 / 40
    np.testing.assert_allclose(
        header["crop"], [0.5 - across, 0.5 - down, 0.5 + across, 0.5 + down], atol=1e-9
    )
    with serving(viewer) as address:
        for side, size in ((1600, (300, 160)), (100, (100, 53))):
            code, content, headers = get(f"{address}/api/pixels/1?side={side}")
            assert code == 200 and headers["content-type"] == "image/jpeg"
            path = viewer.data.train.path(1)
            with Image.open(BytesIO(content)) as shown, Image.open(path) as file:
                assert shown.size == size
                expected = np.asarray(file.convert("RGB").resize(size), float)
                assert np.abs(np.asarray(shown, float) - expected).mean() < 3


def post(address: str, name: str, content: bytes | Iterator[bytes] = b"") -> tuple[int, dict]:
    """An iterator is sent in pieces, without the length of all."""
    url = f"{address}/api/images?{urllib.parse.urlencode({'name': name})}"
    request = urllib.request.Request(url, content, method="POST")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_photos_are_added_while_it_runs(viewer, folder, tmp_path):
    ramps(50, 60).save(tmp_path / "new.png")
    content = (tmp_path / "new.png").read_bytes()
    before = unpacked(viewer.image(0), "maps")[1]
    with serving(viewer) as address:
        assert post(address, "wide.png") == (200, {"image": 1})
        assert post(address, str(folder / "photos" / "high.png"))[1]["image"] == 0
        assert post(address, str(tmp_path / "new.png")) == (200, {"image": 2})
        assert post(address, "../dropped.png", iter([content])) == (200, {"image": 3})
        no_file = "neither the name of an image here, nor the path"
        for name, body, message in (
            ("wide.jpg", b"", no_file),
            ("a" * 300, b"", no_file),
            ("~nosuchuser/x.png", b"", no_file),
            ("\0", b"", no_file),
            ("text.png", b"no image", "not readable"),
            ("..", content, "cannot be kept"),
            ("\0", content, "cannot be kept"),
            ("a" * 300, content, "cannot be kept"),
        ):
            code, answer = post(address, name, body)
            assert code == 404 and message in answer["error"]
        items = json.loads(get(f"{address}/api/gallery")[1])["items"]
    names = ["high.png", "wide.png", "new.png", "dropped.png"]
    assert [item["title"] for item in items] == names
    np.testing.assert_array_equal(unpacked(viewer.image(0), "maps")[1], before)
    first, second = (unpacked(viewer.image(image), "maps")[1] for image in (2, 3))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, before)


def test_a_body_of_no_length_is_not_read_beyond_the_limit(viewer, monkeypatch):
    monkeypatch.setattr(app, "MOST_BYTES", 1000)
    sent = []

    def without_end() -> Iterator[bytes]:
        while len(sent) < 1000:
            sent.append(None)
            yield bytes(100_000)

    with serving(viewer) as address, contextlib.suppress(urllib.error.URLError):
        code, answer = post(address, "zeros.png", without_end())
        assert code == 404 and "at most 1000 bytes" in answer["error"]
    assert len(sent) < 500


def test_an_image_whose_name_is_not_utf_8_is_shown(viewer, tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.png")
    ramps(50, 60).save(path)
    viewer.add(path)
    path.write_bytes(b"no image")
    viewer.data.train.source.class_names = (os.fsdecode(b"ch\xe8vre"),)
    with serving(viewer) as address:
        assert json.loads(get(f"{address}/api/status")[1])["class_names"] == [r"ch\xe8vre"]
        code, content, _ = get(f"{address}/api/pixels/2")
        assert code == 404 and "not readable" in json.loads(content)["error"]


def test_images_of_a_run_cannot_be_added_to(small_run, tmp_path):
    ramps(50, 60).save(tmp_path / "new.png")
    viewer = open_viewer(None, small_run)
    viewer.load_images()
    with pytest.raises(UserError, match="gaupipe view --model"):
        viewer.find_or_add(str(tmp_path / "new.png"))


def test_it_opens_on_the_gradient_for_the_class_token_or_on_what_there_is(viewer, folder, tmp_path):
    assert viewer.about().start == Start(layer=1, head="gradient", query="x0")
    pooled = timm.create_model(
        "vit_tiny_patch16_224", **SIZES | dict(num_classes=0), class_token=False, global_pool="avg"
    )
    save_student(pooled, tmp_path / "pooled", mean=(0.5,) * 3, std=(0.5,) * 3)
    job, _ = open_model(str(tmp_path / "pooled"), [folder / "photos"], to_look=True)
    start = model_viewer(job).about().start
    assert start == Start(layer=1, head="gradient", query="mean")


def test_classes_of_imagenet_have_their_names():
    config = {"tag": "fb_in1k", "num_classes": 1000}
    model = timm.create_model("vit_tiny_patch16_224", depth=1, pretrained_cfg_overlay=config)
    names = class_names(model, 1000)
    assert names[698] == "palace" and names[0] == "tench, Tinca tinca"
    model.pretrained_cfg["label_names"] = [f"mine {n}" for n in range(1000)]
    assert class_names(model, 1000)[698] == "mine 698"
    del model.pretrained_cfg["label_names"], model.pretrained_cfg["tag"]
    assert class_names(model, 1000)[698] == "698"  # 1,000 classes of somebody's own


def test_a_head_that_reads_a_token_without_a_value_does_nothing():
    """Grid 2 x 2 and a class token; numbers by hand."""
    even = torch.full((5, 5), 0.2)
    sink = torch.full((5, 5), 0.1)
    sink[:, 0] = 0.6
    maps = torch.stack([even, sink, sink])[None]
    values = torch.ones(1, 3, 5)
    values[0, 1, 0] = 0.1
    found = numbers(maps, (2, 2), values)
    np.testing.assert_allclose(found["share"], [[0.2, 0.6, 0.6]], atol=1e-6)
    np.testing.assert_allclose(found["value"], [[1, 0.1 / (4.1 / 5), 1]], atol=1e-6)
    assert found["idle"].tolist() == [[False, True, False]]
    np.testing.assert_allclose(found["entropy"][0, 0], np.log(5), atol=1e-6)
    corner = (0 + 1 + 1 + 2**0.5) / 4  # every patch of 2 x 2 is a corner
    np.testing.assert_allclose(found["distance"], [[corner] * 3], atol=1e-6)
    assert "idle" not in numbers(maps, (2, 2), None)


def test_lengths_of_values_are_those_of_the_model(viewer, folder):
    """By a hook on the layer that makes queries, keys and values."""
    live = viewer.model("")
    made = []
    hook = live.model.blocks[1].attn.qkv.register_forward_hook(
        lambda _module, _inputs, output: made.append(output.detach())
    )
    seen = live.see(1)
    hook.remove()
    value = made[0][0].unflatten(-1, (3, 2, -1))[:, 2]  # [N, H, width of a head]
    np.testing.assert_allclose(seen.values[1], value.norm(dim=-1).T, rtol=1e-5)


def test_mean_and_rollout_stand_beside_the_heads():
    torch.manual_seed(0)
    first, second = torch.rand(2, 2, 3, 3).softmax(-1)
    columns = with_mean_and_rollout([first, None, second])
    np.testing.assert_array_equal(columns[2, :2], second)
    np.testing.assert_allclose(columns[0, 2], (first[0] + first[1]) / 2)
    np.testing.assert_allclose(columns[0, 3], (columns[0, 2] + torch.eye(3)) / 2)
    np.testing.assert_allclose(columns[2, 3], (columns[2, 2] + torch.eye(3)) / 2)  # begun anew
    assert not columns[1].any()


def test_the_page_paints_with_the_colours_of_inspect(viewer, browser):
    with serving(viewer) as address:
        page = Page(browser, address)
        page.open("image=1&head=0&query=5")
        painted = page.page.evaluate(
            """async () => {
              const { paint } = await import("./draw.js");
              const canvas = document.createElement("canvas");
              paint(canvas, [0, 0.25, 1], [1, 3], 1);
              return [...canvas.getContext("2d").getImageData(0, 0, 3, 1).data];
            }"""
        )
        expected = colours()[[0, 64, 255], :3]
        np.testing.assert_array_equal(np.reshape(painted, (3, 4))[:, :3], expected)
        assert page.text("#title") == "wide.png" and not page.complaints
        page.page.close()


ASKED = """async () => {
  const modules = ["./dom.js", "./draw.js", "./maps.js"].map((name) => import(name));
  const [dom, draw, maps] = await Promise.all(modules);
  const canvas = document.querySelector("#panes canvas");
  const weights = Float32Array.from(WEIGHTS);
  const shares = draw.shares(weights, [0, dom.rangeOf(weights)[1]]);
  return {
    range: dom.rangeOf(weights),
    enlarged: [...draw.enlarged(shares, [3, 4], 5)],
    capped: [...maps.capped(weights, [3, 4])],
    light: [...canvas.getContext("2d").getImageData(0, 0, 128, 128).data],
  };
}"""


def test_the_page_throws_light_as_inspect_does(viewer, browser):
    """Against numpy, Pillow and scipy; the page's light is computed on a coarser grid."""
    weights = np.random.default_rng(0).random((3, 4)).astype(np.float32) ** 4
    with serving(viewer) as address:
        page = Page(browser, address)
        page.open("image=1&head=0&query=5&layer=1")
        found = page.page.evaluate(ASKED.replace("WEIGHTS", str(weights.ravel().tolist())))
        map = np.array(json.loads(page.saved("#json"))["map"])
        page.page.close()
    top = np.quantile(weights, 0.98)
    np.testing.assert_allclose(found["range"], [weights.min(), top], rtol=1e-6)
    shares = np.clip(weights / top, 0, 1)
    enlarged = np.clip(Image.fromarray(shares).resize((20, 15), Image.Resampling.BICUBIC), 0, 1)
    np.testing.assert_allclose(np.reshape(found["enlarged"], (15, 20)), enlarged, atol=1e-5)
    around = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]])
    most = maximum_filter(weights, footprint=around, mode="constant")
    np.testing.assert_array_equal(np.reshape(found["capped"], (3, 4)), np.minimum(weights, most))
    drawn = np.reshape(found["light"], (128, 128, 4))  # 0.8 of 160 pixels are seen
    expected = light(np.clip(map / top_of(map), 0, 1), (128, 128))
    np.testing.assert_allclose(drawn[..., 3], expected, atol=3)
    photo = np.asarray(ramps(300, 160))[16:144, 86:214]
    clear = drawn[..., 3] > 200
    np.testing.assert_allclose(drawn[clear][:, :3], photo[clear], atol=8)  # a JPEG


def test_a_map_that_reads_the_border_says_so(viewer, browser):
    said = """async ([most, h, w]) => {
      const { sentence } = await import("./facts.js");
      const weights = Float32Array.from({ length: h * w }, (_, i) => Number(i === most));
      const state = { head: 0, direction: "from", layer: 0 };
      const pane = { name: "one", weights, grid: [h, w], query: "mean", there: true };
      return sentence({ state, className: String }, pane);
    }"""
    with serving(viewer) as address:
        page = Page(browser, address)
        page.open()
        for h, w in ((8, 9), (3, 4)):
            warned = np.zeros((h, w), bool)
            for most in range(h * w):
                warned.flat[most] = "border" in page.page.evaluate(said, [most, h, w])
            border = np.ones((h, w), bool)
            border[1:-1, 1:-1] = False
            few = border.mean() < 0.5  # else the border says little
            np.testing.assert_array_equal(warned, border & few)
        page.page.close()


def test_a_link_names_the_file(viewer, folder, browser, tmp_path):
    """Also of several files of one name, by their folders, and in a page without a server."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        ramps(50, 60).save(tmp_path / name / "same.png")
        viewer.add(tmp_path / name / "same.png")
    names = ["high.png", "wide.png", "one/same.png", "two/same.png"]
    assert viewer.names.unique("train") == names
    assert [item.title for item in viewer.page("train", "", "id", None, 0).items] == names
    write_page(viewer, tmp_path / "page.html", [0, 1], "train", {"image": 0})
    with serving(viewer) as address:
        for url in (address, (tmp_path / "page.html").as_uri()):
            page = Page(browser, url)
            page.open("image=wide.png")
            assert page.text("#title") == "wide.png" and page.state()["image"] == "wide.png"
            assert page.complaints == []
            page.open("image=absent.png")
            assert "absent.png" in page.text("#error")
            page.page.close()


def test_classes_that_differ_in_case_label_their_own_images():
    paths = [Path(name, "one.png") for name in ("Polish", "polish", "POLISH", "nail_Polish")]
    names = ["polish", "Polish", "nail polish"]
    assert folder_labels(paths, names).tolist() == [1, 0, 0, 2]


def test_the_folder_of_a_link_labels_its_image(tmp_path, folder):
    """Not that of the file which it leads to."""
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "one.png").symlink_to(folder / "photos" / "wide.png")
    (tmp_path / "dog").symlink_to(folder / "photos")
    paths = [tmp_path / "cat" / "one.png", tmp_path / "dog" / "high.png"]
    images = PreparedImages(paths, {"input_size": (3, 48, 48)})
    found = [Path(images.path(number)) for number in range(2)]
    assert folder_labels(found, ["cat", "dog"]).tolist() == [0, 1]


def test_folders_called_like_classes_label_their_images(tmp_path, browser):
    names = ["tabby, tabby cat", "tiger cat", "maillot", "maillot, tank suit"]
    folders = ["Tabby", "tiger_cat", "maillot", "maillot, tank suit", "tank suit", "dog"]
    paths = [tmp_path / "photos" / name / "one.png" for name in folders]
    assert folder_labels(paths, names).tolist() == [0, 1, 2, 3, 3, -1]
    imagenet = [f"class {label}" for label in range(1000)]
    assert folder_labels([tmp_path / "n02123045" / "one.png"], imagenet).tolist() == [281]

    model = randomised(timm.create_model("vit_tiny_patch16_224", **SIZES | dict(num_classes=4)))
    save_student(model, tmp_path / "model", label_names=names)
    for path in paths:
        path.parent.mkdir(parents=True)
        ramps(50, 60).save(path)
    job, _ = open_model(str(tmp_path / "model"), [tmp_path / "photos"], to_look=True)
    viewer = model_viewer(job)
    with serving(viewer) as address:
        page = Page(browser, address)
        page.open()
        page.until("document.querySelectorAll('.thumb.wrong').length > 0")  # when it has been read
        predicted = unpacked(viewer.image(0), "maps")[0]["predicted"]  # of six photos alike
        labels = viewer.data.train.labels
        wrong = (labels != predicted) & (labels != -1)
        assert page.page.locator(".thumb.wrong").count() == wrong.sum()
        said = page.page.locator(".thumb span").all_inner_texts()
        shown = ["tabby", "tiger cat", "maillot", "maillot, tank suit"]
        assert set(said) == {shown[predicted]}
        page.page.select_option("#order", "wrong")
        right = str(int(np.flatnonzero(labels == predicted)[0]))
        page.until("location.hash.includes('order=wrong')")
        page.until(f"document.querySelectorAll('.thumb')[0].dataset.image !== '{right}'")
        page.page.fill("#class", shown[predicted])
        page.press("Enter")
        page.until("!document.querySelector('#none-wrong').hidden")
        page.page.close()


def test_predictions_come_in_when_nobody_waits(viewer, tmp_path):
    """Behind the page, and not while an answer is computed."""
    with viewer.answers.awaited():
        assert viewer.page("train", "", "id", None, 0).items[0].predicted is None
        time.sleep(0.5)
        assert viewer.gallery("train", "").done == 0
    viewer.gallery("train", "").thread.join()
    [first, second] = viewer.page("train", "", "unsure", None, 0).items
    assert first.predicted is not None and first.probability <= second.probability
    left = viewer.gallery("train", "")
    ramps(50, 60).save(tmp_path / "new.png")
    viewer.add(tmp_path / "new.png")
    left.done = 0
    left.read_all()  # of what are three images now
    assert left.done == 0
    viewer.gallery("train", "").start()
    viewer.gallery("train", "").thread.join()
    of_class = viewer.page("train", "", "id", first.predicted, 0).items  # without labels
    assert first.id in [item.id for item in of_class]


def test_an_order_that_is_still_computed_is_not_said_to_be_empty(viewer, browser):
    with serving(viewer) as address:
        page = Page(browser, address)
        with viewer.answers.awaited():  # before which nothing is predicted
            page.open("order=unsure")
            page.page.wait_for_selector("#reading")  # visible, soon after the page is open
            assert page.text("#thumbs") == ""
        page.until("document.querySelectorAll('.thumb').length === 2")
        page.page.close()


def test_a_photo_is_opened_by_name_by_path_and_by_dropping_it(viewer, folder, browser, tmp_path):
    ramps(120, 70).save(tmp_path / "other.png")
    with serving(viewer) as address:
        page = Page(browser, address)
        page.open()
        assert page.text("#title") == "high.png"
        for asked, title in (("wide.png", "wide.png"), (tmp_path / "other.png", "other.png")):
            page.page.fill("#go-to", str(asked))
            page.page.press("#go-to", "Enter")
            page.page.wait_for_selector(f"h2:has-text('{title}')")
        page.page.evaluate(
            """async () => {
              const blob = await (await fetch("api/pixels/1")).blob();
              const data = new DataTransfer();
              data.items.add(new File([blob], "dropped.jpg"));
              window.dispatchEvent(new DragEvent("drop", { dataTransfer: data, cancelable: true }));
            }"""
        )
        page.page.wait_for_selector("h2:has-text('dropped.jpg')")
        page.until("document.querySelectorAll('.thumb').length == 4")
        with Image.open(BytesIO(page.saved("#png"))) as card:
            assert card.format == "PNG" and card.width == 1600
        page.page.fill("#go-to", "nothing.png")
        page.page.press("#go-to", "Enter")
        page.page.wait_for_selector("#banner:has-text('nothing.png: neither')")
        assert page.page.is_visible("#panes canvas")
        assert all("404" in complaint for complaint in page.complaints)
        page.page.close()


def test_a_photo_as_an_object_is_turned_as_its_file_is(folder, tmp_path):
    picture = ramps(60, 20)
    exif = picture.getexif()
    exif[0x0112] = 6  # a quarter turn
    picture.save(tmp_path / "a.jpg", exif=exif)
    [written] = as_files(Image.open(tmp_path / "a.jpg"), tmp_path)
    assert Image.open(written).size == (20, 60)


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(3, 8, 8),
        np.zeros((8, 8, 3), np.float32),
        np.zeros((2, 8, 8, 3), np.uint8),
        [],
        None,
    ],
    ids=["tensor", "floats", "batch", "none", "None"],
)
def test_a_notebook_refuses_what_is_no_image(images):
    with pytest.raises(UserError, match="show: (image 0 is a .* should be|there are no images)"):
        gaupipe.show(torch.nn.Identity(), images)


def test_a_notebook_refuses_what_is_no_model_of_timm():
    with pytest.raises(UserError, match="Identity: is not a model that timm"):
        gaupipe.show(torch.nn.Identity(), ramps(8, 8))


def test_a_notebook_shows_the_page(browser, folder, tmp_path):
    model = randomised(timm.create_model("vit_tiny_patch16_224", **SIZES)).train()
    images = [folder / "photos" / "wide.png", ramps(80, 50).convert("CMYK")]
    images.append(np.asarray(ramps(40, 40)))
    shown = gaupipe.show(model, images, height=700)
    assert model.training and all(part.requires_grad for part in model.parameters())
    (tmp_path / "notebook.html").write_text(f"<!doctype html><p>Out[1]</p>{shown._repr_html_()}")
    page = Page(browser, "")
    page.page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.page.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for()
    assert (
        frame.locator(".thumb").count() == 3 and frame.locator("#title").inner_text() == "wide.png"
    )
    frame.locator(".thumb").nth(1).click()
    frame.locator("h2:has-text('image 1.tiff')").wait_for()
    frame.locator(".cell").first.click()
    assert "block 0, head 0" in frame.locator("#facts").inner_text()
    assert page.complaints == []
    page.page.close()
    shown.save(tmp_path / "saved.html")
    assert (tmp_path / "saved.html").read_text() == shown.page
    with pytest.raises(UserError, match="no such file"):
        gaupipe.show(model, tmp_path / "absent.png")
    with pytest.raises(UserError, match="image 0 is a ndarray"):
        gaupipe.show(model, np.zeros((0, 50, 3), np.uint8))
