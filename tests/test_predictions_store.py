"""A store of predictions without maps, as the commands meet it; and images without labels."""

import json
from functools import partial

import numpy as np
import pytest
import zarr

import store
from arguments import sets
from damage import contents, differing
from exports import write_store as export_maps
from gaupipe import open_run
from gaupipe.distillation import job, reading
from gaupipe.settings import PhaseBSettings
from gaupipe.system.errors import UserError
from gaupipe.teachers.notes import StoreNotes
from pictures import photos
from stores import NO_MAPS, make_arrays, make_schema, write_store


@pytest.fixture
def stored(run, in_process):
    """A run of 40 digits, and a store of its teacher's predictions in place of its own."""
    command = ("export-maps", "--run-dir", run, "--kind", "predictions", "--overwrite")
    before = zarr.open_group(run / "maps.zarr", mode="r")["logits"][...]
    assert in_process(*command)[0] == 0
    return run, before


def test_predictions_are_those_of_a_store_with_maps(stored, in_process):
    run, before = stored
    maps = store.open(run / "maps.zarr")
    assert list(maps.schema.arrays) == ["logits", "labels"]
    assert (maps.schema.grid, maps.schema.layers, maps.schema.heads) == (None, None, None)
    assert np.array_equal(maps.gather(np.arange(40))["logits"], before)
    assert in_process("verify", run / "maps.zarr", "--teacher")[0] == 0
    shown = json.loads(in_process("inspect", run / "maps.zarr", "--json")[1])
    assert (shown["kind"], shown["images"], shown["classes"]) == ("predictions", 40, 10)
    assert not {"layers", "heads", "grid", "blocks"} & shown.keys()
    card = (run / "maps.zarr/README.md").read_text()
    assert "# Predictions of digits\n" in card and "a teacher's predictions, and the label" in card
    assert "\n* kind: predictions, float16\n* images: `digits`, 10 classes" in card


def test_parts_of_predictions_give_the_bytes_of_one_process(stored):
    run, _ = stored
    export = partial(export_maps, run, {"kind": "predictions"}, shard_mb=0.0003)
    export(out=str(run / "whole.zarr"))
    for number in (2, 3, 1):
        export(out=str(run / "parts.zarr"), part=(number, 3))
    assert differing(contents(run / "parts.zarr"), contents(run / "whole.zarr")) == []
    assert len(store.open(run / "parts.zarr").shards) == 4


def test_a_student_learns_from_predictions_alone(stored, in_process, example):
    run, _ = stored
    train = ("phase-b", "--run-dir", run, "--name", "new", "--set", "train.epochs=1")
    code, _, error = in_process(*train)
    assert code == 2 and error.count("\n") == 1
    for word in ("maps.zarr", "predictions", "phase_b.gamma=0"):
        assert word in error
    assert not (run / "phase_b" / "new").exists()
    assert in_process(*train, "--set", "phase_b.gamma=0")[0] == 0
    [line] = (run / "phase_b/new/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["loss_soft"] > 0 and json.loads(line)["loss_feat"] is None
    scores = json.loads(in_process("evaluate", "--run-dir", run, "--student", "new", "--json")[1])
    assert 0 <= scores["teacher_agreement"] <= 1 and "map_kl" not in scores
    shown = ("inspect", "--run-dir", run, "--student", "new", "--image", 3, "--json")
    assert json.loads(in_process(*shown)[1])["teacher"] is None
    page = ("view", "--run-dir", run, "--html", run / "page.html")
    assert in_process(*page)[0] == 0  # of the student alone
    relative = ("view", f"{run.name}/maps.zarr", "--html", "page.html")
    assert in_process(*relative, cwd=run.parent)[0] == 0
    with pytest.raises(UserError, match="no attention maps"):
        open_run(run).maps([3])
    with pytest.raises(SystemExit, match=r"no attention maps: its predictions of image 3 are .*"):
        example("read_store")[0].read_map(zarr.open_group(run / "maps.zarr", mode="r"), 3)


@pytest.mark.parametrize(
    "command", [("inspect", "--image", 3), ("view", "--html", "page.html")], ids=lambda c: c[0]
)
def test_maps_that_are_not_there_are_refused_in_a_line(tmp_path, in_process, command):
    schema = make_schema(**NO_MAPS)
    write_store(tmp_path / "p.zarr", schema, make_arrays(schema))
    code, out, error = in_process(command[0], "p.zarr", *command[1:], cwd=tmp_path)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "p.zarr" in error and "no attention maps" in error and "--kind topk" in error
    assert [path.name for path in tmp_path.iterdir()] == ["p.zarr"]


def test_the_store_of_a_folder_has_the_names_of_its_files(tmp_path, in_process):
    """As many bytes and files as planned, in the order of split.json."""
    photos(tmp_path / "photos", classes=("käfer", "dog"))
    settings = sets(
        "data={name: folder, image_size: 8, batch_size: 8}",
        f"data.root={tmp_path / 'photos'}",
        "model.args={depth: 1, embed_dim: 16, num_heads: 2, patch_size: 4}",
        "phase_a.max_epochs=1",
        "phase_b.gamma=0",
        "export.kind=predictions",
        "threads=1",
    )
    assert in_process("phase-a", "digits", *settings, cwd=tmp_path)[0] == 0
    assert in_process("export-maps", "--out", "p.zarr", cwd=tmp_path)[0] == 0
    [split] = tmp_path.glob("runs/*/split.json")
    group = zarr.open_group(tmp_path / "p.zarr", mode="r")
    names = [row.tobytes().rstrip(b"\0").decode() for row in group["names"][...]]
    assert names == json.loads(split.read_text())["train"] and "käfer/0.png" in names

    planned = json.loads(in_process("plan", "digits", *settings, "--json", cwd=tmp_path)[1])
    export = planned["stages"]["export"]
    assert export["disk_bytes"] == sum(array.nbytes for _, array in group.arrays())
    assert export["files"] == sum(path.is_file() for path in (tmp_path / "p.zarr").rglob("*"))


@pytest.fixture
def two_stores(run, in_process):
    """A run of 40 digits, its own store, and one of a ViT's predictions of them."""
    teacher = ("--teacher", "vit", "--set", "phase_a.max_epochs=1")
    other = run.parent / "other"
    settings = run / "config.yaml"
    assert in_process("phase-a", settings, "--run-dir", other, *teacher)[0] == 0
    command = ("export-maps", "--run-dir", other, "--kind", "predictions", "--out")
    assert in_process(*command, run / "predictions.zarr")[0] == 0
    return run, run / "predictions.zarr"


def test_maps_of_one_store_and_predictions_of_another(two_stores, in_process):
    """Each loss is of its own store; the student goes on with both of them, and with no other."""
    run, predictions = two_stores
    train = ("phase-b", "--run-dir", run, "--name", "two", "--predictions", predictions)
    short = ("--set", "train.epochs=1", "--set", "phase_b.alpha=0.5")
    read = []
    before = job.StudentLosses.forward

    def watched(self, batch, *weights):
        read.append((batch.ids, batch.stored))
        return before(self, batch, *weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job.StudentLosses, "forward", watched)
        # the teacher of the maps need not predict
        patch.setattr(StoreNotes, "has_predictions", property(lambda notes: notes.teacher == "vit"))
        code, _, error = in_process(*train, *short)
    assert code == 0 and "predicts nothing" not in error
    own, other = store.open(run / "maps.zarr"), store.open(predictions)
    assert len(read) > 1
    for ids, stored in read:
        name = next(iter(own.schema.store_kind.arrays(own.schema)))
        assert np.array_equal(stored[name], own.gather(ids.numpy())[name])
        assert np.array_equal(stored["logits"], other.gather(ids.numpy())["logits"])
        assert not np.array_equal(stored["logits"], own.gather(ids.numpy())["logits"])
    learned = json.loads((run / "phase_b/two/maps.json").read_text())
    assert [source["url"] for source in learned] == ["../../maps.zarr", "../../predictions.zarr"]

    scores = json.loads(in_process("evaluate", "--run-dir", run, "--student", "two", "--json")[1])
    assert "map_kl" in scores and "teacher_agreement" not in scores and "teacher_top1" not in scores

    again = ("phase-b", "--run-dir", run, "--name", "two", "--resume", *short)
    code, _, error = in_process(*again)
    assert code == 0, error  # with the stores that it began with
    code, _, error = in_process(*again, "--predictions", run / "maps.zarr")
    assert code == 2 and "the teacher of the predictions" in error


def test_a_teacher_without_a_store_needs_one_of_maps_beside(tmp_path, in_process):
    local = tmp_path / "local"
    assert in_process("phase-a", "digits", "--teacher", "local", "--run-dir", local)[0] == 0
    train = ("phase-b", "--run-dir", local, "--predictions", "predictions.zarr")
    code, out, error = in_process(*train)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "local has none: name one by --maps" in error


def test_a_second_store_that_says_nothing_is_refused(two_stores, in_process):
    run, predictions = two_stores
    train = ("phase-b", "--run-dir", run, "--name", "two")
    other = ("--predictions", predictions)
    for words, said in [
        ((*other, "--set", "phase_b.alpha=0"), "phase_b.alpha is 0"),
        ((*other, "--set", "phase_b.gamma=0", "--set", "phase_b.alpha=0.5"), "--maps"),
        ((*other, "--no-distill"), "not for a training on the labels alone"),
        (("--predictions", run / "none.zarr"), "none.zarr"),
        (("--predictions", ""), "should be the path or URL of a store"),
    ]:
        code, out, error = in_process(*train, *words)
        assert (code, out, error.count("\n")) == (2, "", 1) and said in error, (words, error)
    assert not (run / "phase_b/two").exists()


def views_of(folder, count, **kind):
    """A store of so many views of 6 images, opened."""
    schema = make_schema(num_images=6 * count, views=count, extra={"predicts": True}, **kind)
    write_store(folder / f"{count}.zarr", schema, make_arrays(schema, seed=count))
    return store.open(folder / f"{count}.zarr")


@pytest.mark.parametrize("maps, predictions", [(1, 1), (3, 1), (2, 5)])
def test_each_store_has_views_of_its_own(maps, predictions, tmp_path):
    """An epoch has one view, which both stores have if both are read; a store of the images
    themselves says the same of each."""
    first = views_of(tmp_path / "maps", maps)
    second = views_of(tmp_path / "predictions", predictions, **NO_MAPS)
    job.check_second_store(
        reading.StoresOfSplit(first, second), PhaseBSettings(alpha=0.5, gamma=0.5)
    )
    images = reading.StoredImages(first, second, PhaseBSettings(), seed=0)
    ids = np.array([4, 0, 5])
    for epoch in range(7):
        for with_maps in (True, False):
            stored = reading.StoredOfEpoch([images], epoch, with_maps)
            view = epoch % (maps if with_maps and maps > 1 else predictions)
            assert (stored.view or 0) == view
            [read] = stored.prefetch([ids])
            wanted = second.gather(ids * predictions + view % predictions)["logits"]
            assert np.array_equal(read["logits"], wanted)
            assert ("gaussians" in read) == with_maps
            if with_maps:
                wanted = first.gather(ids * maps + view % maps)["gaussians"]
                assert np.array_equal(read["gaussians"], wanted)


@pytest.mark.parametrize("control", ["maps", "predictions"])
def test_two_splits_of_two_stores_with_a_control(control, tmp_path):
    """Images 0 to 5 are labelled, 6 to 11 are not; a control gives each the maps, or the
    predictions, of another one of its split."""
    splits = []
    for split in ("train", "unlabelled"):
        first = views_of(tmp_path / split / "maps", 1)
        second = views_of(tmp_path / split / "predictions", 1, **NO_MAPS)
        splits.append(reading.StoresOfSplit(first, second))
    phase = PhaseBSettings(**{f"shuffle_{control}": True})
    images = [reading.StoredImages(*stores, phase, seed=0) for stores in splits]
    ids = np.array([7, 0, 11, 5, 6])
    [read] = reading.StoredOfEpoch(images, 0, with_maps=True).prefetch([ids])
    for row, image in enumerate(ids):
        split, own = divmod(image, 6)
        place = {"maps": own, "predictions": own}
        place[control] = getattr(images[split], f"{control[:-1]}_partners")[own]
        maps, predictions = splits[split]
        wanted = maps.gather(np.array([place["maps"]]))["gaussians"][0]
        assert np.array_equal(read["gaussians"][row], wanted)
        wanted = predictions.gather(np.array([place["predictions"]]))["logits"][0]
        assert np.array_equal(read["logits"][row], wanted)


@pytest.mark.parametrize("maps, predictions", [(1, 5), (5, 2)])
def test_views_that_one_store_lacks_are_refused(maps, predictions, tmp_path):
    first = views_of(tmp_path / "maps", maps)
    second = views_of(tmp_path / "predictions", predictions, **NO_MAPS)
    with pytest.raises(UserError, match=f"has {predictions} views of an image and .* {maps}:"):
        job.check_second_store(
            reading.StoresOfSplit(first, second), PhaseBSettings(alpha=0.5, gamma=0.5)
        )
