"""docs/results/judge.py, on a clone with two classes and four images."""

import hashlib
import sys
from pathlib import Path

import pytest

CLASSES = """Class Name (str),Class ID (int),Coarse Class Name (str),Coarse Class ID (int)
Granny-Smith,0,Apple,0
Pink-Lady,1,Apple,0
Leek,2,Leek,1
"""
TRAIN = """train/Fruit/Apple/Granny-Smith/Granny-Smith_001.jpg, 0, 0
train/Fruit/Apple/Pink-Lady/Pink-Lady_001.jpg, 1, 0
"""
TEST = "test/Vegetables/Leek/Leek_001.jpg, 2, 1\n"
VAL = "val/Vegetables/Leek/Leek_001.jpg, 2, 1\n"
FOLDERS = {
    "train": ["train/Apple/Granny-Smith_001.jpg", "train/Apple/Pink-Lady_001.jpg"],
    "val": ["val/Leek/Leek_001.jpg"],
    "test": ["test/Leek/Leek_001.jpg"],
}


@pytest.fixture
def judge(script):
    return script("docs/results/judge.py")


@pytest.fixture
def clone(tmp_path):
    dataset = tmp_path / "clone" / "dataset"
    dataset.mkdir(parents=True)
    (dataset / "classes.csv").write_text(CLASSES)
    for split, lines in {"train": TRAIN, "val": VAL, "test": TEST}.items():
        (dataset / f"{split}.txt").write_text(lines)
        for line in lines.splitlines():
            image = dataset / line.split(",")[0]
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_text(f"{split} {image.name}")
    return dataset.parent


def make_folders(judge, monkeypatch, clone):
    out = clone.parent / "groceries"
    monkeypatch.setattr(sys, "argv", ["judge.py", str(clone), str(out)])
    judge.main()
    return out


def test_folders_have_coarse_classes_and_the_files_as_they_are(judge, clone, monkeypatch):
    for split, paths in FOLDERS.items():
        lines = ""
        for path in paths:  # as sha256sum prints them
            content = f"{split} {Path(path).name}".encode()
            lines += f"{hashlib.sha256(content).hexdigest()}  {path}\n"
        monkeypatch.setitem(judge.LISTS, split, hashlib.sha256(lines.encode()).hexdigest())
    out = make_folders(judge, monkeypatch, clone)
    made = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    assert made == sorted(path for paths in FOLDERS.values() for path in paths)
    assert (out / "train/Apple/Pink-Lady_001.jpg").read_text() == "train Pink-Lady_001.jpg"


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda clone: None, "train has other images: check out commit fc80ba9"),
        (lambda clone: next(clone.rglob("Leek_001.jpg")).unlink(), "cannot be read"),
        (lambda clone: (clone / "dataset/classes.csv").unlink(), "has no classes.csv"),
        (lambda clone: (clone.parent / "groceries").mkdir(), "exists: name a new folder"),
    ],
)
def test_another_clone_is_refused_and_nothing_written(
    judge, clone, monkeypatch, capsys, damage, message
):
    damage(clone)
    with pytest.raises(SystemExit, match="2"):
        make_folders(judge, monkeypatch, clone)
    assert message in capsys.readouterr().err
    assert not list(clone.parent.rglob("groceries*/*"))


def test_the_page_has_the_checksums_of_the_script(judge):
    page = Path(judge.__file__).with_suffix(".md").read_text()
    for split, checksum in judge.LISTS.items():
        assert f"| {split} |" in page
        assert f"| {checksum} |" in page
