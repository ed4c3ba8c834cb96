"""gaupipe train: a ViT on the labels alone, in a run without a teacher."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from safetensors.numpy import load_file

import gaupipe.vit.models  # noqa: F401  (timm learns the attentions)
from arguments import sets, tiny
from gaupipe.settings.load import dump, load
from gaupipe.system.errors import UserError
from pictures import photos
from runs import metrics, run_main
from stages import compare, phase_a, run, train
from stages.request import read_settings
from stages.runs.chosen_settings import settings_for
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_student

TINY = [*tiny(100, 50, 3), "phase_a.max_epochs=1"]
SETS = sets(*TINY)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with two students."""
    folder = tmp_path_factory.mktemp("train") / "run"
    for attention in ("standard", "belief2"):
        train.run(load("digits", [*TINY, f"model.attention={attention}"]), folder)
    return folder


def test_the_command_trains_without_a_first_phase(tmp_path, capfd):
    """It says what it does, and what may follow."""
    assert run_main("train", "digits", *SETS, "--student", "xsa", cwd=tmp_path) == 0
    out, err = capfd.readouterr()
    assert out == "runs/digits/plain/xsa/student\n" and "xsa (plain) epoch 3/3: loss" in err
    said = err.splitlines()
    into = "digits, gauvit_pico_patch2_8, attention xsa, into runs/digits/plain/xsa"
    assert said[0] == f"gaupipe: training: {into} ..."
    assert said[1].startswith("xsa (plain): 100 images, ")
    assert said[1].endswith(" parameters, cpu, float32, epochs 1 to 3")
    assert said[-2:] == [
        "gaupipe: next: gaupipe evaluate --run-dir runs/digits --student xsa",
        "gaupipe: or: gaupipe view --run-dir runs/digits --student xsa",
    ]
    folder = tmp_path / "runs" / "digits"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "split.json", "lock", "plain"}
    assert timm.create_model(f"local-dir:{folder / 'plain/xsa/student'}", pretrained=True)
    rows = metrics(folder / "plain" / "xsa" / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [1, 2, 3] and rows[0]["gamma"] == 0


def test_the_options_of_a_training_are_settings(tmp_path, in_process):
    """Those of phase A, whose epochs and rate are its own; with --set of another one beside."""
    options = ["--epochs", 1, "--lr", 0.01, "--batch-size", 25, "--seed", 7]
    sized = sets("data.train_images=100", "model.args={depth: 1, embed_dim: 16, num_heads: 2}")
    for name in ("train", "phase-a"):
        code, _, err = in_process(name, *sized, *options, "--run-dir", tmp_path / name)
        assert code == 0, err
        settings = RunDirectory(tmp_path / name).settings()
        assert (settings.data.batch_size, settings.seed) == (25, 7)
    plain = RunDirectory(tmp_path / "train").settings()
    assert (plain.train.epochs, plain.train.optim.lr) == (1, 0.01)
    assert len(metrics(tmp_path / "train/plain/standard/metrics.jsonl")) == 1
    teacher = RunDirectory(tmp_path / "phase-a").settings()
    assert (teacher.phase_a.max_epochs, teacher.phase_a.optim.lr) == (1, 0.01)
    assert teacher.train == load("digits").train


def test_a_seed_gives_the_metrics_of_run_and_of_compare(trained, tmp_path):
    settings = load("digits", TINY)
    run.run_all(settings, tmp_path / "run")
    options = {"students": ["standard"], "seeds": [0], "only": ["plain ViT"]}
    (row,) = compare.compare(settings, tmp_path / "compare", **options).rows
    folders = [
        trained / "plain" / "standard",
        tmp_path / "run" / "plain" / "standard",
        tmp_path / "compare" / row.runs[0].folder,
    ]
    first, *others = [metrics(folder / "metrics.jsonl") for folder in folders]
    assert len(first) == 3 and others == [first, first]


def test_what_the_other_commands_make_of_the_students(trained, in_process):
    code, out, err = in_process("evaluate", "--run-dir", trained, "--student", "standard", "--json")
    assert code == 0, err
    last = metrics(trained / "plain" / "standard" / "metrics.jsonl")[-1]
    assert json.loads(out)["top1"] == pytest.approx(last["val_acc"])
    assert "belief2" in in_process("evaluate", "--run-dir", trained)[1]  # the one trained last
    code, out, _ = in_process(
        "inspect", "--run-dir", trained, "--student", "belief2", "--image", 3, "--json"
    )
    assert code == 0 and sum(map(sum, json.loads(out)["map"])) == pytest.approx(1, abs=1e-5)


def test_a_student_of_phase_b_goes_before_a_plain_one_of_its_name(trained):
    directory = RunDirectory(trained)
    assert not directory.is_distilled() and not directory.is_distilled("belief2")
    assert directory.is_distilled("nobody")
    (trained / "phase_a").mkdir()  # a teacher alone is no student
    assert not directory.is_distilled()
    (trained / "phase_a").rmdir()
    with pytest.raises(UserError, match="is not there: there are standard, belief2$"):
        load_student(trained, "nobody")
    student = trained / "phase_b" / "belief2" / "student"
    student.mkdir(parents=True)
    try:
        assert directory.is_distilled() and directory.is_distilled("belief2")
        assert not directory.is_distilled("standard")
    finally:
        student.rmdir()
        student.parent.rmdir()
        student.parent.parent.rmdir()


def test_the_epoch_to_keep_may_change(trained, tmp_path, in_process):
    run_dir = shutil.copytree(trained, tmp_path / "run")
    best = ["--run-dir", run_dir, *SETS, "--set", "train.keep=best", "--resume"]
    code, _, err = in_process("train", *best)
    assert code == 0, err
    folder = run_dir / "plain" / "standard"
    assert json.loads((folder / "student.json").read_text())["keep"] == "best"
    assert RunDirectory(run_dir).student_settings("standard", False).train.keep == "best"
    assert (
        in_process("publish", "standard", "--run-dir", run_dir, "--out", tmp_path / "out")[0] == 0
    )
    epoch = json.loads((folder / "student.json").read_text())["epoch"]
    assert (
        f"weights: of epoch {epoch}, the best by val_acc"
        in (tmp_path / "out/README.md").read_text()
    )


def test_other_students_and_a_teacher_may_come_later(trained, tmp_path, in_process):
    run_dir = shutil.copytree(trained, tmp_path / "run")
    other = ["--no-distill", "--name", "other", "--set", "train.epochs=1"]
    assert in_process("phase-b", "--run-dir", run_dir, *other)[0] == 0
    _, out, _ = in_process("evaluate", "--run-dir", run_dir, "--json")
    assert json.loads(out)["student"] == "other"
    phase_a.run(load("digits", TINY), run_dir)
    assert RunDirectory(run_dir).teacher_digest() is not None


def test_keywords_of_the_model_join_the_chosen_ones_on_resume_too(tmp_path):
    photos(tmp_path / "photos")
    asked = (tmp_path / "photos", ["model.args={depth: 1}"], tmp_path / "run")
    first, _ = settings_for(*asked, plain=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump(first))
    again, _ = settings_for(*asked, plain=True)
    assert first.model.args["depth"] == 1 and "patch_size" in first.model.args
    assert again.model.args == first.model.args


def test_a_later_student_on_the_images_of_a_run_has_its_own_attention(tmp_path):
    images = photos(tmp_path / "photos")
    run = tmp_path / "run"
    run.mkdir()
    for student in ("xsa", "Belief2"):  # in any case
        settings, _ = read_settings(None, None, run, images, student, plain=True)
        assert settings.model.attention == student.lower()
        (run / "config.yaml").write_text(dump(settings))


def test_a_finished_student_is_not_trained_again(trained):
    settings = load("digits", TINY)
    path = trained / "plain" / "standard" / "checkpoint" / "state.pt"
    before = path.stat().st_mtime_ns
    rows = train.run(settings, trained, resume=True)
    assert len(rows) == 3 and path.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="is an attention|was started with"):
        train.run(load("digits", [*TINY, "train.epochs=4"]), trained, resume=True)


def test_a_copied_run_goes_on_with_its_own_settings(trained, tmp_path, in_process):
    """As on another machine, where nobody repeats what the run began with."""
    copied = shutil.copytree(trained, tmp_path / "copied")
    before = metrics(copied / "plain/standard/metrics.jsonl")
    code, _, err = in_process("train", "--run-dir", copied, "--resume")
    assert code == 0 and "nothing is left to train" in err, err
    code, _, err = in_process("train", "--run-dir", copied, "--student", "xsa", cwd=tmp_path)
    assert code == 0, err
    assert len(metrics(copied / "plain/xsa/metrics.jsonl")) == len(before) == 3
    assert RunDirectory(copied).settings() == RunDirectory(trained).settings()
    code, _, err = in_process("train", "digits", "--run-dir", copied, "--resume")
    assert code == 2 and "was started with data.train_images 100" in err


def test_a_plan_says_what_a_training_takes(trained, in_process, tmp_path):
    code, out, err = in_process("plan", trained / "config.yaml", "--train", "--json", cwd=tmp_path)
    assert code == 0, err
    plan = json.loads(out)
    (stage,) = plan["stages"].values()
    weights = load_file(trained / "plain" / "standard" / "student" / "model.safetensors")
    assert stage["parameters"] == sum(array.size for array in weights.values())
    checkpoint = trained / "plain" / "standard" / "checkpoint" / "state.pt"
    checkpoints = stage["disk_bytes"] - 2 * 4 * stage["parameters"]  # beside the two students
    assert checkpoints == pytest.approx(2 * checkpoint.stat().st_size, rel=0.5)
    assert (plan["images"], stage["epochs"]) == (100, 3)
    moments = torch.load(checkpoint, weights_only=True)["optimizer"]["state"]
    assert {int(state["step"]) for state in moments.values()} == {stage["steps"]}
    assert list(tmp_path.iterdir()) == []
    settings = ["--set", "model.args={class_token: true, global_pool: token}"]
    code, out, _ = in_process("plan", "--train", "--images", 60000, "--classes", 7, *settings)
    assert code == 0 and "60,000" in out  # a class token, which no Gaussian teacher has
