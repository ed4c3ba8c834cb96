"""`gaupipe view` without a browser: what the server answers, and what is refused."""

import contextlib
import json
import os
import platform
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import store
from gaupipe.system.errors import UserError
from gaupipe.system.imports import pip_install
from stages.view import page
from stages.view.gallery import stored_gallery
from stages.view.serve import bound, open_viewer
from stores import make_arrays, make_schema, write_store
from viewing import get, serving, unpacked

ROOT = Path(__file__).parents[1]
MANY = "9" * 5000


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A store of 150 images in shards of 40, and what is in it."""
    folder = tmp_path_factory.mktemp("view")
    schema = make_schema(num_images=150)
    arrays = make_arrays(schema)
    write_store(folder / "s.zarr", schema, arrays, shard_bytes=40 * schema.bytes_per_image)
    return folder / "s.zarr", arrays


def test_orders_of_the_gallery(written, tmp_path):
    url, arrays = written
    logits = arrays["logits"].astype(np.float16).astype(np.float64)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    sure, right = probability.max(-1), logits.argmax(-1) == arrays["labels"]
    gallery = stored_gallery(store.open(url))
    gallery.read_all()

    def ids(*asked) -> list[int]:
        return [item.id for item in gallery.page(*asked).items]

    assert [*ids("id"), *ids("id", None, 1), *ids("id", None, 2)] == list(range(150))
    assert ids("id", None, 3) == [] and gallery.page("id", None, 3).total == 150
    assert ids("id", 2) == np.flatnonzero(arrays["labels"] == 2).tolist()
    first = ids("wrong")
    wrong = [i for i in first if not right[i]]
    assert first[: len(wrong)] == wrong and len(wrong) == min((~right).sum(), 60)
    assert np.all(np.diff(sure[wrong]) <= 1e-6)
    assert np.all(np.diff(sure[ids("sure")]) <= 1e-6) and sure[ids("sure")[0]] == sure.max()
    assert np.all(np.diff(sure[ids("unsure")]) >= -1e-6)
    item = gallery.page("id").items[7]
    assert (item.label, item.predicted) == (arrays["labels"][7], logits[7].argmax())
    assert item.probability == pytest.approx(sure[7], abs=1e-6)
    with pytest.raises(UserError, match="0 to 4"):
        gallery.page("id", 5)


def test_a_store_without_predictions_shows_none(tmp_path):
    schema = make_schema(num_images=20, extra={"predicts": False})
    arrays = make_arrays(schema)
    write_store(tmp_path / "s.zarr", schema, arrays)
    gallery = stored_gallery(store.open(tmp_path / "s.zarr"))
    gallery.read_all()
    [first, *_] = items = gallery.page("wrong").items
    assert [item.id for item in items] == list(range(20))  # no order without predictions
    assert (first.predicted, first.probability) == (None, None)
    assert first.label == arrays["labels"][0]


def test_images_are_listed_while_labels_are_still_read(written):
    gallery = stored_gallery(store.open(written[0]))
    assert [item.id for item in gallery.page("id", None, 1).items] == list(range(60, 120))
    assert gallery.page("wrong").items is None  # not before all labels are known
    gallery.thread.join()  # which that began to read
    assert gallery.done == 150 and not gallery.reading
    assert gallery.page("wrong").items[0].label is not None


def test_a_view_of_an_image_is_its_first(tmp_path):
    schema = make_schema(kind="topk", k=3, num_images=24, views=3)
    arrays = make_arrays(schema)
    write_store(tmp_path / "s", schema, arrays, shard_bytes=5 * schema.bytes_per_image)
    gallery = stored_gallery(store.open(tmp_path / "s"))
    gallery.read_all()
    some = gallery.page("id")
    assert some.total == 8
    message = open_viewer(str(tmp_path / "s"), None).image(2, 1)
    _, shown = unpacked(message, "maps")
    largest = arrays["weights"][7, ..., 0].astype(np.float16)  # of each query's three keys
    np.testing.assert_allclose(shown[:, : schema.heads].max(-1), largest, atol=2e-3)
    assert [item.label for item in some.items] == arrays["labels"][::3].tolist()


def test_a_damaged_shard_stops_the_reading_with_its_name(written, tmp_path):
    url = tmp_path / "s.zarr"
    schema = make_schema(num_images=150)
    write_store(url, schema, make_arrays(schema), shard_bytes=40 * schema.bytes_per_image)
    damaged = url / "logits" / "c" / "2" / "0"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    gallery = stored_gallery(store.open(url))
    gallery.read_all()
    assert "images 80 to 119 " in gallery.error and "shard 2 " in gallery.error
    assert not gallery.complete and not gallery.reading


def test_what_the_server_answers(written):
    viewer = open_viewer(str(written[0]), None)
    viewer.gallery("train", "").read_all()
    with serving(viewer) as address:
        code, body, headers = get(f"{address}/")
        assert code == 200 and b"gaupipe" in body
        assert "default-src 'none'" in headers["content-security-policy"]
        assert get(f"{address}/main.js")[2]["content-type"].startswith("text/javascript")
        assert json.loads(get(f"{address}/api/about")[1])["kind"] == "gaussian"
        assert json.loads(get(f"{address}/api/gallery?page=2")[1])["total"] == 150
        for path, code, message in (
            ("api/image/150", 404, "0 to 149"),
            ("api/image/3?view=1", 404, "0 to 0"),
            ("api/image/3?view=x", 404, "whole number"),
            (f"api/image/{MANY}", 404, "whole number"),
            (f"api/pixels/{MANY}", 404, "whole number"),
            (f"api/gallery?page={MANY}", 404, "whole number"),
            ("api/gallery?order=x", 404, "should be one of"),
            ("api/image/3?student=standard", 404, "not one of none"),
            ("api/relevance/3?class=x", 404, "whole number"),
            ("api/pixels/3", 404, "still being read"),
        ):
            answer = get(f"{address}/{path}")
            assert answer[0] == code and message in json.loads(answer[1])["error"], path
        assert get(f"{address}/api/gallery?label=1")[0] == 200  # which is called class
        assert get(f"{address}/..%2fapp.py")[0] == 404
        assert get(f"{address}/api/image/x")[0] == 404


def test_splits_that_there_are_not_are_refused(small_run):
    with serving(open_viewer(None, small_run)) as address:
        for path in ("status", "gallery", "image/0", "relevance/0", "pixels/0"):
            for split in ("nope", "test"):
                answer = get(f"{address}/api/{path}?split={split}&student=standard")
                assert answer[0] == 404 and split in json.loads(answer[1])["error"], path


def test_another_host_is_refused(written):
    with serving(open_viewer(str(written[0]), None)) as address:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
            for path in ("/", "/api/about", "/main.js"):
                assert get(address + path, Host=host)[0] == 400
        assert get(f"{address}/api/about", Host="localhost:9000")[0] == 200  # a forwarded port


def test_who_does_not_know_the_token_learns_nothing(written):
    """Neither what is there, nor the token from an answer to those who know it."""
    viewer = open_viewer(str(written[0]), None)
    with serving(viewer) as address:
        local, _, token = address.rpartition("/")
        refused = set()
        for path in ("", "api/about", "main.js", "api/pixels/0", "absent", f"{token[:-1]}/", "x/"):
            code, content, _ = get(f"{local}/{path}")
            refused.add((code, content))
        code, content, _ = get(f"{local}/api/images?name={__file__}", data=b"")
        [(code, content)] = refused | {(code, content)}
        assert code == 404 and b"Open the link" in content
        for path in ("", "main.js", "api/about", "api/status", "api/gallery", "api/image/0"):
            code, content, headers = get(f"{address}/{path}")
            assert code == 200 and token.encode() not in content and token not in str(headers)


def test_it_ends_with_ctrl_c(written, in_process, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    seen = {}
    monkeypatch.setattr(secrets, "token_hex", lambda length: "0" * length)

    def look_and_interrupt() -> None:
        while not seen:
            with contextlib.suppress(urllib.error.URLError):
                about = get(f"http://127.0.0.1:{port}/{'0' * 16}/api/about")[1]
                seen.update(json.loads(about))
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=look_and_interrupt).start()
    code, out, err = in_process("view", written[0], "--no-open", "--port", port)
    assert (code, err) == (0, "") and seen["kind"] == "gaussian"
    assert out.startswith(f"http://127.0.0.1:{port}/{'0' * 16}/ ")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_threads_share_a_heap():
    """By glibc's own count of heaps, of which four threads would make four more."""
    program = """if 1:
        import ctypes, threading
        from gaupipe.system.machine import share_one_heap
        share_one_heap()
        together = threading.Barrier(4)

        def work():
            blocks = [bytes(2000) for _ in range(1000)]
            together.wait()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        ctypes.CDLL(None).malloc_stats()
    """
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    assert said.count("Arena") == 1


def test_a_port_in_use_is_one_line(written, in_process):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, err = in_process("view", written[0], "--no-open", "--port", port)
        assert code == 2 and err.startswith(f"gaupipe: --port {port}: ") and err.count("\n") == 1
    with bound(None) as one, bound(None) as two:  # the usual port, then any other
        assert one.getsockname()[1] != two.getsockname()[1]


def test_without_the_extra_it_says_what_to_install(written, in_process, monkeypatch):
    monkeypatch.delitem(sys.modules, "stages.view.app")
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    code, _, err = in_process("view", written[0], "--no-open")
    assert code == 2 and pip_install("view") in err and err.count("\n") == 1


def test_a_page_of_no_named_image_shows_the_first(small_run, in_process, tmp_path):
    pages = [tmp_path / "none.html", tmp_path / "first.html"]
    assert in_process("view", "--run-dir", small_run, "--html", pages[0])[0] == 0
    assert in_process("view", "--run-dir", small_run, "--html", pages[1], "--image", 0)[0] == 0
    assert pages[0].read_text() == pages[1].read_text()
    page = ("--html", tmp_path / "val.html")  # of which a student alone has maps
    code, _, err = in_process("view", "--run-dir", small_run, *page, "--split", "val")
    assert code == 0, err


@pytest.mark.parametrize("command", [("view", "--html", "o.html"), ("inspect", "--png", "o.png")])
def test_a_file_that_does_not_fit_on_the_disk_leaves_nothing(
    small_run, tmp_path, in_process, command
):
    """Nor does it touch a file of the user's, whatever its name."""
    name, option, out = command
    folder = tmp_path / "out"
    folder.mkdir()
    for mine in ("o.partial", f"{out}.partial"):
        (folder / mine).write_text("mine")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        arguments = (name, small_run / "maps.zarr", "--image", 3, option, out)
        code, printed, err = in_process(*arguments, cwd=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code and not printed and err.count("\n") == 1 and "too large" in err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert in_process(*arguments, cwd=folder)[0] == 0
    assert len(list(folder.iterdir())) == len(before) + 1


def test_the_bundle_has_every_module_once():
    names = {path.stem for path in page.STATIC.glob("*.js")}
    assert set(page.MODULES) == names and len(page.MODULES) == len(names)
    bundle = page.bundle()
    assert not re.search(r"^(import|export)\b", bundle, re.MULTILINE)
    names = r"^(?:async )?(?:const|let|var|class|function\*?) (\S+)"
    declared = [name.split("(")[0] for name in re.findall(names, bundle, re.MULTILINE)]
    assert all(re.fullmatch(r"[$\w]+", name) for name in declared)  # none of several at once
    assert len(declared) == len(set(declared)) > 30  # nor do two modules have one private name


def test_an_image_of_a_large_store_is_read_alone(tmp_path):
    """Looking at one image of many shards reads that image's shard, not the others."""
    schema = make_schema(num_images=40)
    url = tmp_path / "s.zarr"
    write_store(url, schema, make_arrays(schema), shard_bytes=2 * schema.bytes_per_image)
    labels = url / "labels" / "c"  # a gather would read them whole
    for path in labels.rglob("*"):
        if path.is_file() and path.relative_to(labels).parts[0] != "7":
            path.unlink()
    viewer = open_viewer(str(url), None)
    assert len(viewer.image(15)) > 100
    with pytest.raises(store.StoreError):
        viewer.image(3)
