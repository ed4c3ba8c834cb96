"""``--data FOLDER``: what is chosen for a folder of images, and a run with it."""

import itertools
import json
import re
import shlex
import shutil
import tarfile

import pytest
from PIL import Image

from arguments import sets
from gaupipe.data.load import load_data
from gaupipe.data.sources import facts_of
from gaupipe.settings import DataSettings, Settings
from gaupipe.settings.load import flatten, load, parse, with_overrides
from gaupipe.system.errors import UserError
from pictures import facts, more_photos, photos
from runs import metrics
from stages.cli.hints import say_if_overfitted
from stages.runs.choices import Choices, choose
from stages.runs.chosen_settings import settings_for
from stages.runs.directory import RunDirectory

PLACE = {"name": "folder", "root": "photos"}
TINY = ("model.args.embed_dim=16", "model.args.depth=1", "train.epochs=2", "threads=1")


def chosen(given=(), gpu=False, **folder_facts) -> Choices:
    return choose(facts(**folder_facts), PLACE, gpu, with_overrides({}, given))


def proposed(given=(), gpu=False, **folder_facts) -> Settings:
    return parse(chosen(given, gpu, **folder_facts).tree, "test")


# what is chosen


@pytest.mark.parametrize(
    "size,gpu,image_size,patch_size",
    [
        ((400, 534), False, 64, 8),
        ((400, 534), True, 128, 8),
        ((5000, 60), True, 64, 8),
        ((32, 32), False, 32, 4),
        ((28, 28), False, 28, 4),
        ((47, 90), False, 44, 4),
        ((8, 8), False, 8, 2),
        ((1, 3), False, 8, 2),
    ],
)
def test_sizes_follow_the_shorter_side(size, gpu, image_size, patch_size):
    settings = proposed(size=size, gpu=gpu)
    assert settings.data.image_size == image_size
    assert settings.model.args["patch_size"] == patch_size


def test_what_is_chosen_can_be_built_whatever_the_folder():
    teachers = "phase_a.teacher=local", "phase_a.teacher=vit"
    folders = itertools.product((2, 20, 3000, 10**6), (1, 31, 50, 3000), (False, True), teachers)
    for images, pixels, gpu, teacher in folders:
        settings = proposed([teacher], images=images, size=(pixels, pixels), gpu=gpu)
        args = settings.model.args
        assert settings.data.image_size % args["patch_size"] == 0
        assert args["embed_dim"] % args["num_heads"] == 0
        together = settings.phase_a.most_epochs + settings.student_training.epochs
        assert settings.train.epochs == together
        assert 0 < settings.data.val_fraction <= 0.5
        store = (settings.data.image_size // args["patch_size"]) ** 2
        store *= images * args["depth"] * args["num_heads"] * 16
        assert (settings.export.views or 1) * 0.5 * store < max(2e9, store)


def test_more_images_have_fewer_epochs_and_larger_batches():
    few, many = proposed(images=2000), proposed(images=200_000)
    assert few.train.epochs > many.train.epochs
    assert few.data.batch_size < many.data.batch_size
    gpu = proposed(images=2000, gpu=True)
    assert gpu.model.args["embed_dim"] > few.model.args["embed_dim"]


@pytest.mark.parametrize("unlabelled,epochs", [(500, 90), (20_300, 30), (46_000, 14), (10**6, 10)])
def test_images_without_labels_are_seen_in_more_epochs_the_fewer_they_are(unlabelled, epochs):
    settings = proposed(images=3000, unlabelled=unlabelled)
    assert settings.student_training.epochs == epochs
    assert settings.train.epochs == proposed(images=3000).train.epochs  # on the labels alone


def test_a_small_folder_holds_out_an_image_of_each_class():
    names = [f"class of {number} things" for number in range(10)]
    assert proposed(images=20, classes=names).data.val_fraction == 0.5
    assert proposed(images=200).data.val_fraction == 0.2
    assert proposed(images=2000).data.val_fraction == 0.1
    assert chosen(images=20, val=5).given("data.val_fraction") is None


@pytest.mark.parametrize("names", ["0123456789", ["digit-0", "digit-7"], "AbC"])
def test_digits_and_letters_are_not_mirrored(names):
    assert not proposed(classes=list(names)).augment.flip
    words = proposed(classes=["digital watch", "ab"])
    assert words.augment.flip and words.phase_a.augment


def test_what_the_user_set_stays_and_the_rest_follows():
    given = ["data.image_size=30", "model.args.embed_dim=50", "train.epochs=6"]
    vit = ["phase_a.teacher=vit"]
    settings = proposed([*vit, *given, "augment.flip=false", "phase_b.alpha=0.5"])
    assert (settings.data.image_size, settings.model.args["patch_size"]) == (30, 3)
    assert (settings.model.args["embed_dim"], settings.model.args["num_heads"]) == (50, 1)
    assert settings.phase_a.max_epochs == 3
    assert settings.student_training.epochs == settings.train.epochs == 6
    assert proposed([*vit, "phase_b.epochs=6"]).train.epochs == 9
    assert not settings.augment.flip and settings.phase_b.alpha == 0.5
    fewer = proposed(["data.train_images=100"])
    assert fewer.train.epochs > proposed().train.epochs
    named = chosen(["model.name=gauvit_tiny_patch16_224"])
    assert named.given("model.args") == {"patch_size": 8}  # its own sizes otherwise
    settings = proposed(["data.image_size=null"])
    assert (settings.data.image_size, settings.model.args["patch_size"]) == (None, 16)
    assert settings.augment.crop_padding == 28


def test_the_rate_of_muon_is_for_muon():
    assert proposed().train.optim.lr == proposed(["train.optim.name=muon"]).train.optim.lr == 4e-3
    assert proposed(["train.optim.name=adamw"]).train.optim.lr == 1e-3
    reasons = chosen(["train.optim.name=adamw"]).reasons
    assert reasons["train.optim.lr"] == "the learning rate; try what suits adamw"
    resnet = ["phase_a.teacher=resnet"]
    assert proposed(resnet).phase_a.optim.lr == 0.016
    assert proposed([*resnet, "phase_a.optim.name=adamw"]).phase_a.optim.lr == 1e-3


def test_a_line_for_each_choice_names_the_setting():
    choices = chosen(["data.batch_size=7", "train.optim.lr=0.01"])
    known = flatten(parse(choices.tree, "test"))
    every, plain = choices.lines(), choices.lines(plain=True)
    for lines in (every, plain):
        keys = [line.split("=")[0] for line in lines]
        assert keys and set(keys) <= known.keys()
        assert [line.split(maxsplit=1) for line in lines if "as you set it" in line] == [
            ["data.batch_size=7", "as you set it"],
            ["train.optim.lr=0.01", "as you set it"],
        ]
    teacher_lines = ("phase_a.teacher=local ", "phase_b.gamma=0.25 ", "phase_b.epochs=")
    for start in (
        *teacher_lines,
        "model.args.depth=",
        "model.attention=standard ",
        "model.stem=residual ",
    ):
        assert any(line.startswith(start) for line in every)
        assert any(line.startswith(start) for line in plain) == (start not in teacher_lines)


@pytest.mark.parametrize(
    "given,views",
    [
        ([], 10),
        (["augment.crop_padding=0"], None),
        (["phase_b.gamma=0"], None),
        (["phase_b.alpha=0.5"], None),
        (["phase_b.alpha=0.5", "phase_b.alpha_epochs=10"], 10),
        (["phase_b.alpha=0.5", "phase_b.alpha_epochs=20"], None),
        (["phase_a.teacher=local-dir:mine", "phase_b.gamma=0.3"], 12),
        (["phase_a.teacher=local"], None),
        (["export.views=null"], None),
        (["export.views=3"], 3),
        (["phase_b.gamma_epochs=1"], 2),  # the fewest
    ],
)
def test_maps_are_those_of_views_that_shifts_move(given, views):
    settings = proposed(["phase_a.teacher=vit", *given])
    assert settings.export.views == views
    assert views != 10 or settings.phase_b.gamma_epochs == 10


@pytest.mark.parametrize(
    "given,line",
    [
        ([], "gamma_schedule=constant  .*maps .* in all epochs"),
        (["phase_b.gamma_epochs=3"], "gamma_schedule=stop_after  .*you set gamma_epochs"),
        (["phase_b.gamma_epochs=3", "phase_b.gamma_schedule=linear"], "=linear  .*you set it"),
    ],
)
def test_the_papers_maps_teach_in_all_epochs_unless_some_are_given(given, line):
    lines = "\n".join(chosen(["phase_a.teacher=gaussian", *given]).lines())
    assert re.search(f"phase_b.*{line}", re.sub("  +", "  ", lines)), lines


def test_a_trained_teacher_leaves_the_student_all_epochs():
    settings = proposed(["phase_a.teacher=deit_tiny_patch16_224.fb_in1k"])
    assert settings.phase_a.teacher_args == {}  # it sees images of its own size
    assert settings.train.epochs == settings.student_training.epochs
    trained_here = proposed(["phase_a.teacher=vit"]).student_training.epochs
    assert settings.student_training.epochs > trained_here


def test_a_teacher_that_costs_nothing_fits_the_heads_and_leaves_the_student_all_epochs():
    settings = proposed()
    assert settings.phase_a.teacher == "local"
    assert len(settings.phase_a.local.std) == settings.model.args["num_heads"] == 2
    epochs = settings.student_training.epochs
    assert epochs == settings.train.epochs
    assert epochs > proposed(["phase_a.teacher=vit"]).student_training.epochs


@pytest.mark.parametrize("stem", ["conv", "residual"])
def test_patches_of_a_convolutional_stem_are_powers_of_two(stem):
    for size in (36, 40, 64, 96, 100, 224):
        given = [f"model.stem={stem}", f"data.image_size={size}"]
        assert chosen(given).given("model.args.patch_size") in (2, 4, 8, 16)


@pytest.mark.parametrize(
    "given, stem",
    [
        ([], "residual"),
        (["model.stem=patch"], "patch"),
        (["model.stem=conv"], "conv"),
        (["data.image_size=9"], "patch"),  # no patch of its own halves an image of 9 pixels
        (["model.args.patch_size=6", "data.image_size=36"], "patch"),
    ],
)
def test_the_stem_is_convolutional_where_the_patches_allow_it(given, stem):
    settings = proposed(given)
    assert settings.model.stem == stem
    assert settings.train.optim.warmup_epochs == 4


def test_few_images_are_changed_by_randaugment():
    few = proposed(images=700).augment.randaugment
    assert (few.ops, few.magnitude) == (1, 6)
    assert proposed(images=3000).augment.randaugment is None
    assert proposed(["augment.randaugment=null"], images=700).augment.randaugment is None
    maps_of_images = proposed(["phase_a.teacher=vit"], images=700)
    assert maps_of_images.augment.randaugment is None


UNUSABLE = "data=[1]", "data.image_size=x", "data.image_size=0", "model.args=3", "augment=null"


@pytest.mark.parametrize("given", [*UNUSABLE, "train.epochs=-1", "model.args.patch_size=0"])
def test_unusable_settings_are_refused_as_ever(tmp_path, given):
    section = re.split("[.=]", given)[0]
    with pytest.raises(UserError, match=f"^{section}"):
        settings_for(photos(tmp_path / "photos"), [given], tmp_path / "run")


# what a folder is like


def test_facts_are_those_of_the_training_images(tmp_path):
    photos(tmp_path / "train", size=(40, 30), mode="L")
    photos(tmp_path / "validation", count=2)
    photos(tmp_path / "test", count=3)
    giant = Image.new("L", (3000, 2000))
    giant.save(tmp_path / "train" / "cat" / "giant.png")
    folder_facts = facts_of(DataSettings(name="folder", root=tmp_path))
    assert folder_facts.counts == {"cat": 13, "dog": 12}
    assert (folder_facts.width, folder_facts.height) == (40, 30)
    assert (folder_facts.val, folder_facts.test) == (4, 6)


def test_copies_among_the_images_without_labels_count_for_no_choice(tmp_path, capfd):
    photos(tmp_path / "mine" / "train")
    more = more_photos(tmp_path / "more", count=6)
    overrides = [f"data.unlabelled={more}", "phase_a.teacher=resnet"]
    expected = settings_for(tmp_path / "mine", overrides, tmp_path / "run")
    shutil.copytree(tmp_path / "mine" / "train", more / "copies")
    assert settings_for(tmp_path / "mine", overrides, tmp_path / "run") == expected
    assert "left out copies of training, validation and test images: 24" in capfd.readouterr().err
    settings, lines = expected
    assert settings.phase_b.beta == 0.76  # 19 training images and 6 others
    assert ", 6 images without labels, " in lines[0]
    broken = more / "copies" / "cat" / "0.png"
    broken.write_bytes(broken.read_bytes()[:40])
    overrides.append("data.unreadable=leave_out")
    assert settings_for(tmp_path / "mine", overrides, tmp_path / "run")[1] == lines


def test_copies_that_are_left_out_of_the_training_images_count_for_no_choice(tmp_path):
    mine = photos(tmp_path / "mine" / "train").parent
    photos(mine / "val", count=2)  # the first four of the same noise
    overrides = ["data.leave_out_copies=true"]
    with_copies = settings_for(mine, overrides, tmp_path / "run")
    for number in range(4):
        (mine / "train" / "cat" / f"{number}.png").unlink()
    assert settings_for(mine, overrides, tmp_path / "run") == with_copies
    assert ": 20 training images of 2 classes (8 of cat to 12 of dog)" in with_copies[1][0]


def test_what_is_left_out_is_said_once(tmp_path, in_process):
    """Although the images are opened for the choices, and again for what then reads them."""
    mine = photos(tmp_path / "mine" / "train").parent
    more_photos(mine / "unlabelled")
    (mine / "unlabelled" / "notes.txt").write_text("no image")
    (mine / "docs").mkdir()
    for name in ("train/cat/1.png", "unlabelled/0.png"):
        (mine / name).write_bytes((mine / name).read_bytes()[:40])
    call = ("plan", "--data", "mine", *sets("data.unreadable=leave_out"))
    code, _, err = in_process(*call, cwd=tmp_path)
    assert code == 0, err
    said = ["cat/1.png: not", "unlabelled/0.png: not", "these images: 1", "no images: 1", ": docs"]
    assert [err.count(words) for words in said] == [1, 1, 2, 1, 1], err


def test_a_class_of_one_image_is_refused_before_anything_is_chosen(tmp_path):
    mine = photos(tmp_path / "mine" / "train").parent
    for number in range(1, 12):
        (mine / "train" / "cat" / f"{number}.png").unlink()
    with pytest.raises(UserError, match="such as 'cat', and cannot be split: add .* folder 'val'"):
        settings_for(mine, (), tmp_path / "run")
    photos(mine / "val", classes=["dog"], count=1)
    settings_for(mine, (), tmp_path / "run")
    assert sorted(load_photos(mine).train.labels) == [0] + 12 * [1]


@pytest.mark.parametrize("few", [dict(train_images=6), dict(val_fraction=0.9)])
def test_no_class_loses_all_its_training_images(tmp_path, few):
    photos(tmp_path / "mine", classes=["cat"], count=100)
    photos(tmp_path / "mine", classes=["dog"], count=2)
    with pytest.raises(UserError, match="no training image of the class 'dog' is left"):
        load_photos(tmp_path / "mine", **few)


def load_photos(root, **more):
    return load_data(DataSettings(name="folder", root=root, image_size=8, **more))


def test_validation_images_of_their_own(tmp_path):
    photos(tmp_path / "train")
    photos(tmp_path / "val", count=2)
    data = load_photos(tmp_path)
    assert (len(data.train), len(data.val), data.test) == (24, 4, None)
    assert "of 2 classes, 4 validation images, no test images," in str(
        facts_of(DataSettings(name="folder", root=tmp_path))
    )
    assert data.val.source.root == tmp_path / "val"
    assert data.val.labels.tolist() == [0, 0, 1, 1]
    assert len(load_photos(tmp_path, train_images=10).val) == 4
    shutil.copy(tmp_path / "val" / "cat" / "1.png", tmp_path / "val" / "cat" / "0.png")
    other = load_photos(tmp_path)
    assert other.sha256 == data.sha256 and other.both_sha256 != data.both_sha256
    photos(tmp_path / "test", count=3)
    data = load_photos(tmp_path)
    assert (len(data.train), len(data.val), len(data.test)) == (24, 4, 6)
    shutil.rmtree(tmp_path / "val")
    shutil.rmtree(tmp_path / "test" / "cat")
    data = load_photos(tmp_path)
    assert set(data.test.labels) == {1}  # the dogs alone are still class 1
    assert (len(data.train), len(data.val), len(data.test)) == (21, 3, 3)
    assert "of 2 classes, 3 test images," in str(
        facts_of(DataSettings(name="folder", root=tmp_path))
    )


def test_class_folders_without_a_folder_for_training(tmp_path):
    inside = load_photos(photos(tmp_path / "photos" / "train").parent)
    shutil.copytree(tmp_path / "photos" / "train", tmp_path / "flat")
    flat = load_photos(tmp_path / "flat")
    assert flat.test is None
    assert flat.sha256 == inside.sha256


@pytest.mark.parametrize("folder", [".", "../photos", "../photos/"])
def test_a_folder_may_be_named_from_within(tmp_path, monkeypatch, folder):
    whole = photos(tmp_path / "photos")
    monkeypatch.chdir(whole)
    found = load_photos(folder)
    assert found.class_names == ["cat", "dog"]
    assert found.sha256 == load_photos(whole).sha256


# a run


def run(in_process, *arguments, cwd):
    return in_process(*arguments, *sets(*TINY), cwd=cwd)


def test_run_on_a_folder_and_again_and_from_its_file(in_process, tmp_path):
    photos(tmp_path / "mine")
    teacher = sets("phase_a.teacher=vit")
    code, out, err = run(in_process, "run", "--data", "mine", *teacher, cwd=tmp_path)
    assert code == 0, err
    lines = err.splitlines()
    assert lines[0].startswith("mine: 24 training images of 2 classes")
    assert any(line.startswith("  data.image_size=8 ") for line in lines)
    assert "'gaupipe train --data mine' does without a teacher, in half the time or less" in lines
    for row in ("teacher (phase A)", "standard, distilled", "standard, plain"):
        assert row in out
    first = tmp_path / "runs" / "mine-vit"
    student = metrics(first / "phase_b" / "standard" / "metrics.jsonl")
    assert len(student) == 2

    code, again, err = in_process("run", "--data", tmp_path / "mine", *teacher, cwd=tmp_path)
    assert (code, "goes on with the settings" in err) == (0, True), err
    assert "epoch 1/" not in err
    rows = [[line.split() for line in shown.splitlines()[1:]] for shown in (again, out)]
    lasting = [[row[:-3] + row[-2:-1] for row in shown] for shown in rows]
    assert lasting[0] == lasting[1]  # core seconds of exports and speeds are measured again

    code, _, err = in_process("run", first / "config.yaml", "--run-dir", "other", cwd=tmp_path)
    assert code == 0, err
    for part in ("phase_b", "plain"):
        path = f"{part}/standard/metrics.jsonl"
        assert metrics(tmp_path / "other" / path) == metrics(first / path)

    code, out, err = in_process(
        "run", "--data", "mine", *teacher, "--set", "data.image_size=16", cwd=tmp_path
    )
    assert (code, out) == (2, "") and "image_size 8, now it is 16" in err.splitlines()[-1], err


@pytest.mark.parametrize("place", ["classes", "archives", "unlabelled"])
def test_a_run_is_no_class_of_its_images(in_process, tmp_path, place):
    """What a command writes into the folder of the images would be read by the next one."""
    mine = photos(tmp_path / "mine" / "train").parent
    more_photos(mine / "unlabelled")
    command = ["run", "--data", "mine", "--run-dir", "mine/runs/first"]
    if place == "classes":
        command[2] = "mine/train"
        command[4] = "mine/train/runs/first"
    elif place == "archives":
        with tarfile.open(mine / "train.tar", "w") as archive:
            archive.add(mine / "train", "train")
        shutil.rmtree(mine / "train")
    else:
        command[4] = "mine/unlabelled/run"
    before = {*tmp_path.rglob("*")}
    code, _, err = run(in_process, *command, cwd=tmp_path)
    assert code == 2 and "lies among the images in" in err.splitlines()[-1], err
    assert {*tmp_path.rglob("*")} == before


def test_a_run_may_lie_beside_a_folder_for_training(in_process, tmp_path):
    photos(tmp_path / "mine" / "train")
    for name in ("first", "second"):
        command = ["train", "--data", ".", "--run-dir", f"runs/{name}"]
        code, _, err = run(in_process, *command, cwd=tmp_path / "mine")
        assert code == 0, err
    assert (tmp_path / "mine" / "runs").is_dir()


def test_a_continued_run_still_guards_its_test_images(in_process, tmp_path):
    mine = photos(tmp_path / "mine" / "train").parent
    photos(mine / "test", count=2)
    command = ["train", "--data", "mine"]
    assert run(in_process, *command, cwd=tmp_path)[0] == 0
    (mine / "test" / "cat" / "0.png").rename(mine / "test" / "cat" / "new.png")
    for _ in range(2):
        code, _, err = in_process("evaluate", "--test", cwd=tmp_path)
        assert code == 2 and "cat/new.png" in err, err
        code, _, err = run(in_process, *command, "--resume", cwd=tmp_path)
        assert code == 0, err


def test_where_the_images_are_is_said_once_to_a_begun_run_too(in_process, tmp_path):
    photos(tmp_path / "mine")
    command = ["train", "--data", "mine"]
    assert run(in_process, *command, cwd=tmp_path)[0] == 0
    code, _, err = run(in_process, *command, *sets("data.root=elsewhere"), cwd=tmp_path)
    assert code == 2 and "data.root: --data mine says where" in err.splitlines()[-1]


def test_epochs_that_are_left_open_are_chosen():
    assert proposed(["phase_a.teacher=vit", "phase_b.epochs=null"]).train.epochs > 1


def test_a_folder_that_was_moved_is_recognised_by_its_images(in_process, tmp_path):
    photos(tmp_path / "mine")
    plain = sets(*TINY[:2], "train.epochs=1", "threads=1")
    assert in_process("train", "--data", "mine", *plain, cwd=tmp_path)[0] == 0
    (tmp_path / "mine").rename(tmp_path / "moved")
    code, _, err = in_process("evaluate", "--run-dir", "runs/mine", cwd=tmp_path)
    assert (code, err.count("\n")) == (2, 1) and "with --data NEW --run-dir RUN" in err
    again = "train", "--data", "moved", "--run-dir", "runs/mine"
    code, _, err = in_process(*again, "--student", "xsa", cwd=tmp_path)
    assert (code, "goes on with the settings" in err) == (0, True), err
    (tmp_path / "below").mkdir()
    for student in ("standard", "xsa"):
        evaluate = "evaluate", "--run-dir", "../runs/mine", "--student", student
        code, _, err = in_process(*evaluate, cwd=tmp_path / "below")
        assert code == 0, err
    (tmp_path / "moved" / "cat" / "3.png").unlink()
    code, _, err = in_process(*again, "--student", "belief", cwd=tmp_path)
    assert code == 2
    assert "the training images of data set moved were others when the run began" in err


@pytest.mark.parametrize("command", ["run", "train"])
def test_the_student_that_is_asked_for_is_the_one_that_is_chosen(in_process, tmp_path, command):
    photos(tmp_path / "mine")
    call = command, "--data", "mine", "--run-dir", "x", "--student"
    tiny = TINY if command == "run" else [*TINY[:2], "train.epochs=1", "threads=1"]
    code, _, err = in_process(*call, "xsa", *sets(*tiny), cwd=tmp_path)
    assert code == 0, err
    [line] = [line for line in err.splitlines() if "model.attention=" in line]
    assert line.split() == ["model.attention=xsa", "as", "you", "set", "it"]
    assert RunDirectory(tmp_path / "x").settings().model.attention == "xsa"
    code, _, err = in_process(*call, "standard", cwd=tmp_path)
    assert code == 0 and "goes on with the settings" in err, err


def test_train_and_plan_on_a_folder(in_process, tmp_path):
    photos(tmp_path / "mine" / "train", mode="L")
    code, out, err = in_process("plan", "--data", "mine", "--json", cwd=tmp_path)
    assert code == 0, err
    assert json.loads(out)["images"] == 19
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    plain = sets(*TINY[:2], "train.epochs=3", "threads=1")
    code, out, err = in_process("train", "--data", "mine", *plain, cwd=tmp_path)
    assert code == 0 and "teacher" not in err and "  train.epochs=3 " in err, err
    trained = tmp_path / "runs" / "mine" / "plain" / "standard"
    assert out == f"{trained.relative_to(tmp_path)}/student\n"
    assert len(metrics(trained / "metrics.jsonl")) == 3
    code, _, err = in_process("train", "--data", "mine", "--resume", cwd=tmp_path)
    assert code == 0 and "nothing is left to train" in err, err


def test_a_folder_is_compared_without_settings(tmp_path, in_process):
    folder = photos(tmp_path / "photos")
    rows = ("--seeds", "0", "--row", "plain ViT", "--json")
    changes = sets(*TINY, "train.epochs=1")
    code, out, err = in_process("compare", "--data", folder, *rows, *changes, cwd=tmp_path)
    assert code == 0, err
    [cell] = json.loads(out)["rows"]
    assert cell["row"] == "plain ViT" and len(cell["runs"][0]["val_acc"]) == 1
    assert (tmp_path / "runs" / "compare-photos" / "compare.json").is_file()


def test_few_photos_are_offered_a_pretrained_vit_and_plan_says_nothing_of_maps(
    tmp_path, in_process
):
    photos(tmp_path / "photos")
    code, _, err = in_process("plan", "--data", "photos", "--train", cwd=tmp_path)
    facts, few, command, *settings = err.splitlines()
    assert code == 0 and "few images" in few and "training images of" in facts
    words = shlex.split(command)
    assert words[:4] == ["gaupipe", "train", "--data", "photos"] and "--download" in words
    assert settings and not any("map" in line or "teacher=" in line for line in settings)
    pretrained = sets("model.name=vit_tiny_patch16_224")
    assert "few images" not in in_process("plan", "--data", "photos", *pretrained, cwd=tmp_path)[2]


@pytest.mark.parametrize("train, said", [(0.74, False), (0.76, True)])
def test_accuracies_far_apart_are_explained(capsys, tmp_path, monkeypatch, train, said):
    monkeypatch.chdir(tmp_path)
    metrics: list = [{"train_acc": train, "val_acc": 0.6}]
    for name, follows in (
        ("folder", "train --data photos --model"),
        ("digits", "settings augment"),
    ):
        root = f"data.root={tmp_path / 'photos'}"
        say_if_overfitted(metrics, load("digits", [f"data.name={name}", root]))
        err = capsys.readouterr().err
        assert ("lie far apart" in err) is (f"gaupipe {follows}" in err) is said
