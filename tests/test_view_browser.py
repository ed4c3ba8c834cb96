"""`gaupipe view` as a browser shows it: Debian's chromium, driven by Playwright.

Without a chromium on this machine the tests are skipped. Most of them share one page, on which each
goes to an address of its own.
"""

import json
import shutil
import socket
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import store
from arguments import tiny
from gaupipe.distillation.kinds import StoredAttentionReader
from gaupipe.maps.gaussians import expected_map
from gaupipe.models import save_student
from gaupipe.settings.load import load
from gaupipe.teachers.files import open_model
from gaupipe.teachers.gaussian_vit import Decoder
from gaupipe.training.scores import predictions
from stages.look import inspect
from stages.look.image_maps import StoredMaps, images_of
from stages.run import run_all
from stages.view.serve import model_viewer, open_viewer
from stores import make_arrays, make_schema, write_store
from viewing import Page, serving
from vits import randomised

KINDS = {
    "gaussian": dict(kind="gaussian"),
    "embedding": dict(kind="embedding", embedding_dim=7),
    "prior": dict(kind="prior"),
    "topk": dict(kind="topk", k=3, encoding="uint8"),
    "dense": dict(kind="dense"),
    "dense-codes": dict(kind="dense", encoding="uint8"),
}
SETTINGS = tiny(60, 20, 2)


def write_kind(folder: Path, name: str) -> str:
    """A store of a kind with extreme numbers; its dataset is not there."""
    schema = make_schema(grid=(4, 5), num_images=9, **KINDS[name])
    arrays, draw = make_arrays(schema, 1), torch.Generator().manual_seed(0)
    if name == "gaussian":
        extreme = [[0, 0, 0, 0], [-1, 1, 1e-4, 65504], [30, -30, 2, 0.01]]
        extreme += [[0.5, -0.5, 65504, 65504], [1.2, 0.1, 1e-3, 0.3], [-0.25, 0.6, 5e-2, 12]]
        arrays["gaussians"][0, 0, 0, :6] = extreme
    decoder = None
    prior = torch.randn(2, 3, 20, 4, generator=draw).numpy()
    if name == "prior":
        decoder = {"prior": prior}
    elif name == "embedding":
        torch.manual_seed(0)
        network = Decoder(2, 7, 6, prior[0].size)
        decoder = {key: value.numpy() for key, value in network.state_dict().items()}
        decoder["prior"] = prior
    write_store(folder / f"{name}.zarr", schema, arrays, decoder=decoder)
    return str(folder / f"{name}.zarr")


def same(shown: dict, expected: dict) -> None:
    """What the page saved is what inspect prints, numbers to 2e-6."""
    assert list(shown) == list(expected)
    for name, value in expected.items():
        if name in ("map", "teacher", "gaussian") and value is not None:
            np.testing.assert_allclose(shown[name], value, rtol=1e-5, atol=2e-6, err_msg=name)
        elif name in ("kl", "probability") and value is not None:
            assert shown[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        else:
            assert shown[name] == value, name


def stored_map(url: str | Path, image: int, layer: int) -> torch.Tensor:
    """[H, T, T], as inspect shows it."""
    return StoredMaps(store.open(url)).see(image).map(layer)


ALL_ROWS = """async () => {
  const { unpack } = await import("./source.js");
  const { Maps } = await import("./maps.js");
  const { header, arrays } = unpack(await (await fetch("api/image/0")).arrayBuffer());
  const maps = new Maps(header, arrays);
  const rows = [];
  for (let layer = 0; layer < maps.layers; layer++) {
    for (let head = 0; head < maps.heads; head++) rows.push(Array.from(maps.map(layer, head)));
  }
  return rows;
}"""


def exact_rows(url: str) -> np.ndarray:
    """[L, H, T, T] of image 0, all but whole maps computed in float64."""
    maps = store.open(url)
    kind, stored = maps.schema.kind, maps.gather(np.array([0]))
    attention = StoredAttentionReader(maps, torch.device("cpu")).attention(stored)
    if kind == "topk":
        keys, weights = stored["keys"][0].astype(int), stored["weights"][0].astype(float)
        rest = (1 - weights.sum(-1, keepdims=True)).clip(0) / (20 - keys.shape[-1])
        rows = np.broadcast_to(rest, (*rest.shape[:-1], 20)).copy()
        np.put_along_axis(rows, keys, weights, -1)
        return rows / rows.sum(-1, keepdims=True)
    if hasattr(attention, "gaussians"):
        return expected_map(attention.gaussians[0].double(), maps.schema.grid).numpy()
    return torch.cat([attention.map(layer) for layer in range(2)]).numpy()


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_those_of_inspect(browser, tmp_path, name):
    url = write_kind(tmp_path, name)
    with serving(viewer := open_viewer(url, None)) as address:
        viewer.start()
        shown = Page(browser, address)
        shown.open("image=0&layer=1&head=2&query=7")
        rows = np.array(shown.page.evaluate(ALL_ROWS)).reshape(2, 3, 20, 20)
        exact = exact_rows(url)
        for layer in range(2):  # wide Gaussians are computed in float32 to 1e-4
            np.testing.assert_array_equal(rows[layer], stored_map(url, 0, layer).numpy())
            narrow = (slice(None), slice(6, None)) if layer == 0 else slice(None)
            np.testing.assert_allclose(rows[layer][narrow], exact[layer][narrow], atol=2e-6)
        np.testing.assert_allclose(rows.sum(-1), 1, atol=2e-3)  # what float16 leaves
        chosen = {"layer": 1, "head": "2", "query": "7"}
        same(json.loads(shown.saved("#json")), inspect.attention(0, url=url, **chosen).to_json())
        shown.page.wait_for_selector("text=does not say which images")
        assert not shown.complaints
        shown.page.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on the digits, with a teacher, its store and a student."""
    folder = tmp_path_factory.mktemp("browser") / "run"
    run_all(load("digits_expected", SETTINGS), folder)
    return folder


@pytest.fixture(scope="module")
def shared(browser, run):
    """A page over the run, which tests may leave at any address."""
    viewer = open_viewer(None, run)
    with serving(viewer) as address:
        viewer.start()
        page = Page(browser, address)
        page.base = "student="
        page.open()
        page.page.wait_for_selector("#thumbs img")
        yield page
        page.page.close()


@pytest.fixture
def page(shared):
    shared.complaints.clear()
    yield shared
    assert not shared.complaints


GRID = (4, 4)


def test_gallery(page, run):
    page.open()
    maps = store.open(run / "maps.zarr").gather(np.arange(60))
    logits, labels = maps["logits"].astype(float), maps["labels"]
    wrong = np.flatnonzero(logits.argmax(-1) != labels)
    thumbs = page.page.locator(".thumb")
    assert thumbs.count() == 60 and page.text("#page-text").endswith("60 of 60")
    assert page.page.locator(".thumb.wrong").count() == len(wrong)
    page.page.select_option("#order", "wrong")
    page.until(f"document.querySelector('.thumb').dataset.image == {first(logits, wrong)}")
    page.page.wait_for_selector(f"h2:has-text('Image {first(logits, wrong)}:')")
    page.page.fill("#class", "3")
    page.press("Enter")
    count = int((labels == 3).sum())
    page.until(f"document.querySelectorAll('.thumb').length == {count}")
    assert page.state()["order"] == "wrong" and page.state()["class"] == "3"
    thumbs.nth(1).click()
    chosen = thumbs.nth(1).get_attribute("data-image")
    page.page.wait_for_selector(f"text=Image {chosen}: class 3")
    assert thumbs.nth(1).get_attribute("aria-current") == "true"
    assert f"Image {chosen}, class 3, predicted class" in thumbs.nth(1).get_attribute("aria-label")
    page.press("n")
    page.until("document.querySelectorAll('.thumb')[2].ariaCurrent == 'true'")
    page.page.go_back()
    page.page.wait_for_selector(f"h2:has-text('Image {chosen}:')")
    page.page.fill("#go-to", "41")
    page.page.press("#go-to", "Enter")
    page.page.wait_for_selector("h2:has-text('Image 41:')")


def first(logits: np.ndarray, among: np.ndarray) -> int:
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return int(among[probability[among].max(-1).argmax()])


def test_hover_and_click(page, run):
    page.open("image=3&layer=1&head=0")
    label = page.page.locator("#panes canvas")
    before = page.page.evaluate("document.querySelector('.cell canvas').toDataURL()")
    page.over(6, GRID)
    assert "6 (row 1, col 2)" in page.text("#facts")
    assert "row 1, column 2" in label.get_attribute("aria-label")
    assert page.page.evaluate("document.querySelector('.cell canvas').toDataURL()") != before
    assert "query" not in page.state()  # hovering is not a choice
    page.page.hover("h1")
    assert "10 (row 2, col 2)" in page.text("#facts")  # what it opened with
    page.over(6, GRID, "click")
    page.page.hover("h1")
    assert page.state()["query"] == "6"
    seen = inspect.attention(3, url=str(run / "maps.zarr"), layer=1, head="0", query="6")
    same(json.loads(page.saved("#json")), seen.to_json())
    mean_x = f"mean ({seen.gaussian[0]:.3f}, {seen.gaussian[1]:.3f})"
    assert mean_x in page.text("#facts")
    page.page.click("[data-direction=to]")
    reversed_ = json.loads(page.saved("#json"))
    maps = stored_map(run / "maps.zarr", 3, 1)
    np.testing.assert_allclose(reversed_["map"], maps[0, :, 6].reshape(GRID), atol=1e-7)
    assert reversed_["direction"] == "to"


def test_keyboard(page):
    page.open("image=5&query=5")
    page.press("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft")
    assert page.state()["query"] == "13"
    page.press("[", ".")
    assert (page.state()["layer"], page.state()["head"]) == ("0", "0")
    page.press("m", ",")
    assert page.state()["head"] == "rollout"
    page.press("m", ".", ".", "t", "+", "b", "z")
    state = page.state()
    assert state["head"] == "1" and state["direction"] == "to" and state["style"] == "squares"
    assert state["opacity"] == "0.55" and state["floor"] == "1"
    page.press("Escape")
    assert page.state()["query"] == "mean" and "direction" not in page.state()
    page.press("?")
    assert page.page.locator("#help").is_visible()
    page.press("Escape")
    page.press("]")
    page.page.locator(".cell[aria-pressed=true]").focus()
    page.press("ArrowUp", "ArrowLeft")
    assert page.page.evaluate("document.activeElement.ariaLabel").startswith("Block 0, head 0")
    page.press("n", "n", "p")
    page.page.wait_for_selector("h2:has-text('Image 6:')")


def test_a_link_shows_the_same(page, browser):
    page.open(
        "image=29&layer=1&head=1&query=9&direction=to&student=standard&show=teacher&opacity=0.3"
        "&scale=1&order=sure&class=2"
    )
    other = Page(browser, page.address)
    other.open(page.page.url.partition("#")[2])
    for one in (page, other):
        assert one.page.input_value("#order") == "sure"
        assert one.page.input_value("#class") == "class 2"
        assert one.page.get_attribute("[data-show=teacher]", "aria-pressed") == "true"
        assert one.page.is_checked("#scale") and one.page.input_value("#opacity") == "0.3"
    pictures = [
        one.page.evaluate("[...document.querySelectorAll('canvas')].map(c => c.toDataURL())")
        for one in (page, other)
    ]
    assert pictures[0] == pictures[1] and len(pictures[0]) > 8
    assert not other.complaints
    other.page.close()
    page.open("layer=99&head=-1&query=1e3&nonsense=1&student=nobody")  # what makes no sense
    assert page.text("#title").startswith("Image 0:") and "layer" not in page.state()


def test_a_student_beside_the_teacher(page, run):
    page.open("image=7&layer=1&head=0&query=4&student=standard")
    assert page.page.locator("#panes canvas").count() == 2
    chosen = {"layer": 1, "head": "0", "query": "4"}
    seen = inspect.attention(7, run_dir=run, student="standard", **chosen)
    same(json.loads(page.saved("#json")), seen.to_json())
    assert f"{seen.kl:.4f} nats" in page.text("#facts")
    whole = {"layer": 1, "head": "0", "query": "mean"}
    head_kl = inspect.attention(7, run_dir=run, student="standard", **whole).kl
    label = page.page.get_attribute(".cell[data-layer='1'][data-head='0']", "aria-label")
    assert label.endswith(f"KL {head_kl:.3f} nats")
    page.press("m", "Escape")
    seen = inspect.attention(7, run_dir=run, student="standard", layer=1, query="mean")
    same(json.loads(page.saved("#json")), seen.to_json())


def test_numbers_of_heads_and_rollout(page, run):
    page.open("image=7&layer=1&head=rollout&query=4")
    maps = [stored_map(run / "maps.zarr", 7, layer) for layer in (0, 1)]
    half = [(each.mean(0) + torch.eye(16)) / 2 for each in maps]
    expected = (half[1] @ half[0])[4].reshape(GRID)
    shown = json.loads(page.saved("#json"))
    np.testing.assert_allclose(shown["map"], expected, atol=1e-6)
    entropy = -(maps[1] * maps[1].clamp_min(1e-38).log()).sum(-1).mean(-1)
    y, x = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    places = torch.stack([y.flatten(), x.flatten()], dim=-1)
    distance = (maps[1] * torch.cdist(places, places)).sum(-1).mean(-1)
    for head in (0, 1):
        label = page.page.get_attribute(f".cell[data-layer='1'][data-head='{head}']", "aria-label")
        assert f"Entropy {entropy[head]:.2f} nats" in label
        assert f"Distance {distance[head]:.2f} tokens" in label
    share = [float(maps[1][head].mean(0).max()) for head in (0, 1)]
    assert f"Largest key {share[1]:.2f}" in label
    charts = "[...document.querySelectorAll('#charts figure')].map(figure => figure.id)"
    assert page.page.evaluate(charts) == ["chart-entropy", "chart-distance", "chart-share"]


def test_png_and_pixels(page, run):
    page.open("image=7&head=0&query=3")
    png = page.saved("#png")
    assert png.startswith(b"\x89PNG") and len(png) > 3000
    pixels = page.page.evaluate(
        """async (source) => {
          const picture = await createImageBitmap(await (await fetch(source)).blob());
          const canvas = new OffscreenCanvas(picture.width, picture.height);
          canvas.getContext("2d").drawImage(picture, 0, 0);
          const { data } = canvas.getContext("2d").getImageData(0, 0, 8, 8);
          return [...data].filter((_, place) => place % 4 == 0);
        }""",
        page.page.get_attribute(".thumb[data-image='7'] img", "src"),
    )
    data = images_of(store.open(run / "maps.zarr"))
    assert pixels == data.train.image(7).flatten().tolist()


def test_a_phone(browser, shared):
    phone = Page(browser, shared.address, has_touch=True, is_mobile=True)
    phone.page.set_viewport_size({"width": 390, "height": 844})
    phone.open("image=7&student=standard")
    wide = phone.page.evaluate("document.documentElement.scrollWidth")
    assert wide == 390  # nothing to scroll sideways
    phone.over(6, GRID, "tap")
    assert phone.state()["query"] == "6" and not phone.complaints
    phone.page.close()


OVERLAPS = """() => {
  const titles = "#grid .label, #heads-card h2, #heads-card label, #charts b, #charts .at";
  const said = [...document.querySelectorAll(titles)].filter((part) => part.textContent);
  const boxes = said.map((part) => {
    const range = document.createRange(); // of the text, which may be wider than its box
    range.selectNodeContents(part);
    const { left, right, top, bottom } = range.getBoundingClientRect();
    return { text: part.textContent, left, right, top: top + 3, bottom: bottom - 3 };
  });
  const across = (a, b) => a.left < b.right && b.left < a.right;
  const meet = (a, b) => across(a, b) && a.top < b.bottom && b.top < a.bottom;
  return boxes.flatMap((a, i) =>
    boxes.slice(i + 1).filter((b) => meet(a, b)).map((b) => `${a.text} over ${b.text}`));
}"""
WIDTHS = (1440, 1024)


def test_headings_of_twelve_blocks_and_three_heads_do_not_overlap(browser, tmp_path):
    sizes = dict(img_size=32, patch_size=8, embed_dim=24, depth=12, num_heads=3, num_classes=3)
    model = randomised(timm.create_model("vit_tiny_patch16_224", **sizes))
    save_student(model, tmp_path / "model", mean=(0.5,) * 3, std=(0.5,) * 3)
    Image.new("RGB", (40, 40)).save(tmp_path / "photo.png")
    job, _ = open_model(str(tmp_path / "model"), [tmp_path / "photo.png"], to_look=True)
    with serving(model_viewer(job)) as address:
        page = Page(browser, address)
        page.open()
        assert page.page.locator("#grid .label").count() == 1 + 6 + 12
        for width in WIDTHS:
            page.page.set_viewport_size({"width": width, "height": 800})
            assert page.page.evaluate(OVERLAPS) == [], width
            assert page.page.evaluate("document.documentElement.scrollWidth") == width
        page.page.evaluate(
            "document.querySelectorAll('.label').forEach(part => part.style.fontSize = '40px')"
        )
        assert page.page.evaluate(OVERLAPS)  # where there are some they are found
        page.page.close()


def test_a_student_beside_the_teacher_fills_the_page(page):
    """Two pictures as wide as their column, and no column that ends half way down the other."""
    page.open("image=3&layer=1&head=1&query=6&student=standard")
    for width in WIDTHS:
        page.page.set_viewport_size({"width": width, "height": 800})
        panes, stage, side = (
            page.page.locator(part).bounding_box() for part in ("#panes", "#stage", ".side")
        )
        left, right = (page.page.locator("#panes figure").nth(n).bounding_box() for n in (0, 1))
        assert left["y"] == right["y"]
        assert right["x"] + right["width"] - left["x"] > 0.9 * panes["width"], width
        assert 0.5 < stage["height"] / side["height"] < 2, width
    page.page.set_viewport_size({"width": 1280, "height": 800})


def test_a_run_opens_with_its_student_beside_its_teacher(browser, shared):
    page = Page(browser, shared.address)
    page.open("image=3")
    assert page.page.locator("#panes canvas").count() == 2
    assert page.page.input_value("#student") == "standard" and "student" not in page.state()
    page.page.select_option("#student", "")
    page.until("document.querySelectorAll('#panes canvas').length === 1")
    assert page.state()["student"] == ""
    page.press("s")  # there is no teacher to change to
    assert "show" not in page.state() and page.complaints == []
    page.page.close()


def test_on_a_phone_the_picture_stays_while_its_maps_are_tapped(page):
    page.page.set_viewport_size({"width": 390, "height": 844})
    page.open("image=3&layer=1&head=1&query=6")
    assert page.page.locator("#grid").bounding_box()["y"] < 844
    last = page.page.locator(".cell").last
    last.scroll_into_view_if_needed()
    page.page.evaluate("scrollBy(0, 200)")
    last.click()
    box = page.page.locator("#panes canvas").bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= 844
    page.page.set_viewport_size({"width": 1280, "height": 800})


def test_the_slider_draws_no_charts(page):
    page.open("image=3&layer=1&head=1&query=6")
    page.page.evaluate("document.querySelector('.plot').dataset.kept = 'yes'")
    page.page.fill("#opacity", "0.7")
    assert page.state()["opacity"] == "0.7"
    assert page.page.locator(".plot[data-kept=yes]").count() == 1


def test_a_banner_wraps_on_a_phone(page):
    page.page.set_viewport_size({"width": 390, "height": 844})
    page.open(f"image=3&student={'nobody' * 20}")
    banner = page.page.locator("#banner").bounding_box()
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    assert banner["x"] + banner["width"] <= 390 and banner["height"] > 60  # three lines
    page.page.click("#banner [title=Close]")
    assert page.page.is_hidden("#banner")
    page.page.set_viewport_size({"width": 1280, "height": 800})


@pytest.mark.parametrize("scheme,width", [("light", 1280), ("dark", 390)])
def test_a_run_without_a_store_shows_its_students(browser, run, tmp_path, scheme, width):
    """On the validation images, in the order of the student's mistakes."""
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("maps.zarr"))
    viewer = open_viewer(None, tmp_path / "run")
    live = viewer.model("standard")
    logits, labels = predictions(live.model, live.data.val, live.data, load("digits_expected"))
    wrong = np.flatnonzero(logits.argmax(-1) != labels)
    with serving(viewer) as address:
        page = Page(browser, address, color_scheme=scheme)
        page.page.set_viewport_size({"width": width, "height": 844})
        page.open("order=wrong&layer=1&head=0&query=4&image=5")
        page.until(
            f"document.querySelector('.thumb')?.dataset.image == {first(logits.numpy(), wrong)}"
        )
        assert page.page.locator(".thumb.wrong").count() == min(len(wrong), 60)
        assert page.page.evaluate("document.documentElement.scrollWidth") == width
        ground = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(243, 244, 246)", "dark": "rgb(14, 17, 21)"}[scheme]
        shown = json.loads(page.saved("#json"))
        expected = live.see(5, split="val")
        np.testing.assert_allclose(np.ravel(shown["map"]), expected.map(1)[0, 4], atol=1e-6)
        assert (shown["by"], shown["label"]) == ("standard", int(labels[5]))
        assert shown["teacher"] is None and not page.page.is_visible("#no-teacher")
        page.page.select_option("#split", "train")
        page.until("document.querySelector('#page-text').textContent.endsWith('of 60')")
        assert page.state()["split"] == "train" and page.complaints == []
        page.open("split=val&image=130")
        page.until("document.querySelector('[aria-current]')?.dataset.image == 130")
        assert page.text("#page-text").startswith("121")
        page.open("student=nobody&split=test")
        assert "no student “nobody”" in page.text("#banner")
        page.page.close()


def test_a_page_without_a_server(browser, run, tmp_path, in_process):
    out = tmp_path / "out.html"
    command = ["view", "--run-dir", run, "--html", out, "--image", 3, "--image", 29]
    assert in_process(*command, "--student", "standard")[:2] == (0, f"{out}\n")
    page = Page(browser, out.as_uri())
    requests = []
    page.page.on("request", lambda request: requests.append(request.url))
    page.open("image=29&layer=1&head=1&query=2")
    assert page.page.locator(".thumb img").count() == 2
    seen = inspect.attention(29, run_dir=run, student="standard", layer=1, head="1", query="2")
    same(json.loads(page.saved("#json")), seen.to_json())
    page.page.select_option("#student", "")
    page.until("document.querySelectorAll('#panes canvas').length == 1")
    page.press("p")
    page.page.wait_for_selector("h2:has-text('Image 3:')")
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in requests)
    page.page.fill("#opacity", "1")
    page.open("image=4")
    assert "only the images 3, 29" in page.text("#error") and not page.complaints
    page.page.close()


def test_a_damaged_shard_is_named(browser, tmp_path):
    schema = make_schema()
    url = tmp_path / "s.zarr"
    write_store(url, schema, make_arrays(schema), shard_bytes=8 * schema.bytes_per_image)
    damaged = url / "gaussians/c/1/0/0/0/0"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    viewer = open_viewer(str(url), None)
    viewer.start()
    with serving(viewer) as address:
        page = Page(browser, address)
        page.open("image=9")
        assert "shard 1 (images 8 to 15)" in page.text("#error")
        assert not page.page.locator("#panes").is_visible()
        page.press("n")  # the next image of a shard that is whole
        page.page.fill("#go-to", "17")
        page.page.press("#go-to", "Enter")
        page.page.wait_for_selector("h2:has-text('Image 17:')")
        page.until("document.getElementById('error').hidden")
        assert page.page.locator("#panes").is_visible()
        assert all("500" in complaint for complaint in page.complaints)
        page.page.close()


def test_each_control_does_what_it_says(page):
    """By clicks: what the address says after each, and that another picture is drawn."""
    page.open("image=3&layer=1&head=1&query=6&student=standard")
    page.page.wait_for_selector(".cell[data-head=gradient] canvas:not([hidden])")
    drawn = (
        "[...document.querySelectorAll('#panes canvas, .cell canvas')]"
        ".map(canvas => canvas.className + canvas.toDataURL()).join()"
    )
    clicks = (
        ("#tokens [data-query=mean]", "query", "mean"),
        (".cell[data-layer='0'][data-head='rollout']", "head", "rollout"),
        (".cell[data-layer='1'][data-head='gradient']", "head", "gradient"),
        ("#chart-share .dot", "head", "0"),
        ("[data-direction=to]", "direction", "to"),
        ("#floor", "floor", "1"),
        ("[data-style=squares]", "style", "squares"),
        ("[data-style=heat]", "style", "heat"),
        ("#capped", "capped", "1"),
        ("#scale", "scale", "1"),
        ("[data-show=teacher]", "show", "teacher"),
    )
    for control, name, value in clicks:
        before = json.dumps(page.page.evaluate(drawn))
        page.page.click(control)
        assert page.state()[name] == value, control
        page.until(f"{before} !== {drawn}")
    page.open("image=3&layer=1&head=gradient&student=standard")
    page.page.select_option("#explain", "4")
    page.until("document.querySelector('#facts').innerText.includes('relevance for class 4')")
    for image, button in ((4, "#image-on"), (3, "#image-back")):
        page.page.click(button)
        page.page.wait_for_selector(f"h2:has-text('Image {image}:')")
    page.page.click("#help-button")
    assert "Click a patch" in page.text("#help")
    page.page.click("#help button")
    page.open("image=3&layer=1&head=1&query=6")
    assert page.page.locator("#panes ellipse").count() == 3  # a line and what sets it off


EXPLAINED = """() => {
  const groups = ".control, .choices, figure, #go, .buttons.end, #heads-card";
  const controls = [...document.querySelectorAll("button, select, input, canvas[tabindex]")];
  const sentences = (group) => [...group?.querySelectorAll("small, figcaption") ?? []];
  const said = (group) => sentences(group).some((part) => part.textContent.length > 10);
  return controls.filter((part) => !part.closest("dialog, [hidden]")).map((part) => {
    const pictured = part.matches(".icon, .thumb"); // what these do is their title
    const group = part.closest(part.matches(".segments *") ? ".control" : groups);
    const explained = pictured ? part.title : said(group);
    return [part.id || part.textContent || part.className, Boolean(explained)];
  });
}"""


def test_every_control_has_a_sentence(page):
    """Also those of the header, of a student beside a teacher, and of a store of views."""
    page.open("image=3&layer=1&head=gradient&query=6&student=standard")
    page.page.evaluate("document.querySelector('#view-choice').hidden = false")
    controls = page.page.evaluate(EXPLAINED)
    assert [name for name, explained in controls if not explained] == []
    everywhere = {"student", "view", "Teacher", "is read by", "explain", "order", "go-to", "png"}
    assert {name for name, _ in controls} >= everywhere


def test_the_whole_walk_by_keyboard(page):
    """Tab reaches everything that a mouse can click, in its order, and shows where it is."""
    page.open("image=3&layer=1&head=1&query=6&student=standard")
    page.press("Tab", "Enter")
    assert page.page.evaluate("document.activeElement.id") == "stage"
    page.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    # By their places in a list of elements: a picture that loads meanwhile changes their text.
    count = page.page.evaluate(
        """(window.wanted = [...document.querySelectorAll("main *, header *")].filter((part) =>
             part.matches("button, select, input, canvas[tabindex]") && part.tabIndex >= 0 &&
             !part.disabled && part.checkVisibility())).length"""
    )
    page.page.focus("#student")
    page.press("Shift+Tab")
    reached = []
    for _ in range(count):
        page.press("Tab")
        reached.append(page.page.evaluate("window.wanted.indexOf(document.activeElement)"))
        seen = page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert seen == "solid", page.page.evaluate("document.activeElement.outerHTML")
    assert reached == list(range(count)) and count > 70
    page.page.focus(".thumb[data-image='7']")
    page.press("Enter")
    page.page.wait_for_selector("h2:has-text('Image 7:')")
    page.page.focus("#opacity")
    page.press("ArrowRight")
    page.page.focus("#floor")
    page.press("Space")
    page.page.focus("[data-direction=to]")
    page.press("Enter")
    state = page.state()
    assert (state["opacity"], state["floor"], state["direction"]) == ("0.55", "1", "to")
    page.page.focus("#order")
    page.press("ArrowDown", "Enter")
    page.until("location.hash.includes('order=wrong')")
    page.page.focus("#stage")
    page.press("?")
    assert page.page.is_visible("#help")
    page.press("Escape")
    assert page.page.is_hidden("#help")


def luminance(pixels: np.ndarray) -> np.ndarray:
    """WCAG's relative luminance of sRGB colours [..., 3]."""
    share = pixels[..., :3] / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def test_who_is_colour_blind_sees_weights_marks_and_mistakes(browser, shared):
    """Weights grow lighter all along the bar; a mark differs in lightness from what is beside it
    (WCAG 1.4.11 asks for 3 to 1); right and wrong have a sign."""
    page = Page(browser, shared.address, color_scheme="light")
    page.open("image=7&layer=1&head=0&query=5&student=standard&order=wrong&style=squares")
    session = page.page.context.new_cdp_session(page.page)

    def seen(selector: str, border: int = 0) -> np.ndarray:
        box = page.page.locator(selector).first.bounding_box()
        page.page.mouse.move(0, 0)
        clip = {"x": box["x"] - border, "y": box["y"] - border}
        clip |= {"width": box["width"] + 2 * border, "height": box["height"] + 2 * border}
        content = page.page.screenshot(clip=clip)
        return np.asarray(Image.open(BytesIO(content)).convert("RGB"), float)

    for deficiency in ("protanopia", "deuteranopia", "tritanopia", "achromatopsia"):
        session.send("Emulation.setEmulatedVisionDeficiency", {"type": deficiency})
        bar = luminance(seen("#bar"))
        middle = bar[bar.shape[0] // 2, 3:-3]
        assert np.all(np.diff(middle) > -0.01) and middle[-1] - middle[0] > 0.6, deficiency
        cell = luminance(seen(".cell[aria-pressed=true]", border=6))
        ring, ground = cell[cell.shape[0] // 2, 3], cell[0, 0]
        assert (ground + 0.05) / (ring + 0.05) > 3, deficiency
    assert np.ptp(seen("#bar"), -1).max() < 3  # the page was seen without colours at last
    assert page.text("#verdict").count("✓") + page.text("#verdict").count("✗") == 2
    sign = page.page.evaluate(
        "getComputedStyle(document.querySelector('.thumb.wrong'), '::after').content"
    )
    assert sign == '"✗"'
    page.page.close()


def test_a_dead_server_leaves_the_page_and_says_how_to_go_on(browser, run):
    viewer = open_viewer(None, run)
    viewer.load_images()
    viewer.command = "gaupipe view --run-dir mine"
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    listening.close()
    with serving(viewer, port) as address:
        page = Page(browser, address)
        page.open("image=3&query=6")
    before = page.page.evaluate("document.querySelector('#panes canvas').toDataURL()")
    page.page.fill("#go-to", "9")  # the images beside this one may be here already
    page.page.press("#go-to", "Enter")
    page.page.wait_for_selector("#banner:has-text('gaupipe view --run-dir mine')")
    assert page.page.is_hidden("#error") and page.text("#title").startswith("Image 3:")
    assert page.page.evaluate("document.querySelector('#panes canvas').toDataURL()") == before
    page.page.click("#banner button")  # too early
    page.page.wait_for_timeout(300)
    assert page.page.is_visible("#panes canvas")
    page.page.focus("#stage")
    page.press("ArrowRight")  # what is there can still be looked at
    assert "7 (row 1, col 3)" in page.text("#facts")
    with serving(viewer, port):
        page.page.click("#banner button")
        page.page.wait_for_selector("h2:has-text('Image 9:')")
        page.page.wait_for_selector("#banner", state="hidden")
        page.page.close()
