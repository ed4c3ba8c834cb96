"""Evaluate: where a student fails, beside every state of the run's store; and where an exported
student may go."""

import csv
import json
import os
import resource
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import binomtest
from sklearn.metrics import confusion_matrix

import store
from arguments import sets
from runs import run_main
from stages.cli.output import print_rich
from stages.evaluate.by_class import by_class, tables
from stages.predict import Prediction


def evaluate(run: Path, in_process, *arguments) -> tuple[int, str, str]:
    return in_process("evaluate", "--run-dir", run, "--student", "standard", "--json", *arguments)


def remove(run: Path) -> None:
    shutil.rmtree(run / "maps.zarr")


def reopen(run: Path) -> None:
    store.join(run / "maps.zarr").reopen([1])


@pytest.mark.parametrize("change", [remove, reopen])
def test_without_a_complete_store_there_are_only_scores(run, in_process, change):
    whole = json.loads(evaluate(run, in_process)[1])
    change(run)
    code, out, err = evaluate(run, in_process)
    scores = json.loads(out)
    assert code == 0 and scores == {name: whole[name] for name in scores}
    assert "the student is not compared with its maps: " in err and "maps.zarr" in err
    assert whole.keys() - scores.keys() == {"teacher_images", "teacher_agreement", "map_kl"}


def test_a_teacher_that_is_not_known_is_not_compared(run, in_process):
    (run / "phase_a/teacher_sha256").unlink()
    assert "teacher_agreement" in json.loads(evaluate(run, in_process)[1])


# ---- where a student fails -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """The run of a ViT that was trained for an epoch on photos/{train,val}/{ant,bee,cat}."""
    folder, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 12)):
        for shade, name in enumerate(("ant", "bee", "cat")):
            (folder / "photos" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(80 * shade, 80 * shade + 96, (20, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"photos/{split}/{name}/{number}.png")
    options = ["--epochs", "1", "--lr", "1e-4", "--run-dir", folder / "run"]
    # after an epoch of two steps it is right for a part of the images
    options += sets("threads=1", "model.stem=conv", "model.args.depth=4")
    assert run_main("train", "--data", folder / "photos", *options) == 0
    return folder


def test_classes_mistakes_and_files_are_those_of_the_predictions(photos, tmp_path, in_process):
    arguments = ["evaluate", "--run-dir", photos / "run", "--confusion", "c.png"]
    code, text, err = in_process(*arguments, "--out", "p.json", cwd=tmp_path)
    assert code == 0, err
    assert " (95 % interval 0." in text
    heads = [line.split() for line in text.splitlines() if line.startswith("label ")]
    assert [head[:3] for head in heads] == [
        ["label", "images", "top1"],
        ["label", "predicted", "probability"],
    ]
    look, _, image = err.rpartition(" --image ")
    assert look.endswith(f"view --run-dir {photos / 'run'} --student standard --split val")
    plain = in_process("evaluate", "--run-dir", photos / "run", "--plain")[2]
    assert f"next: gaupipe view --model {photos / 'run/plain/standard'} --images " in plain
    code, out, err = in_process(*arguments, "--out", "p.csv", "--json", cwd=tmp_path)
    assert code == 0, err
    scores = json.loads(out)
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [*rows[0]] == ["path", "label", "class", "probability"]
    assert [Path(row["path"]).parent.name for row in rows] == [row["label"] for row in rows]
    labels, classes = ([row[key] for row in rows] for key in ("label", "class"))
    assert scores["confusion"] == confusion_matrix(labels, classes).tolist()
    right = int(np.trace(scores["confusion"]))
    assert scores["top1"] == pytest.approx(right / 36) and 0 < right < 36 and "top5" not in scores
    assert sum(entry["top1"] * entry["images"] for entry in scores["classes"]) == right
    wilson = binomtest(right, 36).proportion_ci(method="wilson")
    assert scores["top1_interval"] == pytest.approx([wilson.low, wilson.high], abs=1e-6)
    wrong = [row for row in rows if row["class"] != row["label"]]
    wrong.sort(key=lambda row: -float(row["probability"]))
    assert [row["path"] for row in scores["mistakes"]] == [row["path"] for row in wrong[:10]]
    assert [row["image"] for row in scores["mistakes"]] == [rows.index(row) for row in wrong[:10]]
    assert scores["mistakes"][0]["image"] == int(image)
    as_json = json.loads((tmp_path / "p.json").read_text())
    assert [row["classes"][0]["class"] for row in as_json] == classes
    assert Image.open(tmp_path / "c.png").width > 400


def test_another_folder_is_scored_like_the_split_it_is(photos, tmp_path, in_process):
    arguments = ["evaluate", "--run-dir", photos / "run", "--json"]
    whole = json.loads(in_process(*arguments)[1])
    scores = json.loads(in_process(*arguments, "--data", photos / "photos/val")[1])
    assert scores.pop("split") == str(photos / "photos/val")
    assert scores == {name: whole[name] for name in scores} and "confusion" in scores
    part = Path(shutil.copytree(photos / "photos/val", tmp_path / "part"))
    shutil.rmtree(part / "cat")
    code, out, err = in_process(*arguments[:-1], "--data", part)
    assert code == 0 and "no images of cat" in out and scores["classes"][1]["class"] == "bee"
    look = shlex.split(err.rpartition("next: ")[2])
    model = photos / "run/plain/standard"
    assert look[:4] == ["gaupipe", "view", "--model", str(model)] and look[4::2] == 5 * ["--images"]
    wrong = [row["path"] for row in scores["mistakes"] if "/cat/" not in row["path"]]
    assert {*look[5::2]} & {path.replace(str(photos / "photos/val"), str(part)) for path in wrong}


@pytest.mark.parametrize("form,name", [("csv", r"caf\xe9.png"), ("json", r"caf\\xe9.png")])
def test_a_name_that_is_not_utf_8_is_written_as_in_a_store(
    photos, tmp_path, in_process, form, name
):
    folder = tmp_path / "photos"
    shutil.copytree(photos / "photos/val/ant", folder / "ant")
    (folder / "ant/0.png").rename(folder / os.fsdecode(b"ant/caf\xe9.png"))
    out = tmp_path / f"out.{form}"
    scored = ["evaluate", "--run-dir", photos / "run", "--data", folder, "--out", out]
    for command in (["predict", photos / "run", folder, "--out", out], scored):
        assert in_process(*command)[0] == 0
        assert f"/ant/{name}" in out.read_text()
        out.unlink()


def test_a_class_whose_name_is_not_utf_8_is_known_again(photos, tmp_path, in_process):
    images = tmp_path / "photos/train"
    shutil.copytree(photos / "photos/val/ant", images / os.fsdecode(b"caf\xe9"))
    shutil.copytree(photos / "photos/val/bee", images / "bee")
    changes = sets("train.epochs=1", "threads=1")
    run = tmp_path / "run"
    assert in_process("train", "--data", tmp_path / "photos", "--run-dir", run, *changes)[0] == 0
    scores = json.loads(in_process("evaluate", "--run-dir", run, "--data", images, "--json")[1])
    assert [row["class"] for row in scores["classes"]] == ["bee", r"caf\xe9"]


@pytest.fixture(scope="module")
def spots(tmp_path_factory):
    """The run of a ViT on photos/{train,test}/{ant,bee}, and beside it a second ViT of phase B
    with the teacher's store, all trained for an epoch."""
    folder, draw = tmp_path_factory.mktemp("spots"), np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for shade, name in enumerate(("ant", "bee")):
            (folder / "photos" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(80 * shade, 80 * shade + 96, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"photos/{split}/{name}/{number}.png")
    model = "model.args={embed_dim: 16, depth: 1, num_heads: 2, patch_size: 4}"
    epochs = ["phase_a.max_epochs=1", "train.epochs=1"]
    changes = sets("phase_a.teacher=vit", *epochs, "data.batch_size=8", "threads=1", model)
    where = ["--data", folder / "photos", "--run-dir", folder / "run", "--student", "standard"]
    assert run_main("run", *where, *changes) == 0
    return folder


READERS = {
    "evaluate": ["evaluate", "--json"],
    "evaluate --plain": ["evaluate", "--plain", "--json"],
    "evaluate --test": ["evaluate", "--test", "--json"],
    "publish": ["publish", "--plain", "--out", "card"],
    "export-maps": ["export-maps", "--out", "other.zarr"],
    "inspect": ["inspect", "--student", "standard", "--image", "0", "--json"],
}


def rename_a_class(photos: Path) -> None:
    for split in ("train", "test"):
        (photos / split / "ant").rename(photos / split / "wasp")


def relabel_an_image(photos: Path) -> None:
    (photos / "train/ant/3.png").rename(photos / "train/bee/30.png")


def add_an_image(photos: Path) -> None:
    shutil.copy(photos / "train/ant/3.png", photos / "train/ant/30.png")


def delete_an_image(photos: Path) -> None:
    (photos / "train/ant/3.png").unlink()


def replace_a_test_image(photos: Path) -> None:
    (photos / "test/ant/3.png").unlink()
    shutil.copy(photos / "test/bee/3.png", photos / "test/ant/3.png")


@pytest.mark.parametrize(
    "change, message",
    [
        (rename_a_class, "'ant' has gone, 'wasp' is new"),
        (relabel_an_image, "('ant/3.png' has gone, 'bee/30.png' is new)"),
        (add_an_image, "when the run began ('ant/30.png' is new)"),
        (delete_an_image, "were others when the run began ('ant/3.png' has gone)"),
        (replace_a_test_image, "(the same names, but other content or order)"),
    ],
)
def test_other_images_than_those_of_the_run_are_not_scored(
    spots, tmp_path, in_process, change, message
):
    """An image more moves the split: images that were trained with would count as unseen ones."""
    moved = Path(shutil.copytree(spots, tmp_path / "moved"))
    files = [moved / "run/config.yaml", *(moved / "run").glob("*/*/config.yaml")]
    for file in files:
        file.write_text(file.read_text().replace(str(spots), str(moved)))
    change(moved / "photos")
    every = change in (add_an_image, replace_a_test_image)
    for name in READERS if every else ["evaluate"]:
        command, *more = READERS[name]
        code, out, err = in_process(command, "--run-dir", moved / "run", *more, cwd=moved)
        if change is replace_a_test_image and name not in ("evaluate --test", "publish"):
            assert code == 0, (name, err)
            continue
        assert (code, out) == (2, "") and message in err.splitlines()[-1], (name, err)
    assert (moved / "other.zarr").exists() == (change is replace_a_test_image)
    assert not (moved / "card").exists()


def test_images_without_files_are_named_by_their_ids(run, in_process, tmp_path):
    out = evaluate(run, in_process, "--out", tmp_path / "p.csv")[1]
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [row["path"] for row in rows] == [str(image) for image in range(360)]
    assert {row["path"] for row in json.loads(out)["mistakes"]} <= {row["path"] for row in rows}


def test_tables_of_many_classes_fit_a_terminal_and_no_path_is_broken(monkeypatch, capfd):
    names = [f"a class with quite a long name [{number}]" for number in range(300)]
    draw = np.random.default_rng(0)
    rows = [
        Prediction(f"/photos/{90 * 'x'}.jpg", ((names[draw.integers(280)], 0.5),), label=name)
        for name in names[:280]
    ]
    scores = by_class(rows, names)
    monkeypatch.setenv("COLUMNS", "80")
    print_rich(*tables(scores))
    lines = capfd.readouterr().out.splitlines()
    paths = [line for line in lines if line.endswith(f"  0.5000       {rows[0].path}")]
    assert len(paths) == len(scores["mistakes"]) == 10
    assert max(map(len, lines[: lines.index(paths[0]) - 1])) <= 80 and len(lines) < 110
    said = " ".join(line.strip() for line in lines)
    assert "and 260 classes with higher accuracy" in said and "15 more classes" in said


# ---- export-student ------------------------------------------------------------------------------


def export(run: Path, out: Path, in_process) -> tuple[int, str, str]:
    return in_process("export-student", "--run-dir", run, "--out", out)


def test_the_line_that_runs_an_exported_student_can_be_pasted(run, tmp_path, in_process, capfd):
    code, _, err = export(run, tmp_path / "it's here.pt2", in_process)
    assert code == 0
    line = err.partition("to run it: ")[2].strip()
    program, option, code = shlex.split(line)
    assert (program, option) == ("python", "-c")
    exec(code)
    assert "grad_fn" in capfd.readouterr().out
    _, _, err = export(run, tmp_path / "plain.pt2", in_process)
    assert err.partition("to run it: ")[2].count("'") == 2


def test_an_exported_student_replaces_a_file_through_a_link(run, tmp_path, in_process):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "student.pt2").write_text("old")
    link = folder / "link.pt2"
    link.symlink_to("student.pt2")
    assert export(run, link, in_process)[0] == 0
    assert sorted(path.name for path in folder.iterdir()) == ["link.pt2", "student.pt2"]
    assert link.is_symlink() and (folder / "student.pt2").stat().st_size > 1000


def test_an_export_that_the_disk_cannot_hold_leaves_the_file_that_is_there(
    run, tmp_path, in_process
):
    """torch aborts the process where it cannot write a program."""
    out = tmp_path / "student.pt2"
    out.write_text("old")
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))  # bytes of a file
    try:
        code, stdout, err = export(run, out, in_process)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (code, stdout) == (2, "") and err.splitlines()[-1].endswith("File too large")
    assert out.read_text() == "old" and sorted(tmp_path.iterdir()) == before
