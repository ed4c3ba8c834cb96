"""Publish: the folder, the model card, and what is asked of the Hugging Face Hub."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from markdown_it import MarkdownIt
from PIL import Image, ImageCms
from scipy.stats import binomtest

import store
from arguments import sets
from exports import write_store
from gaupipe import __version__
from gaupipe.data import load as data_load
from gaupipe.settings.load import dump, flatten, load
from gaupipe.vit.saving import load_folder, save_student, saved_sha256
from stages import evaluate, phase_b, predict
from stages.publish.export_student import to_onnx
from stages.publish.folder import without_folders
from stages.runs.directory import RunDirectory
from stages.runs.students import StudentRequest


def publish(run: Path, in_process, *arguments) -> tuple[int, str, str]:
    return in_process("publish", "standard", "--run-dir", run, *arguments)


def test_a_published_folder_is_the_student_with_its_card(run, tmp_path, in_process):
    settings = load(run / "config.yaml", [f"data.root={tmp_path / 'private'}"])
    for file in (run / "config.yaml", run / "phase_b" / "standard" / "config.yaml"):
        file.write_text(dump(settings))  # digits read no folder
    out = tmp_path / "out"
    code, stdout, _ = publish(run, in_process, "--out", out)
    assert (code, stdout) == (0, f"{out}\n")
    names = ["README.md", "config.json", "model.safetensors", "settings.yaml"]
    assert sorted(path.name for path in out.iterdir()) == names
    for path in out.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path
    store = {"export.kind": "gaussian", "export.encoding": "float16", "data.root": "private"}
    published = flatten(load(out / "settings.yaml"))
    assert published == flatten(settings) | store

    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    student = evaluate.load_student(run, "standard").model
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(model(images), student(images), atol=0, rtol=0)
    scores, card = evaluate.run(run, "standard"), (out / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    result = head["model-index"][0]["results"][0]
    assert result["dataset"]["split"] == "validation"  # the digits have no test images
    assert result["metrics"][0]["value"] == round(scores["top1"], 4)
    assert "license" not in head and "To be filled in" in card
    wilson = binomtest(round(360 * scores["top1"]), 360).proportion_ci(method="wilson")
    low, high = 100 * wilson.low, 100 * wilson.high
    for said in (
        f"| validation | 360 | {100 * scores['top1']:.2f} % | {low:.1f} to {high:.1f} % |",
        "40 training images, 360 validation images",
        f"gaupipe {__version__}",
        "a ViT with GauAttention, trained in phase A; epochs: 1;",
        "0 x teacher's predictions + 0.9 x labels + 0.1 x attention maps",
        "stored: gaussian, float16",
        "gaupipe phase-a settings.yaml --run-dir run\n",
    ):
        assert said in card


def test_the_code_of_the_card_classifies_an_image(run, tmp_path, in_process, monkeypatch, capfd):
    assert publish(run, in_process, "--out", tmp_path / "out")[0] == 0
    code = (tmp_path / "out/README.md").read_text().split("```python\n")[1].split("```")[0]
    assert "ImageOps.exif_transpose(Image.open(" in code
    pixels = np.random.default_rng(0).integers(256, size=(30, 20), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "out" / "config.json"
    said = []
    for interpolation in ("bicubic", "bilinear"):  # as the weights expect
        written = json.loads(config.read_text())
        written["pretrained_cfg"]["interpolation"] = interpolation
        config.write_text(json.dumps(written))
        exec(code.replace("hf-hub:OWNER/out", "local-dir:out"), {})
        label, probability = capfd.readouterr().out.split()
        assert 0 <= int(label) < 10 and 0.1 <= float(probability) <= 1
        said.append(probability)
    assert said[0] != said[1]


def test_card_and_settings_name_what_the_student_learned_from(
    run, tmp_path, in_process, monkeypatch
):
    """Not its run's own teacher and store; and the published commands train such a student."""
    phase_b.run_request(StudentRequest(RunDirectory(run).settings(), tmp_path / "vit"))
    monkeypatch.setattr("gaupipe.teachers.model.NEAR_CHANCE", -1)  # it was hardly trained
    maps, teacher = str(tmp_path / "dense.zarr"), f"local-dir:{tmp_path / 'vit' / 'student'}"
    write_store(run, {"kind": "dense"}, out=maps, teacher=teacher)
    changes = ["train.epochs=1", "seed=7"]
    phase_b.run(run, "xsa", name="mine", overrides=changes, maps_url=maps)
    out = tmp_path / "out"
    assert in_process("publish", "mine", "--run-dir", run, "--out", out)[0] == 0
    card = (out / "README.md").read_text()
    for said in ("teacher: `local-dir:student`\n", "stored: dense, float16", "seed 7"):
        assert said in card, card
    assert "phase A; epochs" not in card and str(tmp_path) not in card
    settings = load(out / "settings.yaml")
    assert (settings.model.attention, settings.seed, settings.export.kind) == ("xsa", 7, "dense")
    shutil.copytree(tmp_path / "vit" / "student", out / "student")  # the path to be adapted
    for line in card.split("```sh\n")[1].split("```")[0].splitlines():
        code, _, err = in_process(*line.split()[1:], cwd=out)
        assert code == 0, err


def test_the_card_names_the_weights_that_a_student_began_with(run, tmp_path, in_process):
    settings = RunDirectory(run).settings()
    phase_b.run_request(StudentRequest(settings, tmp_path / "vit"))
    weights = f"local-dir:{tmp_path / 'vit' / 'student'}"
    fine = tmp_path / "fine"
    train = ("train", "digits", "--model", weights, "--run-dir", fine, "--epochs", "1")
    code, _, err = in_process(*train, *sets("data.train_images=40", "data.batch_size=20"))
    assert code == 0, err
    assert in_process("publish", "--run-dir", fine, "--out", tmp_path / "out")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\n* began with the trained weights of `local-dir:student`;" in card
    assert str(tmp_path) not in card


def test_paths_of_this_machine_are_in_no_setting():
    args = "{pretrained_cfg_overlay: {file: /home/someone/weights.bin, mean: [0.5, a/b]}}"
    sets = "phase_a.teacher=local-dir:/x/vit", f"phase_a.teacher_args={args}", "data.root=/x/y"
    settings = without_folders(load("digits_expected", [*sets, "data.name=folder"]))
    assert settings.phase_a.teacher == "local-dir:vit" and settings.data.root == Path("y")
    overlay = {"file": "weights.bin", "mean": [0.5, "a/b"]}
    assert settings.phase_a.teacher_args == {"pretrained_cfg_overlay": overlay}
    assert without_folders("local-dir:vit") == "local-dir:vit"
    assert without_folders("hfds//x/more") == "hfds/more"
    assert without_folders("hfds/user/more") == "hfds/user/more"


def test_the_baseline_has_a_card_of_its_own(run, tmp_path, in_process):
    (run / "phase_b").rename(run / "plain")
    assert publish(run, in_process, "--plain", "--out", tmp_path / "out")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "learned from the labels alone" in card and "export-maps" not in card
    assert "gaupipe train settings.yaml --run-dir run\n" in card


def test_class_names_reach_those_who_load_the_model_and_are_no_markup_in_the_card(
    run, tmp_path, in_process, monkeypatch
):
    """Rendered by CommonMark, each name is the text of one <code>, and nothing else."""
    names = [
        *("<script>alert(1)</script>", "[a](http://b) ![c](d)", "``` **`x`** ```"),
        *("\x1b[31mred\x07", "two\n\n# lines", "&amp; | `"),
        os.fsdecode(b"caf\xe9"),  # a folder's name that is not UTF-8
        *("digit-7", "digit-8", "digit-9"),
    ]
    load_data = data_load.load_data

    def load_named(*settings):
        data = load_data(*settings)
        data.train.source.class_names = tuple(names)
        return data

    monkeypatch.setattr(data_load, "load_data", load_named)
    student = RunDirectory(run).student("standard") / "student"
    described = load_named(load("digits_expected").data, False).data_config
    save_student(load_folder(student, ""), student, **described)
    entry = json.loads((student.parent / "student.json").read_text())
    entry["sha256"] = saved_sha256(student)
    (student.parent / "student.json").write_text(json.dumps(entry))
    assert publish(run, in_process, "--out", tmp_path / "out")[0] == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert model.pretrained_cfg["label_names"][6:8] == ["caf\\xe9", "digit-7"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(letter.isprintable() or letter == "\n" for letter in card)
    inline = [token for token in MarkdownIt().parse(card) if token.content.startswith("10 classes")]
    (children,) = (token.children for token in inline)
    assert {child.type for child in children} == {"text", "code_inline"}
    shown = [child.content for child in children if child.type == "code_inline"]
    escaped = [name.replace("\x1b", "\\x1b").replace("\x07", "\\x07") for name in names]
    escaped[4], escaped[6] = "two\\n\\n# lines", "caf\\xe9"
    assert shown == escaped


def test_a_store_has_a_card_that_its_owner_may_edit(run):
    """As the Hub reads it; hf upload takes it along."""
    from huggingface_hub import DatasetCard

    shutil.rmtree(run / "maps.zarr")
    write_store(run, license="cc-by-4.0")
    path = run / "maps.zarr" / "README.md"
    card = DatasetCard.load(path)
    assert card.data.license == "cc-by-4.0"
    assert "`labels` | 40 | int64 | image" in card.text and str(run) not in card.text
    maps = store.open(run / "maps.zarr")
    assert maps.schema.teacher_sha256 in card.text and maps.schema.dataset_sha256 in card.text
    path.write_text("mine")
    assert store.verify(run / "maps.zarr") == []
    write_store(run, overwrite=True)
    assert "licence under which these may be used" in path.read_text()
    assert DatasetCard.load(path).data.license is None


# ---- the example that reads an ONNX file ---------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder with a student, and with its ONNX file."""
    folder = tmp_path_factory.mktemp("onnx")
    torch.manual_seed(0)
    sizes = dict(img_size=32, patch_size=4, num_classes=3, in_chans=3)
    model = timm.create_model("gauvit_pico_patch2_8", **sizes)
    torch.nn.init.normal_(model.head.weight)  # every pixel matters
    scaling = dict(mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3), interpolation="bilinear")
    cropped = dict(crop_pct=1.0, crop_mode="center")
    save_student(model, folder / "student", ["ant", "bee", "cat"], **cropped, **scaling)
    content, _ = to_onnx(load_folder(folder / "student", ""), torch.zeros(2, 3, 32, 32))
    (folder / "student.onnx").write_bytes(content)
    return folder


@pytest.fixture
def example(exported, monkeypatch):
    """The example's code, and how far the probabilities of code are from those of ``gaupipe
    predict``, which has timm prepare photo.png or photo.jpg in the working directory."""
    monkeypatch.chdir(exported)

    def difference(code, photo):
        [prediction] = predict.run("student", [Path(photo)], top=3)
        expected = dict(prediction.classes)
        monkeypatch.setattr(sys, "argv", ["predict_onnx.py", "student.onnx", photo])
        seen: dict = {}
        exec(code, seen)
        got = dict(zip(seen["about"]["label_names"], seen["probabilities"], strict=True))
        assert got.keys() == expected.keys()
        return max(abs(got[name] - expected[name]) for name in got)

    code = (Path(__file__).parent.parent / "examples/predict_onnx.py").read_text()
    return code, difference


def test_the_example_for_onnx_prepares_photos_of_any_shape(example):
    code, difference = example
    rounded_up = code.replace("short * side // min", "1 + (short * side - 1) // min")
    draw = np.random.default_rng(0)
    differences = []
    for shape in ((77, 50), (60, 101), (333, 45)):
        pixels = draw.integers(0, 256, (shape[1] // 4, shape[0] // 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(shape).save("photo.jpg", exif=turned())
        differences += [difference(code, "photo.jpg"), difference(rounded_up, "photo.jpg")]
    assert max(differences[::2]) < 1e-3 < max(differences[1::2])


def test_the_example_for_onnx_reads_photos_of_any_kind(example):
    """As ``gaupipe predict`` does, or not at all."""
    code, difference = example
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 6, 4), dtype=np.uint8))
    photo = photo.resize((48, 40), Image.Resampling.BICUBIC)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = profile.replace(b"bXYZ", b"?").replace(b"gXYZ", b"bXYZ").replace(b"?", b"gXYZ")
    for kind in ("RGBA", "LA", "P", "CMYK", "1"):
        name = "photo.tif" if kind == "CMYK" else "photo.png"
        photo.convert(kind).save(name, icc_profile=swapped)
        assert difference(code, name) < 1e-3, kind
    photo.resize((4000, 2)).save("photo.png")
    assert difference(code, "photo.png") < 1e-3
    Image.new("I;16", (40, 40)).save("photo.png")
    with pytest.raises(SystemExit, match="photo.png has more than 8 bits"):
        difference(code, "photo.png")


def turned() -> Image.Exif:
    """The note of a camera that was held upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif
