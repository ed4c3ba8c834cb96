"""Data sets: stable image ids, fixed splits, and what is said when one is not there."""

import gzip
import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from gaupipe.data import sources
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData
from gaupipe.data.stratified import stratified_split
from gaupipe.settings import DataSettings
from gaupipe.settings.augment import AugmentSettings
from gaupipe.system.errors import UserError
from pictures import UNCHANGED, NumberedMaps, write_idx

CPU = torch.device("cpu")


def digits(**settings) -> ImageData:
    return load_data(DataSettings(name="digits", **settings))


def test_every_class_of_torchvisions_data_sets_has_a_name_of_its_own():
    lemmas = [("crane",), ("crane",), ("maillot",), ("maillot", "tank suit")]
    numbers = {name: number for number, names in enumerate(lemmas) for name in names}
    imagenet = SimpleNamespace(classes=lemmas, class_to_idx=numbers)
    names = ["crane (0)", "crane (1)", "maillot (2)", "maillot (3)"]
    assert sources._class_names(imagenet) == names
    digits = SimpleNamespace(class_to_idx={"one": 1, "zero": 0}, classes=["zero", "one"])
    assert sources._class_names(digits) == ["zero", "one"]
    assert sources._class_names(SimpleNamespace()) == []


def test_of_qmnists_labels_the_digit_is_taken():
    labels = torch.tensor([[3, 7, 1], [5, 7, 2]])
    pixels = torch.zeros(2, 28, 28, dtype=torch.uint8)
    made = SimpleNamespace(data=pixels, targets=labels, classes=[])
    source = sources._timm_source(made, DataSettings(name="torch/qmnist"))
    assert source.labels.tolist() == [3, 5]


def test_digits_are_split_class_by_class_and_always_the_same_way(tmp_path):
    data, again = digits(), digits()
    assert (len(data.train), len(data.val), data.test) == (1437, 360, None)
    assert not set(data.train.positions) & set(data.val.positions)
    assert data.sha256 == again.sha256
    assert digits(leave_out_copies=True).sha256 == data.sha256  # they are in no files
    share = np.bincount(data.val.labels) / np.bincount(load_digits().target)
    assert np.all(np.abs(share - 0.2) < 0.01)
    data.write_split(tmp_path / "split.json")
    written = json.loads((tmp_path / "split.json").read_text())
    assert written["train"] == data.train.positions.tolist()
    assert written["val"] == data.val.positions.tolist()


def test_scaling_in_whole_numbers_scales_as_fractions_do():
    scaled = [
        digits(scaling={"mean": [zero] * 3, "std": [one]}) for zero, one in ((0, 1), (0.0, 1.0))
    ]
    images = [next(Batches(data.train, data, CPU, 4).in_order()).images for data in scaled]
    assert images[0].dtype == torch.float32 and torch.equal(*images)


def test_other_images_than_those_of_the_split_are_refused(tmp_path):
    path = tmp_path / "split.json"
    data = digits()
    data.check_split(path)  # nothing is known
    data.val_sha256 = "a"
    data.write_split(path)
    data.check_split(path)
    data.val_sha256 = "b"
    with pytest.raises(UserError, match="the validation images of data set digits were others"):
        data.check_split(path)
    data.sha256 = "c"
    with pytest.raises(UserError, match="the training images of data set digits were others"):
        data.check_split(path)
    data.train.source.class_names = ("nought", *map(str, range(1, 10)))
    data.write_split(path)
    data.train.source.class_names = tuple(map(str, range(10)))
    with pytest.raises(UserError, match=r"\('nought' has gone, '0' is new\)"):
        data.check_split(path)
    path.write_text("[1]")
    with pytest.raises(UserError, match=r"split.json is damaged: restore it from a copy"):
        data.check_split(path)


def test_batches_hold_the_image_that_their_id_names_in_an_order_of_seed_and_epoch():
    data, source = digits(), load_digits()

    def order(batch_size: int, seed: int, epoch: int) -> list[int]:
        seen = []
        batches = Batches(data.train, data, CPU, batch_size)
        for batch in batches.epoch(epoch, Augment(AugmentSettings(), seed)):
            pixels = (batch.images * data.std[0] + data.mean[0]) * 16
            positions = data.train.positions[batch.ids.numpy()]
            expected = source.images[positions]
            np.testing.assert_allclose(pixels[:, 0].numpy(), expected, atol=0.05)  # of uint8
            assert np.array_equal(batch.labels.numpy(), source.target[positions])
            seen += batch.ids.tolist()
        assert sorted(seen) == list(range(1437))
        return seen

    assert order(100, 1, 2) == order(300, 1, 2)
    assert order(300, 1, 2) != order(300, 1, 3) and order(300, 1, 2) != order(300, 2, 2)


def test_a_batch_carries_the_stored_maps_of_its_own_images():
    data = digits(train_images=50)
    batches = Batches(data.train, data, CPU, 7)
    for batch in batches.epoch(0, UNCHANGED, NumberedMaps()):
        assert batch.stored["maps"].tolist() == (batch.ids * 10).tolist()


def test_a_stratified_split_is_scikit_learns():
    """Bit for bit: classes of equal and of odd sizes, any labels in any order, any share."""
    random_numbers = np.random.default_rng(0)
    for _ in range(300):
        classes = int(random_numbers.integers(1, 12))
        sizes = random_numbers.integers(2, 2 + random_numbers.integers(1, 60), classes)
        values = random_numbers.choice(100, classes, replace=False)
        labels = random_numbers.permutation(np.repeat(values, sizes))
        if len(labels) < 2 * classes:
            continue
        count = int(random_numbers.integers(classes, len(labels) - classes + 1))
        expected = train_test_split(
            np.arange(len(labels)), test_size=count, stratify=labels, random_state=0
        )
        for ours, theirs in zip(stratified_split(labels, count), expected, strict=True):
            assert np.array_equal(ours, np.sort(theirs)), (sizes, count)


def test_a_part_without_an_image_of_each_class_is_refused():
    with pytest.raises(UserError, match="data.train_images: cannot take 5 of .* each of the 10"):
        digits(train_images=5)


def test_a_smaller_training_set_keeps_the_validation_set_and_the_classes():
    data, full = digits(train_images=100), digits()
    assert len(data.train) == 100 and np.array_equal(data.val.positions, full.val.positions)
    assert np.all(np.bincount(data.train.labels) >= 9) and data.sha256 != full.sha256


def digest_in_memory(data: ImageData, images: np.ndarray) -> str:
    """The digest of a data set held in memory, as old runs and stores carry it."""
    digest = hashlib.sha256(hashlib.sha256(images.tobytes()).digest())
    for array in (data.train.positions, data.train.labels):
        digest.update(array.astype("<i8").tobytes())
    return digest.hexdigest()


def test_the_digest_of_the_digits_stays_what_it_was():
    data = digits(train_images=200)
    pixels = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    assert data.sha256 == digest_in_memory(data, pixels)


def write_mnist(root, images, labels):
    """torchvision's folder of MNIST, unpacked."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for prefix in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = raw / f"{prefix}-{kind}-ubyte"
            write_idx(path, array)
            path.write_bytes(gzip.decompress(path.read_bytes()))


def test_pixels_and_labels_of_a_torchvision_data_set_count(tmp_path):
    images = np.random.default_rng(0).integers(256, size=(20, 6, 6), dtype=np.uint8)
    labels = np.arange(20, dtype=np.uint8) % 2
    settings = DataSettings(name="torch/mnist", root=tmp_path)
    write_mnist(tmp_path, images, labels)
    data = load_data(settings)
    sizes = (len(data.train), len(data.test), data.num_classes)
    assert sizes == (18, 20, 10)  # there are names for ten
    assert data.sha256 == digest_in_memory(data, images)
    exchanged = labels.copy()
    pair = data.train.positions[:2]
    exchanged[pair] = labels[pair][::-1]
    write_mnist(tmp_path, images, exchanged)
    assert load_data(settings).sha256 != data.sha256
    images[data.train.positions[5], 3, 3] ^= 1
    write_mnist(tmp_path, images, labels)
    assert load_data(settings).sha256 != data.sha256


def test_one_class_is_refused(tmp_path):
    write_mnist(tmp_path, np.zeros((20, 6, 6), np.uint8), np.full(20, 3, np.uint8))
    with pytest.raises(UserError, match="torch/mnist: the training images are all of the class"):
        load_data(DataSettings(name="torch/mnist", root=tmp_path))


def test_fashion_mnist_is_where_the_environment_says(machine, tmp_path, monkeypatch):
    data = load_data(DataSettings(name="fashion_mnist"))
    assert (len(data.train), len(data.val), len(data.test)) == (270, 30, 50)
    assert np.bincount(data.test.labels).tolist() == [5] * 10 and data.image_size == 8
    here = load_data(DataSettings(name="fashion_mnist", root=machine / "fashion-mnist"))
    assert here.sha256 == data.sha256
    monkeypatch.setenv("GAUPIPE_FASHION_MNIST", str(tmp_path / "absent"))
    with pytest.raises(UserError, match="absent/train-images.*apt-get install"):
        load_data(DataSettings(name="fashion_mnist"))


def test_other_images_in_fashion_mnists_format(tmp_path):
    images = np.random.default_rng(0).integers(256, size=(20, 6, 6), dtype=np.uint8)
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", np.arange(20, dtype=np.uint8) % 2)
    data = load_data(DataSettings(name="fashion_mnist", root=tmp_path))
    assert data.image_size == 6 and np.array_equal(data.test.source.images[:, 0], images)
    for others, text in (
        (images[:, 1:], "20 t10k images of 5 x 6 pixels and 20 labels"),
        (images[1:], "19 t10k images of 6 x 6 pixels and 20 labels"),
        (np.concatenate([images, images]), "40 t10k images of 6 x 6 pixels and 20 labels"),
    ):
        write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", others)
        with pytest.raises(UserError, match=text):
            load_data(DataSettings(name="fashion_mnist", root=tmp_path))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    cut = gzip.compress(gzip.decompress(whole)[:-1])
    flipped = whole[:500] + bytes([whole[500] ^ 16]) + whole[501:]
    for damaged in (whole[:100], b"", gzip.compress(b"no"), cut, flipped):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="train-images-idx3-ubyte.gz: not readable"):
            load_data(DataSettings(name="fashion_mnist", root=tmp_path))
