"""How fast images come: decoders that give the same pixels, crops of full-size images, and decoded
images that are kept. Whatever is kept, and whoever reads, a seed gives the same bits."""

import contextlib
import io
import os
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from arguments import sets
from gaupipe.data import cache as kept_images
from gaupipe.data import decoded_images, decoding
from gaupipe.data.augment import Augment, AugmentSettings, Crops, middle_square
from gaupipe.data.batches import Batches, ImageData, load_data
from gaupipe.data.decoding import read_pixels, read_rgb
from gaupipe.data.loader import Loader
from gaupipe.settings import DataSettings, scope
from gaupipe.settings import load as config
from gaupipe.settings.sections import Scope
from gaupipe.system import machine
from gaupipe.system.errors import UserError
from gaupipe.system.signals import Pauses, spare_worker
from processes import FORKS, exit_code, kill_this_process
from stages.compare.workers import _start_worker
from stages.plan import kept_images as kept_images_of_plan

CPU = torch.device("cpu")
SQUARE = Augment(AugmentSettings(), 0)
FULL = Augment(AugmentSettings(resized_crop={"full_size": True}, flip=True, crop_padding=1), 3)


def smooth(seed: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    """An image that JPEG keeps well, and no other one of another seed."""
    coarse = np.random.default_rng(seed).integers(256, size=(4, 4, channels), dtype=np.uint8)
    image = Image.fromarray(coarse if channels > 1 else coarse[..., 0])
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def write_jpegs(root: Path) -> Path:
    """train/ with 16 JPEGs of two classes, of several sizes."""
    for number in range(16):
        path = root / "train" / ("cat", "dog")[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(smooth(number, 24 + number, 40 - number)).save(path, quality=90)
    return root


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("GAUPIPE_CACHE", str(tmp_path / "cache"))
    return write_jpegs(tmp_path / "data")


@pytest.fixture
def decoded(monkeypatch):
    """The names of files that are decoded."""
    names = []

    def noted(content, name):
        names.append(os.path.basename(name))
        return read_pixels(content, name)

    monkeypatch.setattr(decoded_images, "read_pixels", noted)
    return names


def load(root, **settings) -> ImageData:
    chosen = {"name": "folder", "root": root, "image_size": 16, "val_fraction": 0.25, **settings}
    return load_data(DataSettings(**chosen))


def all_images(data: ImageData, workers=0) -> list[torch.Tensor]:
    """What trainings and evaluations read."""
    train = Batches(data.train, data, CPU, 5, workers)
    epochs = [batch for a in (SQUARE, FULL) for e in (0, 1) for batch in train.epoch(e, a)]
    views = train.views(np.arange(3, 18), FULL, 3)
    val = Batches(data.val, data, CPU, 3).in_order()
    images = [batch.images for batch in (*epochs, *views, *val)]
    return images + [batch.geometry.offset for batch in epochs if batch.geometry is not None]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def folders(root: Path) -> list[Path]:
    return sorted((root.parent / "cache" / "images-1").glob("*/images"))


# ---- decoders ------------------------------------------------------------------------------------


def jpeg(pixels: np.ndarray, mode: str | None = None, **options) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(file, "JPEG", **options)
    return file.getvalue()


def by_pillow(content: bytes, name: str = "a.jpg") -> np.ndarray | str:
    try:
        return np.asarray(read_rgb(io.BytesIO(content), name))
    except Exception as error:
        return type(error).__name__


def by_gaupipe(content: bytes, name: str = "a.jpg") -> np.ndarray | str:
    try:
        return read_pixels(content, name).permute(1, 2, 0).numpy()
    except Exception as error:
        return type(error).__name__


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


PHOTO = smooth(0, 37, 50)
JPEGS = {
    "colour": jpeg(PHOTO),
    "not subsampled": jpeg(PHOTO, subsampling=0),
    "progressive": jpeg(PHOTO, progressive=True),
    "grey": jpeg(PHOTO, "L"),
    "cmyk": jpeg(PHOTO, "CMYK"),
    "turned": jpeg(PHOTO, exif=exif(6)),
    "not turned": jpeg(PHOTO, exif=exif(1)),
    "damaged exif": jpeg(PHOTO, exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
    "comment": jpeg(PHOTO, comment=b"\xff\xc0" * 50),
    "one pixel": jpeg(PHOTO[:1, :1]),
    "rgb": jpeg(PHOTO, keep_rgb=True),
    "restarts": jpeg(PHOTO, restart_marker_blocks=2),
}


@pytest.fixture(params=["torchvision", "Pillow"])
def decoder(request, monkeypatch):
    """The decoder of most JPEGs."""
    if request.param == "Pillow":
        monkeypatch.setitem(sys.modules, "torchvision.io", None)
    decoding.decode_jpeg.cache_clear()
    yield request.param
    decoding.decode_jpeg.cache_clear()


@pytest.mark.parametrize("name", JPEGS)
def test_a_jpeg_has_the_pixels_that_pillow_gives_it(name, decoder):
    np.testing.assert_array_equal(by_gaupipe(JPEGS[name]), by_pillow(JPEGS[name]))


def test_most_jpegs_go_past_pillow(decoder, monkeypatch):
    if decoder == "Pillow":
        pytest.skip("nothing else is there")
    monkeypatch.setattr(decoding, "read_rgb", None)
    for name in ("colour", "not subsampled", "progressive", "grey", "not turned", "comment"):
        assert by_gaupipe(JPEGS[name]).shape[2] == 3, name


def test_a_jpeg_cut_off_anywhere_is_refused_or_read_as_pillow_does(decoder):
    for name in ("colour", "progressive", "turned"):
        content = JPEGS[name]
        for length in range(0, len(content), 11):
            cut = content[:length]
            assert np.array_equal(by_gaupipe(cut), by_pillow(cut)), (name, length)
        for length in range(1, 12):
            cut = content[:-length]
            assert np.array_equal(by_gaupipe(cut), by_pillow(cut)), (name, -length)


def test_damaged_jpegs_are_refused_or_read_as_pillow_does(decoder):
    draw = np.random.default_rng(0)
    for _ in range(300):
        content = bytearray(JPEGS["colour"])
        for at in draw.integers(len(content), size=2):
            content[at] = draw.integers(256)
        assert np.array_equal(by_gaupipe(bytes(content)), by_pillow(bytes(content)))


def test_a_jpeg_of_too_many_pixels_goes_to_pillow_which_refuses_it(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert by_gaupipe(JPEGS["colour"]) == by_pillow(JPEGS["colour"]) == "DecompressionBombError"


def test_squares_are_torchvisions(root):
    data = load(root)
    square = v2.Compose([v2.ToImage(), v2.Resize(16, antialias=True), v2.CenterCrop(16)])
    source = data.train.source
    for position in range(16):
        with open(source.files.name(position), "rb") as file:
            expected = square(read_rgb(file, "a.jpg"))
        images, _ = source.__getitems__([position])
        assert torch.equal(images[0], expected) and images.is_contiguous()


# ---- crops of full-size images -------------------------------------------------------------------


def coordinates(height: int, width: int) -> torch.Tensor:
    """An image whose first two channels say where a pixel is: x and y, scaled to 0 to 255."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 / (width - 1), y * 255 / (height - 1), 0 * x]).astype(np.float32)
    return torch.from_numpy(np.rint(pixels).astype(np.uint8))


@pytest.mark.parametrize("height,width", [(120, 80), (80, 200), (96, 96), (41, 40)])
def test_a_crop_of_a_full_size_image_lies_where_its_place_says(height, width):
    image, size, ids = coordinates(height, width), 32, np.arange(40)
    crops = Crops(AugmentSettings(resized_crop={}).resized_crop, 0, ids, np.zeros(40, np.int64))
    views, places = crops.of([image] * 40, size)
    # the square that the image becomes without a crop, in pixels of the image
    side = min(height, width)
    left, top = (width - side) / 2, (height - side) / 2
    outside = 0
    for view, (x0, y0, scale_x, scale_y) in zip(views.float(), places.tolist(), strict=True):
        for x, y in ((8, 8), (16, 24), (23, 10)):
            border = (2 * (x + 0.5) / size - 1, 2 * (y + 0.5) / size - 1)
            seen_x = left + (x0 + scale_x * border[0] + 1) / 2 * side - 0.5
            seen_y = top + (y0 + scale_y * border[1] + 1) / 2 * side - 0.5
            assert abs(view[0, y, x] / 255 * (width - 1) - seen_x) < 1.6
            assert abs(view[1, y, x] / 255 * (height - 1) - seen_y) < 1.6
        outside += abs(x0) + scale_x > 1.01 or abs(y0) + scale_y > 1.01
    assert bool(outside) == (abs(height - width) > 1)
    areas = places[:, 2:].prod(1) * side * side / (height * width)
    assert areas.min() < 0.2 and areas.max() > 0.4  # scale 0.08 to 1 of the full size


@pytest.mark.parametrize("height,width,size", [(375, 500, 224), (500, 333, 32), (7, 9, 16)])
def test_the_square_of_a_full_size_image_is_the_middle_as_torchvision_cuts_it(height, width, size):
    x = torch.linspace(0, 1, width, dtype=torch.float64).expand(1, height, width)
    resized = v2.Resize(size, antialias=False)(x)
    square = v2.CenterCrop(size)(resized)
    start, extent = middle_square(height, width, size)
    pixels = start[0] + (np.arange(size) + 0.5) * extent[0] / size - 0.5
    expected = np.clip(pixels, 0, width - 1) / (width - 1)
    np.testing.assert_allclose(square[0, 0].numpy(), expected, atol=1e-6)


def test_crops_are_those_that_augment_draws_of_square_images(root):
    """Of images that are square already, the place of a crop is its geometry."""
    for path in (root / "train").rglob("*.jpg"):
        Image.fromarray(smooth(0, 16, 16)).save(path)
    data = load(root)
    batches = Batches(data.train, data, CPU, 12)
    few = Augment(AugmentSettings(resized_crop={}, flip=True, crop_padding=1), 3)
    [full], [small] = batches.epoch(2, FULL), batches.epoch(2, few)
    assert torch.equal(full.images, small.images)
    torch.testing.assert_close(full.geometry.offset, small.geometry.offset)
    torch.testing.assert_close(full.geometry.scale, small.geometry.scale)


def test_a_view_of_a_full_size_image_can_be_drawn_alone(root):
    data = load(root)
    batch = next(Batches(data.train, data, CPU, 12).views(np.arange(12) * 4 + 2, FULL, 4))
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (data.mean, data.std))
    for image_id in (0, 7):
        view = torch.from_numpy(data.train.view(image_id, FULL, 2)).permute(2, 0, 1)
        torch.testing.assert_close((view - mean) / std, batch.images[image_id])


# ---- what is kept --------------------------------------------------------------------------------


def test_kept_images_are_those_that_are_decoded(root):
    expected = all_images(load(root, cache="none"))
    for cache in ("none", "memory", "file", "auto"):
        assert same(all_images(load(root, cache=cache)), expected), cache
    assert len(folders(root)) == 2  # squares, and images of full size


def test_processes_read_what_a_thread_reads(root):
    expected = all_images(load(root, cache="none"))
    all_images(load(root))
    for cache in ("none", "file"):
        data = load(root, cache=cache)
        for kind in ("square", "full"):
            data.train.source.find(kind)
        assert same(all_images(data, workers=1), expected), cache


def test_what_is_kept_is_decoded_once(root, decoded):
    expected = all_images(load(root, cache="none"))
    for cache, times in (("memory", 2), ("file", 2), ("file", 0), ("auto", 0)):
        decoded.clear()
        assert same(all_images(load(root, cache=cache)), expected)
        assert sorted(decoded) == sorted(f"{n:02}.jpg" for n in range(16) for _ in range(times))


def test_commands_that_train_nothing_keep_nothing_but_read_what_is_kept(root, decoded):
    data = load(root)
    batches = Batches(data.train, data, CPU, 5)
    list(batches.in_order()), list(batches.of_rank())
    assert not folders(root) and len(decoded) == 24
    list(batches.epoch(0, SQUARE))
    decoded.clear()
    again = load(root)
    list(Batches(again.val, again, CPU, 5).in_order())
    assert decoded == []


def test_the_test_images_are_not_kept(root, decoded):
    shutil.copytree(root / "train", root / "val")
    data = load(root)
    list(Batches(data.train, data, CPU, 5).epoch(0, SQUARE))
    decoded.clear()
    for _ in range(2):
        list(Batches(data.test, data, CPU, 5).in_order())
    assert len(decoded) == 32


def test_an_image_that_changes_is_not_taken_from_the_cache(root):
    expected = all_images(load(root))
    path = root / "train" / "cat" / "04.jpg"
    before = path.stat()
    Image.fromarray(smooth(99, 28, 36)).save(path, quality=90)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = all_images(load(root))
    assert not same(changed, expected)
    assert same(changed, all_images(load(root, cache="none")))
    assert len(folders(root)) == 2  # in place of the others


@pytest.mark.parametrize("cache", ["memory", "file"])
def test_an_image_that_changes_after_its_digest_is_refused_when_it_is_kept(root, cache):
    data = load(root, cache=cache)
    path = root / "train" / "cat" / "04.jpg"
    Image.fromarray(smooth(99, 28, 36)).save(path)
    with pytest.raises(UserError, match=r"04\.jpg: has changed since the data set was opened"):
        next(Batches(data.train, data, CPU, 5).epoch(0, SQUARE))
    assert not folders(root)


def test_an_image_that_cannot_be_decoded_is_refused_by_name(root):
    path = root / "train" / "dog" / "05.jpg"
    os.truncate(path, path.stat().st_size - 20)
    data = load(root)
    with pytest.raises(UserError, match=r"05\.jpg: not readable as an image \(.*truncated"):
        next(Batches(data.train, data, CPU, 5).epoch(0, SQUARE))
    assert not folders(root)


@pytest.mark.parametrize("what", ["image_size", "train_images", "libraries"])
def test_other_images_are_kept_beside(root, what, monkeypatch):
    all_images(load(root))
    settings = {"image_size": {"image_size": 8}, "train_images": {"train_images": 6}}.get(what, {})
    if what == "libraries":
        monkeypatch.setattr(decoded_images.torchvision, "__version__", "0.0")
    data = load(root, **settings)
    data.train.source.find("square")
    assert not data.train.source.kept
    assert same(all_images(data), all_images(load(root, cache="none", **settings)))


def flip_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_damaged_pixels_are_decoded_again_and_then_kept_again(root, capsys, decoded):
    expected = all_images(load(root))
    for folder in folders(root):
        flip_bit(folder / "pixels", 2000)
    capsys.readouterr()
    decoded.clear()
    assert same(all_images(load(root)), expected) and decoded
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("images: image" in line for line in lines), lines
    assert "is damaged" in lines[0]
    all_images(load(root))
    decoded.clear()
    assert same(all_images(load(root)), expected) and decoded == []


def test_what_another_process_has_mended_stays(root, capsys):
    expected = all_images(load(root))
    damaged = load(root)
    damaged.train.source.find("square")
    square = damaged.train.source.kept["square"].folder
    flip_bit(square / "pixels", 2000)  # which the mapping shows, too
    damaged = load(root)
    damaged.train.source.find("square")
    shutil.rmtree(square)
    all_images(load(root))
    mended = (square / "pixels").stat().st_ino
    assert same(all_images(damaged), expected)
    assert "is damaged" in capsys.readouterr().err
    assert (square / "pixels").stat().st_ino == mended


def test_warnings_of_pillow_are_silent_and_others_are_not(tmp_path):
    content = jpeg(PHOTO, exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = [*warnings.filters]
        read_pixels(content, "a.jpg")
        warnings.warn("of another", stacklevel=1)
        assert [str(one.message) for one in caught] == ["of another"]
        assert warnings.filters[1:] == before


def with_own_validation(root: Path) -> Path:
    """The same with val/ and test/, of four images each."""
    for number in range(4):
        path = root / "val" / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(smooth(50 + number, 20, 20)).save(path)
    shutil.copytree(root / "val", root / "test")
    return root


def test_validation_images_of_their_own_folder_are_kept(root, decoded):
    data = load(with_own_validation(root))
    val, test = (Batches(split, data, CPU, 3, keep=True) for split in (data.val, data.test))
    once = Batches(data.val, data, CPU, 3)  # as a command that trains nothing
    first = [batch.images for batch in once.of_rank()]
    assert len(decoded) == 4 and not data.val.source.kept
    assert same([batch.images for batch in val.of_rank()], first) and len(decoded) == 8
    decoded.clear()
    for batches in (val, once):
        assert same([batch.images for batch in batches.of_rank()], first) and decoded == []
    assert same([batch.images for batch in test.of_rank()], first)
    # of images that training reads too, those that training keeps are enough
    shutil.rmtree(root / "val")
    shutil.rmtree(root / "test")
    data = load(root)
    list(Batches(data.val, data, CPU, 3, keep=True).of_rank())
    assert not data.val.source.kept


def test_plan_counts_validation_images_of_their_own_folder(root):
    settings = config.load("digits")
    together = kept_images_of_plan(settings, load(root))
    assert together == ("file", 16 * 3 * 16 * 16)
    apart = kept_images_of_plan(settings, load(with_own_validation(root)))
    assert apart == ("file", 20 * 3 * 16 * 16)


def test_a_run_does_not_go_on_with_other_validation_images(root, in_process, tmp_path):
    with_own_validation(root)
    settings = [
        "data.name=folder",
        f"data.root={root}",
        "data.image_size=8",
        "model.args={depth: 1, embed_dim: 16, num_heads: 2}",
        "phase_b.epochs=1",
        "threads=1",
    ]
    train = ["train", "digits", "--run-dir", "run", *sets(*settings)]
    before = load(root)
    assert in_process(*train, cwd=tmp_path)[0] == 0
    Image.fromarray(smooth(99, 20, 20)).save(root / "val" / "cat" / "0.jpg")
    after = load(root)
    assert after.sha256 == before.sha256 and after.both_sha256 != before.both_sha256
    for more in (["--resume"], ["--student", "xsa"]):
        code, _, err = in_process(*train, *more, cwd=tmp_path)
        assert (code, err.count("\n")) == (2, 1)
        assert "the validation images of data set folder were others when the run began" in err
    assert [path.name for path in (tmp_path / "run" / "plain").iterdir()] == ["standard"]


DAMAGE = {
    "index cut off": lambda folder: os.truncate(folder / "index", 100),
    "index changed": lambda folder: flip_bit(folder / "index", 300),
    "index gone": lambda folder: (folder / "index").unlink(),
    "pixels cut off": lambda folder: os.truncate(folder / "pixels", 5000),
    "pixels gone": lambda folder: (folder / "pixels").unlink(),
    "folder empty": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_anew(root, damage, decoded):
    expected = all_images(load(root))
    for folder in folders(root):
        DAMAGE[damage](folder)
    decoded.clear()
    assert same(all_images(load(root)), expected) and len(decoded) == 32
    decoded.clear()
    assert same(all_images(load(root)), expected) and decoded == []


def train_epoch(root: Path, kill: int | None = None) -> None:
    """Keeps the squares; is killed at a file operation in the cache."""
    os.environ["GAUPIPE_CACHE"] = str(root.parent / "cache")
    if kill is not None:
        kill_this_process(root.parent / "cache", kill, 0)
    torch.set_num_threads(1)
    data = load(root, cache="file")
    list(Batches(data.train, data, CPU, 5).epoch(0, SQUARE))


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_taken_for_whole(root):
    expected = [batch.images for batch in Batches(*_pair(root), CPU, 5).epoch(0, SQUARE)]
    for operation in range(1, 60):
        if exit_code(train_epoch, root, operation) == 0:
            break
        data = load(root)
        data.train.source.find("square")
        got = [batch.images for batch in Batches(data.train, data, CPU, 5).in_order()]
        assert {tuple(image.flatten().tolist()) for batch in got for image in batch} == {
            tuple(image.flatten().tolist()) for batch in expected for image in batch
        }
    assert operation > 8
    [folder] = folders(root)
    left = sorted(path.name for path in folder.parent.iterdir())
    assert left == ["images", "lock"]


def _pair(root: Path):
    data = load(root, cache="none")
    return data.train, data


def hold(root: Path, barrier, done) -> None:
    os.environ["GAUPIPE_CACHE"] = str(root.parent / "cache")
    torch.set_num_threads(1)
    decoded_here = []

    def noted(content, name):
        decoded_here.append(name)
        return read_pixels(content, name)

    decoded_images.read_pixels = noted
    data = load(root, cache="file")
    barrier.wait()
    images = all_images(data)
    done.put((len(decoded_here), [image.sum().item() for image in images]))


def test_of_two_processes_at_once_one_writes_and_both_read(root):
    expected = [image.sum().item() for image in all_images(load(root, cache="none"))]
    barrier, done = FORKS.Barrier(2), FORKS.Queue()
    processes = [FORKS.Process(target=hold, args=(root, barrier, done)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [done.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [sums for _, sums in answers] == [expected] * 2
    assert sum(count for count, _ in answers) == 32  # squares and full size, once each


def test_a_worker_whose_cache_has_gone_decodes(root, monkeypatch):
    data = load(root)
    expected = list(Batches(data.train, data, CPU, 5).epoch(0, SQUARE))
    state = data.train.source.kept["square"].__getstate__()
    assert state["pixels"] is None  # a worker maps the file itself
    shutil.rmtree(folders(root)[0])
    data.train.source.kept["square"].__setstate__(state)
    for batch, again in zip(
        expected, Batches(data.train, data, CPU, 5).epoch(0, SQUARE), strict=True
    ):
        assert torch.equal(batch.images, again.images)


# ---- where images are kept -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings,disk,memory,place",
    [
        ({}, 10**9, 10**9, "file"),
        ({}, 20_000, 10**9, "memory"),
        ({}, 20_000, 20_000, "none"),
        ({}, 20_000, None, "memory"),
        ({"cache_gb": 1e-5}, 10**9, 10**9, "none"),
        ({"cache": "none"}, 10**9, 10**9, "none"),
        ({"cache": "memory"}, 10**9, 10**9, "memory"),
        ({"cache": "file", "cache_gb": 1e-5}, 10**9, 10**9, "file"),
        ({"cache": "file"}, 20_000, 10**9, "take 0.0 GB of disk"),
        ({"cache": "memory"}, 10**9, 20_000, "take 0.0 GB of memory"),
    ],
)
def test_auto_keeps_images_where_they_fit(root, monkeypatch, settings, disk, memory, place):
    monkeypatch.setattr(machine, "free_disk", lambda folder: disk)
    monkeypatch.setattr(machine, "available_memory", lambda: memory)
    source = load(root, **settings).train.source
    if " " in place:
        with pytest.raises(UserError, match=place) as error:
            source.keep("square")
        assert "\n" not in str(error.value)
    else:
        assert source.would_keep("square") == (place, 16 * 3 * 16 * 16)


@pytest.mark.parametrize("cache", ["auto", "file"])
def test_images_that_another_process_is_writing_need_no_space(root, monkeypatch, cache):
    """Of two that want the same the first has filled the disk when the second one comes."""
    first, second = (load(root, cache=cache).train.source for _ in range(2))
    one_at_a_time, free = kept_images.one_at_a_time, [10**9]
    monkeypatch.setattr(machine, "free_disk", lambda folder: free[0])
    monkeypatch.setattr(machine, "available_memory", lambda: 0)

    @contextlib.contextmanager
    def while_the_second_comes(folder):
        with one_at_a_time(folder):
            free[0] = 0
            monkeypatch.setattr(kept_images, "one_at_a_time", after_the_first)
            with pytest.raises(Waits):
                second.keep("square")  # the lock is the first's
            free[0] = 10**9
            yield
            free[0] = 0

    class Waits(Exception):
        pass

    @contextlib.contextmanager
    def after_the_first(folder):
        if free[0] == 0 and not folders(root):
            raise Waits
        with one_at_a_time(folder):
            yield

    monkeypatch.setattr(kept_images, "one_at_a_time", while_the_second_comes)
    first.keep("square")
    second.keep("square")
    assert second.kept["square"].folder == first.kept["square"].folder == folders(root)[0]


def test_a_cache_without_space_is_not_touched(root, monkeypatch, capsys):
    monkeypatch.setattr(machine, "free_disk", lambda folder: 0)
    source = load(root).train.source
    source.keep("square")
    assert source.kept["square"].folder is None and capsys.readouterr().err == ""
    assert not (root.parent / "cache" / "images-1").exists()


@pytest.mark.parametrize("share", [0.35, 0.45])
def test_images_that_were_just_kept_need_no_more_space(root, monkeypatch, share):
    size = 16 * 3 * 16 * 16
    monkeypatch.setattr(
        machine, "free_disk", lambda folder: size / share - size * len(folders(root))
    )
    source = load(root, cache="file").train.source
    source.keep("square")
    assert source.kept["square"].folder == folders(root)[0]


def test_the_size_of_full_size_images_is_known_beforehand(root):
    source = load(root).train.source
    pixels = sum((24 + n) * (40 - n) for n in range(16))
    assert abs(source.would_keep("full")[1] / (3 * pixels) - 1) < 0.05


def test_a_cache_that_cannot_be_written_stops_nothing_unless_it_is_asked_for(
    root, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    expected = all_images(load(root, cache="none"))
    monkeypatch.setenv("GAUPIPE_CACHE", str(tmp_path / "file" / "cache"))
    data = load(root)
    assert same(all_images(data), expected)
    assert "cannot be kept in" in capsys.readouterr().err
    assert data.train.source.kept["square"].folder is None  # but in memory
    with pytest.raises(UserError, match="data.cache=none decodes in every epoch"):
        all_images(load(root, cache="file"))


def test_images_that_nobody_reads_any_more_are_removed(root, monkeypatch):
    all_images(load(root))
    old, _ = before = folders(root)
    os.utime(old, (0, 0))
    unfinished, fresh = (before[1].parent / f".images.partial-{name}" for name in ("a", "b"))
    for folder in (unfinished, fresh):
        folder.mkdir()
    os.utime(unfinished, (0, time.time() - 2 * 86400))
    all_images(load(root, image_size=8))
    assert old not in folders(root) and before[1] in folders(root)
    assert fresh.exists() and not unfinished.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_decoding_that_comes_before_the_first_step(root, number):
    """There is no step yet that could be saved."""
    source, read_only = load(root).train.source, []

    def train() -> None:
        signal.signal(signal.SIGTERM, lambda *_: read_only.append("ended"))
        with Pauses():
            for image in source._decoded("square"):
                read_only.append(image)
                signal.raise_signal(number)

    before = signal.getsignal(signal.SIGTERM)
    try:
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                train()
            assert len(read_only) == 1
        else:
            train()
            assert "ended" in read_only
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_file_that_goes_is_refused_by_name(root, monkeypatch):
    source = load(root, cache="none").train.source
    for path in root.glob("train/*/*"):
        path.unlink()
    with pytest.raises(UserError, match="No such file"):
        Loader(source, CPU, "auto").number_of_workers()


def test_settings_of_input_do_not_make_another_run():
    for name in ("data.workers", "data.cache", "data.cache_gb"):
        assert scope(name) is Scope.MACHINE


def test_workers_are_chosen_by_the_machine(root, monkeypatch):
    source = load(root, cache="none").train.source
    monkeypatch.setattr(machine, "cores", lambda: 12)
    gpu = Loader(source, CPU, "auto")
    gpu.pin = True
    cpu = Loader(source, CPU, "auto")
    assert cpu.number_of_workers() == gpu.number_of_workers() == 0  # few images
    monkeypatch.setattr(decoded_images, "SECONDS", 1.0)
    assert (cpu.number_of_workers(), gpu.number_of_workers()) == (6, 11)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 8), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    assert (cpu.number_of_workers(), gpu.number_of_workers()) == (1, 2)
    monkeypatch.setattr(machine, "jobs", 2)  # trainings of one comparison
    assert (cpu.number_of_workers(), gpu.number_of_workers()) == (0, 1)
    source.settings = source.settings.model_copy(update={"cache": "memory"})
    source.keep("square")
    assert gpu.number_of_workers() == 0 and gpu.number_of_workers("full") > 0
    asked = Loader(source, CPU, 3)  # what lies in memory is not copied to processes
    assert (asked.number_of_workers(), asked.number_of_workers("full")) == (0, 3)
    digits = load_data(DataSettings(train_images=50)).train.source
    assert Loader(digits, CPU, "auto").number_of_workers() == 0


def tell_jobs(connection) -> None:
    _start_worker(3, 1, connection)
    connection.send(machine.processes())


def test_trainings_of_one_comparison_share_the_machine():
    ours, theirs = FORKS.Pipe()
    worker = FORKS.Process(target=tell_jobs, args=(theirs,))
    worker.start()
    assert ours.recv() == 3
    ours.send("end")
    worker.join()


def read_images(connection) -> None:
    """As a process that the loader starts."""
    spare_worker(0)
    connection.send("reads")
    signal.pause()


def train_with_reader(connection) -> None:
    FORKS.Process(target=read_images, args=(connection,)).start()
    signal.pause()


def test_a_process_that_reads_images_ends_with_the_one_that_trains():
    ours, theirs = FORKS.Pipe()
    training = FORKS.Process(target=train_with_reader, args=(theirs,))
    training.start()
    theirs.close()
    assert ours.recv() == "reads"
    training.kill()
    training.join()
    with pytest.raises(EOFError):  # nobody holds the other end any more
        ours.recv()
