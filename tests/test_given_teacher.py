"""From a trained ViT to a small one by one command: what is chosen, what is shown, what is
refused."""

import re

import numpy as np
import pytest
import timm
import torch

from arguments import sets
from gaupipe.models import save_student
from gaupipe.settings.load import parse, with_overrides
from gaupipe.teachers import vit as vit_teacher
from gaupipe.teachers.readable_vit import parts_of_teachers
from pictures import facts, photos
from stages.run import speed_of
from stages.runs.choices import Choices, choose
from stages.runs.directory import RunDirectory
from stages.runs.trained_teacher import choose_start, look_at
from vits import small

DEIT_S = "deit_small_patch16_224.fb_in1k"
TINY = sets("train.epochs=2", "threads=1", "export.views=2")


@pytest.fixture
def vit(tmp_path):
    """A folder with a ViT of 7 other classes, for images of 48 pixels."""
    sizes = dict(size=48, patch_size=16, embed_dim=48, num_heads=3, depth=5, num_classes=7)
    save_student(small(**sizes), tmp_path / "vit", mean=(0.2,) * 3, std=(0.3,) * 3)
    return f"local-dir:{tmp_path / 'vit'}"


def proposed(*given: str):
    """The settings for 3,000 photos with a trained teacher."""
    tree = with_overrides({}, [f"phase_a.teacher={DEIT_S}", *given])
    return parse(choose(facts(), {"name": "folder", "root": "photos"}, False, tree).tree, "test")


def test_of_a_trained_teacher_predictions_are_learned_unless_its_maps_are_asked_for():
    settings = proposed()
    assert (settings.model.stem, settings.model.args["depth"]) == ("residual", 2)
    phase = settings.phase_b
    assert (phase.alpha, phase.beta, phase.gamma, phase.warm_start) == (0.7, 0.3, 0, "none")
    assert settings.export.kind == "predictions" and settings.export.views is None
    assert settings.student_training.epochs == settings.train.epochs == 132_000 // 2700
    for asks in ("phase_b.gamma=0.3", "export.kind=topk", "phase_b.alpha=0"):
        with_maps = proposed(asks)
        phase = with_maps.phase_b
        assert (phase.alpha, phase.gamma, phase.head_map) == (0, 0.3, "mean")
        assert with_maps.export.kind == "topk"
        assert with_maps.export.views == phase.gamma_epochs == 12
        assert with_maps.model == settings.model


def test_of_images_without_labels_maps_are_learned_beside_predictions_if_asked_for():
    given = with_overrides({}, [f"phase_a.teacher={DEIT_S}", "phase_b.gamma=0.3"])
    choices = choose(facts(unlabelled=20_000), {"name": "folder", "root": "photos"}, False, given)
    settings = parse(choices.tree, "test")
    phase = settings.phase_b
    assert (phase.alpha, phase.beta, phase.gamma, phase.head_map) == (0.88, 0.12, 0.3, "mean")
    assert settings.export.kind == "topk"


SLICE = [
    *("data.image_size=128", "model.args.patch_size=16", "model.args.embed_dim=96"),
    *("model.args.depth=4", "model.args.num_heads=6"),
]


def started(*given: str, teacher: str = DEIT_S):
    """What follows from a trained teacher for the student of a configuration, and why."""
    choices = Choices(with_overrides({}, [f"phase_a.teacher={teacher}", *SLICE, *given]))
    choose_start(choices, look_at(teacher, {}))
    return parse(choices.tree, "test"), choices.reasons


def test_a_student_of_a_configuration_is_a_slice_of_its_teacher_where_one_fits():
    settings, reasons = started()
    assert (settings.phase_b.warm_start, settings.phase_b.head_map) == ("slice", None)
    assert "of the teacher's weights" in reasons["phase_b.warm_start"]
    four, _ = started("model.args.num_heads=4")
    assert (four.phase_b.warm_start, four.phase_b.head_map) == ("slice", "mean")
    larger, reasons = started("model.args.embed_dim=480")
    assert larger.phase_b.warm_start == "none"
    assert "channels: 480, the trained ViT 384" in reasons["phase_b.warm_start"]
    lacking, reasons = started(teacher="vit_base_patch16_clip_224.openai")
    assert lacking.phase_b.warm_start == "none"
    assert "the teacher has norm_pre.weight" in reasons["phase_b.warm_start"]
    scaled, _ = started(teacher="vit_small_patch16_224.augreg_in1k")
    assert scaled.data.scaling == {"mean": [0.5] * 3, "std": [0.5] * 3}  # as its patches expect
    other, reasons = started(teacher="vit_small_patch16_dinov3.lvd1689m")
    assert (other.phase_b.warm_start, other.phase_b.head_map) == ("none", "mean")
    assert "no VisionTransformer" in reasons["phase_b.warm_start"]


def test_one_command_from_photos_to_a_table(vit, tmp_path, in_process, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    photos(tmp_path / "photos", size=(140, 150), count=14)
    command = ["run", "--data", tmp_path / "photos", "--teacher", vit, *TINY]
    code, out, err = in_process(*command, "--run-dir", tmp_path / "run")
    assert code == 0, err
    for said in ("export.kind=predictions ", "model.stem=residual ", "a linear probe on its"):
        assert err.count(said) == 1
    [teacher] = [line for line in out.splitlines() if "teacher, linear head" in line]
    [student] = [line for line in out.splitlines() if "standard, distilled" in line]
    [plain] = [line for line in out.splitlines() if "standard, plain" in line]
    model = timm.create_model(vit, pretrained=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count:,}" in teacher and f"{count:,}" not in student + plain
    cells = re.split(" {2,}", student.strip())
    assert len(cells) == 6 and cells[4] == re.split(" {2,}", plain.strip())[4]
    assert re.fullmatch(r"\d+\.\d % \(\d+\.\d to \d+\.\d %\)", cells[2])


def test_a_configuration_says_what_it_says_and_the_rest_follows_the_teacher(
    vit, tmp_path, in_process
):
    photos(tmp_path / "photos", size=(24, 24), count=14)
    tree = {
        "data": {"name": "folder", "root": str(tmp_path / "photos"), "image_size": 16},
        "model": {"args": {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}},
        "augment": {"flip": True, "crop_padding": 2},
        "train": {"epochs": 2},
        "threads": 1,
    }
    for start in ("none", None):
        tree["phase_b"] = {"warm_start": start} if start else {}
        (tmp_path / "c.yaml").write_text(str(tree))
        run = tmp_path / f"run-{start}"
        command = ["run", tmp_path / "c.yaml", "--teacher", vit, "--run-dir", run]
        code, out, err = in_process(*command)
        assert code == 0, err
        assert "teacher, linear head" in out
        phase = RunDirectory(run).settings().phase_b
        assert (phase.warm_start, phase.head_map) == (start or "slice", "mean")
        assert RunDirectory(run).settings().export.views == 2
    assert in_process(*command)[0] == 0  # the same choices


@pytest.mark.long
def test_every_stage_of_a_continued_run_has_the_threads_of_its_command(
    vit, tmp_path, in_process, monkeypatch
):
    photos(tmp_path / "photos", size=(24, 24), count=14)
    command = ["run", "--data", tmp_path / "photos", "--teacher", vit, "--run-dir", tmp_path / "r"]
    began = ["phase-a", *command[1:], *TINY]
    code, _, err = in_process(*began)
    assert code == 0, err
    threads = []

    def recorded(settings, *arguments, load=vit_teacher.load_teacher):
        threads.append(settings.threads)
        return load(settings, *arguments)

    monkeypatch.setattr(vit_teacher, "load_teacher", recorded)
    code, _, err = in_process(*command, *TINY, *sets("threads=2"))
    assert code == 0, err
    assert set(threads) == {2} and len(threads) >= 2  # the export, the table
    assert RunDirectory(tmp_path / "r").settings().threads == 1


@pytest.mark.parametrize("start,by_option", [("slice", False), ("teacher", False), ("slice", True)])
def test_a_student_is_told_what_images_its_weights_expect(
    vit, tmp_path, in_process, start, by_option
):
    """A configuration that names the teacher itself may normalise images otherwise; the option
    --teacher does so as the teacher does."""
    photos(tmp_path / "photos", size=(24, 24), count=14)
    sizes = {"embed_dim": 48, "depth": 5, "num_heads": 3, "patch_size": 16, "mlp_ratio": 4}
    tree = {
        "data": {"name": "folder", "root": str(tmp_path / "photos"), "image_size": 48},
        "model": {"args": sizes, "student_args": {"class_token": False}},
        "train": {"epochs": 1},
        "phase_a": {"teacher": vit},
        "phase_b": {"warm_start": start, "alpha": 0, "beta": 1},
        "threads": 1,
    }
    (tmp_path / "c.yaml").write_text(str(tree))
    command = ["run", tmp_path / "c.yaml", "--no-baseline", "--run-dir", tmp_path / "run"]
    if by_option:
        command += ["--teacher", vit]
    code, _, err = in_process(*command)
    assert code == 0, err
    told = "expect data.scaling={mean: [0.2, 0.2, 0.2], std: [0.3" in err
    assert told != by_option


@pytest.mark.parametrize(
    "changes, message",
    [
        (["phase_a.teacher_args={in_chans: 1}"], "of 3 channels and resized to 48 x 48"),
        (["phase_b.warm_start=slice", "model.args.embed_dim=96"], "has channels: 96, the trained"),
        (["phase_b.alpha=0.5", "data.train_images=4"], "4 training images are fewer than its 5"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(vit, tmp_path, in_process, changes, message):
    photos(tmp_path / "photos", size=(24, 24), count=14)
    command = ["run", "--data", tmp_path / "photos", "--teacher", vit, "--run-dir", tmp_path / "r"]
    code, out, err = in_process(*command, *TINY, *sets(*changes))
    assert (code, out) == (2, "") and message in err.splitlines()[-1], err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("alpha", [0, 0.5])
def test_a_class_with_one_image_is_refused(vit, tmp_path, in_process, alpha):
    photos(tmp_path / "photos" / "train", size=(24, 24), count=8)
    photos(tmp_path / "photos" / "val", size=(24, 24), count=2)
    photos(tmp_path / "photos" / "train", ["eel"], size=(24, 24), count=1)
    command = ["run", "--data", tmp_path / "photos", "--teacher", vit, "--run-dir", tmp_path / "r"]
    code, _, err = in_process(*command, *TINY, *sets(f"phase_b.alpha={alpha}"))
    assert "the class eel has 1 training images" in err
    assert code == (2 if alpha else 0), err


@pytest.mark.parametrize(
    "name, parts",
    [
        ("vit_tiny_patch16_224", []),
        ("vit_small_patch14_dinov2", ["LayerScale"]),
        ("vit_small_patch14_reg4_dinov2", ["register tokens", "LayerScale"]),
        ("vit_small_patch16_dinov3", ["register tokens", "LayerScale", "rotary positions"]),
        ("eva02_tiny_patch14_224", ["rotary positions"]),
        ("deit3_small_patch16_224", ["LayerScale"]),
    ],
)
def test_parts_that_a_student_lacks_are_named(name, parts):
    with torch.device("meta"):
        assert parts_of_teachers(timm.create_model(name, depth=1)) == parts


def test_a_teacher_with_such_parts_is_spoken_of_once(tmp_path, in_process):
    photos(tmp_path / "photos", size=(24, 24), count=14)
    sizes = dict(img_size=28, patch_size=14, embed_dim=24, num_heads=3, depth=2, num_classes=2)
    model = timm.create_model("vit_small_patch14_reg4_dinov2", **sizes)
    save_student(model, tmp_path / "reg", label_names=["dog", "cat"])
    teacher = f"local-dir:{tmp_path / 'reg'}"
    command = ["run", "--data", tmp_path / "photos", "--teacher", teacher, *TINY]
    code, _, err = in_process(*command, "--run-dir", tmp_path / "run")
    assert code == 0, err
    assert err.count("has register tokens and LayerScale, which its student lacks") == 1
    assert "its own head predicts the classes, matched by name: " in err


def test_the_speed_of_a_larger_vit_is_lower():
    images = torch.zeros(4, 3, 32, 32)
    slow = small(size=32, patch_size=4, embed_dim=192, depth=8).eval()
    assert np.isfinite(speed_of(slow, images))
    assert speed_of(slow, images) < speed_of(small(size=32).eval(), images)
