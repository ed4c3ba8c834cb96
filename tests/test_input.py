"""How fast images come: crops of full-size images, decoded images that are kept, and processes that
read. Whatever is kept, and whoever reads, a seed gives the same bits."""

import io
import os
import shutil
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from gaupipe.data import cache, decoding, loader
from gaupipe.data import images as image_files
from gaupipe.data.augment import Augment, AugmentSettings, middle_square
from gaupipe.data.batches import Batches
from gaupipe.data.decoding import read_rgb
from gaupipe.data.load import load_data
from gaupipe.data.loader import Loader, view_of
from gaupipe.data.splits import ImageData
from gaupipe.settings import DataSettings
from gaupipe.system import machine
from gaupipe.system.errors import UserError
from gaupipe.system.signals import spare_worker
from killing import FORKS, KILLED, each_operation, exit_code

CPU = torch.device("cpu")
SQUARE = Augment(AugmentSettings(), 0)
FULL = Augment(AugmentSettings(resized_crop={"full_size": True}, flip=True, crop_padding=1), 3)


def smooth(seed: int, height: int, width: int) -> np.ndarray:
    """An image that JPEG keeps well, and no other one of another seed."""
    coarse = np.random.default_rng(seed).integers(256, size=(4, 4, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture
def root(tmp_path, monkeypatch):
    """train/ with 16 JPEGs of two classes, of several sizes; an empty cache."""
    monkeypatch.setenv("GAUPIPE_CACHE", str(tmp_path / "cache"))
    for number in range(16):
        path = tmp_path / "data" / "train" / ("cat", "dog")[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(smooth(number, 24 + number, 40 - number)).save(path, quality=90)
    return tmp_path / "data"


@pytest.fixture
def decoded(monkeypatch):
    """The names of files that are decoded."""
    names = []

    def noted(file):
        names.append(os.path.basename(file.name))
        return read_rgb(file)

    monkeypatch.setattr(image_files, "read_rgb", noted)
    return names


def load(root, **settings) -> ImageData:
    given = {"name": "folder", "root": root, "image_size": 16, "val_fraction": 0.25, **settings}
    return load_data(DataSettings(**given))


def epoch_of(data: ImageData, workers=0, augment=SQUARE) -> list[torch.Tensor]:
    batches = Batches(data.train, data, CPU, 5, workers)
    return [batch.images for batch in batches.epoch(0, augment)]


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


def cached(root: Path) -> list[Path]:
    """The files of decoded images."""
    paths = (root.parent / "cache" / "images").glob("*")
    return sorted(path for path in paths if path.suffix != ".lock")


# ---- pixels --------------------------------------------------------------------------------------


def jpeg(**options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(smooth(0, 37, 50)).save(file, "JPEG", **options)
    return file.getvalue()


def is_readable(content: bytes, read) -> bool:
    try:
        read(io.BytesIO(content))
    except Exception:
        return False
    return True


@pytest.mark.parametrize("progressive", [False, True])
def test_an_image_that_is_cut_off_anywhere_is_found_before_it_is_used(progressive):
    """The check reads no fine detail, and finds what reading the pixels would."""
    content = jpeg(progressive=progressive)
    for length in (*range(0, len(content), 11), *range(len(content) - 12, len(content) + 1)):
        cut = content[:length]
        assert is_readable(cut, decoding.check) == is_readable(cut, read_rgb), length


def test_squares_are_torchvisions(root):
    data = load(root)
    square = v2.Compose([v2.ToImage(), v2.Resize(16, antialias=True), v2.CenterCrop(16)])
    for position in range(16):
        with open(data.train.source.path(position), "rb") as file:
            expected = square(read_rgb(file))
        images, _ = data.train.source.__getitems__([position])
        torch.testing.assert_close(images[0], expected, rtol=0, atol=0)
        assert images.is_contiguous()


# ---- crops of full-size images -------------------------------------------------------------------


def coordinates(height: int, width: int) -> torch.Tensor:
    """An image whose first two channels say where a pixel is: x and y, scaled to 0 to 255."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 / (width - 1), y * 255 / (height - 1), 0 * x]).astype(np.float32)
    return torch.from_numpy(np.rint(pixels).astype(np.uint8))


@pytest.mark.parametrize("height,width", [(120, 80), (80, 200), (96, 96), (41, 40)])
def test_a_crop_of_a_full_size_image_lies_where_its_place_says(height, width):
    image, size, views = coordinates(height, width), 32, np.zeros(40, np.int64)
    augment = Augment(AugmentSettings(resized_crop={}), 0)
    views, places = augment.crops([image] * 40, np.arange(40), views, size)
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
    square = v2.CenterCrop(size)(v2.Resize(size, antialias=False)(x))
    start, extent = middle_square(height, width, size)
    pixels = start[0] + (np.arange(size) + 0.5) * extent[0] / size - 0.5
    expected = np.clip(pixels, 0, width - 1) / (width - 1)
    np.testing.assert_allclose(square[0, 0].numpy(), expected, atol=1e-6)


def test_crops_are_those_that_augment_draws_of_square_images(root):
    """Of images that are square already, the place of a crop is its geometry; their pixels are
    rounded once more."""
    for path in (root / "train").rglob("*.jpg"):
        Image.fromarray(smooth(0, 16, 16)).save(path)
    data = load(root)
    batches = Batches(data.train, data, CPU, 12)
    few = Augment(AugmentSettings(resized_crop={}, flip=True, crop_padding=1), 3)
    [full], [small] = batches.epoch(2, FULL), batches.epoch(2, few)
    grey_level = 1.01 / (255 * min(data.std))
    torch.testing.assert_close(full.images, small.images, rtol=0, atol=grey_level)
    torch.testing.assert_close(full.geometry.offset, small.geometry.offset)
    torch.testing.assert_close(full.geometry.scale, small.geometry.scale)


def test_a_view_of_a_full_size_image_can_be_drawn_alone(root):
    data = load(root)
    batch = next(Batches(data.train, data, CPU, 12).views(np.arange(12) * 4 + 2, FULL, 4))
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (data.mean, data.std))
    for image_id in (0, 7):
        view = torch.from_numpy(view_of(data.train, image_id, FULL, 2)).permute(2, 0, 1)
        torch.testing.assert_close((view - mean) / std, batch.images[image_id])


# ---- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_images_are_the_same_decoded_or_kept_read_here_or_by_a_process(root, workers):
    expected = all_images(load(root, cache="none"))
    assert not cached(root)
    for setting in ("auto", "auto", "none"):
        assert same(all_images(load(root, cache=setting), workers), expected), setting
    [path] = cached(root)
    assert path.suffix == ".npy" and np.load(path).shape == (16, 3, 16, 16)


def test_squares_are_decoded_once_and_crops_of_full_size_images_in_every_epoch(root, decoded):
    for times in (1, 0):
        decoded.clear()
        data = load(root)
        for _ in range(2):
            epoch_of(data)
            list(Batches(data.val, data, CPU, 3).in_order())
        assert sorted(decoded) == sorted(f"{n:02}.jpg" for n in range(16) for _ in range(times))
    epoch_of(load(root), augment=FULL)
    assert len(decoded) == 12


def test_commands_that_train_nothing_keep_nothing_but_read_what_is_kept(root, decoded):
    data = load(root)
    batches = Batches(data.train, data, CPU, 5)
    list(batches.in_order()), list(batches.rank_batches())
    assert not cached(root) and len(decoded) == 24
    epoch_of(data)
    decoded.clear()
    again = load(root)
    list(Batches(again.val, again, CPU, 5).in_order())
    assert decoded == []


def test_validation_images_of_their_own_folder_are_kept_and_test_images_are_not(root, decoded):
    for name in ("cat", "dog"):
        shutil.copytree(root / "train" / name, root / "test" / name)
        shutil.copytree(root / "train" / name, root / "val" / name)
    held_out = [*(root / "val").rglob("*.jpg"), *(root / "test").rglob("*.jpg")]
    for number, path in enumerate(held_out):  # equal images would share a file of the cache
        Image.fromarray(smooth(50 + number, 30, 30)).save(path)
    data = load(root)
    for augment, count in ((FULL, 16 + 16), (SQUARE, 16)):  # crops of full size are not kept
        decoded.clear()
        epoch_of(data, augment=augment)
        assert len(decoded) == count
    decoded.clear()
    for split, count in ((data.val, 0), (data.test, 16)):
        list(Batches(split, data, CPU, 3).rank_batches())
        assert len(decoded) == count


def test_an_image_that_changes_is_not_taken_from_the_cache(root):
    expected = all_images(load(root))
    path = root / "train" / "cat" / "04.jpg"
    before = path.stat()
    Image.fromarray(smooth(99, 28, 36)).save(path, quality=90)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = all_images(load(root))
    assert not same(changed, expected)
    assert same(changed, all_images(load(root, cache="none")))
    assert len(cached(root)) == 2  # the others stay until nobody has read them for long


@pytest.mark.parametrize("damage", [False, True])
def test_an_image_that_changes_after_its_digest_is_refused_when_it_is_kept(root, damage):
    data = load(root)
    path = root / "train" / "cat" / "04.jpg"
    if damage:
        os.truncate(path, path.stat().st_size - 20)
    else:
        Image.fromarray(smooth(99, 28, 36)).save(path)
    with pytest.raises(UserError, match=r"04\.jpg: has changed since the data set was opened"):
        epoch_of(data)
    assert not cached(root)


@pytest.mark.parametrize("settings", [{"image_size": 8}, {"train_images": 6}, {}])
def test_other_images_are_kept_beside(root, settings, monkeypatch):
    all_images(load(root))
    if not settings:
        monkeypatch.setattr(image_files.torchvision, "__version__", "0.0")
    data = load(root, **settings)
    assert data.train.source.cache.images is None
    assert same(all_images(data), all_images(load(root, cache="none", **settings)))


DAMAGE = {
    "another shape": lambda path: np.save(path, np.zeros((16, 3, 16, 15), np.uint8)),
    "another dtype": lambda path: np.save(path, np.zeros((16, 3, 16, 16), np.int8)),
    "no array": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: os.truncate(path, 0),
    "cut off": lambda path: os.truncate(path, 5000),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_anew_or_done_without(root, damage, decoded):
    expected = all_images(load(root))
    DAMAGE[damage](*cached(root))
    assert same(all_images(load(root)), expected)
    decoded.clear()
    epoch_of(load(root))
    assert decoded == []


def train_epoch(root: Path) -> None:
    """Keeps the squares."""
    os.environ["GAUPIPE_CACHE"] = str(root.parent / "cache")
    torch.set_num_threads(1)
    epoch_of(load(root))


@pytest.mark.long
def test_a_process_killed_while_it_writes_leaves_nothing_that_is_taken_for_whole(root):
    expected = epoch_of(load(root, cache="none"))
    folder = root.parent / "cache"
    # the file of 16 images has 12,416 bytes
    for kill in each_operation(folder, 0, 100, 1000, 12_000):
        code = exit_code(train_epoch, root, kill=kill)
        assert code in KILLED or kill.byte is None, kill
        if code == 0:
            break
        data = load(root)
        for batch in Batches(data.train, data, CPU, 12).in_order():
            pixels = torch.cat(expected)
            known = [(pixels == image).flatten(1).all(1).any().item() for image in batch.images]
            assert known == [True] * len(known), kill
    assert kill.operation > 4
    assert same(epoch_of(load(root)), expected) and len(cached(root)) == 1


def test_of_two_readers_at_once_one_writes_and_both_read(root, decoded):
    expected = epoch_of(load(root, cache="none"))
    decoded.clear()
    barrier = threading.Barrier(2)

    def read(_: int) -> list[torch.Tensor]:
        data = load(root)
        barrier.wait()
        return epoch_of(data)

    with ThreadPoolExecutor(2) as pool:
        assert all(same(images, expected) for images in pool.map(read, range(2)))
    assert len(decoded) == 16


@pytest.mark.parametrize(
    "settings,disk,most,keeps",
    [
        ({}, 10**9, 20e9, True),
        ({}, 20_000, 20e9, False),
        ({}, 10**9, 10_000, False),
        ({"cache": "none"}, 10**9, 20e9, False),
    ],
)
def test_images_are_kept_where_they_fit(root, monkeypatch, settings, disk, most, keeps):
    monkeypatch.setattr(machine, "free_disk", lambda folder: disk)
    monkeypatch.setattr(cache, "MOST_BYTES", most)
    source = load(root, **settings).train.source
    assert source.cache.fits() == keeps
    source.keep()
    assert (source.cache.images is not None) == keeps
    disk = 0  # images that are there need no more space
    source = load(root, **settings).train.source
    source.keep()
    assert (source.cache.images is not None) == keeps


@pytest.mark.parametrize("owner,name", [(os, "replace"), (Path, "mkdir")])
def test_a_cache_that_cannot_be_written_stops_nothing(root, owner, name, monkeypatch, capsys):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    expected = epoch_of(load(root, cache="none"))
    monkeypatch.setattr(owner, name, full)
    assert same(epoch_of(load(root)), expected) and not cached(root)
    assert not list((root.parent / "cache").rglob(".*"))
    said = capsys.readouterr().err
    assert "No space left on device" in said and "GAUPIPE_CACHE names another folder" in said


@pytest.fixture
def nobody():
    """Not root, who may search every folder."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_cache_in_a_folder_that_may_not_be_searched_stops_nothing(monkeypatch, nobody, capsys):
    locked = Path(tempfile.mkdtemp())
    locked.chmod(0)
    monkeypatch.setenv("GAUPIPE_CACHE", str(locked / "cache"))
    images = cache.ImageCache("name", (2, 3, 4, 4))
    assert not images.open() and images.fits()
    images.keep(lambda number: torch.zeros(3, 4, 4, dtype=torch.uint8))
    assert images.gather(np.array([0])) is None and not images.enabled
    assert "cannot be kept" in capsys.readouterr().err
    locked.rmdir()


def test_images_that_nobody_reads_any_more_are_removed(root):
    epoch_of(load(root))
    [old] = cached(root)
    folder, times = old.parent, {"recent": 59, ".partial-a": 2, ".partial-b": 0}
    for name, days in times.items():
        (folder / name).touch()
        os.utime(folder / name, (0, time.time() - days * 86400))
    os.utime(old, (0, 0))
    epoch_of(load(root, image_size=8))
    assert not old.exists()
    assert {name for name in times if (folder / name).exists()} == {"recent", ".partial-b"}


# ---- processes that read -------------------------------------------------------------------------


def test_workers_are_chosen_by_the_machine(root, monkeypatch):
    source = load(root, cache="none").train.source
    monkeypatch.setattr(machine, "cores", lambda: 12)
    cpu, gpu = Loader(source, CPU, "auto"), Loader(source, CPU, "auto")
    gpu.pin = True

    def numbers() -> tuple[int, int]:
        return cpu.number_of_workers(True), gpu.number_of_workers(True)

    assert numbers() == (0, 0)  # few images
    monkeypatch.setattr(loader, "FEW_IMAGES", 1)
    assert numbers() == (6, 11)
    launch = {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    assert numbers() == (1, 2)
    monkeypatch.setattr(machine, "jobs", 2)  # trainings of one comparison
    assert numbers() == (0, 1)
    assert gpu.number_of_workers(False) == 0  # nothing has to be decoded
    assert Loader(source, CPU, 3).number_of_workers(False) == 3


def read_images(connection) -> None:
    """As a process that the loader starts."""
    spare_worker(0)
    connection.send("reads")
    signal.pause()


def train_with_reader(connection) -> None:
    FORKS.Process(target=read_images, args=(connection,)).start()
    signal.pause()


@pytest.mark.long
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
