"""Images without labels: which they are, what they leave alone, and how an epoch has them."""

import json
import shutil
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from arguments import sets
from gaupipe.data import images as image_files
from gaupipe.data import unlabelled as room
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches, train_and_val
from gaupipe.data.images import UNLABELLED
from gaupipe.data.load import load_data
from gaupipe.data.mixing import Mix
from gaupipe.settings import DataSettings
from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.load import load as load_settings
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.training.job import LabelLosses, build_plain, hard_loss, train, training_state
from gaupipe.training.update import Update
from oracles import cross_entropies
from pictures import more_photos, photos
from runs import metrics
from worlds import in_world

CPU = torch.device("cpu")
SIZE = 8


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


def test_a_table_without_labels_is_taken_rather_than_that_for_training(mine, tmp_path, capfd):
    """As STL-10 has them."""
    datasets = pytest.importorskip("datasets")
    tables = {}
    for split, folder in (("train", "train/cat"), ("unlabeled", "unlabelled")):
        paths = [str(path) for path in sorted((mine / folder).rglob("*.png"))]
        table = datasets.Dataset.from_dict({"image": paths})
        tables[split] = table.cast_column("image", datasets.Image())
    datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "stl"))
    data = load(mine / "train", unlabelled=f"hfds/{tmp_path}/stl")
    assert torch.equal(pixels(data.unlabelled), pixels(load(mine).unlabelled))
    said = "data.unlabelled: unlabeled of hfds/stl is taken (train, unlabeled)"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("shard", ["train/0.tar", "train-0.tar"])
def test_a_folder_without_labels_beside_archives(mine, tmp_path, shard):
    """It may hold archives, too."""
    expected = load(mine)
    for name, folder in ((shard, "train"), ("unlabelled/0.tar", "unlabelled")):
        path = tmp_path / "shards" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            tar.add(mine / folder, "")
    data = load(tmp_path / "shards")
    assert data.unlabelled_sha256 == expected.unlabelled_sha256
    assert data.sha256 == expected.sha256


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
    both = data.with_unlabelled()
    data.keep(both, epoch=0)
    assert data.train.source.is_cached and not both.source.is_cached
    assert not [name for name in decoded if "unlabelled" in name]
    with pytest.raises(UserError, match=r"a/b/2\.png: not readable as an image"):
        data.keep(both, epoch=1)
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
    with pytest.raises(UserError, match="images of data set mine were others .*'0.png' has gone"):
        load(mine).check_split(path)
    shutil.move(mine / "unlabelled", tmp_path / "gone")
    none = load(mine)
    with pytest.raises(UserError, match="the unlabelled images of data set mine were others"):
        none.check_split(path)
    none.write_split(path)
    none.check_split(path)
    shutil.move(tmp_path / "gone", mine / "unlabelled")
    with pytest.raises(UserError, match="the unlabelled images of data set mine were others"):
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


def test_the_baseline_of_a_run_is_the_same_without_them(mine, in_process, tmp_path):
    for name in ("with", "without"):
        same = sets("augment.randaugment=null", "phase_a.teacher=resnet", "phase_a.max_epochs=1")
        call = "run", "--data", "mine", *TINY, *same, "--run-dir", name
        code, _, err = in_process(*call, cwd=tmp_path)
        assert code == 0, err
        shutil.rmtree(mine / "unlabelled", ignore_errors=True)
    files = [tmp_path / name / "plain/standard" for name in ("with", "without")]
    assert metrics(files[0] / "metrics.jsonl") == metrics(files[1] / "metrics.jsonl")
    weights = [(file / "student" / "model.safetensors").read_bytes() for file in files]
    assert weights[0] == weights[1]


def test_phase_a_begins_with_them_and_later_commands_want_the_same(mine, in_process, tmp_path):
    other = more_photos(tmp_path / "other", count=4, seed=2)
    call = "phase-a", "--data", "mine", "--unlabelled", "other", *TINY, "--run-dir", "run"
    code, _, err = in_process(*call, cwd=tmp_path)
    assert code == 0, err
    assert "4 images without labels, 10 x 8 pixels" in err
    assert len(json.loads((tmp_path / "run" / "split.json").read_text())["unlabelled"]) == 4
    assert in_process("export-maps", "--run-dir", "run", cwd=tmp_path)[0] == 0
    phase_b = "phase-b", "--run-dir", "run", "--name"
    assert in_process(*phase_b, "first", cwd=tmp_path)[0] == 0

    other.rename(tmp_path / "moved")
    again = "phase-a", "--data", "mine", "--unlabelled", "moved", "--run-dir", "run", "--resume"
    assert in_process(*again, cwd=tmp_path)[0] == 0
    assert in_process(*phase_b, "second", cwd=tmp_path)[0] == 0
    (tmp_path / "moved" / "0.png").unlink()
    code, _, err = in_process(*phase_b, "third", cwd=tmp_path)
    assert code == 2 and "the unlabelled images of data set mine were others" in err
    assert not (tmp_path / "run" / "phase_b" / "third").exists()


def test_plan_counts_them(mine, in_process, tmp_path):
    plan = "plan", "--data", "mine", "--json", *TINY
    other = more_photos(tmp_path / "other", count=4, seed=2)
    code, out, _ = in_process(*plan, "--unlabelled", other, cwd=tmp_path)
    assert code == 0 and json.loads(out)["unlabelled"] == 4
    code, out, _ = in_process(*plan, "--train", cwd=tmp_path)
    assert code == 0 and json.loads(out)["unlabelled"] == 0


# an epoch

VIEWS = AugmentSettings(
    resized_crop={"scale": (0.3, 1)},
    crop_padding=2,
    flip=True,
    randaugment={"ops": 2},
    erasing=0.5,
)
OF_FILES = VIEWS.model_copy(
    update={"resized_crop": VIEWS.resized_crop.model_copy(update={"full_size": True})}
)


def test_training_images_keep_their_ids_and_the_others_follow(mine, tmp_path, monkeypatch):
    monkeypatch.setenv("GAUPIPE_CACHE", str(tmp_path / "cache"))  # other tests' is not empty
    data = load(mine)
    both = data.with_unlabelled()
    assert both.labels.tolist() == [*data.train.labels, *[UNLABELLED] * 7]
    assert both.names() == [*data.train.names(), *data.unlabelled.names()]
    expected = torch.cat([pixels(data.train), pixels(data.unlabelled)])
    mixed_up = np.random.default_rng(0).permutation(len(both))

    for cached in (False, True):
        assert both.source.is_cached == data.unlabelled.source.is_cached == cached
        found = Batches(both, data, CPU, 5).in_order(mixed_up)
        ids = torch.cat([batch.ids for batch in found])
        assert ids.tolist() == mixed_up.tolist()
        images, labels = both.source.__getitems__(both.positions[mixed_up].tolist())
        assert torch.equal(images.permute(0, 2, 3, 1), expected[mixed_up])
        assert labels.tolist() == both.labels[mixed_up].tolist()
        larger = both.source.at(12, "bicubic").__getitems__(both.positions[-2:].tolist())[0]
        assert torch.equal(larger, data.unlabelled.source.at(12, "bicubic").__getitems__([5, 6])[0])
        data.keep(both)


def views_of(split, data, settings, epoch):
    """{id: (image, geometry)} of an epoch."""
    views = {}
    for batch in Batches(split, data, CPU, 5).epoch(epoch, Augment(settings, seed=3)):
        places = torch.cat([batch.geometry.offset, batch.geometry.scale], dim=1)
        views |= zip(batch.ids.tolist(), zip(batch.images, places, strict=True), strict=True)
    return views


@pytest.mark.parametrize("settings", [VIEWS, OF_FILES], ids=["squares", "files"])
def test_views_depend_on_an_images_own_id_alone(mine, settings):
    data, fewer = load(mine), load(mine, train_images=10)
    alone = views_of(data.unlabelled, data, settings, 2)
    labelled = views_of(data.train, data, settings, 2)
    for these in (data, fewer):
        count = len(these.train)
        found = views_of(these.with_unlabelled(), these, settings, 2)
        assert found.keys() == set(range(count + 7))
        for number, (image, place) in alone.items():
            assert torch.equal(found[count + number][0], image)
            assert torch.equal(found[count + number][1], place)
    for number, (image, _) in labelled.items():
        assert torch.equal(views_of(data.with_unlabelled(), data, settings, 2)[number][0], image)
    assert not any(torch.equal(alone[number][1], labelled[number][1]) for number in alone)

    entries = np.arange(7) * 3 + 2  # the third view of each
    [stored] = Batches(data.unlabelled, data, CPU, 9).views(entries, Augment(settings, 3), 3)
    for number in alone:
        assert torch.equal(stored.images[number], alone[number][0])


@pytest.mark.parametrize("buckets", [1, 2])
def test_images_are_mixed_with_their_kind(tmp_path, buckets):
    photos(tmp_path / "train", count=20)
    data = load(more_photos(tmp_path / "unlabelled", 40).parent)
    batches = Batches(data.with_unlabelled(), data, CPU, 16, buckets=buckets)
    for batch in batches.epoch(0, Augment(AugmentSettings(mixup=0.5, cutmix=0.5), 0)):
        known = (batch.labels != UNLABELLED).numpy()
        assert batch.whole_labelled == batch.labelled == known.sum()
        group = 2 * batches.buckets.of(batch.ids.numpy()) + known
        partner = batch.mixed.partner.numpy()
        assert (group[partner] == group).all()
        is_alone = np.bincount(group)[group] == 1
        assert ((partner == np.arange(len(batch))) == is_alone).all()


# a training


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_labels_are_compared_where_there_are_some(smoothing, is_mixed):
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(6, 3))
    labels = np.array([2, UNLABELLED, 0, UNLABELLED, 1, UNLABELLED])
    targets = np.eye(3)[labels]
    mixed = None
    if is_mixed:
        partner, own = np.array([2, 3, 4, 5, 0, 1]), np.array([0.8, 0.7, 0.6, 0.5, 0.9, 0.4])
        mixed = Mix(torch.from_numpy(partner), torch.from_numpy(own), torch.zeros(6, 4))
        targets = own[:, None] * targets + (1 - own[:, None]) * targets[partner]
    targets = (1 - smoothing) * targets + smoothing / 3
    expected = cross_entropies(logits, targets)[labels != UNLABELLED].sum()
    given = torch.from_numpy(logits).float().requires_grad_()
    for count in (3.0, 1.25):
        loss = hard_loss(given, torch.from_numpy(labels), smoothing, mixed, count)
        assert loss.item() == pytest.approx(expected / count, rel=1e-5)
    loss.backward()
    assert not given.grad[labels == UNLABELLED].any()

    none = hard_loss(given, torch.full((6,), UNLABELLED), smoothing, None, 0.0)
    assert none.item() == 0


SMALL = [
    "threads=1",
    "model.args={embed_dim: 16, depth: 1, num_heads: 2, patch_size: 4}",
    "data.name=folder",
    f"data.image_size={SIZE}",
    "data.batch_size=4",
    "train.epochs=2",
    "train.label_smoothing=0.1",
    "precision=float32",
]


STILL = ["train.optim.lr=1e-9", "train.optim.min_lr=0", "train.optim.weight_decay=0"]


def settings_of(root, *more):
    return load_settings("digits", [*SMALL, f"data.root={root}", *more])


class AllImages(LabelLosses):
    """Also a loss of every image, as phase B has."""

    def forward(self, batch, gamma=0.0, alpha=0.0):
        logits = self.forward_student(batch.images).float()
        losses = self.label_losses(logits, batch)
        return replace(losses, loss=losses.loss_hard + logits.square().mean())


def job_of(settings):
    data = load_data(settings.data, unlabelled=True)
    job = replace(build_plain(settings, data), unlabelled=True)
    return replace(job, losses=AllImages(job.student, job.train))


def gradients_of_an_epoch(settings, folder):
    """Writes for each step this rank's labels, and the gradients of all ranks."""
    with distributed.process_group():
        job = job_of(settings)
        training, _ = train_and_val(job.data, settings.data, job.device, job.images)
        update = Update(training_state(job), training.steps)
        losses = update.data_parallel(job.losses)
        steps = []
        for batch in training.epoch(0, Augment(job.augment, settings.seed)):
            job.student.zero_grad()
            with update.forward():
                loss = losses(batch).loss
            update.backward(loss, batch.weight)
            gradients = [one.grad.flatten() for one in job.student.parameters()]
            steps.append((batch.labels, batch.whole_labelled, torch.cat(gradients)))
        torch.save(steps, folder / f"rank{distributed.rank()}.pt")


def test_gradients_do_not_depend_on_the_number_of_ranks(tmp_path):
    photos(tmp_path / "mine" / "train", count=12)
    more_photos(tmp_path / "mine" / "unlabelled", 60)
    settings = settings_of(tmp_path / "mine", "data.buckets=2", "augment.mixup=0.5")
    found = {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        codes = in_world(size, folder, gradients_of_an_epoch, settings, folder)
        assert codes == [0] * size, [path.read_text() for path in folder.glob("*.txt")]
        found[size] = [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]

    [alone], (first, second) = found[1], found[2]
    for one, *ranks in zip(alone, first, second, strict=True):
        labels = torch.cat([labels for labels, _, _ in ranks])
        assert labels.tolist() == one[0].tolist()
        for _, count, gradient in ranks:
            assert count == one[1] == (labels != UNLABELLED).sum()
            assert torch.allclose(gradient, one[2], rtol=1e-4, atol=1e-6)
    counts = [[int((labels != UNLABELLED).sum()) for labels, _, _ in steps] for steps in found[2]]
    assert 0 in np.add(*counts)  # a batch without any label
    assert any(0 in pair and any(pair) for pair in zip(*counts, strict=True))  # on one rank alone


def test_accuracy_and_loss_of_an_epoch_are_those_of_images_with_labels(mine, tmp_path, capfd):
    """Of a student that does not move, in batches with many and with few labels."""
    more_photos(mine / "unlabelled", 40)
    settings = settings_of(mine, *STILL, "train.epochs=1", "log.every=1")
    job = job_of(settings)
    images = torch.cat(
        [batch.images for batch in Batches(job.data.train, job.data, CPU, 64).in_order()]
    )
    with torch.no_grad():
        logits = job.student.eval()(images).double().numpy()
    labels = job.data.train.labels
    targets = 0.9 * np.eye(2)[labels] + 0.1 / 2
    state = training_state(job)
    train(job, state, tmp_path / "out", "student")
    [epoch] = state.metrics
    assert epoch["train_acc"] == pytest.approx((logits.argmax(1) == labels).mean(), abs=1e-6)
    assert epoch["loss_hard"] == pytest.approx(cross_entropies(logits, targets).mean(), rel=1e-4)
    assert "61 images (40 of them without labels), " in capfd.readouterr().err
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 16 and all(line["loss"] > 0 for line in lines)
    assert state.identity["the images without labels"] == job.data.unlabelled_sha256
