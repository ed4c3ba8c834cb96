"""A teacher sees every view at its own size: what a student and a teacher of another size get of
one view lies where the same drawn parameters say."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

import store
from exports import write_store
from gaupipe.data import images as image_files
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.decoding import read_rgb
from gaupipe.data.images import ArrayImages
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData, Split
from gaupipe.models import save_student
from gaupipe.settings import DataSettings
from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.load import load
from gaupipe.teachers.base import outline
from gaupipe.teachers.readable_vit import ReadableViT
from gaupipe.teachers.vit import VitTeacher
from pictures import photos
from stages.run import run_all
from stages.verify import against_teacher
from vits import small

CPU = torch.device("cpu")
SMALL, LARGE = 16, 56
"""Pixels of a side of the student's images, and of the teacher's."""
VIEWS = 6
COUNT = 8
SIDES = (96, 64)
"""Height and width of the files."""

CROPS = {"scale": [0.2, 0.8]}
DRAWN = {
    "flips": {"flip": True},
    "flips and shifts": {"flip": True, "crop_padding": 3},
    "crops": {"flip": True, "crop_padding": 2, "resized_crop": CROPS},
    "crops of full size": {"flip": True, "resized_crop": CROPS | {"full_size": True}},
}


def coordinates(height: int, width: int) -> np.ndarray:
    """An image whose first two channels say where a pixel is, x and y from 0 to 255, and whose
    third is 255: in a view it is 0 where the view lies outside."""
    y, x = np.mgrid[:height, :width] + 0.5
    pixels = np.stack([x * 255 / width, y * 255 / height, np.full_like(x, 255)], axis=-1)
    return np.rint(pixels).astype(np.uint8)


@pytest.fixture
def in_files(tmp_path) -> ImageData:
    for number in range(2 * COUNT):
        path = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coordinates(*SIDES)).save(path)
    settings = DataSettings(
        name="folder", root=tmp_path / "photos", image_size=SMALL, val_fraction=0.5, cache="none"
    )
    return load_data(settings)


@pytest.fixture
def in_memory() -> ImageData:
    pixels = np.stack([coordinates(SMALL, SMALL).transpose(2, 0, 1)] * COUNT)
    split = Split(ArrayImages(pixels, np.arange(COUNT) % 2), np.arange(COUNT))
    scaling = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    return ImageData("arrays", split, split, 2, 3, SMALL, **scaling)


def job_of(data: ImageData) -> VitTeacher:
    teacher = ReadableViT(small(size=LARGE, patch_size=8), data, "vit")
    return VitTeacher(load("digits"), data, CPU, teacher)


def pixels_of(batch, takes) -> torch.Tensor:
    """[B, 3, height, width], 0 to 1, of what is normalised."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (takes.mean, takes.std))
    return batch.images * std + mean


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("where", ["in_files", "in_memory"])
def test_one_view_is_the_same_at_two_sizes(drawn, where, request):
    """By the place of every pixel in its file, from where the student's view lies."""
    data = request.getfixturevalue(where)
    augment = AugmentSettings(**DRAWN[drawn])
    job, entries = job_of(data), np.arange(COUNT * VIEWS)
    batches = {
        SMALL: (Batches(data.train, data, CPU, 7), data),
        LARGE: (job.batches(data.train, 7), job.network.takes),
    }
    full = where == "in_files" and "full size" in drawn
    geometry = places(data, augment, entries, full)
    height, width = SIDES if where == "in_files" else (SMALL, SMALL)
    side = min(height, width)
    corner = np.array([(width - side) / 2, (height - side) / 2])  # of the middle square
    for size, (sized_batches, takes) in batches.items():
        views = list(sized_batches.views(entries, Augment(augment, 3, SMALL), VIEWS))
        pixels = torch.cat([pixels_of(batch, takes) for batch in views]).double().numpy()
        assert pixels.shape == (len(entries), 3, size, size)
        assert [int(entry) for batch in views for entry in batch.ids] == entries.tolist()
        border = (2 * np.arange(size) + 1) / size - 1
        for view, (offset, scale) in zip(pixels, geometry, strict=True):
            in_square = [offset[axis] + scale[axis] * border for axis in (0, 1)]
            x, y = (
                (corner[axis] + (in_square[axis] + 1) / 2 * side) / (width, height)[axis]
                for axis in (0, 1)
            )
            inside = view[2] > 0.99
            off = np.stack([view[0] - x[None], view[1] - y[:, None]])[:, inside]
            most = 0.6 / SMALL  # of the image: shifts are rounded to pixels of the larger
            assert np.abs(off).max() < most and np.abs(off).mean() < most / 3
            hidden = np.any([np.abs(part) > 1.1 for part in np.meshgrid(*in_square)], axis=0)
            if not full:
                assert not view[2][hidden].any()
            assert inside.mean() > 0.4


def places(data, augment, entries, full) -> list[tuple[np.ndarray, np.ndarray]]:
    """(offset, scale) of each view in its image, as the student's views are said to lie."""
    drawer = Augment(augment, 3, SMALL)
    ids, views = entries // VIEWS, entries % VIEWS
    crops, places = torch.zeros(len(ids), 3, SMALL, SMALL, dtype=torch.uint8), None
    if full:
        files = [data.train.source.pixels(0)] * len(ids)
        crops, places = drawer.crops(files, ids, views, SMALL)
    _, geometry = drawer(crops, torch.from_numpy(ids), views, places)
    parts = geometry.offset.double().numpy(), geometry.scale.double().numpy()
    return list(zip(*parts, strict=True))


def test_images_are_prepared_as_timm_prepares_them_for_the_teacher(in_files):
    """All of the middle square: a view of a student has no border that its teacher does not see."""
    job = job_of(in_files)
    takes = job.network.takes
    transform = create_transform(
        (3, LARGE, LARGE),
        crop_pct=1.0,
        mean=takes.mean,
        std=takes.std,
        interpolation=takes.interpolation,
    )
    [batch] = job.batches(in_files.train).in_order()
    for image_id, image in enumerate(batch.images):
        expected = transform(Image.open(in_files.train.path(image_id)))
        torch.testing.assert_close(image, expected, rtol=0, atol=1.6 / 255 / min(takes.std))


def test_a_part_of_a_square_keeps_the_detail_of_its_file(tmp_path, in_files):
    """Stripes of one pixel can be seen in a crop for the teacher, and not in the student's."""
    stripes = np.zeros((*SIDES, 3), np.uint8)
    stripes[:, ::2] = 255
    for position in range(2 * COUNT):
        Image.fromarray(stripes).save(in_files.train.source.path(position))
    augment = AugmentSettings(resized_crop={"scale": [0.2, 0.3]})
    drawer = Augment(augment, 0, SMALL)
    job = job_of(in_files)
    small_views = next(Batches(in_files.train, in_files, CPU, 4).views(np.arange(4), drawer, 1))
    large_views = next(job.batches(in_files.train, 4).views(np.arange(4), drawer, 1))
    assert pixels_of(small_views, in_files).std() < 0.1
    assert pixels_of(large_views, job.network.takes).std() > 0.3


def test_an_image_is_decoded_once_for_all_its_views(in_files, monkeypatch):
    names = []

    def noted(file):
        names.append(file.name)
        return read_rgb(file)

    monkeypatch.setattr(image_files, "read_rgb", noted)
    batches = job_of(in_files).batches(in_files.train)
    assert batches.batch_size >= COUNT * VIEWS
    for drawn in DRAWN.values():
        names.clear()
        augment = Augment(AugmentSettings(**drawn), 0, SMALL)
        list(batches.views(np.arange(COUNT * VIEWS), augment, VIEWS))
        assert len(names) == len(set(names)) == COUNT


def test_batches_are_small_where_maps_are_large():
    """A map of a patch of a real ViT is large: 14 blocks of them fill a memory."""
    data = SimpleNamespace(
        name="x", channels=3, num_classes=5, class_names=[], mean=(0.5,) * 3, std=(0.5,) * 3
    )
    teacher = ReadableViT(small(size=256, patch_size=8), data, "vit")
    numbers = 2 * 3 * (32 * 32 + 1) ** 2
    source = ArrayImages(np.zeros((20, 3, 8, 8), np.uint8), np.zeros(20))
    split = Split(source, np.arange(20))
    images = ImageData("x", split, split, 5, 3, 8, mean=(0.5,) * 3, std=(0.5,) * 3)
    batches = VitTeacher(load("digits"), images, CPU, teacher).batches(split, with_maps=True)
    assert batches.batch_size == 10**8 // numbers < 20


def test_a_run_takes_a_teacher_of_another_size_and_stores_what_its_student_compares(
    tmp_path, monkeypatch
):
    """Phase A, export, phase B and verify; blocks and grid are the student's, unless they are
    named."""
    photos(tmp_path / "photos", size=(40, 30))
    vit = small(size=LARGE, patch_size=8, depth=5, num_classes=2)
    names = ["cat", "dog"]
    save_student(vit, tmp_path / "vit", names, mean=(0.2,) * 3, std=(0.3,) * 3)
    settings = load(
        "digits",
        [
            "data={name: folder, image_size: 16, batch_size: 8}",
            f"data.root={tmp_path / 'photos'}",
            f"phase_a.teacher=local-dir:{tmp_path / 'vit'}",
            "model.args={depth: 2, embed_dim: 12, num_heads: 3, patch_size: 4}",
            "augment={flip: true, crop_padding: 2}",
            "augment.resized_crop={scale: [0.5, 1.0]}",
            "export={views: 2, kind: dense}",
            "phase_a.per_image=table",
            "train.epochs=2",
            "phase_b.gamma=0.3",
            "phase_b.alpha=0.5",
            "threads=1",
        ],
    )
    rows = run_all(settings, tmp_path / "run", baseline=False)
    assert np.isfinite(rows[1].val_acc)
    maps = store.open(tmp_path / "run" / "maps.zarr")
    assert (maps.schema.grid, maps.schema.layers, maps.schema.heads) == ((4, 4), 2, 3)
    assert maps.schema.extra["layers"] == [0, 4]
    assert against_teacher(str(tmp_path / "run" / "maps.zarr")) == []
    stored = torch.from_numpy(maps.gather(np.arange(4))["maps"]).float()
    data = load_data(settings.data)
    names = store.unpack_names(maps.gather(np.arange(len(maps)), ["names"])["names"])
    assert names == [name for name in data.train.names() for _ in range(2)]
    job = outline(settings, data)
    augment = Augment(settings.augment, settings.seed, 16)
    batch = next(job.batches(data.train).views(np.arange(4), augment, 2))
    _, _, seen = job.network.forward_with_maps(batch.images)
    for place, block in enumerate((0, 4)):
        np.testing.assert_allclose(stored[:, place].sum(-1), 1, atol=2e-3)
        keys = shares() @ seen.blocks[block].numpy() @ shares().T
        expected = keys / shares().sum(-1, keepdims=True)
        np.testing.assert_allclose(stored[:, place], expected, atol=1e-3)
    write_store(
        tmp_path / "run", {"grid": (7, 7), "layers": [*range(5)]}, out=str(tmp_path / "whole.zarr")
    )
    schema = store.open(tmp_path / "whole.zarr").schema
    assert (schema.grid, schema.layers) == ((7, 7), 5)


def shares() -> np.ndarray:
    """[16, 49]: the share of each of 7 x 7 tokens that lies in each of 4 x 4, by counting 28 x 28
    small squares."""
    new, old = np.mgrid[:28, :28].reshape(2, -1)  # rows and columns of the small squares
    new_token = new // 7 * 4 + old // 7
    old_token = new // 4 * 7 + old // 4
    counts = np.zeros((16, 49))
    np.add.at(counts, (new_token, old_token), 1)
    return counts / 16
