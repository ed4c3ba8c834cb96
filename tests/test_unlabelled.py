"""Images without labels: which they are, what they leave alone, and how an epoch has them."""

import json
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from arguments import sets
from gaupipe.data import images as image_files
from gaupipe.data import unlabelled as room
from gaupipe.data.images import UNLABELLED
from gaupipe.data.splits import load_data
from gaupipe.settings import DataSettings
from gaupipe.system.errors import UserError
from pictures import photos

CPU = torch.device("cpu")
SIZE = 8


def more_photos(folder, count=7, seed=1):
    """Images of noise at several depths, other ones than :func:`photos` makes."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        place = folder / "/".join("ab"[: number % 3])
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(256, size=(8, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


@pytest.fixture
def mine(tmp_path):
    """24 photos in two classes with labels, and 7 without."""
    photos(tmp_path / "mine" / "train")
    more_photos(tmp_path / "mine" / "unlabelled")
    return tmp_path / "mine"


def load(root, **more):
    settings = DataSettings(name="folder", root=root, image_size=SIZE, **more)
    return load_data(settings, unlabelled=True)


def pixels(split):
    return torch.stack([torch.from_numpy(split.image(number)) for number in range(len(split))])


# which images


def test_images_at_any_depth_beside_the_training_images(mine):
    (mine / "unlabelled" / "notes.txt").write_text("no image")
    (mine / "unlabelled" / ".hidden.png").write_text("no image")
    data = load(mine)
    names = ["0.png", "3.png", "6.png", "a/1.png", "a/4.png", "a/b/2.png", "a/b/5.png"]
    assert data.unlabelled.names() == sorted(names)
    assert set(data.unlabelled.labels) == {UNLABELLED}
    assert len(data.train) + len(data.val) == 24


def test_any_other_place_takes_the_place_of_the_folder_beside(mine, tmp_path, capfd):
    other = more_photos(tmp_path / "other", count=4, seed=2)
    data = load(mine, unlabelled=str(other))
    assert data.unlabelled.source.root == other and len(data.unlabelled) == 4
    assert f"{other} is taken, and {mine / 'unlabelled'} left out" in capfd.readouterr().err


@pytest.mark.parametrize("packed", ["tar", "folder of tars", "hfds"])
def test_packed_images_are_those_of_a_folder(packed, tmp_path):
    photos(tmp_path / "mine" / "train")
    other = more_photos(tmp_path / "other", count=5)
    place = tmp_path / "packed"
    if packed == "hfds":
        datasets = pytest.importorskip("datasets")
        paths = [str(path) for path in sorted(other.rglob("*.png"))]
        table = datasets.Dataset.from_dict({"image": paths})
        table.cast_column("image", datasets.Image()).save_to_disk(str(place))
        name = f"hfds/{place}"
    elif packed == "tar":
        name = str(place.with_suffix(".tar"))
        with tarfile.open(name, "w") as tar:
            tar.add(other, "anything")
    else:
        place.mkdir()
        for number, path in enumerate(sorted(other.rglob("*.png"))):
            with tarfile.open(place / f"{number}.tar", "w") as tar:
                tar.add(path, "one.png")
        name = str(place)
    data = load(tmp_path / "mine", unlabelled=name)
    assert torch.equal(
        pixels(data.unlabelled), pixels(load(tmp_path / "mine", unlabelled=str(other)).unlabelled)
    )
    assert set(data.unlabelled.labels) == {UNLABELLED}


def test_neither_split_moves_the_ids_and_the_digest_of_the_other(mine):
    data = load(mine)
    fewer = load(mine, train_images=10, val_fraction=0.3)
    assert fewer.unlabelled_sha256 == data.unlabelled_sha256
    assert fewer.unlabelled.names() == data.unlabelled.names()
    more_photos(mine / "unlabelled" / "more", seed=3)
    more = load(mine)
    assert more.unlabelled_sha256 != data.unlabelled_sha256
    assert (more.sha256, more.both_sha256) == (data.sha256, data.both_sha256)
    shutil.copy(mine / "unlabelled" / "more" / "0.png", mine / "unlabelled" / "0.png")
    assert load(mine).unlabelled_sha256 != more.unlabelled_sha256  # of contents, not of names


def test_copies_of_labelled_images_are_counted_and_left_out(mine, capfd):
    photos(mine / "val", count=1, size=(5, 5))
    photos(mine / "test", count=1, size=(6, 6))
    before = load(mine)
    for number, split in enumerate(("train", "val", "test")):
        shutil.copy(mine / split / "dog" / "0.png", mine / "unlabelled" / "a" / f"copy{number}.png")
    shutil.copy(mine / "unlabelled" / "0.png", mine / "unlabelled" / "z.png")  # of no labelled one
    capfd.readouterr()
    data = load(mine, train_images=2)
    assert data.unlabelled.names() == [*before.unlabelled.names(), "z.png"]
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.endswith("validation and test images: 3")] == lines[-1:]
    (mine / "unlabelled" / "z.png").unlink()
    assert load(mine).unlabelled_sha256 == before.unlabelled_sha256


def test_a_folder_of_copies_alone_is_refused(mine):
    shutil.rmtree(mine / "unlabelled")
    shutil.copytree(mine / "train" / "cat", mine / "unlabelled")
    with pytest.raises(UserError, match="all 12 images in .*unlabelled are copies"):
        load(mine)


def test_a_folder_without_labels_is_no_class(mine):
    for folder in (mine / "train").iterdir():
        folder.rename(mine / folder.name)
    (mine / "train").rmdir()
    with pytest.raises(UserError, match=r"unlabelled would be a class like the folders beside it"):
        load_data(DataSettings(name="folder", root=mine))


def test_images_in_no_files_have_no_others_beside_them(mine):
    settings = DataSettings(name="digits", unlabelled=str(mine / "unlabelled"))
    assert load_data(settings).unlabelled is None
    with pytest.raises(UserError, match="cannot join the images of digits"):
        load_data(settings, unlabelled=True)


# damaged ones


def damage(path):
    path.write_bytes(path.read_bytes()[:-30])
    return path


def test_a_damaged_image_is_refused_or_left_out(mine):
    damage(mine / "unlabelled" / "a" / "1.png")
    with pytest.raises(UserError, match=r"unlabelled/a/1\.png: not readable as an image"):
        load(mine)
    assert len(load(mine, unreadable="leave_out").unlabelled) == 6
    for path in (mine / "unlabelled").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="unlabelled: none of its images can be read"):
        load(mine, unreadable="leave_out")


def test_of_very_many_images_none_is_decoded_before_it_is_needed(mine, monkeypatch):
    monkeypatch.setattr(room, "MOST_DECODED_FIRST", 6)
    damage(mine / "unlabelled" / "a" / "b" / "2.png")
    decoded = []
    for function in (image_files.check, image_files.read_rgb):

        def noted(file, function=function):
            decoded.append(file.name)
            return function(file)

        monkeypatch.setattr(image_files, function.__name__, noted)
    data = load(mine)
    assert len(data.unlabelled) == 7
    assert len(decoded) == 24 and not [name for name in decoded if "unlabelled" in name]
    whole = [number for number, name in enumerate(data.unlabelled.names()) if "2" not in name]
    assert len([data.unlabelled.image(number) for number in whole]) == 6
    with pytest.raises(UserError, match=r"a/b/2\.png: not readable as an image"):
        data.unlabelled.image(data.unlabelled.names().index("a/b/2.png"))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"a/b/2\.png: not readable as an image"):
        load(mine)  # what has been read is not taken for what has been decoded


# a run


def test_other_images_than_those_that_the_run_began_with_are_refused(mine, tmp_path):
    path = tmp_path / "split.json"
    labelled = load_data(DataSettings(name="folder", root=mine, image_size=SIZE))
    labelled.write_split(path)
    assert "unlabelled" not in json.loads(path.read_text())
    data = load(mine)
    data.check_split(path)  # the run began with a training on labels
    data.write_split(path)
    assert json.loads(path.read_text())["unlabelled"] == data.unlabelled.names()
    data.check_split(path)
    (mine / "unlabelled" / "0.png").unlink()
    labelled.check_split(path)
    with pytest.raises(UserError, match="the unlabelled images of data set folder were others"):
        load(mine).check_split(path)
    shutil.move(mine / "unlabelled", tmp_path / "gone")
    none = load(mine)
    with pytest.raises(UserError, match="the unlabelled images of data set folder were others"):
        none.check_split(path)
    none.write_split(path)
    none.check_split(path)
    shutil.move(tmp_path / "gone", mine / "unlabelled")
    with pytest.raises(UserError, match="the unlabelled images of data set folder were others"):
        load(mine).check_split(path)


TINY = sets("model.args.embed_dim=16", "model.args.depth=1", "train.epochs=1", "threads=1")


def test_a_training_on_labels_never_looks_at_images_without(mine, in_process, tmp_path):
    call = "train", "--data", "mine", *TINY, "--run-dir"
    assert in_process(*call, "with", cwd=tmp_path)[0] == 0
    assert in_process("evaluate", "--run-dir", "with", cwd=tmp_path)[0] == 0
    weights = "plain/standard/student/model.safetensors"
    damage(mine / "unlabelled" / "0.png")
    assert in_process(*call, "damaged", cwd=tmp_path)[0] == 0
    assert in_process("evaluate", "--run-dir", "damaged", cwd=tmp_path)[0] == 0
    shutil.rmtree(mine / "unlabelled")
    assert in_process(*call, "without", cwd=tmp_path)[0] == 0
    files = [(tmp_path / run / weights).read_bytes() for run in ("with", "damaged", "without")]
    assert len({*files}) == 1


def test_phase_a_begins_with_them_and_later_commands_want_the_same(mine, in_process, tmp_path):
    other = more_photos(tmp_path / "other", count=4, seed=2)
    call = "phase-a", "--data", "mine", "--unlabelled", "other", *TINY, "--run-dir", "run"
    code, _, err = in_process(*call, cwd=tmp_path)
    assert code == 0, err
    assert "4 images without labels, 10 x 8 pixels" in err
    assert len(json.loads((tmp_path / "run" / "split.json").read_text())["unlabelled"]) == 4
    phase_b = "phase-b", "--run-dir", "run", "--name"
    assert in_process(*phase_b, "first", cwd=tmp_path)[0] == 0

    other.rename(tmp_path / "moved")
    again = "phase-a", "--data", "mine", "--unlabelled", "moved", "--run-dir", "run", "--resume"
    assert in_process(*again, cwd=tmp_path)[0] == 0
    assert in_process(*phase_b, "second", cwd=tmp_path)[0] == 0
    (tmp_path / "moved" / "0.png").unlink()
    code, _, err = in_process(*phase_b, "third", cwd=tmp_path)
    assert code == 2 and "the unlabelled images of data set folder were others" in err
    assert not (tmp_path / "run" / "phase_b" / "third").exists()


def test_plan_counts_them(mine, in_process, tmp_path):
    plan = "plan", "--data", "mine", "--json", *TINY
    code, out, err = in_process(*plan, cwd=tmp_path)
    assert code == 0, err
    assert json.loads(out)["unlabelled"] == 7
    other = more_photos(tmp_path / "other", count=4, seed=2)
    code, out, err = in_process(*plan, "--unlabelled", other, cwd=tmp_path)
    assert code == 0 and json.loads(out)["unlabelled"] == 4
    code, out, err = in_process(*plan, "--train", cwd=tmp_path)
    assert code == 0 and json.loads(out)["unlabelled"] == 0
