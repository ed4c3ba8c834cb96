"""Images in tar archives and in tables of Hugging Face's ``datasets``: as those of a folder."""

import contextlib
import io
import json
import re
import shutil
import tarfile

import numpy as np
import pytest
import torch
from timm.data import create_dataset

from arguments import sets
from gaupipe.data.folder import place_of, whole_place
from gaupipe.data.load import load_data
from gaupipe.data.sources import images_with_labels
from gaupipe.data.tar import find_archives, images_in
from gaupipe.settings import DataSettings
from gaupipe.system.errors import UserError
from gaupipe.system.imports import pip_install
from pictures import photos
from runs import run_main

datasets = pytest.importorskip("datasets")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def hub_cache(monkeypatch, tmp_path_factory):
    """A cache of ``datasets`` of its own, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def tar(path, folder, names=None, arcname=""):
    """An archive of the files below a folder, in any order."""
    files = sorted(folder.rglob("*.*"), reverse=True) if names is None else names
    with tarfile.open(path, "w") as archive:
        for file in files:
            archive.add(file, arcname + str(file.relative_to(folder)))
    return path


def webdataset(path, samples):
    """An archive of (key, image file, class) as WebDataset writes it."""
    with tarfile.open(path, "w") as archive:
        for key, image, label in samples:
            archive.add(image, f"{key}.png")
            if label is not None:
                text = label.encode()
                entry = tarfile.TarInfo(f"{key}.cls")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))
    return path


@pytest.fixture
def folder(tmp_path):
    photos(tmp_path / "photos" / "train")
    photos(tmp_path / "photos" / "val", count=3)
    return tmp_path / "photos"


def load(root, name="folder", **more):
    return load_data(DataSettings(name=name, root=root, image_size=8, **more))


def pixels(split):
    return split.source.__getitems__(split.positions.tolist())[0]


def same(data, folder_data):
    """The same images, ids, labels and digests."""
    for name, split in folder_data.splits.items():
        assert torch.equal(pixels(data.splits[name]), pixels(split))
        assert np.array_equal(data.splits[name].labels, split.labels)
    assert data.class_names == folder_data.class_names
    assert (data.sha256, data.val_sha256) == (folder_data.sha256, folder_data.val_sha256)
    return True


@pytest.mark.parametrize("start", ["", "./", "photos/"])
def test_a_tar_is_as_the_folder_that_it_packs(folder, tmp_path, start):
    assert same(load(tar(tmp_path / "x.tar", folder, arcname=start)), load(folder))


def test_classes_that_are_numbers_come_by_their_value(folder, tmp_path):
    """In a folder as in a tar, and as timm's ImageFolder has them."""
    (folder / "train" / "cat").rename(folder / "train" / "10")
    (folder / "train" / "dog").rename(folder / "train" / "9")
    data = load(folder / "train")
    assert data.class_names == ["9", "10"]
    assert same(load(tar(tmp_path / "x.tar", folder / "train")), data)
    theirs = create_dataset("folder", root=str(folder / "train")).reader.class_to_idx
    assert sorted(theirs, key=theirs.get) == data.class_names


@pytest.mark.parametrize("start", ["", "train"])
@pytest.mark.parametrize("named", [True, False])
def test_a_folder_of_tars_is_as_a_folder(folder, tmp_path, named, start):
    """Shards named by their split, or in folders of the splits; the split's folder may be in it."""
    for split in ("train", "val"):
        files = sorted((folder / split).rglob("*.png"))
        for number in range(2):
            place = tmp_path / "tars" / ("" if named else split)
            place.mkdir(parents=True, exist_ok=True)
            name = f"mine-{split}-000{number}.tar" if named else f"{number}.tar"
            inside = start and f"{split}/"
            tar(place / name, folder / split, files[number::2], inside)
    (tmp_path / "tars" / "README.md").touch()
    assert same(load(tmp_path / "tars"), load(folder))


def test_a_tar_for_each_class(folder, tmp_path):
    """As ImageNet's: the images lie in no folder."""
    (tmp_path / "tars").mkdir()
    for name in ("cat", "dog"):
        tar(tmp_path / "tars" / f"{name}.tar", folder / "train" / name)
    assert same(load(tmp_path / "tars"), load(folder / "train"))


def test_an_archive_beside_class_folders_is_left_out_and_said(folder, capsys):
    shutil.rmtree(folder / "val")
    expected = load(folder)
    tar(folder / "train" / "old.tar", folder / "train" / "cat")
    assert same(load(folder), expected)
    said = f"files that are no images: 1, such as {folder}/train/old.tar"
    assert said in capsys.readouterr().err


def test_two_splits_of_one_meaning_are_refused(folder, tmp_path):
    table = rows(folder / "train")
    splits = datasets.DatasetDict(train=table, test=table, testing=table)
    splits.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match="has two splits for test, testing is one of them"):
        load(tmp_path, "hfds/saved")


def labelled(data):
    return images_with_labels(str(data), DataSettings(image_size=8))


@pytest.mark.parametrize("packed", ["x.tar", "hfds/{}/saved"])
def test_test_images_are_scored_rather_than_those_trained_on(folder, tmp_path, capsys, packed):
    photos(folder / "test", count=2, size=(9, 9))
    tar(tmp_path / "x.tar", folder)
    parts = {part: rows(folder / part) for part in ("train", "val", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    data = tmp_path / "x.tar" if packed == "x.tar" else packed.format(tmp_path)
    expected = labelled(folder / "test")
    assert "is taken" not in capsys.readouterr().err
    images = labelled(data)
    assert images.fingerprint() == expected.fingerprint()
    assert images.class_names == expected.class_names
    assert f"--data {data}: test is taken (" in capsys.readouterr().err


def test_a_single_split_is_scored_whatever_its_name(folder, tmp_path, capsys):
    expected = labelled(folder / "val").fingerprint()
    files = sorted((folder / "val").rglob("*.png"))
    x = tar(tmp_path / "x.tar", folder, files)
    datasets.DatasetDict(full=rows(folder / "val")).save_to_disk(str(tmp_path / "saved"))
    for data in (x, f"hfds/{tmp_path}/saved"):
        assert labelled(data).fingerprint() == expected
    assert "left out" not in capsys.readouterr().err


def test_labels_of_webdataset(folder, tmp_path):
    files = sorted((folder / "train").rglob("*.png"))
    classes = ["10" if file.parent.name == "cat" else "9" for file in files]
    keys = [f"{number:05}" for number in range(24)]
    samples = list(zip(keys, files, classes, strict=True))
    (tmp_path / "tars").mkdir()
    for number in range(2):
        webdataset(tmp_path / "tars" / f"{number}.tar", samples[number::2])
    data = load(tmp_path / "tars")
    assert data.class_names == ["9", "10"]  # as numbers
    assert sorted(data.train.labels.tolist() + data.val.labels.tolist()) == [0] * 12 + [1] * 12
    cats = data.train.source.labels == 1
    expected = {file.read_bytes() for file in files if file.parent.name == "cat"}
    assert {data.train.source.open(i).read() for i in np.flatnonzero(cats)} == expected


def rows(folder, path=True):
    """A table of the images of a folder, their bytes in it."""
    files = sorted(folder.rglob("*.png"))
    images = [{"bytes": file.read_bytes(), "path": file.name if path else None} for file in files]
    labels = [["cat", "dog"].index(file.parent.name) for file in files]
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    return datasets.Dataset.from_dict(
        {"image": images, "label": labels}, features=datasets.Features(kinds)
    )


def arrow(folder, path):
    """A ``save_to_disk`` folder of train and val."""
    tables = {"train": rows(folder / "train"), "validation": rows(folder / "val")}
    datasets.DatasetDict(tables).save_to_disk(str(path))
    return path


def test_a_saved_table_is_as_the_folder(folder, tmp_path):
    arrow(folder, tmp_path / "saved")
    assert same(load(tmp_path, "hfds/saved"), load(folder))


def test_a_table_anywhere_is_found_with_one_slash_and_with_two(tmp_path):
    """pathlib, which parses the option, makes one of them."""
    for name in (f"hfds/{tmp_path}", f"hfds{tmp_path}"):
        assert place_of(name) == {"name": f"hfds/{tmp_path.name}", "root": str(tmp_path.parent)}
        assert whole_place(name) == f"hfds/{tmp_path}"


def test_an_imagefolder_and_parquet_are_as_the_folder(folder, tmp_path):
    """``datasets`` makes tables of paths of the one, and of bytes of the other."""
    shutil.copytree(folder, tmp_path / "images")
    assert same(load(tmp_path, "hfds/images"), load(folder))
    (tmp_path / "parquet").mkdir()
    rows(folder / "train").to_parquet(tmp_path / "parquet" / "train.parquet")
    rows(folder / "val").to_parquet(tmp_path / "parquet" / "validation.parquet")
    assert same(load(tmp_path, "hfds/parquet"), load(folder))


def test_webdataset_archives_through_datasets(folder, tmp_path):
    (tmp_path / "wds").mkdir()
    files = sorted((folder / "train").rglob("*.png"))
    samples = [(f"{i:05}", f, str(int(f.parent.name == "dog"))) for i, f in enumerate(files)]
    webdataset(tmp_path / "wds" / "train-0.tar", samples)
    data, folder_data = load(tmp_path, "hfds/wds"), load(folder / "train")
    assert torch.equal(pixels(data.train), pixels(folder_data.train))
    assert np.array_equal(data.train.labels, folder_data.train.labels)


def test_images_without_names_and_a_part_without_labels(folder, tmp_path, capsys):
    table = rows(folder / "train", path=False)
    hidden = rows(folder / "val").remove_columns("label")
    both = datasets.DatasetDict({"train": table.shuffle(seed=0), "test": hidden})
    both.save_to_disk(str(tmp_path / "hfds"))
    data = load(tmp_path, "hfds/hfds")
    assert data.test is None and "left out test" in capsys.readouterr().err
    assert len({*data.train.source.names}) == 24


def test_files_of_one_name_in_a_metadata_file(folder, tmp_path):
    """Whose folders are no classes."""
    lines = ["file_name,label"]
    for place in ("first", "second"):
        shutil.copytree(folder / "train", tmp_path / "mine" / "train" / place)
        for name in ("cat", "dog"):
            lines += [f"{place}/{name}/{number}.png,{name}" for number in range(12)]
    (tmp_path / "mine" / "train" / "metadata.csv").write_text("\n".join(lines) + "\n")
    data = load(tmp_path, "hfds/mine")
    assert data.class_names == ["cat", "dog"] and len({*data.train.source.names}) == 48
    by_folder = load(folder / "train")
    for label in (0, 1):
        source, expected = data.train.source, by_folder.train.source
        mine = [source.open(i).read() for i in np.flatnonzero(source.labels == label)]
        theirs = [expected.open(i).read() for i in np.flatnonzero(expected.labels == label)]
        assert sorted(mine) == sorted(2 * theirs)


def save(table, tmp_path):
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "mine"))
    return "hfds/mine"


def test_class_labels_count_for_more_than_a_text_called_label(folder, tmp_path, capsys):
    table = rows(folder / "train").rename_column("label", "animal")
    table = table.add_column("label", [f"photo {number}" for number in range(len(table))])
    save(table, tmp_path)
    assert load(tmp_path, "hfds/mine").class_names == ["cat", "dog"]
    assert "the classes are those of the column animal, not of label" in capsys.readouterr().err


def test_class_labels_that_are_numbers_come_by_their_value(folder, tmp_path):
    """As an imagefolder's folders do not, for ``datasets``."""
    shutil.copytree(folder / "train" / "cat", tmp_path / "mine" / "train" / "10")
    shutil.copytree(folder / "train" / "dog", tmp_path / "mine" / "train" / "9")
    assert load(tmp_path, "hfds/mine").class_names == ["9", "10"]


def test_the_column_called_image_is_trained_on(folder, tmp_path, capsys):
    """Wherever it stands; where none is called so, several are refused."""
    table = rows(folder / "train")
    masks = [{"bytes": (folder / "val/cat/0.png").read_bytes(), "path": None}] * len(table)
    kinds = datasets.Features({"mask": datasets.Image(), **table.features})
    columns = {"mask": masks, "label": table["label"]}
    columns["image"] = table.cast_column("image", datasets.Image(decode=False))["image"]
    columns = {name: [*values] for name, values in columns.items()}
    both = datasets.Dataset.from_dict(columns, features=kinds)
    save(both, tmp_path)
    data = load(tmp_path, "hfds/mine")
    assert torch.equal(pixels(data.train), pixels(load(folder / "train").train))
    assert "left out the images in mask, beside those in image" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    save(both.rename_column("image", "photo"), tmp_path / "other")
    with pytest.raises(UserError, match="images in the columns mask, photo: that of the photos"):
        load(tmp_path / "other", "hfds/mine")


def with_labels(labels):
    """A table with other labels, which ``labels`` makes of the number of its rows."""

    def make(folder, tmp_path):
        table = rows(folder / "train").remove_columns("label")
        return save(table.add_column("label", labels(len(table))), tmp_path)

    return make


def without_an_image(folder, tmp_path):
    table = rows(folder / "train")
    columns = table.cast_column("image", datasets.Image(decode=False)).to_dict()
    columns["image"][5] = None
    return save(datasets.Dataset.from_dict(columns, features=table.features), tmp_path)


@pytest.mark.long
def test_identical_students(folder, tmp_path, in_process):
    """From a folder, a tar and a table, by the documented commands, with workers that decode."""
    tar(tmp_path / "x.tar", folder)
    arrow(folder, tmp_path / "saved")
    students = set()
    tiny = "model.args={embed_dim: 16, depth: 1, num_heads: 2}", "train.epochs=2", "threads=1"
    for data in ("photos", "x.tar", "hfds/saved"):
        run = f"of-{data.replace('/', '-')}"
        call = ("train", "--data", data, "--run-dir", run, *sets(*tiny, "data.workers=1"))
        code, out, err = in_process(*call, cwd=tmp_path)
        assert code == 0, err
        students.add((tmp_path / out.strip() / "model.safetensors").read_bytes())
        code, out, err = in_process("plan", "--data", data, "--json", cwd=tmp_path)
        assert code == 0 and json.loads(out)["images"] == 24, err
        images = data.replace("photos", "photos/val")
        call = ("evaluate", "--run-dir", run, "--data", images, "--json")
        code, out, err = in_process(*call, cwd=tmp_path)
        assert code == 0 and json.loads(out)["images"] == 6, err
    assert len(students) == 1


def test_a_command_names_the_table_that_it_reads(folder, tmp_path, capfd):
    arrow(folder, tmp_path / "saved")
    assert run_main("plan", "--data", "hfds/saved", cwd=tmp_path) == 0
    assert "plan: hfds/saved, " in capfd.readouterr().err


def test_the_headers_of_an_archive_are_read_once(folder, tmp_path, in_process, monkeypatch):
    """Settings are chosen by the images, and then these are loaded."""
    opened = []
    open_tar = tarfile.open
    monkeypatch.setattr(tarfile, "open", lambda **how: opened.append(how) or open_tar(**how))
    path = tmp_path / "x.tar"
    with open_tar(path, "w") as archive:
        archive.add(folder, "")
    code, _, err = in_process("plan", "--data", path, cwd=tmp_path)
    assert (code, len(opened)) == (0, 1), err
    with open_tar(path, "a") as archive:
        archive.add(folder / "train" / "cat" / "0.png", "train/cat/new.png")
    code, out, err = in_process("plan", "--data", path, "--json", cwd=tmp_path)
    assert (code, len(opened), json.loads(out)["images"]) == (0, 2, 25), err


@pytest.mark.parametrize("packed", ["x.tar", "hfds/saved"])
def test_unreadable_images_are_listed_and_can_be_left_out(folder, tmp_path, in_process, packed):
    """As on a folder that never had them; what comes after them keeps its bytes."""
    whole = shutil.copytree(folder, tmp_path / "whole")
    broken = ["train/cat/1.png", "train/dog/0.png", "val/dog/2.png"]
    for name in broken:
        (whole / name).unlink()
        (folder / name).write_bytes((folder / name).read_bytes()[:60])
    tar(tmp_path / "x.tar", folder)
    arrow(folder, tmp_path / "saved")
    tiny = "model.args={embed_dim: 16, depth: 1, num_heads: 2}", "train.epochs=1", "threads=1"
    call = ("train", "--data", packed, "--run-dir", "run", *sets(*tiny))
    code, _, err = in_process(*call, cwd=tmp_path)
    listed = [line for line in err.splitlines()[:-1] if ": not readable" in line]
    assert code == 2 and len(listed) == 2 and f"{packed}/" in listed[0], err
    call += ("--set", "data.unreadable=leave_out")
    code, _, err = in_process(*call, cwd=tmp_path)
    assert code == 0 and err.count("goes on without these images") == 2, err
    place = ("folder", "x.tar") if packed == "x.tar" else (packed, "")
    with pytest.raises(UserError, match="the 2 of 24 images that are not are listed above"):
        load(tmp_path / place[1], place[0])
    assert same(load(tmp_path / place[1], place[0], unreadable="leave_out"), load(whole))


def cut(folder, tmp_path, end):
    path = tar(tmp_path / "x.tar", folder)
    path.write_bytes(path.read_bytes()[:end])
    return path


def twice(folder, tmp_path):
    files = sorted(folder.rglob("*.png"))
    return tar(tmp_path / "x.tar", folder, [*files, files[0]])


def gzipped(folder, tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w:gz") as archive:
        archive.add(folder, "")
    return tmp_path / "x.tar"


def zipped(folder, tmp_path):
    return shutil.make_archive(str(tmp_path / "x"), "zip", folder)


def neither_bytes_nor_a_path(folder, tmp_path):
    table = rows(folder / "train")
    columns = table.cast_column("image", datasets.Image(decode=False)).to_dict()
    columns["image"][5] = {"bytes": None, "path": None}
    parts = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({**table.features, "image": parts})
    table = datasets.Dataset.from_dict(columns, features=features)
    table = table.cast_column("image", datasets.Image())
    (tmp_path / "mine").mkdir()
    parquet.write_table(table.data.table, tmp_path / "mine" / "train.parquet")
    return "hfds/mine"


def without_labels(folder, tmp_path):
    (tmp_path / "mine").mkdir()
    rows(folder / "train").remove_columns("label").to_parquet(tmp_path / "mine" / "train.parquet")
    return "hfds/mine"


def flat(folder, tmp_path):
    (tmp_path / "mine").mkdir()
    tar(tmp_path / "mine" / "train-0.tar", folder / "train" / "cat")
    return tmp_path / "mine"


def archive(path, *files, format=tarfile.PAX_FORMAT):
    """An archive of (name, content), the contents in bytes; a content of text is a link to that."""
    with tarfile.open(path, "w", format=format) as packed:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type = tarfile.SYMTYPE
                entry.linkname = content
                content = b""
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return path


def named_by_time(folder, tmp_path):
    """Of all photos of a minute the last one's class would be that of each."""
    first, *_, last = sorted((folder / "train").rglob("*.png"))
    times = "2024-01-05 10.03.33", "2024-01-05 10.03.34"
    return webdataset(tmp_path / "x.tar", [(times[0], first, "0"), (times[1], last, "1")])


def with_masks(folder, tmp_path):
    [first, *_] = sorted((folder / "train").rglob("*.png"))
    image = first.read_bytes()
    return archive(tmp_path / "x.tar", ("1.png", image), ("1.seg.png", image), ("1.cls", b"0"))


def masks_in_classes(folder, tmp_path):
    shutil.copy(folder / "train" / "cat" / "1.png", folder / "train" / "cat" / "0_mask.png")
    return tar(tmp_path / "x.tar", folder / "train")


def labelled_in_json(folder, tmp_path):
    [first, *_] = sorted((folder / "train").rglob("*.png"))
    (tmp_path / "mine").mkdir()
    for number in range(2):
        files = ("1.png", first.read_bytes()), ("1.json", b'{"label": 1}')
        archive(tmp_path / "mine" / f"{number}.tar", *files)
    return tmp_path / "mine"


def labelled_in_json_in_folders(folder, tmp_path):
    [first, *_] = sorted((folder / "train").rglob("*.png"))
    files = []
    for number in range(2):
        files += [(f"part{number}/1.png", first.read_bytes()), (f"part{number}/1.json", b"{}")]
    return archive(tmp_path / "x.tar", *files)


def tested_alone(folder, tmp_path):
    (folder / "val").rename(folder / "test")
    shutil.rmtree(folder / "train")
    return tar(tmp_path / "x.tar", folder)


def a_split_among_classes(folder, tmp_path):
    (folder / "train" / "cat").rename(folder / "train" / "test")
    return tar(tmp_path / "x.tar", folder / "train")


def labelled_in_one_of_two(folder, tmp_path):
    [first, *_] = sorted((folder / "train").rglob("*.png"))
    (tmp_path / "mine").mkdir()
    webdataset(tmp_path / "mine" / "0.tar", [("1", first, "0")])
    webdataset(tmp_path / "mine" / "1.tar", [("1", first, None)])
    return tmp_path / "mine"


def in_a_split_alone(folder, tmp_path):
    [first, *_] = sorted((folder / "train").rglob("*.png"))
    return archive(tmp_path / "x.tar", ("train/1.png", first.read_bytes()))


def beside_the_classes(folder, tmp_path):
    shutil.copy(folder / "train" / "cat" / "0.png", folder / "train" / "stray.png")
    return tar(tmp_path / "x.tar", folder / "train")


def in_parts(folder, tmp_path):
    (folder / "train").rename(folder / "first")
    (folder / "val").rename(folder / "second")
    return tar(tmp_path / "x.tar", folder)


def beside_images_without_labels(folder, tmp_path):
    shutil.copytree(folder / "train" / "cat", folder / "train" / "Unlabelled")
    return tar(tmp_path / "x.tar", folder / "train")


def of_a_size_that_cannot_be(folder, tmp_path, form=tarfile.USTAR_FORMAT):
    path = archive(tmp_path / "x.tar", ("cat/1.png", b"none"), format=form)
    header = tarfile.TarInfo.frombuf(path.read_bytes()[:512], "utf-8", "strict")
    header.size = 2**62
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + path.read_bytes()[512:])
    return path


def linked(folder, tmp_path):
    return archive(tmp_path / "x.tar", ("cat/1.png", "2.png"))


def half_labelled(folder, tmp_path):
    files = sorted((folder / "train").rglob("*.png"))
    (tmp_path / "mine").mkdir()
    samples = [("a", files[0], "0"), ("b", files[1], None)]
    webdataset(tmp_path / "mine" / "0.tar", samples)
    return tmp_path / "mine"


BAD = {
    "x.tar: is no whole, uncompressed .tar (": lambda folder, tmp: cut(folder, tmp, 3000),
    "x.tar: is no whole, uncompressed .tar (invalid": gzipped,
    "x.zip: is no whole, uncompressed .tar (invalid header); unpack it, and name": zipped,
    "images have the name cat/0.png; leave one": twice,
    "hfds/mine: no labels in the columns image": without_labels,
    "hfds/mine/train: 1 of 24 images have no label in the column 'label' (none, or -1), such as "
    "that of row 3": with_labels(lambda count: [0] * 3 + [-1] + [1] * (count - 4)),
    "hfds/mine/train: 1 of 24 rows have no image": without_an_image,
    "1 of 24 rows have no image: take them out": neither_bytes_nor_a_path,
    "the column 'label' holds lists, and": with_labels(lambda count: [[0, 1]] * count),
    "the column 'label' holds float64": with_labels(lambda count: [0.5] * count),
    "9.png has no class": flat,
    "x.tar: several files .cls have the name 2024-01-05 10 up to the first dot": named_by_time,
    "x.tar: several images have the name 1 up to the first dot": with_masks,
    "0.tar: 1.png may have its class in another file beside it": labelled_in_json,
    "x.tar: part0/1.png may have its class in another": labelled_in_json_in_folders,
    "x.tar: has images for test, and none for training": tested_alone,
    "x.tar: test/9.png has no class": a_split_among_classes,
    "holds masks beside images, 1 of 25 files, such as cat/0_mask": masks_in_classes,
    "1.tar: 1/1.png has no class": labelled_in_one_of_two,
    "x.tar: train/1.png has no class": in_a_split_alone,
    "x.tar: stray.png has no class": beside_the_classes,
    "x.tar: Unlabelled/ would be a class": beside_images_without_labels,
    "x.tar holds first, second, and each of them the same folders cat, dog": in_parts,
    "x.tar: is no whole, uncompressed .tar (cat/1.png has 4611686018427387904 bytes by its": (
        of_a_size_that_cannot_be
    ),
    "x.tar: cat/1.png is a link to 2.png: pack what is linked to": linked,
    "b.png has no class": half_labelled,
    "hfds/none cannot be read": lambda folder, tmp: "hfds/none",
    "wds/imagenet is a stream": lambda folder, tmp: "wds/imagenet",
    "hfids/imagenet is a stream": lambda folder, tmp: "hfids/imagenet",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_archives_and_tables_give_one_line(folder, tmp_path, in_process, message):
    data = BAD[message](folder, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = in_process("train", "--data", data, cwd=tmp_path)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1, err
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_tables_of_no_known_split_are_refused(folder, tmp_path):
    tables = {"fold1": rows(folder / "train"), "fold2": rows(folder / "val")}
    datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "mine"))
    with pytest.raises(UserError, match="hfds/mine: has fold1, fold2: one split with labels"):
        load(tmp_path, "hfds/mine")


def test_small_copies_of_other_programs_are_no_images(folder, tmp_path):
    expected = load(folder)
    copies = folder / "train" / "cat" / "@eaDir" / "0.png"
    copies.mkdir(parents=True)
    shutil.copy(folder / "train" / "cat" / "0.png", copies / "SYNOPHOTO_THUMB_M.png")
    assert same(load(tar(tmp_path / "x.tar", folder)), expected)


def test_images_beside_the_splits_of_a_tar_are_left_out_and_said(folder, tmp_path, capsys):
    expected = load(folder)
    shutil.copy(folder / "train" / "cat" / "0.png", folder / "logo.png")
    assert same(load(tar(tmp_path / "x.tar", folder)), expected)
    assert "left out 1 images that are of no split" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["GNU", "PAX"])
def test_a_file_without_its_holes_is_refused(tmp_path, form):
    """As 'tar --sparse' stores it."""
    entry = tarfile.TarInfo("cat/1.bmp")
    if form == "GNU":
        entry.type = tarfile.GNUTYPE_SPARSE
    else:
        facts = {"major": "1", "minor": "0", "name": "cat/1.bmp", "realsize": "512"}
        entry.pax_headers = {f"GNU.sparse.{name}": fact for name, fact in facts.items()}
    holes = b"0\n".ljust(512, b"\0")
    entry.size = len(holes)
    with tarfile.open(tmp_path / "x.tar", "w") as packed:
        packed.addfile(entry, io.BytesIO(holes))
    with pytest.raises(UserError, match="x.tar: cat/1.bmp is stored without its zeros"):
        load(tmp_path / "x.tar")


@pytest.mark.parametrize("text", [b"", b"-1", b"0\n1", b"[0, 1]", b"\1\0\0\0"])
def test_a_label_that_is_no_class_is_refused(tmp_path, text):
    """Nothing, none, several, and a number of four bytes."""
    path = archive(tmp_path / "x.tar", ("1.png", b"image"), ("1.cls", text))
    with pytest.raises(UserError, match="x.tar: 1.cls should hold one class, as text in one line"):
        load(path)


def test_labels_may_have_any_case(folder, tmp_path):
    files = sorted((folder / "train").rglob("*.png"))
    contents = []
    for number, file in enumerate(files):
        contents.append((f"{number}.PNG", file.read_bytes()))
        contents.append((f"{number}.CLS", file.parent.name.encode()))
    data = load(archive(tmp_path / "x.tar", *contents))
    assert data.class_names == ["cat", "dog"]
    assert np.bincount(data.train.source.labels).tolist() == [12, 12]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("field", [(124, 12), (156, 1), (386, 100)])
@pytest.mark.parametrize("value", [b"7", b"\x80", b"\xff", b"L", b"-1"])
def test_a_header_of_any_size_and_kind_is_refused_or_read(tmp_path, form, field, value):
    """Headers of members with long names, and of what tells these names, with right checksums."""
    place, size = field
    image = b"image"
    names = [f"{kind}/{'x' * 120}.png" for kind in ("cat", "dog")]
    path = archive(tmp_path / "x.tar", *[(name, image) for name in names], format=form)
    whole = path.read_bytes()
    for start in range(0, len(whole), 512):
        if whole[start + 257 : start + 262] != b"ustar":
            continue
        header = bytearray(whole[start : start + 512])
        header[place : place + size] = (value * size)[:size]
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        path.write_bytes(whole[:start] + header + whole[start + 512 :])
        with contextlib.suppress(UserError):
            reader = images_in(path, find_archives(path))["train"].reader
            assert all(reader.read(position) == image for position in range(len(reader.places)))


@pytest.mark.parametrize("end", [512 * 20, 512 * 21 + 100, -512 * 20])
def test_a_tar_that_ends_anywhere_is_refused(folder, tmp_path, end):
    """Also between two members, which Python's tarfile takes for the end."""
    with pytest.raises(UserError, match="x.tar: is no whole"):
        load(cut(folder, tmp_path, end))


def test_a_shard_that_vanished(folder, tmp_path):
    (tmp_path / "tars").mkdir()
    for name in ("cat", "dog"):
        tar(tmp_path / "tars" / f"{name}.tar", folder / "train" / name)
    data = load(tmp_path / "tars", cache="none")
    (tmp_path / "tars" / "dog.tar").unlink()
    with pytest.raises(UserError, match=r"tars/dog.tar/dog/0.png: not readable .*No such file"):
        data.train.source.__getitems__([0, 12])


def test_an_edited_archive_is_another_data_set(folder, tmp_path):
    first = load(tar(tmp_path / "x.tar", folder)).sha256
    shutil.copy(folder / "train" / "cat" / "1.png", folder / "train" / "cat" / "0.png")
    assert load(tar(tmp_path / "x.tar", folder)).sha256 != first


def test_without_datasets_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=re.escape(pip_install("hfds"))):
        load(tmp_path, "hfds/x")
