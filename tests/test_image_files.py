"""Images in files: what a folder holds, what is refused, how pixels are decoded, and the digest."""

import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import unicodedata
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from arguments import sets
from gaupipe.data import decoding
from gaupipe.data import images as image_files
from gaupipe.data.batches import Batches
from gaupipe.data.decoding import read_rgb
from gaupipe.data.load import load_data
from gaupipe.data.prepared import PreparedImages, reader
from gaupipe.data.splits import ImageData
from gaupipe.settings import DataSettings
from gaupipe.system.errors import UserError
from pictures import write_png

CPU = torch.device("cpu")


def noise(seed: int, *shape: int, dtype: type = np.uint8) -> np.ndarray:
    top = np.iinfo(dtype).max
    return np.random.default_rng(seed).integers(top, size=shape, dtype=dtype, endpoint=True)


@pytest.fixture
def root(tmp_path):
    """train/ with ten and val/ with two images of cats and dogs each, all files of one length."""
    for number, (split, name, count) in enumerate(
        [("train", "cat", 10), ("train", "dog", 10), ("val", "cat", 2), ("val", "dog", 2)]
    ):
        folder = tmp_path / "data" / split / name
        folder.mkdir(parents=True)
        for image in range(count):
            Image.fromarray(noise(100 * number + image, 8, 8, 3)).save(folder / f"{image}.bmp")
    return tmp_path / "data"


def load(root, **settings) -> ImageData:
    return load_data(
        DataSettings(
            **{"name": "folder", "root": root, "image_size": 8, "val_fraction": 0.2, **settings}
        )
    )


def refused(root, **settings) -> str:
    """The one line with which a data set is refused."""
    with pytest.raises(UserError) as error:
        load(root, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def pixels(path) -> np.ndarray:
    with open(path, "rb") as file:
        return np.asarray(read_rgb(file))


# images that cannot be read


@pytest.mark.parametrize(
    "content,reason",
    [
        (b"", "of no format that Pillow reads"),
        (bytes(5000), "of no format that Pillow reads"),
        (b"\x89PNG\r\n\x1a\n", ""),
        (None, "No such file"),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_file_that_is_no_image_is_refused_by_name(root, split, content, reason):
    path = root / split / "cat" / "1.bmp"
    path.unlink()
    if content is None:
        path.symlink_to(root / "absent.bmp")
    else:
        path.write_bytes(content)
    message = refused(root)
    assert message.startswith(f"{path}: not readable as an image (") and reason in message
    other = root / split / "cat" / "0.bmp"
    other.write_text("none")
    message = refused(root)
    assert message.startswith(f"{other}: not") and "; the 2 of " in message


def test_all_unreadable_files_are_listed_and_can_be_left_out(root, in_process, tmp_path):
    """A run without them is one on a folder that never had them, but for their names."""
    broken = [root / name for name in ("train/cat/1.bmp", "train/cat/2.bmp", "val/cat/1.bmp")]
    shutil.copytree(root, tmp_path / "without")
    for path in broken:
        (tmp_path / "without" / path.relative_to(root)).unlink()
        os.truncate(path, 150)
    call = ("train", "--data", root, "--run-dir", tmp_path / "run", "--epochs", 1)
    model = sets("model.args={depth: 1, embed_dim: 16, num_heads: 2, patch_size: 4}", "threads=1")
    code, out, err = in_process(*call, *model)
    listed = [line for line in err.splitlines() if line.startswith(f"{root}/train/cat/")]
    assert (code, out) == (2, "") and not (tmp_path / "run").exists()
    assert [line.partition(":")[0] for line in listed] == [str(path) for path in broken[:2]]
    leave_out = "data.unreadable=leave_out"
    assert f"set {leave_out} to go on without them" in err.splitlines()[-1]
    code, _, err = in_process(*call, *model, *sets(leave_out))
    assert code == 0 and all(f"\n{path}: not readable" in f"\n{err}" for path in broken), err
    split = json.loads((tmp_path / "run/split.json").read_text())
    whole = load(tmp_path / "without")
    assert split["sha256"] == whole.sha256 and split["val_sha256"] == whole.val_sha256
    assert split["val"] == whole.val.source.names and "cat/0.bmp" in split["val"]
    assert in_process("evaluate", "--run-dir", tmp_path / "run")[0] == 0
    for path in (root / "train" / "cat").iterdir():
        path.write_text("none")
    assert refused(root, unreadable="leave_out").endswith("of the class 'cat' can be read")


@pytest.mark.parametrize(
    "workers,damage,reason",
    [(0, lambda path: os.truncate(path, 150), "truncated"), (1, os.unlink, "No such file")],
)
def test_an_image_that_is_damaged_after_a_look_is_refused_when_it_is_read(
    root, workers, damage, reason
):
    data = load(root)
    path = root / "train" / data.train.source.names[data.train.positions[5]]
    damage(path)
    with pytest.raises(UserError) as error:
        list(Batches(data.train, data, CPU, 4, workers).in_order())
    message = str(error.value)
    assert message.startswith(f"{path}: not readable as an image (")
    assert reason in message and "\n" not in message
    for process in active_children():
        process.kill()  # as gaupipe does at its end; torch would wait for it ten seconds


# what a folder holds


@pytest.mark.parametrize(
    "names",
    [
        ("Train", "VAL", "Test"),
        ("Training", "validation", "Testing"),
        ("seg_train/seg_train", "valid", "seg_test/seg_test"),
        ("training_set", "Validation", "test_set"),
    ],
)
def test_the_folders_of_splits_have_their_usual_names(root, names):
    shutil.copytree(root / "val", root / "the rest")
    expected = load(root)
    for name, old in zip(names, ("train", "val", "the rest"), strict=True):
        (root / name).parent.mkdir(exist_ok=True)
        (root / old).rename(root / "moved")
        (root / "moved").rename(root / name)
    data = load(root)
    assert (len(data.train), len(data.val), len(data.test)) == (20, 4, 4)
    assert (data.sha256, data.val_sha256) == (expected.sha256, expected.val_sha256)


def test_folders_beside_the_splits_are_named(root, capfd):
    for name in ("fox", "owl", ".hidden"):
        shutil.copytree(root / "train" / "cat", root / name)
    assert len(load(root).train.source) == 20
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.endswith("nor test images: fox, owl\n")


def test_a_class_may_have_the_name_of_a_split(root):
    """In a folder train/ alone: else it may be meant for one."""
    shutil.rmtree(root / "val")
    (root / "train" / "cat").rename(root / "train" / "valid")
    (root / "train" / "dog").rename(root / "train" / "invalid")
    assert load(root).train.source.class_names == ("invalid", "valid")
    assert f"{root}/train/valid would be a class like the folders" in refused(root / "train")


def test_the_same_folders_in_every_class_are_the_classes(root):
    """Unless there is one alone, or an image beside them."""
    for name in ("Fold_1", "Fold_2"):
        shutil.copytree(root / "train", root / "folds" / name)
    message = refused(root / "folds")
    assert "holds Fold_1, Fold_2, and each of them the same folders cat, dog" in message
    shutil.copy(root / "train" / "cat" / "0.bmp", root / "folds" / "Fold_1")
    assert load(root / "folds").train.source.class_names == ("Fold_1", "Fold_2")
    for name in ("cat", "dog"):
        (root / "train" / name).rename(root / "images")
        (root / "train" / name).mkdir()
        (root / "images").rename(root / "train" / name / "images")
    assert load(root).train.source.class_names == ("cat", "dog")


@pytest.mark.parametrize("names", [["dog"], ["cat", "dog"]])
def test_classes_in_a_folder_of_a_split_hold_any_folders(root, names):
    """One class alone, or the same in each. In any other folder these look like classes."""
    for split in ("train", "val"):
        for name in names:
            for number, path in enumerate(sorted((root / split / name).iterdir())):
                year = root / split / name / str(2019 + number % 2)
                year.mkdir(exist_ok=True)
                path.rename(year / path.name)
    data = load(root)
    assert np.bincount(data.train.labels).tolist() == [10, 10]
    assert np.bincount(data.val.labels).tolist() == [2, 2]
    assert "folders 2019, 2020" in refused(root / "train")


def test_image_ids_follow_the_sorted_classes_and_paths(root):
    (root / "train" / "cat" / "a").mkdir()
    shutil.move(root / "train" / "cat" / "7.bmp", root / "train" / "cat" / "a" / "7.bmp")
    shutil.copytree(root / "train" / "cat", root / "train" / "Zebra")
    files = load(root).train.source
    assert files.names[:2] == ["Zebra/0.bmp", "Zebra/1.bmp"] and files.names[9] == "Zebra/a/7.bmp"
    theirs = ImageFolder(root / "train")
    names = [str(root / "train" / name) for name in files.names]
    assert [path for path, _ in theirs.samples] == names
    assert load(root).train.source.labels.tolist() == theirs.targets


def test_what_is_no_image_is_left_out_and_said_once(root, capfd):
    cat, train = root / "train" / "cat", root / "train"
    for name in ("notes.txt", "more.TXT", "README", "._0.bmp"):
        (cat / name).write_text("no image")
    shutil.copytree(train / "dog", train / ".ipynb_checkpoints")
    shutil.copy(cat / "0.bmp", train / "stray.bmp")
    (cat / "up").symlink_to(cat)
    (cat / "around").symlink_to(train)
    os.mkfifo(cat / "pipe.bmp")
    (cat / "zero.png").symlink_to("/dev/zero")
    assert len(load(root).train.source) == 20
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    images = f"images in no class folder: 1, such as {train}/stray.bmp"
    assert err.startswith(
        f"data.root {train}: left out {images}; files that are no images: 5, such"
    )
    load(root)
    assert capfd.readouterr() == ("", "")


def test_all_reasons_are_given_at_once(root, capfd):
    """Before a folder is refused, too."""
    train = root / "train"
    for name in ("cat/1.HEIC", "cat/2.heif", "fox/3.heic", "gnu/notes.txt"):
        (train / name).parent.mkdir(exist_ok=True)
        (train / name).write_bytes(b"ftypheic")
    for number in range(4):
        (train / "cat" / f"{number}.bmp").rename(train / f"{number}.bmp")
    message = refused(root)
    assert f"the class folder {train}/fox holds no image" in message
    assert "and 1 others do not either (gnu)" in message
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "images in no class folder: 4, such as" in err
    assert "HEIC photos, which have to be converted, to JPEG for example: 3, such as" in err
    assert "files that are no images: 1, such as" in err


def test_folders_of_other_programs_hold_no_images_and_are_no_classes(root):
    """What macOS and network drives leave behind, inside of classes too."""
    expected = load(root).sha256
    for place in (root / "__MACOSX" / "train", root / "train" / "@eaDir"):
        shutil.copytree(root / "train" / "cat", place)
    shutil.copytree(root / "train" / "dog", root / "train" / "cat" / "@eaDir" / "0.bmp")
    assert load(root).sha256 == expected
    assert load(root / "train").train.source.class_names == ("cat", "dog")


def test_masks_beside_images_are_refused(root):
    """But not a mask of no image beside it."""
    cat = root / "train" / "cat"
    shutil.copy(cat / "1.bmp", cat / "face_mask.bmp")
    assert len(load(root).train) == 21
    shutil.copy(cat / "1.bmp", cat / "0_mask.png")
    assert "such as cat/0_mask" in refused(root)


def test_folders_of_images_and_of_masks_are_no_classes(root):
    (root / "train" / "cat").rename(root / "train" / "Images")
    (root / "train" / "dog").rename(root / "train" / "masks")
    assert "holds Images, masks, which look like images and their masks" in refused(root / "train")


@pytest.mark.parametrize("inside", ["train", "."])
def test_a_folder_around_the_data_set_is_refused(root, inside, tmp_path):
    """As a repository's root, with a picture elsewhere in it."""
    around = tmp_path / "repository"
    shutil.copytree(root / inside, around / "data")
    shutil.copytree(root / "val" / "cat", around / "docs" / "figures")
    message = refused(around)
    assert "data no images but the folders " in message and f"name {around / 'data'};" in message


# copies


def test_copies_of_training_images_are_counted_and_can_be_left_out(root, capfd):
    for split, count in (("val", 2), ("test", 3)):
        for number in range(count):
            (root / split / "dog").mkdir(parents=True, exist_ok=True)
            copied = root / "train" / "dog" / f"{number}.bmp"
            shutil.copy(copied, root / split / "dog" / f"copy{number}.bmp")
    data = load(root)
    assert data.test_sha256
    err = capfd.readouterr().err
    assert "2 of 6 validation images are copies of training images" in err
    assert "3 of 3 test images are copies of training images" in err
    without = load(root, leave_out_copies=True)
    assert without.test_sha256
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "copies of validation or test images: 3 of 20" in err
    expected = {f"cat/{number}.bmp" for number in range(10)}
    expected |= {f"dog/{number}.bmp" for number in range(3, 10)}
    assert {*without.train.names()} == expected
    assert (without.val_sha256, without.test_sha256) == (data.val_sha256, data.test_sha256)
    for path in (root / "train" / "cat").iterdir():
        shutil.copy(path, root / "val" / "cat" / f"copy{path.name}")
    message = refused(root, leave_out_copies=True)
    assert "no training image of the class 'cat' is left" in message


def contents(split) -> list[bytes]:
    return [split.source.open(position).read() for position in split.positions]


def test_copies_among_the_images_of_one_folder_are_counted(root, capfd):
    """Of which a part is held out."""
    shutil.rmtree(root / "val")
    cat = root / "train" / "cat"
    for number in range(10):
        shutil.copy(cat / f"{number}.bmp", cat / f"x{number}.bmp")
    data = load(root)
    count = sum(content in contents(data.train) for content in contents(data.val))
    assert count and f"{count} of 6 validation images are copies" in capfd.readouterr().err
    without = load(root, leave_out_copies=True)
    assert without.val.names() == data.val.names()
    assert not {*contents(without.train)} & {*contents(without.val)}


def test_copies_in_another_class_are_counted(root, capfd):
    """Two of each image, and a third of one; copies within a class are right."""
    train = root / "train"
    for number, name in ((0, "a"), (1, "b"), (1, "c")):
        shutil.copy(train / "cat" / f"{number}.bmp", train / "dog" / f"{name}.bmp")
    shutil.copy(train / "cat" / "5.bmp", train / "cat" / "copy.bmp")
    load(root)
    assert "5 of 24 training images have copies in another class" in capfd.readouterr().err


def test_folders_in_a_class_belong_to_it_and_a_folder_linked_twice_counts_once(root):
    cat = root / "train" / "cat"
    (cat / "deep" / "deeper").mkdir(parents=True)
    shutil.copy(cat / "0.bmp", cat / "deep" / "deeper" / "0.BMP")
    (cat / "z").symlink_to(cat / "deep")
    elsewhere = shutil.move(root / "train" / "dog", root.parent / "dogs")
    (root / "train" / "dog").symlink_to(elsewhere)
    (root / "train" / "dog" / "linked.bmp").symlink_to(cat / "0.bmp")
    data = load(root)
    assert np.bincount(data.train.source.labels).tolist() == [11, 11]
    assert "cat/deep/deeper/0.BMP" in data.train.source.names


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def remove(*paths):
    subprocess.run(["rm", "-r", *paths], check=True)


def only(folder, name):
    """Leaves nothing in a folder but an empty file."""
    empty(folder)
    (folder / name).touch()


def spelled_in_two_ways(root):
    """As Macs and others write one name."""
    for split, form in (("train", "NFC"), ("val", "NFD")):
        folder = root / split
        (folder / "cat").rename(folder / unicodedata.normalize(form, "café"))


FOLDERS = {
    "/val holds no class folder": lambda root: empty(root / "val"),
    "are both named as val/ may be: rename one": lambda root: shutil.copytree(
        root / "val", root / "Valid"
    ),
    "/train holds no class folder": lambda root: only(root / "train", "a.bmp"),
    "leads nowhere": lambda root: (root / "train" / "gone").symlink_to(root / "absent"),
    "/train/cat holds no image that Pillow reads; put": lambda root: empty(root / "train" / "cat"),
    "training images are all of the class 'cat'; two": lambda root: remove(
        root / "train" / "dog", root / "val" / "dog"
    ),
    "/val has the class 'fox', which": lambda root: shutil.copytree(
        root / "val" / "dog", root / "val" / "fox"
    ),
    "/val has the class 'cafe\\u0301', which {root}/train spells 'caf\\xe9'": spelled_in_two_ways,
    "the classes 'cat' and 'cat ' look alike: rename one": lambda root: shutil.copytree(
        root / "train" / "dog", root / "train" / "cat "
    ),
    "1 of 2 classes have one image alone, such as 'cat'": lambda root: remove(
        root / "val", *(root / "train" / "cat").glob("[1-9].bmp")
    ),
    "if the images of a run have moved, repeat its command (run; phase-a or train with --resume)": (
        lambda root: root.rename(root.with_name("moved"))
    ),
}


@pytest.mark.parametrize("message", FOLDERS)
def test_a_folder_that_cannot_be_meant_is_refused(root, message):
    FOLDERS[message](root)
    assert message.format(root=root) in refused(root)


# pixels


def test_formats_that_lose_nothing_give_the_pixels_of_the_first_frame_back(tmp_path):
    values = noise(0, 6, 9, 3)
    for suffix in ("ppm", "PNG"):
        Image.fromarray(values).save(tmp_path / f"a.{suffix}")
        np.testing.assert_array_equal(pixels(tmp_path / f"a.{suffix}"), values)
    frames = [Image.fromarray(np.full((5, 5), value, np.uint8)) for value in (40, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(pixels(tmp_path / "a.gif"), 40)


def test_16_bits_are_scaled_to_8(tmp_path):
    values = noise(0, 20, 30, dtype=np.uint16)
    values[0, :4] = 0, 128, 129, 65535
    expected = np.repeat(np.floor(values / 257 + 0.5)[..., None], 3, axis=2)
    for name in ("a.png", "a.tif"):
        Image.fromarray(values).save(tmp_path / name)
        np.testing.assert_array_equal(pixels(tmp_path / name), expected)
    assert expected[0, :4, 0].tolist() == [0, 0, 1, 255] and len(np.unique(expected)) > 200


@pytest.mark.parametrize("shape", [(40, 50), (40, 50, 3), (40, 50, 4)])
def test_white_below_16_bits_is_spoken_of_once(tmp_path, capfd, shape):
    """Also with a hot pixel, and where all is transparent."""
    path = tmp_path / "a.png"
    said = []
    for white in (65535, 2**14 - 1, 4095, 1023, 255, 0):
        decoding.SAID.clear()
        values = np.full(shape, white, np.uint16)
        values[3, 4] = 65535
        values[..., 3:] = 0  # of alpha
        write_png(path, values)
        for _ in range(2):
            pixels(path)
        said.append(capfd.readouterr().err.count(f"{path}: has more than 8 bits"))
    assert said == [0, 1, 1, 1, 1, 1]


def test_fractions_are_scaled_and_numbers_without_a_known_range_refused(root):
    path = root / "train" / "cat" / "5.tif"
    Image.fromarray(np.array([[0, 0.5, 1]], np.float32)).save(path)
    assert pixels(path)[0, :, 0].tolist() == [0, 128, 255]
    for values in ([[0, 1.5]], [[-0.1, 0]], [[np.nan, 1]]):
        Image.fromarray(np.array(values, np.float32)).save(path)
        assert "its values go from " in refused(root)
    Image.fromarray(np.array([[0, 65536]], np.int32)).save(path)
    assert "0 to 65536; 0 to 65535 can be scaled" in refused(root)


@pytest.mark.parametrize("name", ["a.tif", "16.png"])
def test_an_image_is_turned_as_its_exif_orientation_says(tmp_path, name):
    values = noise(0, 6, 9, 3) if name != "16.png" else noise(0, 6, 9, dtype=np.uint16)
    shown = values if values.ndim == 3 else np.repeat(np.rint(values / 257)[..., None], 3, axis=2)
    exif = Image.Exif()
    exif[0x0112] = 6  # of its orientation
    Image.fromarray(values).save(tmp_path / name, exif=exif)
    np.testing.assert_array_equal(pixels(tmp_path / name), np.rot90(shown, -1))


def on_white(colours: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Colours [H, W, C] with alpha [H, W], as they look on white paper."""
    share = alpha[..., None] / 255
    return np.rint(share * colours + (1 - share) * 255)


def test_what_is_transparent_is_laid_on_white(tmp_path):
    path, values = tmp_path / "a.png", noise(0, 6, 9, 4)
    values[0, :2, 3] = 0, 255
    Image.fromarray(values, "RGBA").save(path)
    expected = on_white(values[..., :3], values[..., 3])
    np.testing.assert_allclose(pixels(path), expected, atol=1)
    assert pixels(path)[0, 0].tolist() == [255] * 3
    assert pixels(path)[0, 1].tolist() == values[0, 1, :3].tolist()
    Image.fromarray(values[..., 2:].copy(), "LA").save(path)
    expected = on_white(np.repeat(values[..., 2:3], 3, axis=2), values[..., 3])
    np.testing.assert_allclose(pixels(path), expected, atol=1)
    palette, indices = noise(1, 256, 3), values[..., 0]
    with_palette = Image.fromarray(indices, "L")
    with_palette.putpalette(palette.tobytes())
    with_palette.save(path, transparency=bytes(range(256)))
    np.testing.assert_allclose(pixels(path), on_white(palette[indices], indices), atol=1)


@pytest.mark.parametrize("mode,colour,other", [("RGB", (9, 8, 7), (3, 2, 1)), ("L", 9, 3)])
def test_a_transparent_colour_is_white(tmp_path, mode, colour, other):
    image = Image.new(mode, (4, 4), colour)
    image.putpixel((1, 2), other)
    image.save(tmp_path / "a.png", transparency=colour)
    shown = pixels(tmp_path / "a.png")
    assert (shown == 255).all(axis=2).sum() == 15 and shown[2, 1, 0] == 3


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 3)])
def test_a_transparent_colour_of_16_bits_is_refused(root, shape):
    path = root / "train" / "cat" / "5.png"
    write_png(path, noise(0, *shape, dtype=np.uint16), [(b"tRNS", bytes(6))])
    assert "Pillow finds a transparent colour among those of 8 bits" in refused(root)


def planes(values: np.ndarray) -> bytes:
    """A TIFF of [3, 4, 4], 8 or 16 bits, without compression, each colour by itself."""
    tags = {256: 4, 257: 4, 258: 0, 262: 2, 273: 0, 277: 3, 284: 2}
    lengths = {258: (3, 3), 273: (4, 3)}  # (type, count) of what lies behind
    tags[258] = 8 + 2 + 12 * len(tags) + 4
    tags[273] = tags[258] + 6
    start = tags[273] + 12
    content = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    for tag, value in tags.items():
        content += struct.pack("<2H2I", tag, *lengths.get(tag, (4, 1)), value)
    content += bytes(4) + struct.pack("<3H", *3 * [8 * values.itemsize])
    size = values[0].nbytes
    return content + struct.pack("<3I", start, start + size, start + 2 * size) + values.tobytes()


def test_planes_of_8_bits_are_read_and_of_16_bits_refused(root):
    """Of 16 bits Pillow takes the lower half of each value for a value."""
    path = root / "train" / "cat" / "5.tif"
    values = noise(0, 3, 4, 4)
    path.write_bytes(planes(values))
    np.testing.assert_array_equal(pixels(path), values.transpose(1, 2, 0))
    path.write_bytes(planes(values.astype(np.uint16)))
    assert "Pillow may misread its planes" in refused(root)


def test_a_plane_of_16_bits_is_read_if_it_is_compressed(tmp_path):
    values = noise(0, 6, 9, dtype=np.uint16)
    path = tmp_path / "a.tif"
    Image.fromarray(values).save(path, compression="tiff_lzw", tiffinfo={284: 2})
    np.testing.assert_array_equal(pixels(path)[..., 1], np.rint(values / 257))


def test_signed_bytes_are_refused(root):
    image = Image.fromarray(noise(0, 4, 4))
    image.save(root / "train" / "cat" / "5.tif", tiffinfo={339: 2})
    assert "its bytes have signs" in refused(root)


def test_colours_become_rgb(tmp_path):
    path, values = tmp_path / "a.png", noise(0, 6, 9)
    Image.fromarray(values > 127).save(path)
    np.testing.assert_array_equal(pixels(path)[..., 1], 255 * (values > 127))
    palette = noise(1, 256, 3)
    with_palette = Image.fromarray(values, "L")
    with_palette.putpalette(palette.tobytes())
    with_palette.save(path)
    np.testing.assert_array_equal(pixels(path), palette[values])


def icc_profile(space: bytes, **tags: bytes) -> bytes:
    """A profile, version 2, of colours in ``space`` that it describes in L*a*b* or XYZ."""
    described_in = b"Lab " if "A2B0" in tags else b"XYZ "
    d50 = np.array([0.9642, 1, 0.8249]) * 65536
    table = struct.pack(">I", len(tags))
    start = 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        table += name.encode() + struct.pack(">2I", start, len(content))
        start += len(content)
    head = struct.pack(
        ">I4sI4s4s4s12x4s28x", start, b"", 0x02400000, b"prtr", space, described_in, b"acsp"
    )
    head += d50.astype(">i4").tobytes()
    return head.ljust(128, b"\0") + table + b"".join(tags.values())


SQUARES = struct.pack(">4s4xIH2x", b"curv", 1, 2 << 8)
"""The curve of a profile: light is the square of the value."""


def encoded(light: np.ndarray) -> np.ndarray:
    """sRGB from 0 to 255 of linear light from 0 to 1, by IEC 61966-2-1."""
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def test_a_profile_of_colours_is_followed(tmp_path):
    """In the profile of this image red is green, and green red."""
    values = noise(0, 6, 9, 4)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name in (b"XYZ", b"TRC"):
        profile = profile.replace(b"r" + name, b"?").replace(b"g" + name, b"r" + name)
        profile = profile.replace(b"?", b"g" + name)
    swapped = values[..., [1, 0, 2]].astype(float)
    for path in (tmp_path / "a.png", tmp_path / "a.tif", tmp_path / "a.webp"):
        Image.fromarray(values[..., :3].copy()).save(path, icc_profile=profile, lossless=True)
        np.testing.assert_allclose(pixels(path), swapped, atol=1)
        Image.fromarray(values).save(path, icc_profile=profile, lossless=True, exact=True)
        np.testing.assert_allclose(pixels(path), on_white(swapped, values[..., 3]), atol=1)


def test_a_profile_of_grey_is_followed(tmp_path):
    squares = icc_profile(b"GRAY", kTRC=SQUARES)
    for depth in (np.uint8, np.uint16):
        values = noise(0, 6, 9, dtype=depth)
        image = Image.fromarray(values)
        image.save(tmp_path / "a.png", icc_profile=squares)
        expected = encoded((values / np.iinfo(depth).max) ** 2)
        np.testing.assert_allclose(pixels(tmp_path / "a.png")[..., 1], expected, atol=2)


def test_a_profile_of_inks_is_followed(tmp_path):
    """One in which black ink alone is seen: L* = 100 - K."""
    ramp = bytes(range(256))
    nodes = b"\xff\x80\x80\0\x80\x80" * 8  # L*, a*, b* by K, the last of the inks
    table = struct.pack(">4s4x4B", b"mft1", 4, 3, 2, 0)
    table += np.eye(3).astype(">i4").tobytes() + 4 * ramp + nodes + 3 * ramp
    values = noise(0, 6, 9, 4)
    image = Image.fromarray(values, "CMYK")
    profile = icc_profile(b"CMYK", A2B0=table)
    image.save(tmp_path / "a.tif", icc_profile=profile)
    lightness = 1 - values[..., 3] / 255
    cubic = ((100 * lightness + 16) / 116) ** 3
    light = np.where(lightness > 0.08, cubic, lightness * 100 / 903.3)
    np.testing.assert_allclose(pixels(tmp_path / "a.tif")[..., 1], encoded(light), atol=2)


@pytest.mark.parametrize("profile", [b"junk", icc_profile(b"GRAY", kTRC=SQUARES)])
def test_a_profile_that_does_not_fit_is_passed_over(tmp_path, profile):
    values = noise(0, 6, 9, 3)
    Image.fromarray(values).save(tmp_path / "a.png", icc_profile=profile)
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), values)


def test_colours_of_srgb_stay_as_they_are(tmp_path):
    values = noise(0, 6, 9, 3)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.fromarray(values).save(tmp_path / "a.png", icc_profile=profile)
    np.testing.assert_array_equal(pixels(tmp_path / "a.png"), values)


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_white_that_is_zero_is_refused_of_16_bits(root, compression):
    image = Image.fromarray(noise(0, 6, 9, dtype=np.uint16))
    path = root / "train" / "cat" / "5.tif"
    image.save(path, compression=compression, tiffinfo={262: 0})
    assert "its white is 0" in refused(root)


@pytest.mark.parametrize("mode,tags", [("L", {262: 0, 284: 2}), ("LA", {284: 2})])
def test_grey_planes_that_pillow_inverts_or_mixes_are_refused(root, mode, tags):
    image = Image.fromarray(noise(0, 6, 9)).convert(mode)
    image.save(root / "train" / "cat" / "5.tif", tiffinfo=tags)
    assert "Pillow may misread its planes" in refused(root)


@pytest.mark.parametrize("wide", [True, False])
def test_a_line_of_pixels_is_cut_before_it_is_resized(root, wide):
    """Resized by its shorter side, the whole line would take gigabytes."""
    line = noise(0, 1, 20_000, 3)
    middle = line[:, 10_000 - 32 : 10_000 + 32]
    if not wide:
        line = line.transpose(1, 0, 2)
        middle = middle.transpose(1, 0, 2)
    path = root / "train" / "cat" / "0.bmp"
    Image.fromarray(line).save(path)
    torchvisions = v2.Compose([v2.ToImage(), v2.Resize(224, antialias=True), v2.CenterCrop(224)])
    expected = torchvisions(Image.fromarray(middle)).float()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [square] = load(root, image_size=224).train.source.__getitems__([0])[0]
    transform = {"input_size": (3, 224, 224), "interpolation": "bilinear", "crop_pct": 1}
    prepared = reader(transform, normalize=False)(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 500_000  # kB
    for image in (square, prepared):
        torch.testing.assert_close(image.float(), expected, rtol=0, atol=2)


def test_images_prepared_for_a_model_can_be_read_by_another_process(root):
    path = root / "train/cat/0.bmp"
    transform = {"input_size": (3, 16, 16), "interpolation": "bilinear"}
    images = PreparedImages([path], transform)
    [expected], _ = images.__getitems__([0])
    [read], _ = pickle.loads(pickle.dumps(images)).__getitems__([0])
    assert torch.equal(read, expected)


# the digest


def edit(path):
    """Changes one byte of an image and nothing that a listing shows."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # its clock has not ticked yet
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


CHANGES = {
    "edited image": lambda train: edit(train / "cat" / "4.bmp"),
    "exchanged classes": lambda train: (
        (train / "cat").rename(train / "x"),
        (train / "dog").rename(train / "cat"),
        (train / "x").rename(train / "dog"),
    ),
    "renamed class": lambda train: (train / "cat").rename(train / "cow"),
    "renamed image": lambda train: (train / "cat" / "9.bmp").rename(train / "cat" / "99.bmp"),
    "removed image": lambda train: (train / "cat" / "9.bmp").unlink(),
}


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_training_images_changes_the_digest(root, monkeypatch, change, settled):
    if settled:  # also files that have just been written are kept in the cache
        monkeypatch.setattr(image_files, "SETTLED_NS", 0)
    shutil.rmtree(root / "val")
    for path in (root / "train").rglob("*.bmp"):  # as an archive leaves them
        os.utime(path, ns=(10**18, 10**18))
    before = load(root).sha256
    assert load(root).sha256 == before
    CHANGES[change](root / "train")
    assert load(root).sha256 != before


# the cache of digests


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache folder, in which files that have just been written count too."""
    monkeypatch.setenv("GAUPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(image_files, "SETTLED_NS", 0)
    return tmp_path / "cache" / "digests"


@pytest.fixture
def examined(monkeypatch):
    """Names of the files whose content has been read for their digest."""
    names, examine = [], image_files.FileImages.examine

    def count(images, position):
        names.append(os.path.basename(images.path(position)))
        return examine(images, position)

    monkeypatch.setattr(image_files.FileImages, "examine", count)
    return names


def test_only_files_that_have_changed_are_read_again(root, cache, examined):
    """Also after a refusal, of those that were read before."""
    before = load(root).sha256
    assert len(examined) == 24 and len(list(cache.iterdir())) == 2  # a file for train, one for val
    examined.clear()
    assert load(root).sha256 == before and examined == []
    edit(root / "train" / "cat" / "4.bmp")
    assert load(root).sha256 != before and examined == ["4.bmp"]
    examined.clear()
    shutil.copy(root / "train" / "cat" / "0.bmp", root / "train" / "dog" / "new.bmp")
    (root / "train" / "dog" / "zzz.bmp").write_text("no image")
    refused(root)
    assert sorted(examined) == ["new.bmp", "zzz.bmp"]
    examined.clear()
    (root / "train" / "dog" / "zzz.bmp").unlink()
    load(root)
    assert examined == []


def test_a_damaged_cache_counts_as_none(root, cache, examined):
    before = load(root).sha256
    for path in list(cache.iterdir()):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[whole.index(b".bmp") + 60] ^= 1
        for content in (b"", whole[:-1], bytes(len(whole)), bytes(flipped)):
            path.write_bytes(content)
            examined.clear()
            assert load(root).sha256 == before and examined
            assert path.read_bytes() == whole


# other data sets whose images lie in files


def test_torchvisions_image_folder_is_ours(root):
    assert "take data.name=folder" in refused(root, name="torch/image_folder")


def test_inaturalist_in_the_order_of_names(tmp_path):
    for version, count in (("2021_train", 6), ("2021_valid", 2)):
        for number in range(2):
            folder = tmp_path / version / f"{number:05}_a_b_c_d_e_f_g{number}"
            folder.mkdir(parents=True)
            for image in range(count):
                Image.fromarray(noise(image, 8, 8, 3)).save(folder / f"{image}.jpg")
    data = load(tmp_path, name="torch/inaturalist")
    folders = [f"{number:05}_a_b_c_d_e_f_g{number}" for number in range(2)]
    names = [f"{folder}/{image}.jpg" for folder in folders for image in range(6)]
    assert data.train.source.names == names and len(data.test) == 4
    assert data.train.source.labels.tolist() == [0] * 6 + [1] * 6
