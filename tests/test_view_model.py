"""Any ViT on image files, without a run: `gaupipe view --model`, `gaupipe export-maps --model`."""

import base64
import copy
import json
import re
import shutil
import zlib

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import gaupipe.models  # noqa: F401
import store
from gaupipe.models import save_student
from gaupipe.system.errors import UserError
from gaupipe.system.files import alone_in
from gaupipe.teachers.files import open_model, reduce_size
from gaupipe.vit.capture import gradient_rollout
from gaupipe.vit.forward import run_blocks
from stages import predict
from stages.runs import resources
from stages.view import messages
from stages.view.page import write_page
from stages.view.serve import model_viewer, open_viewer
from viewing import Page, get, serving, unpacked
from vits import eager_maps, randomised

SIZES = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=3)
EXTRA = ["class", "register 1", "register 2"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two pictures of 32 pixels."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for name in ("a.png", "b.png"):
        pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def saved(folder, seed=0, **sizes):
    """A random ViT with a class token and two registers, as a folder."""
    torch.manual_seed(seed)
    sizes = dict(reg_tokens=2) | SIZES | sizes
    model = randomised(timm.create_model("vit_tiny_patch16_224", **sizes))
    save_student(model, folder, mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def viewer(pictures, model):
    job, note = open_model(model, [pictures], to_look=True)
    return model_viewer(job, note)


def inputs(pictures, name):
    pixels = np.asarray(Image.open(pictures / name)).transpose(2, 0, 1) / 127.5 - 1
    return torch.tensor(pixels, dtype=torch.float32)[None]


def test_maps_are_those_of_eager_attention_on_the_prepared_image(viewer, pictures):
    header, maps = unpacked(viewer.image(1), "maps")
    images, page_model = inputs(pictures, "b.png"), viewer.model("").model
    np.testing.assert_allclose(maps[:, :2], torch.cat(eager_maps(page_model, images)), atol=1e-5)
    assert header["extra"] == EXTRA and header["grid"] == [4, 4]
    assert header["predicted"] == page_model(images).argmax().item() and header["label"] is None


def test_an_image_that_cannot_be_read_spares_the_others(pictures, model, tmp_path):
    broken = shutil.copytree(pictures, tmp_path / "some") / "aa.png"  # in the middle
    broken.write_bytes(b"no image")
    viewer = model_viewer(*open_model(model, [tmp_path / "some"], to_look=True))
    whole = viewer.gallery("train", "")
    whole.read_all()
    assert not whole.error and whole.complete
    read = [item.predicted is not None for item in whole.page().items]
    assert read == [True, False, True]
    assert sorted(item.id for item in whole.page("sure").items) == [0, 2]


@pytest.mark.parametrize("target", [0, 2])
def test_gradient_weighted_rollout_is_that_of_the_paper(viewer, pictures, target):
    """In numpy, with derivatives from differences of the logit, one weight at a time."""
    vit, images = copy.deepcopy(viewer.model("").model).double(), inputs(pictures, "a.png").double()
    maps = []

    def logit(layer: int, place: tuple, step: float) -> float:
        def attend(block, attention, x):
            q, k, v = attention.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            maps.append(weights[0].numpy().copy())
            if block == layer:
                weights[0][place] += step
            return attention.proj((weights @ v).transpose(1, 2).flatten(2))

        with torch.no_grad():
            return run_blocks(vit, images, attend)[0, target].item()

    shown = gradient_rollout(vit, images, torch.tensor([target]), 2)[0]
    logit(-1, (), 0)
    one = expected = np.eye(shown.shape[-1])
    for layer, block in enumerate(maps[:2]):
        weighted = np.zeros(block.shape)
        for place in np.ndindex(*block.shape):
            slope = (logit(layer, place, 1e-4) - logit(layer, place, -1e-4)) / 2e-4
            weighted[place] = max(slope * block[place], 0)
        expected = expected + weighted.mean(0) @ expected
        np.testing.assert_allclose(shown[layer], expected - one, atol=1e-6)


@pytest.mark.parametrize("pooling", [{}, dict(class_token=False, reg_tokens=0, global_pool="avg")])
def test_what_moves_the_features_is_legrad(pictures, tmp_path, pooling):
    """Of a model that ends with each block in turn, with derivatives from differences of half the
    squared length of its output, one weight at a time."""
    source = saved(tmp_path, num_classes=0, **pooling)
    live = model_viewer(open_model(source, [pictures], to_look=True)[0]).model("")
    vit = copy.deepcopy(live.model).double()
    images = inputs(pictures, "a.png").double()
    shown = live.relevance(None, 0)
    blocks = list(vit.blocks)
    tokens = shown.weights.shape[-1]
    expected = np.zeros(tokens)
    for last in range(2):
        vit.blocks = torch.nn.Sequential(*blocks[: last + 1])

        def half_square(place: tuple, step: float, last: int = last) -> float:
            def attend(block, attention, x):
                q, k, v = attention.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
                weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
                if block == last:
                    weights[0][place] += step
                return attention.proj((weights @ v).transpose(1, 2).flatten(2))

            with torch.no_grad():
                return run_blocks(vit, images, attend).square().sum().item() / 2

        slopes = np.zeros((2, tokens, tokens))
        for place in np.ndindex(*slopes.shape):
            slopes[place] = (half_square(place, 1e-4) - half_square(place, -1e-4)) / 2e-4
        expected = expected + slopes.clip(0).mean((0, 1))
        np.testing.assert_allclose(shown.weights[last, 0], expected, rtol=1e-3, atol=1e-5)
    assert (shown.label, shown.probability) == (None, None)


def test_the_page_shows_class_and_register_tokens(viewer, pictures, browser):
    vit = viewer.model("").model
    maps = torch.cat(eager_maps(vit, inputs(pictures, "a.png")))  # [L, H, N, N]
    with serving(viewer) as address:
        page = Page(browser, f"{address}/")
        page.open("image=0&layer=1&head=1")
        page.press("c")
        page.until("document.querySelector('#facts').innerText.includes('class')")
        shown = json.loads(page.saved("#json"))
        assert (shown["layer"], shown["head"], shown["query"]) == (1, 1, "class")
        np.testing.assert_allclose(np.ravel(shown["map"]), maps[1, 1, 0, 3:], atol=1e-5)
        np.testing.assert_allclose(list(shown["extra"].values()), maps[1, 1, 0, :3], atol=1e-5)
        assert page.text("#title") == "a.png" and page.page.is_hidden("#banner")
        page.press("g", "b")
        page.until("document.querySelector('#facts').innerText.includes('relevance for class')")
        page.page.select_option("#explain", "2")
        page.until("document.querySelector('#facts').innerText.includes('class 2')")
        relevance = json.loads(page.saved("#json"))
        expected = gradient_rollout(vit, inputs(pictures, "a.png"), torch.tensor([2]), 2)[0, 1]
        np.testing.assert_allclose(np.ravel(relevance["map"]), expected[0, 3:], atol=1e-6)
        assert relevance["class"] == 2 and page.state()["style"] == "squares"
        page.press("Escape", "m", ".")
        assert page.state()["head"] == "0"
        page.open("image=1&query=x9&student=nobody")
        assert "query" not in page.state() and "no student “nobody”" in page.text("#banner")
        assert page.complaints == []
        page.page.close()


def test_a_class_has_the_first_of_its_names_that_no_other_class_has(pictures, browser, tmp_path):
    model = randomised(timm.create_model("vit_tiny_patch16_224", **SIZES))
    names = ["maillot", "maillot, tank suit", "oak, tree"]
    save_student(model, tmp_path, label_names=names)
    job, note = open_model(f"local-dir:{tmp_path}", [pictures], to_look=True)
    with serving(model_viewer(job, note)) as address:
        page = Page(browser, f"{address}/")
        page.open("image=0&head=gradient")
        page.until("document.querySelectorAll('#explain option').length === 4")
        options = "[...document.querySelectorAll('#explain option')].map((one) => one.text)"
        page.until(f"{options}.includes('oak')")  # the names arrive with the status
        assert sorted(page.page.evaluate(options)) == [
            "any class",
            "maillot",
            "maillot, tank suit",
            "oak",
        ]
        page.page.close()


def test_a_model_without_classes_opens_with_what_moves_its_features(pictures, browser, tmp_path):
    """With a server and without one."""
    job, _ = open_model(saved(tmp_path, num_classes=0), [pictures], to_look=True)
    viewer = model_viewer(job)
    live = viewer.model("")
    expected = live.relevance(None, 1).weights[1, 0, 3:]
    write_page(viewer, tmp_path / "page.html", [1], "train", {"image": 1})
    with serving(viewer) as address:
        for url in (f"{address}/", (tmp_path / "page.html").as_uri()):
            page = Page(browser, url)
            page.open("image=1")
            shown = json.loads(page.saved("#json"))
            np.testing.assert_allclose(np.ravel(shown["map"]), expected, atol=1e-6)
            assert (shown["head"], shown["query"]) == ("gradient", "class")
            assert shown["predicted"] is None and shown["class"] is None
            assert "what moves the features, up to this block" in page.text("#facts")
            assert "what moves the features in the blocks up to 1, as the class token reads it" in (
                page.text("#says")
            )
            assert page.page.is_hidden("#classes")
            page.over(5, (4, 4))  # nothing is known of what this patch reads
            assert "as the class token reads it" in page.text("#panes figcaption")
            page.over(5, (4, 4), "click")
            assert (page.state()["query"], page.state()["head"]) == ("5", "mean")
            page.press("g")
            assert "query" not in page.state() and "head" not in page.state()
            assert page.complaints == []
            page.page.close()


def test_a_map_of_features_is_tested_by_how_like_they_stay(pictures, browser, tmp_path):
    """Painted by numpy, and asked anew."""
    job, _ = open_model(saved(tmp_path, num_classes=0), [pictures], to_look=True)
    viewer = model_viewer(job)
    vit, images = viewer.model("").model, inputs(pictures, "b.png")
    weights = viewer.model("").relevance(None, 1).weights[1, 0, 3:]
    patches = weights.topk(3).indices.tolist()
    grey = images.clone()
    for patch in patches:
        y, x = divmod(patch, 4)
        grey[..., 8 * y : 8 * y + 8, 8 * x : 8 * x + 8] = 0
    one, other = (vit(each)[0].detach().numpy() for each in (images, grey))
    cosine = one @ other / np.sqrt((one @ one) * (other @ other))
    found = viewer.test("", 1, None, patches)
    assert (found.label, found.whole) == (None, 1)
    assert found.without == pytest.approx(cosine, abs=1e-5)
    with serving(viewer) as address:
        assert get(f"{address}/api/test/1?class=0&patches=1")[0] == 404
        assert get(f"{address}/api/relevance/1?class=0")[0] == 404
        page = Page(browser, f"{address}/")
        page.open("image=1")
        page.page.click("#test")
        page.until("document.querySelector('#tested').textContent !== ''")
        assert page.text("#tested") == (
            f"features stay {cosine:.2f} alike (cosine); without random patches {found.random:.2f}"
        )
        assert page.complaints == []
        page.page.close()


def test_a_page_without_a_server_holds_the_maps(viewer, tmp_path):
    write_page(viewer, tmp_path / "page.html", [0, 1], "train", {"image": 0})
    text = (tmp_path / "page.html").read_text()
    embedded = json.loads(text.partition('id="embedded">')[2].partition("</script>")[0])
    page_image = embedded["images"]["1"]["maps"][viewer.title][0]
    assert zlib.decompress(base64.b64decode(page_image)) == viewer.image(1)  # all of a small one
    assert embedded["images"]["0"]["pixels"][0]


def test_large_maps_are_sent_in_8_bits(monkeypatch, viewer, browser):
    """As the page reads them: within 1.6 % of the most of a row, and smaller by two thirds."""
    monkeypatch.setattr(messages, "EXACT", 0)
    _, maps = unpacked(viewer.image(1), "maps")
    sent = viewer.image(1, packed=messages.pack_small)
    assert len(sent) < 0.35 * maps.nbytes
    text = base64.b64encode(zlib.decompress(sent)).decode()
    read = """async ([text]) => {
      const { unpack } = await import("./source.js");
      return [...unpack(Uint8Array.fromBase64(text).buffer).arrays.maps.values];
    }"""
    with serving(viewer) as address:
        page = Page(browser, f"{address}/")
        page.open()
        read_maps = np.reshape(page.page.evaluate(read, [text]), maps.shape)
        page.page.close()
    assert (np.abs(read_maps - maps) <= 0.016 * maps.max(-1, keepdims=True)).all()


def test_a_map_is_tested_by_what_the_model_says_without_its_patches(viewer, pictures, browser):
    """Painted by numpy, and asked anew."""
    vit = viewer.model("").model
    images = inputs(pictures, "b.png")

    def without(patches) -> float:
        grey = images.clone()
        for patch in patches:
            y, x = divmod(int(patch), 4)
            grey[..., 8 * y : 8 * y + 8, 8 * x : 8 * x + 8] = 0  # the mean that the model knows
        return vit(grey)[0].softmax(-1)[1].item()

    found = viewer.test("", 1, 1, [3, 9, 10])
    assert found.whole == pytest.approx(without([]), abs=1e-5)
    assert found.without == pytest.approx(without([3, 9, 10]), abs=1e-5)
    draw = torch.Generator().manual_seed(0)
    random = [without(torch.randperm(16, generator=draw)[:3]) for _ in range(8)]
    assert found.random == pytest.approx(np.mean(random), abs=1e-5)
    with serving(viewer) as address:
        for patches, code in (("16", 404), ("", 404), ("1,x", 404), ("1", 200)):
            answer = get(f"{address}/api/test/1?patches={patches}")
            assert answer[0] == code, patches
        page = Page(browser, f"{address}/")
        page.open("image=1&explain=1&head=gradient")
        page.page.click("#test")
        page.until("document.querySelector('#tested').textContent !== ''")
        map = np.ravel(json.loads(page.saved("#json"))["map"])
        expected = viewer.test("", 1, 1, map.argsort()[::-1][:3].tolist())
        shares = [f"{100 * share:.1f} %" for share in vars(expected).values() if share != 1]
        assert page.text("#tested") == (
            f"class 1: {shares[0]} → {shares[1]}; without random patches {shares[2]}"
        )
        assert page.page.locator("#panes svg [fill='#7c7770']").count() == 3
        page.press("m")
        assert page.text("#tested") == "" and page.complaints == []
        page.page.close()


def test_two_classes_stand_side_by_side(viewer, pictures, browser, tmp_path):
    """With a server and, for the token that the head reads, without one."""
    images = inputs(pictures, "b.png")
    vit = viewer.model("").model
    probabilities = vit(images)[0].softmax(-1).detach()
    first, second = probabilities.topk(2).indices.tolist()
    write_page(viewer, tmp_path / "page.html", [1], "train", {"image": 1})
    with serving(viewer) as address:
        for url in (f"{address}/", (tmp_path / "page.html").as_uri()):
            page = Page(browser, url)
            page.open("image=1")
            chips = page.page.locator(".chip")
            assert chips.count() == 3
            assert chips.nth(0).locator("button").first.get_attribute("aria-pressed") == "true"
            chips.nth(1).locator(".plus").click()
            page.until("document.querySelectorAll('#panes canvas').length === 2")
            assert page.state()["beside"] == str(second)
            tops = []
            for label in (first, second):
                map = gradient_rollout(vit, images, torch.tensor([label]), 2)[0, 1, 0, 3:]
                tops.append(f"{np.quantile(map.numpy(), 0.98):#.3g}")
            assert page.text("#most") == ", ".join(tops)  # each has a scale of its own
            captions = page.page.locator("#panes figcaption").all_inner_texts()
            for label, said in zip((first, second), captions, strict=True):
                share = 100 * probabilities[label].item()
                assert said.startswith(f"class {label}, {share:.1f} %. ")
            chips.nth(1).locator(".plus").click()
            page.until("document.querySelectorAll('#panes canvas').length === 1")
            chips.nth(1).locator("button").first.click()
            page.until(f"location.hash.includes('explain={second}')")
            shown = json.loads(page.saved("#json"))
            expected = gradient_rollout(vit, images, torch.tensor([second]), 2)[0, 1, 0, 3:]
            np.testing.assert_allclose(np.ravel(shown["map"]), expected, atol=1e-6)
            assert shown["class"] == second and page.complaints == []
            page.page.close()


def test_a_page_to_send_has_no_path_of_the_machine(model, pictures, tmp_path, in_process):
    page = ("--html", tmp_path / "page.html")
    assert in_process("view", "--model", model, "--images", pictures, *page)[0] == 0
    text = (tmp_path / "page.html").read_text()
    (message,) = re.findall(r'"maps": {"[^"]+": \["([^"]+)"', text)
    header, _ = unpacked(zlib.decompress(base64.b64decode(message)), "maps")
    assert header["title"] == "a.png"
    assert str(pictures.parent) not in text + json.dumps(header)


@pytest.mark.parametrize("kind", ["dense", "topk"])
def test_a_store_of_a_model_round_trips(viewer, model, pictures, tmp_path, in_process, kind):
    url = tmp_path / "maps.zarr"
    command = ["export-maps", "--model", model, "--images", pictures, "--kind", kind]
    k = [] if kind == "dense" else ["--k", 16]
    assert in_process(*command, *k, "--out", url, "--shard-mb", 0.001)[0] == 0
    schema = store.open(url).schema
    assert schema.prefix_tokens == 3 and schema.extra["teacher"] == model
    assert [*schema.arrays][-2:] == ["logits", "names"]  # images in files have no labels
    assert in_process("verify", url, "--teacher")[0] == 0
    maps = torch.cat(eager_maps(viewer.model("").model, inputs(pictures, "b.png")))
    row = ("inspect", url, "--image", 1, "--layer", 1, "--head", 0, "--query", "class", "--json")
    shown = json.loads(in_process(*row)[1])
    tolerance = 1e-3 if kind == "dense" else 6e-3
    np.testing.assert_allclose(np.ravel(shown["map"]), maps[1, 0, 0, 3:], atol=tolerance)
    np.testing.assert_allclose(list(shown["extra"].values()), maps[1, 0, 0, :3], atol=tolerance)
    assert shown["file"] == "b.png"
    assert shown["label"] is None and list(shown["extra"]) == EXTRA and shown["by"] == model
    opened = open_viewer(str(url), None)
    opened.load_images()
    opened.gallery("train", "").read_all()
    first, second = opened.page("train", "", "id", None, 0).items
    assert second.title == "b.png" and first.label is None and opened.pixels(1)
    # from patches to patches, renormalised, as a student's are
    from gaupipe.distillation.kinds import StoredAttentionReader

    reader = StoredAttentionReader(store.open(url), torch.device("cpu"))
    patches = reader.attention(store.open(url).gather(np.array([1]))).map(0)[0]
    expected = maps[0, :, 3:, 3:] / maps[0, :, 3:, 3:].sum(-1, keepdim=True)
    np.testing.assert_allclose(patches, expected, atol=2e-2)


def test_a_store_has_the_predictions_of_a_model(viewer, model, pictures, tmp_path, in_process):
    """Of one that has some."""
    command = ("export-maps", "--images", pictures, "--kind", "predictions", "--model")
    url = tmp_path / "p.zarr"
    assert in_process(*command, model, "--out", url)[0] == 0
    assert in_process("verify", url, "--teacher")[0] == 0
    stored = store.open(url).gather(np.array([1, 0]))
    assert store.unpack_names(stored["names"]) == ["b.png", "a.png"]
    with torch.inference_mode():
        logits = viewer.model("").model(torch.cat([inputs(pictures, f"{x}.png") for x in "ba"]))
    np.testing.assert_allclose(stored["logits"], logits.log_softmax(-1), atol=2e-3)
    nothing = saved(tmp_path / "nothing", num_classes=0)
    code, _, err = in_process(*command, nothing, "--out", tmp_path / "n.zarr")
    assert (code, err.count("\n")) == (2, 1) and "predicts no classes" in err
    assert not (tmp_path / "n.zarr").exists()


def test_an_unfinished_store_is_continued_by_its_own_model_alone(
    model, pictures, tmp_path, in_process
):
    url = tmp_path / "maps.zarr"
    command = ("export-maps", "--images", pictures, "--out", url, "--shard-mb", 0.001, "--model")
    assert in_process(*command, model)[0] == 0
    before = {path: path.read_bytes() for path in url.rglob("*") if path.is_file()}
    store.join(url).reopen([1])
    code, _, err = in_process(*command, saved(tmp_path / "other", seed=1))
    assert (code, err.count("\n")) == (2, 1) and "teacher_sha256" in err
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.png").write_bytes((pictures / "b.png").read_bytes())
    code, _, err = in_process(*command, model, "--images", tmp_path / "one")
    assert (code, err.count("\n")) == (2, 1) and "dataset_sha256" in err
    assert in_process(*command, model)[0] == 0
    assert {path: path.read_bytes() for path in before} == before


def test_a_store_says_whose_it_is_in_any_folder(tmp_path, pictures, in_process):
    saved(tmp_path / "model")
    command = ("export-maps", "--model", "local-dir:model", "--images", pictures, "--out", "s")
    assert in_process(*command, "--image-size", 16, cwd=tmp_path)[0] == 0
    schema = store.open(tmp_path / "s").schema
    assert schema.grid == (2, 2) and schema.extra["teacher"] == f"local-dir:{tmp_path / 'model'}"
    assert in_process("verify", tmp_path / "s", "--teacher", cwd=pictures)[0] == 0


def test_two_exports_do_not_write_one_store(model, pictures, tmp_path, in_process):
    command = ("export-maps", "--model", model, "--images", pictures, "--out", tmp_path)
    with alone_in(tmp_path):
        code, _, err = in_process(*command)
    assert (code, err.count("\n")) == (2, 1) and "another process writes this store" in err
    assert not any(tmp_path.iterdir()) and in_process(*command)[0] == 0


@pytest.mark.parametrize("measure", ["free_disk", "available_memory"])
def test_an_export_that_does_not_fit_is_refused(
    model, pictures, tmp_path, in_process, monkeypatch, measure
):
    monkeypatch.setattr(resources, measure, lambda *_: 1)
    command = ("export-maps", "--model", model, "--images", pictures, "--out", tmp_path / "s")
    code, _, err = in_process(*command)
    assert (code, err.count("\n")) == (2, 1) and "--force" in err and not any(tmp_path.iterdir())
    assert in_process(*command, "--force")[0] == 0


def test_a_model_is_random_only_where_that_is_asked_for(pictures, tmp_path, in_process):
    """On the terminal and on the page."""
    command = ("view", "--model", "vit_tiny_patch16_224", "--images", pictures, "--image-size", 32)
    page = ("--html", tmp_path / "page.html", "--image", 0)
    code, out, err = in_process(*command, *page)
    assert (code, out, err.count("\n")) == (2, "", 1) and not any(tmp_path.iterdir())
    assert "not on this machine: download=True (--download) fetches them; --random-weights" in err
    code, _, err = in_process(*command, *page, "--random-weights")
    assert code == 0 and err.startswith("gaupipe: Random weights: vit_tiny_patch16_224")
    assert err.strip().removeprefix("gaupipe: ") in (tmp_path / "page.html").read_text()


def test_a_model_of_the_hub_is_taken_from_its_cache(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"not on this machine: download=True \(--download\)"):
        open_model("hf-hub:somebody/mine", [pictures], to_look=True)
    repository = tmp_path / "models--somebody--mine"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    saved(repository / "snapshots" / ("0" * 40))
    job, note = open_model("hf-hub:somebody/mine", [pictures], to_look=True)
    assert note == "" and job.network.prefix == 3 and job.data.image_size == 32


def test_a_large_model_is_shown_at_fewer_pixels_and_says_so():
    model = timm.create_model("vit_tiny_patch16_224", **SIZES | dict(img_size=256))
    size, note = reduce_size(model)
    assert size == 160 and "image_size=256 (--image-size) shows all" in note


def test_outputs_that_are_no_numbers_are_refused(pictures, tmp_path):
    """JSON has no word for NaN."""
    name = saved(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["sha256"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    save_file(weights | {"head.weight": weights["head.weight"] * np.nan}, file)
    viewer = model_viewer(open_model(name, [pictures], to_look=True)[0])
    with serving(viewer) as address:
        code, content, _ = get(f"{address}/api/image/0")
    assert code == 404 and "outputs are not all numbers" in json.loads(content)["error"]
    with pytest.raises(UserError, match="outputs are not all numbers"):
        predict.run(name, [pictures])


def test_a_file_that_is_no_image_is_refused_by_name(tmp_path, model):
    (tmp_path / "broken.png").write_bytes(b"no image")
    job, _ = open_model(model, [tmp_path / "broken.png"], to_look=True)
    with pytest.raises(UserError, match=r"broken\.png: not readable"):
        model_viewer(job).model("").see(0)
