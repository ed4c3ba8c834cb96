"""Classes of image files, by a folder with a model alone."""

import csv
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import gaupipe.models  # noqa: F401
from gaupipe.models import save_student
from gaupipe.system.errors import UserError
from stages import predict

NAMES = ["ant", "bee", "cat"]
PREPARED = dict(mean=(0.4,) * 3, std=(0.2,) * 3, interpolation="bilinear", crop_pct=1.0)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """The folder of a random ViT for images of 8 pixels and three classes."""
    torch.manual_seed(0)
    model = timm.create_model("gauvit_pico_patch2_8", num_classes=3, in_chans=3)
    folder = tmp_path_factory.mktemp("student") / "belief"
    save_student(model, folder / "student", NAMES, **PREPARED)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with three pictures of 8 pixels in two folders, a file that is none, and a text."""
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for name in ("b/1.png", "b/2.png", "a/3.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "b" / "broken.png").write_bytes(b"not an image")
    (folder / "notes.txt").write_text("no image")
    return folder


def test_probabilities_are_those_of_the_model_on_the_prepared_image(student, pictures):
    (prediction,) = predict.run(str(student), [pictures / "a" / "3.png"], top=3)
    pixels = np.asarray(Image.open(pictures / "a" / "3.png")).transpose(2, 0, 1) / 255
    image = torch.tensor((pixels - 0.4) / 0.2, dtype=torch.float32)
    model = timm.create_model(f"local-dir:{student / 'student'}", pretrained=True).eval()
    expected = model(image[None]).softmax(-1)[0]
    assert [name for name, _ in prediction.classes] == [
        NAMES[c] for c in expected.argsort().flip(0)
    ]
    got = dict(prediction.classes)
    torch.testing.assert_close(torch.tensor([got[name] for name in NAMES]), expected.detach())


def test_folders_are_searched_and_unreadable_images_are_rows(student, pictures):
    source = f"local-dir:{student / 'student'}"
    predictions = predict.run(source, [pictures], top=2, batch_size=2)
    names = [str(Path(prediction.path).relative_to(pictures)) for prediction in predictions]
    assert names == ["a/3.png", "b/1.png", "b/2.png", "b/broken.png"]
    assert [bool(prediction.problem) for prediction in predictions] == [False] * 3 + [True]
    alone = predict.run(str(student), [pictures / "b" / "2.png"], top=2)
    assert [name for name, _ in alone[0].classes] == [name for name, _ in predictions[2].classes]
    with pytest.raises(UserError, match=r"1 of 4 .*broken\.png"):
        predict.check_readable(predictions)


def test_csv_and_json_say_the_same(student, pictures, tmp_path):
    predictions = predict.run(str(student), [pictures], top=2)
    predict.write(predictions, tmp_path / "out.csv")
    predict.write(predictions, tmp_path / "out.json")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    entries = json.loads((tmp_path / "out.json").read_text())
    assert list(rows[0]) == ["path", "class", "probability", "class2", "probability2", "problem"]
    for row, entry in zip(rows, entries, strict=True):
        assert row["path"] == entry["path"]
        if entry["problem"]:
            assert row["problem"] == entry["problem"] and row["class"] == ""
        else:
            assert row["class"] == entry["classes"][0]["class"]
            assert float(row["probability2"]) == pytest.approx(
                entry["classes"][1]["probability"], abs=1e-6
            )


@pytest.mark.parametrize("form", ["csv", "json"])
def test_an_unreadable_image_whose_name_is_not_utf_8_is_written(tmp_path, form):
    path = os.fsdecode(b"caf\xe9.png")
    out = tmp_path / f"out.{form}"
    predict.write([predict.Prediction(path, problem=f"{path}: is damaged")], out)
    row = json.loads(out.read_text())[0] if form == "json" else next(csv.DictReader(out.open()))
    assert (row["path"], row["problem"]) == (r"caf\xe9.png", r"caf\xe9.png: is damaged")


def test_a_folder_that_may_not_be_read_stops_the_command(student, pictures, monkeypatch):
    """And is not skipped. The user who tests may be root, who may read all."""
    scandir = os.scandir

    def refuse(path):
        if os.fspath(path) == str(pictures / "a"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match=str(pictures / "a")):
        predict.run(str(student), [pictures])


def test_pipes_and_hidden_files_in_a_folder_are_no_images(student, pictures, tmp_path):
    shutil.copy(pictures / "a" / "3.png", tmp_path / "1.png")
    shutil.copy(pictures / "a" / "3.png", tmp_path / "._1.png")
    os.mkfifo(tmp_path / "2.png")
    (found,) = predict.run(str(student), [tmp_path])
    assert found.path == str(tmp_path / "1.png") and found.problem is None


def test_what_is_no_image_is_said(student, pictures, tmp_path, capfd):
    """Of a folder without any image, too."""
    (tmp_path / "1.HEIC").write_bytes(b"ftypheic")
    said = f"{tmp_path}: left out HEIC photos, which have to be converted, to JPEG for example: 1"
    with pytest.raises(UserError, match="no image files in this folder"):
        predict.run(str(student), [tmp_path])
    assert said in capfd.readouterr().err
    shutil.copy(pictures / "a" / "3.png", tmp_path / "1.png")
    (tmp_path / "2.txt").write_text("no image")
    assert len(predict.run(str(student), [tmp_path])) == 1
    assert f"{said}, such as {tmp_path}/1.HEIC; files that are no" in capfd.readouterr().err


def test_names_for_another_number_of_classes_are_refused(tmp_path, pictures):
    model = timm.create_model("gauvit_pico_patch2_8", num_classes=3, in_chans=3)
    with pytest.raises(UserError, match="label_names has 2 names, the model 3 classes"):
        save_student(model, tmp_path / "student", NAMES[:2])
    save_student(model, tmp_path / "student", NAMES, **PREPARED)
    path = tmp_path / "student" / "config.json"
    config = json.loads(path.read_text())
    del config["sha256"], config["label_names"][0]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="label_names has 2 names, the model 3 classes"):
        predict.run(str(tmp_path), [pictures])


def test_grey_images_for_a_model_of_one_channel(tmp_path):
    model = timm.create_model("gauvit_pico_patch2_8", num_classes=3, in_chans=1)
    save_student(model, tmp_path / "student", mean=(0.5,), std=(0.5,))
    Image.new("RGB", (8, 8), (10, 200, 30)).save(tmp_path / "green.png")
    (prediction,) = predict.run(str(tmp_path), [tmp_path / "green.png"])
    assert prediction.classes[0][0] in {"0", "1", "2"}


def test_predict_at_the_command_line(student, pictures, tmp_path, in_process, monkeypatch):
    """CSV through a pipe, a table on a terminal, a file with --out; unreadable images are rows."""
    code, out, err = in_process("predict", student, pictures, "--top", 2)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 2 and err.splitlines()[-1].startswith("gaupipe: 1 of 4 images could not be read")
    assert [bool(row["problem"]) for row in rows] == [False] * 3 + [True]
    assert {row["class2"] for row in rows[:3]} <= set(NAMES)
    picture = pictures / "a" / "3.png"
    assert in_process("predict", student, picture)[1].count("\n") == 2
    for out in ("p.csv", "p.json"):
        assert in_process("predict", student, picture, "--out", tmp_path / out)[0] == 0
    assert json.loads((tmp_path / "p.json").read_text())[0]["path"] == str(picture)
    assert (tmp_path / "p.csv").read_text().startswith("path,class,probability,problem")
    code, _, err = in_process("predict", student, picture, "--out", tmp_path / "p.xlsx")
    assert code == 2 and "should be a file whose name ends in .csv or .json" in err
    monkeypatch.setattr("stages.cli.look.on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    _, table, _ = in_process("predict", student, picture, "--top", 3)
    assert "3.png" in table and "%" in table and "path,class" not in table


def test_without_a_model_the_run_used_last_predicts(copied_run, pictures, in_process, tmp_path):
    run = copied_run("runs/mine")
    grey = tmp_path / "grey.png"
    Image.open(pictures / "a" / "3.png").convert("L").save(grey)
    alone = in_process("predict", "grey.png", cwd=tmp_path)
    assert alone[0] == 0 and "runs/mine (the run used last" in alone[2]
    assert in_process("predict", run, grey)[1].replace(str(grey), "grey.png") == alone[1]
    student = run / "phase_b" / "standard" / "student"
    assert in_process("predict", student, "grey.png", cwd=tmp_path)[1] == alone[1]
    assert in_process("predict", "grey.png", grey, cwd=tmp_path)[1].count("\n") == 3
    (tmp_path / "more").mkdir()
    shutil.copy(grey, tmp_path / "more")
    assert in_process("predict", "more", "grey.png", cwd=tmp_path)[1].count("\n") == 3
    for words, said in (
        ((), "name images, or folders of images"),
        (("absent.png", "grey.png"), "absent.png: no such file or folder"),
    ):
        code, _, err = in_process("predict", *words, cwd=tmp_path)
        assert (code, err.count("\n")) == (2, 1) and said in err


def test_the_code_of_the_documentation_predicts_the_same(student, tmp_path, monkeypatch, capsys):
    """Also of a photo that is no plain one: of 16 bits, on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(65536, size=(9, 14), dtype=np.uint16)
    Image.fromarray(pixels).save(tmp_path / "cat.png", exif=exif)
    page = (Path(__file__).parent.parent / "docs/your-own-images.md").read_text()
    code = page.split("```python\n")[1].split("```")[0].replace("cat.jpg", "cat.png")
    code = code.replace("runs/mine/plain/standard/student", str(student / "student"))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    name, probability = capsys.readouterr().out.removesuffix(")\n").split(" tensor(")
    (prediction,) = predict.run(str(student), [tmp_path / "cat.png"])
    [(expected, expected_probability), *_] = prediction.classes
    assert name == expected
    assert float(probability) == pytest.approx(expected_probability, abs=1e-3)
