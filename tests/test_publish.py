"""Publish: the folder, the model card, and what reaches a Hub that stands on this machine."""

import base64
import json
import os
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
import yaml
from huggingface_hub import HfApi
from markdown_it import MarkdownIt

from gaupipe import __version__
from gaupipe.settings import load as config
from gaupipe.vit.saving import load_folder, save_student
from stages import evaluate, export_maps, phase_b
from stages.publish import folder
from stages.runs.directory import RunDirectory


@pytest.fixture(autouse=True)
def no_token(monkeypatch, tmp_path):
    """Nobody is logged in, whoever runs the tests."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))


class Hub(BaseHTTPRequestHandler):
    """The part of the Hugging Face Hub that an upload asks for. Everything is stored as text in the
    commit, as the Hub has small files."""

    def answer(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.answer({}, 200 if self.server.has_card else 404)

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer hf_right"
        self.answer({"name": "somebody"} if known else {"error": "bad"}, 200 if known else 401)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            name = json.loads(body)["name"]
            self.answer({"url": f"{self.server.address}/somebody/{name}"})
        elif "/preupload/" in self.path:
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": path, **modes} for path in paths]})
        elif "/commit/" in self.path and not self.server.full:
            self.server.commits.append([json.loads(line) for line in body.splitlines()])
            url = f"{self.server.address}/somebody/tiny/commit/1"
            self.answer({"commitOid": "1" * 40, "commitUrl": url})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        else:
            self.answer({"error": "the disk is full"}, 403)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.created, server.commits, server.has_card, server.full = [], [], False, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("stages.publish.folder.HfApi", partial(HfApi, endpoint=server.address))
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield server
    server.shutdown()
    server.server_close()


def is_private(created: dict) -> bool:
    """Whether a repository was asked for as private; versions of huggingface_hub say it in two
    ways."""
    return created.get("private") is True or created.get("visibility") == "private"


def uploaded(hub) -> dict[str, bytes]:
    """The files of the only commit."""
    (lines,) = hub.commits
    values = [line["value"] for line in lines if line["key"] == "file"]
    return {value["path"]: base64.b64decode(value["content"]) for value in values}


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def publish(run: Path, in_process, *arguments) -> tuple[int, str, str]:
    return in_process("publish", "standard", "--run-dir", run, *arguments)


def test_a_published_folder_is_the_student_with_its_card(run, tmp_path, in_process):
    settings = config.load(run / "config.yaml", [f"data.root={tmp_path / 'private'}"])
    (run / "config.yaml").write_text(config.dump(settings))  # digits read no folder
    out = tmp_path / "out"
    code, stdout, _ = publish(run, in_process, "--out", out)
    assert (code, stdout) == (0, f"{out}\n")
    names = ["README.md", "SHA256SUMS", "config.json", "model.safetensors", "settings.yaml"]
    assert sorted(path.name for path in out.iterdir()) == names
    for path in out.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path

    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    student = evaluate.load_student(run, "standard").model
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(model(images), student(images), atol=0, rtol=0)
    scores = evaluate.run(run, "standard")
    card = (out / "README.md").read_text()
    result = head_of(card)["model-index"][0]["results"][0]
    assert result["dataset"]["split"] == "validation"  # the digits have no test images
    assert result["metrics"][0]["value"] == round(scores["top1"], 4)
    assert "license" not in head_of(card) and "To be filled in" in card
    for said in (
        f"| validation | 360 | {100 * scores['top1']:.2f} % |",
        "40 training images, 360 validation images",
        f"gaupipe {__version__}",
        "a ViT with GauAttention, trained in phase A; epochs: 1;",
        "0 x teacher's predictions + 0.9 x labels + 0.1 x attention maps",
        "gaupipe export-maps --run-dir run --kind gaussian --encoding float16\n",
        "gaupipe phase-b --run-dir run\n",
    ):
        assert said in card
    private = tmp_path / "private"
    again = config.load(out / "settings.yaml", [f"data.root={private}"])
    assert again == settings


def test_the_code_of_the_card_classifies_an_image(run, tmp_path, in_process, monkeypatch, capfd):
    from PIL import Image

    out = tmp_path / "out"
    assert publish(run, in_process, "--out", out)[0] == 0
    assert "ImageOps.exif_transpose(Image.open(" in (out / "README.md").read_text()
    code = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    Image.new("RGB", (20, 30), "red").save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    exec(code.replace("hf-hub:OWNER/out", "local-dir:out"), {})
    label, probability = capfd.readouterr().out.split()
    assert 0 <= int(label) < 10 and 0.1 <= float(probability) <= 1


def test_the_card_names_what_the_student_learned_from(run, tmp_path, in_process):
    """Not its run's own teacher and store; and the commands set what the student was given."""
    settings = RunDirectory(run).settings()
    phase_b.train_student(settings, tmp_path / "vit", teacher=None)
    maps = tmp_path / "dense.zarr"
    teacher = f"local-dir:{tmp_path / 'vit' / 'student'}"
    export_maps.run(run, "dense", out=str(maps), teacher=teacher)
    phase_b.run(
        run, "xsa", name="mine", overrides=["phase_b.epochs=1", "seed=7"], maps_url=str(maps)
    )
    code, _, err = in_process("publish", "mine", "--run-dir", run, "--out", tmp_path / "out")
    assert code == 0, err
    card = (tmp_path / "out" / "README.md").read_text()
    for said in (
        "teacher: `local-dir:student`\n",
        "stored attention: dense, float16",
        "gaupipe export-maps --run-dir run --teacher local-dir:student --out maps.zarr "
        "--kind dense --encoding float16\n",
        "gaupipe phase-b --run-dir run --maps maps.zarr --student xsa --name mine --set seed=7\n",
    ):
        assert said in card, card
    assert "phase A; epochs" not in card and str(tmp_path) not in card
    assert config.load(tmp_path / "out" / "settings.yaml") == settings


def test_the_baseline_has_a_card_of_its_own(run, tmp_path, in_process):
    (run / "phase_b").rename(run / "plain")
    assert publish(run, in_process, "--plain", "--out", tmp_path / "out")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "learned from the labels alone" in card and "export-maps" not in card
    assert "gaupipe train settings.yaml --run-dir run\n" in card


@pytest.fixture
def class_names(monkeypatch):
    """Names of the ten classes, as if the digits were folders of images."""
    load, names = folder.load_data, [f"digit-{number}" for number in range(10)]

    def load_named(*settings):
        data = load(*settings)
        data.train.source.class_names = tuple(names)
        return data

    monkeypatch.setattr(folder, "load_data", load_named)
    return names


def test_class_names_reach_those_who_load_the_model(run, tmp_path, in_process, class_names):
    class_names[3] = os.fsdecode(b"caf\xe9")  # a folder's name that is not UTF-8
    student = RunDirectory(run).student("standard") / "student"
    data = folder.load_data(config.load("digits").data, False)
    save_student(load_folder(student, ""), student, **data.data_config)
    assert publish(run, in_process, "--out", tmp_path / "out")[0] == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert model.pretrained_cfg["label_names"][2:4] == ["digit-2", "caf\\xe9"]
    assert "`digit-2`, `caf\\xe9`" in (tmp_path / "out" / "README.md").read_text()


def test_no_class_name_is_markup_in_the_card(run, tmp_path, in_process, class_names):
    """Rendered by CommonMark, each name is the text of one <code>, and nothing else."""
    class_names[:6] = [
        "<script>alert(1)</script>",
        "[a](http://b) ![c](d)",
        "``` **`x`** ```",
        "\x1b[31mred\x07",
        "two\n\n# lines",
        "&amp; | `",
    ]
    assert publish(run, in_process, "--out", tmp_path / "out")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(letter.isprintable() or letter == "\n" for letter in card)
    inline = [token for token in MarkdownIt().parse(card) if token.content.startswith("10 classes")]
    (children,) = (token.children for token in inline)
    assert {child.type for child in children} == {"text", "code_inline"}
    shown = [child.content for child in children if child.type == "code_inline"]
    assert shown == [
        name.replace("\x1b", "\\x1b").replace("\x07", "\\x07").replace("\n", "\\n")
        for name in class_names
    ]


def test_an_upload_is_the_published_folder_in_one_commit(run, tmp_path, in_process, hub):
    code, stdout, _ = publish(run, in_process, "--repo", "tiny", "--out", tmp_path / "out")
    assert (code, stdout.strip()) == (0, f"{hub.address}/somebody/tiny")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert uploaded(hub) == files
    assert 'create_model("hf-hub:somebody/tiny"' in files["README.md"].decode()
    assert not is_private(hub.created[0])


def test_a_card_that_the_repository_has_stays(run, tmp_path, in_process, hub):
    hub.has_card = True
    before = sorted(tmp_path.iterdir())
    code, _, _ = publish(run, in_process, "--repo", "somebody/tiny", "--private")
    assert code == 0 and sorted(tmp_path.iterdir()) == before
    assert "README.md" not in uploaded(hub) and "model.safetensors" in uploaded(hub)
    assert is_private(hub.created[0])


def refused(run: Path, in_process, *arguments) -> str:
    """The one line with which publishing fails, leaving nothing behind."""
    before = sorted(run.parent.rglob("*"))
    code, stdout, err = publish(run, in_process, *arguments)
    assert (code, stdout, err.count("\n")) == (2, "", 1), err
    assert sorted(run.parent.rglob("*")) == before
    return err


def test_without_the_hubs_leave_nothing_is_written(run, tmp_path, in_process, hub, monkeypatch):
    arguments = ("--repo", "tiny", "--out", tmp_path / "out")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "refuses the token" in refused(run, in_process, *arguments)
    monkeypatch.delenv("HF_TOKEN")
    assert "hf auth login" in refused(run, in_process, *arguments)
    assert not hub.created and not hub.commits
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    hub.full = True
    assert "--repo somebody/tiny: not uploaded" in refused(run, in_process, "--repo", "tiny")


def test_without_a_network_nothing_is_written(run, tmp_path, in_process, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as closed:
        address = f"http://127.0.0.1:{closed.server_port}"
    monkeypatch.setattr("stages.publish.folder.HfApi", partial(HfApi, endpoint=address))
    err = refused(run, in_process, "--repo", "tiny", "--out", tmp_path / "out")
    assert f"{address} does not answer" in err


def test_an_existing_folder_is_not_replaced(run, tmp_path, in_process):
    (tmp_path / "out").mkdir()
    assert "is there already" in refused(run, in_process, "--out", tmp_path / "out")
