"""``--data FOLDER``: what is chosen for a folder of images, and a run with it."""

import itertools
import json
import pickle
import shutil

import numpy as np
import pytest
import timm
import yaml
from PIL import Image

from arguments import sets
from gaupipe import settings as config
from gaupipe.data.batches import load_data
from gaupipe.data.folder_facts import FolderFacts, facts_of
from gaupipe.settings import DataSettings
from gaupipe.system.errors import UserError
from stages.runs.choices import Machine, choose, training_flops

TWO_CORES = Machine(cores=2)
TINY = (
    "model.args.embed_dim=16",
    "model.args.depth=1",
    "phase_b.epochs=2",
    "threads=1",
)


def facts(images=3000, size=(400, 300), classes=("cat", "dog"), **more) -> FolderFacts:
    counts = {name: images // len(classes) for name in classes}
    return FolderFacts(counts, *size, **more)


def settings(given=(), machine=TWO_CORES, **of_folder) -> config.Settings:
    tree = config.with_overrides({}, given)
    return config.parse(choose(facts(**of_folder), "photos", machine, tree).tree, "test")


def photos(folder, classes=("cat", "dog"), count=12, size=(10, 8), mode="RGB"):
    """Images of noise, a folder for each class."""
    draw = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(256, size=(*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{number}.png")
    return folder


# what is chosen


@pytest.mark.parametrize(
    "size,image_size,patch_size",
    [
        ((400, 534), 64, 8),
        ((5000, 60), 64, 8),
        ((32, 32), 32, 4),
        ((28, 28), 28, 4),
        ((47, 90), 44, 4),
        ((8, 8), 8, 2),
        ((1, 3), 8, 2),
    ],
)
def test_sizes_follow_the_shorter_side(size, image_size, patch_size):
    chosen = settings(size=size)
    assert chosen.data.image_size == image_size
    assert chosen.model.args["patch_size"] == patch_size


def test_what_is_chosen_can_be_built_whatever_the_folder():
    numbers = itertools.product(
        (2, 20, 3000, 10**6), (1, 31, 50, 3000), (Machine(1), Machine(64), Machine(8, gpu=True))
    )
    for images, pixels, machine in numbers:
        chosen = settings(images=images, size=(pixels, pixels), machine=machine)
        args = chosen.model.args
        assert chosen.data.image_size % args["patch_size"] == 0
        assert args["embed_dim"] % args["num_heads"] == 0
        assert chosen.baseline.epochs == chosen.phase_a.max_epochs + chosen.phase_b.epochs
        assert 0 < chosen.data.val_fraction <= 0.5


def test_more_images_have_fewer_epochs_and_a_faster_machine_a_larger_model():
    few, many = settings(images=2000), settings(images=200_000)
    assert few.phase_b.epochs > many.phase_b.epochs
    assert few.model.args["embed_dim"] >= many.model.args["embed_dim"]
    assert few.data.batch_size < many.data.batch_size
    gpu = settings(images=2000, machine=Machine(8, gpu=True))
    assert gpu.model.args["embed_dim"] > few.model.args["embed_dim"]
    assert gpu.data.image_size > few.data.image_size


def test_a_small_folder_holds_out_an_image_of_each_class():
    names = [f"class of {number} things" for number in range(10)]
    assert settings(images=20, classes=names).data.val_fraction == 0.5
    assert settings(images=200).data.val_fraction == 0.2
    assert settings(images=2000).data.val_fraction == 0.1
    own = choose(facts(images=20, val=5), "photos", TWO_CORES)
    assert own.given("data.val_fraction") is None


@pytest.mark.parametrize("names", ["0123456789", ["digit-0", "digit-7"], "AbC"])
def test_digits_and_letters_are_not_mirrored(names):
    chosen = settings(classes=list(names))
    assert not chosen.augment.flip and chosen.phase_a.augment
    words = settings(classes=["digital watch", "ab"])
    assert words.augment.flip


def test_what_the_user_set_stays_and_the_rest_follows():
    chosen = settings(
        [
            "data.image_size=30",
            "model.args.embed_dim=50",
            "phase_b.epochs=6",
            "augment.flip=false",
            "phase_b.alpha=0.5",
        ]
    )
    assert (chosen.data.image_size, chosen.model.args["patch_size"]) == (30, 3)
    assert (chosen.model.args["embed_dim"], chosen.model.args["num_heads"]) == (50, 1)
    assert (chosen.phase_a.max_epochs, chosen.baseline.epochs) == (3, 9)
    assert not chosen.augment.flip
    assert chosen.phase_b.alpha == 0.5
    fewer = settings(["data.train_images=100"])
    assert fewer.phase_b.epochs > settings().phase_b.epochs


def test_a_named_model_keeps_its_own_sizes():
    named = {"name": "gauvit_tiny_patch16_224"}
    chosen = choose(facts(), "photos", TWO_CORES, {"model": dict(named)})
    assert chosen.given("model.args") == {"patch_size": 8}
    vit = timm.create_model(named["name"], device="meta", patch_size=8, img_size=64, num_classes=9)
    products = sum(weight.numel() for weight in vit.parameters() if weight.ndim == 2)
    products += vit.patch_embed.proj.weight.numel()
    attention = 2 * len(vit.blocks) * 64 * vit.embed_dim
    assert training_flops(64, 8, vit.embed_dim, len(vit.blocks), 1) == pytest.approx(
        6 * 64 * (products + attention), rel=0.01
    )
    small = choose(facts(), "photos", TWO_CORES, {"model": {**named, "args": {"depth": 2}}})
    assert small.minutes < chosen.minutes
    unusable = ("no_such_model", "resnet18", "timm/deit_tiny", "local-dir:x", "hf-hub:a/b", 5)
    for unknown in unusable:  # the settings refuse it later
        assert choose(facts(), "photos", TWO_CORES, {"model": {"name": unknown}}).tree["phase_b"]


def test_images_that_are_not_scaled_have_224_pixels():
    chosen = settings(["data.image_size=null"])
    assert (chosen.data.image_size, chosen.model.args["patch_size"]) == (None, 16)
    assert chosen.augment.crop_padding == 28


def test_a_line_for_each_choice_names_the_setting():
    chosen = choose(facts(), "photos", TWO_CORES, {"data": {"batch_size": 7}})
    keys = [line.split("=")[0] for line in chosen.lines()]
    known = config.flatten(config.parse(chosen.tree, "test"))
    assert keys and set(keys) <= known.keys()
    assert "as you set it" in next(line for line in chosen.lines() if "batch_size=7" in line)


def test_a_training_without_a_teacher_is_told_of_its_own_settings_alone():
    chosen = choose(facts(), "photos", TWO_CORES, {"phase_b": {"optim": {"lr": 0.01}}})
    all_lines, lines = ("\n".join(chosen.lines(plain)) for plain in (False, True))
    for line, with_teacher in (
        ("phase_a.teacher=vit ", True),
        ("phase_b.gamma=0.3 ", True),
        ("phase_b.epochs=", True),
        ("model.args.depth=", False),
        ("phase_b.student=belief ", False),
    ):
        assert line in all_lines and (line in lines) != with_teacher
    assert "as many as teacher and student have" in all_lines
    assert not any(word in lines for word in ("teacher", "baseline, "))
    assert "phase_b.optim.lr=0.01 " in lines
    whole, plain = chosen.minutes
    assert plain == pytest.approx(whole / 2, abs=1)
    assert f"the training should take about {plain} min on 2 processor" in chosen.note(plain=True)
    alone = choose(facts(), "photos", TWO_CORES, {"baseline": {"enabled": False}})
    assert alone.minutes == (pytest.approx(whole / 2, abs=1), plain)


def test_maps_are_those_of_views_that_shifts_move():
    chosen = settings()
    assert chosen.export.views == chosen.phase_b.gamma_epochs > 1
    for given in (
        "augment.crop_padding=0",
        "phase_b.gamma=0",
        "phase_b.gamma_schedule=constant",
        "phase_b.alpha=0.5",
        "phase_a.teacher=gaussian",
        "phase_a.teacher=local-dir:mine",
        "export.views=null",
    ):
        assert settings([given]).export.views is None, given
    assert settings(["export.views=3"]).export.views == 3
    assert settings(["phase_b.gamma_epochs=1"]).export.views == 2  # the fewest
    few = settings(images=200_000)
    assert 200_000 * 64 * 2 * 4 * 16 * (few.export.views or 1) < 4e9
    assert settings(images=10**7).export.views is None
    large = ["model.name=gauvit_tiny_patch16_224", "data.image_size=128", "phase_b.epochs=60"]
    of_view = 16 * (128 // 8) ** 2 * 8 * 12  # bytes, by the model's own blocks and heads
    views = settings(large, images=6000).export.views or 0
    assert views == int(2e9 / (5400 * of_view)) < 20
    assert settings(large, images=100_000).export.views is None
    line = next(line for line in choose(facts(), "x", TWO_CORES).lines() if "views" in line)
    assert "export.views=" in line and "moved maps" in line


def test_published_weights_are_taken_for_their_maps_alone():
    chosen = settings(["phase_a.teacher=deit_tiny_patch16_224.fb_in1k"])
    assert chosen.phase_a.teacher_args == {"num_classes": 0, "img_size": 64}
    assert chosen.phase_b.mean_heads and chosen.phase_b.match_grid and not chosen.phase_b.alpha
    assert chosen.baseline.epochs == chosen.phase_b.epochs
    assert settings(["phase_a.teacher=local-dir:mine"]).phase_a.teacher_args == {}


def test_the_student_has_belief_attention_unless_options_are_for_another():
    assert settings().phase_b.student == "belief"
    assert settings(["phase_b.student=xsa"]).phase_b.student == "xsa"
    prior = settings(["phase_b.attention_options.prior=true"]).phase_b
    assert (prior.student, prior.attention_options) == ("standard", {"prior": True})


def test_the_file_says_the_same_with_its_reasons():
    chosen = choose(facts(), "photos: mine", TWO_CORES, {"seed": 3, "log": {"to": []}})
    text = chosen.as_yaml("a head\nof two lines")
    assert yaml.safe_load(text) == chosen.tree
    assert list(chosen.tree) == [
        *("seed", "data", "model", "augment", "phase_a", "export", "log", "phase_b", "baseline")
    ]
    of_file = config.parse(chosen.tree, "test").with_choices(text)
    assert pickle.loads(pickle.dumps(of_file)).choices == text  # ranks send it to each other
    assert text.startswith("# a head\n# of two lines\n")
    for reason in chosen.reasons.values():
        assert f"# {reason}\n" in text


@pytest.mark.parametrize(
    "given",
    ["data=[1]", "data.image_size=x", "model.args=3", "phase_b.epochs=-1", "model.args.depth={}"],
)
def test_unusable_settings_are_refused_as_ever(given):
    with pytest.raises(UserError):
        settings([given])


# what a folder is like


def test_facts_are_those_of_the_training_images(tmp_path):
    photos(tmp_path / "train", size=(40, 30), mode="L")
    photos(tmp_path / "validation", count=2)
    photos(tmp_path / "test", count=3)
    giant = Image.new("L", (3000, 2000))
    giant.save(tmp_path / "train" / "cat" / "giant.png")
    found = facts_of(tmp_path)
    assert found.counts == {"cat": 13, "dog": 12}
    assert (found.width, found.height, found.grey) == (40, 30, True)
    assert (found.val, found.test) == (4, 6)
    Image.new("RGB", (40, 30)).save(tmp_path / "train" / "cat" / "colour.png")
    assert not facts_of(tmp_path).grey


def load(root, **more):
    return load_data(DataSettings(name="folder", root=root, image_size=8, **more))


def test_validation_images_of_their_own(tmp_path):
    photos(tmp_path / "train")
    photos(tmp_path / "val", count=2)
    as_test = load(tmp_path)
    assert (len(as_test.train), len(as_test.val), len(as_test.test)) == (21, 3, 4)
    photos(tmp_path / "test", count=3)
    data = load(tmp_path)
    assert (len(data.train), len(data.val), len(data.test)) == (24, 4, 6)
    assert data.val.source.files.root == tmp_path / "val"
    assert data.val.labels.tolist() == [0, 0, 1, 1]
    assert len(load(tmp_path, train_images=10).val) == 4


def test_class_folders_without_a_folder_for_training(tmp_path):
    inside = load(photos(tmp_path / "photos" / "train").parent)
    shutil.copytree(tmp_path / "photos" / "train", tmp_path / "flat")
    flat = load(tmp_path / "flat")
    assert flat.test is None
    assert flat.sha256 == inside.sha256


# a run


def run(in_process, *arguments, cwd):
    return in_process(*arguments, *sets(*TINY), cwd=cwd)


def metrics(path) -> list[dict]:
    timed = ("seconds", "images_per_s", "data_share", "maps_share")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


def test_run_on_a_folder_and_again_and_from_its_file(in_process, tmp_path):
    photos(tmp_path / "mine")
    code, out, err = run(in_process, "run", "--data", "mine", cwd=tmp_path)
    assert code == 0, err
    lines = err.splitlines()
    assert lines[0].startswith("mine: 24 training images of 2 classes")
    assert any(line.startswith("  data.image_size=8 ") for line in lines)
    assert "'gaupipe train --data mine' does without a teacher, in half the time or less" in lines
    for row in ("teacher (phase A)", "belief, distilled", "belief, plain"):
        assert row in out
    first = tmp_path / "runs" / "mine"
    student = metrics(first / "phase_b" / "belief" / "metrics.jsonl")
    assert len(student) == 2

    code, again, err = in_process("run", "--data", str(tmp_path / "mine"), cwd=tmp_path)
    assert (code, "goes on with the settings" in err) == (0, True), err
    assert "epoch" not in err
    assert again.splitlines()[1:] == out.splitlines()[1:]

    (tmp_path / "below").mkdir()
    code, out, err = in_process(
        "phase-b", "--run-dir", first, "--student", "xsa", cwd=tmp_path / "below"
    )
    assert code == 0, err

    code, _, err = in_process("run", first / "choices.yaml", "--run-dir", "other", cwd=tmp_path)
    assert code == 0, err
    for part in ("phase_b", "plain"):
        path = f"{part}/belief/metrics.jsonl"
        assert metrics(tmp_path / "other" / path) == metrics(first / path)

    for command, message in (
        (("run", "--data", "mine", "--set", "data.image_size=16"), "image_size is 8, asked 16"),
        (("run", "digits", "--data", "mine"), "leave digits out"),
        (("run", "--data", "elsewhere", "--run-dir", first), "holds a run on other images"),
        (("run", "--data", "mine", "--run-dir", "b", "--set", "data.root=x"), "--set data.root"),
    ):
        code, out, err = in_process(*command, cwd=tmp_path)
        assert (code, out) == (2, "") and message in err.splitlines()[-1], err


def test_a_folder_that_was_moved_is_recognised_by_its_images(in_process, tmp_path):
    photos(tmp_path / "mine")
    plain = sets(*TINY[:2], "baseline.epochs=1", "threads=1")
    assert in_process("train", "--data", "mine", *plain, cwd=tmp_path)[0] == 0
    (tmp_path / "mine").rename(tmp_path / "moved")
    again = "train", "--data", "moved", "--run-dir", "runs/mine"
    code, _, err = in_process(*again, "--student", "xsa", cwd=tmp_path)
    assert (code, "goes on with the settings" in err) == (0, True), err
    (tmp_path / "below").mkdir()
    for student in ("belief", "xsa"):
        evaluate = "evaluate", "--run-dir", "../runs/mine", "--student", student
        code, _, err = in_process(*evaluate, cwd=tmp_path / "below")
        assert code == 0, err
    (tmp_path / "moved" / "cat" / "3.png").unlink()
    code, _, err = in_process(*again, "--student", "standard", cwd=tmp_path)
    assert code == 2
    assert "the training images of data set folder were others when the run began" in err


@pytest.mark.parametrize("command", ["run", "train"])
def test_the_student_that_is_asked_for_is_the_one_that_is_chosen(in_process, tmp_path, command):
    photos(tmp_path / "mine")
    own = TINY if command == "run" else [*TINY[:2], "baseline.epochs=1", "threads=1"]
    code, _, err = in_process(
        command, "--data", "mine", "--student", "xsa", *sets(*own), "--run-dir", "x", cwd=tmp_path
    )
    assert code == 0, err
    [line] = [line for line in err.splitlines() if "phase_b.student=" in line]
    assert line.split() == ["phase_b.student=xsa", "as", "you", "set", "it"]
    chosen = yaml.safe_load((tmp_path / "x" / "choices.yaml").read_text())
    assert chosen["phase_b"]["student"] == "xsa"
    again = ["--data", "mine", "--run-dir", "x", "--student", "standard"]
    code, _, err = in_process(command, *again, cwd=tmp_path)
    assert code == 0 and "goes on with the settings" in err, err


def test_train_and_plan_on_a_folder(in_process, tmp_path):
    photos(tmp_path / "mine" / "train", mode="L")
    code, out, err = in_process("plan", "--data", "mine", "--steps", "0", "--json", cwd=tmp_path)
    assert code == 0, err
    assert json.loads(out)["images"] == 19
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    plain = sets(*TINY[:2], "baseline.epochs=3", "threads=1")
    code, out, err = in_process("train", "--data", "mine", *plain, cwd=tmp_path)
    assert code == 0 and "teacher" not in err and "  baseline.epochs=3 " in err, err
    trained = tmp_path / "runs" / "mine" / "plain" / "belief"
    assert out == f"{trained.relative_to(tmp_path)}/student\n"
    assert len(metrics(trained / "metrics.jsonl")) == 3
    code, _, err = in_process("train", "--data", "mine", "--resume", cwd=tmp_path)
    assert code == 0 and "epoch" not in err, err


FOLDERS = {
    "absent": (lambda root: None, "no folder 'mine/train'"),
    "a file": (lambda root: root.write_text("x"), "no folder 'mine/train'"),
    "empty": (lambda root: root.mkdir(), "no folder 'mine/train'"),
    "one class": (lambda root: photos(root, ["cat"]), "one class only, 'cat'"),
    "folders too deep": (
        lambda root: photos(root / "download"),
        "if the folders in mine/download are the classes, name it",
    ),
    "validation alone": (lambda root: photos(root / "val"), "no folder 'mine/train'"),
    "an empty class": (lambda root: (photos(root) / "fox").mkdir(), "mine/fox holds no image"),
    "one image of a class": (lambda root: photos(root, count=1), "class by class"),
    "unreadable": (
        lambda root: (photos(root) / "cat" / "3.png").write_bytes(b"no image"),
        "mine/cat/3.png: not readable",
    ),
    "cut off": (
        lambda root: cut(photos(root, count=300) / "cat" / "200.png"),
        "mine/cat/200.png: not readable",
    ),
}


def cut(path):
    path.write_bytes(path.read_bytes()[:20])


@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_folder_that_cannot_be_meant_gives_one_line(in_process, tmp_path, case, command):
    make, message = FOLDERS[case]
    make(tmp_path / "mine")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = in_process(command, "--data", "mine", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before
