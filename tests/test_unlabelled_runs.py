"""Runs with images without labels: what is stored of both kinds of images, and what a student
learns from it."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
import zarr
from timm.models import save_for_hf

import store
from arguments import sets
from exports import write_store
from gaupipe.data.batches import Batches
from gaupipe.data.images import UNLABELLED
from gaupipe.distillation.export import Exported, is_complete
from gaupipe.distillation.job import StudentLosses
from gaupipe.distillation.reading import StoredImages, StoredOfEpoch
from gaupipe.settings import PhaseBSettings
from killing import KILLED, AtCall, InWrite, exit_code
from oracles import cross_entropies
from pictures import more_photos, photos
from runs import metrics, run_main
from stages import phase_b
from stages.look.image_maps import images_of
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_student, load_teacher, open_maps
from stores import edit_root
from worlds import command

CPU = torch.device("cpu")
SMALL = sets(
    "data.image_size=8",
    "data.batch_size=5",
    "model.args={embed_dim: 16, depth: 1, num_heads: 2, patch_size: 4, mlp_ratio: 2}",
    "phase_a.max_epochs=1",
    "phase_b.epochs=2",
    "threads=1",
)
SHORT = sets("train.epochs=2")
WITHOUT = 10
"""Images without labels. Of 24 with labels 5 are for validation."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with mine/, images of both kinds, and the run that learned from them."""
    folder = tmp_path_factory.mktemp("unlabelled")
    photos(folder / "mine/train")
    more_photos(folder / "mine/unlabelled", WITHOUT)
    assert (
        run_main("run", "--no-baseline", "--data", "mine", *SMALL, "--run-dir", "run", cwd=folder)
        == 0
    )
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the run, whose images stay where they are."""
    return shutil.copytree(finished / "run", tmp_path / "run")


def opened(run):
    """The run's images, its teacher and both stores, of the images with labels first."""
    directory = RunDirectory(run)
    data = directory.load_data(directory.settings(), unlabelled=True)
    stores = [store.open(run / name) for name in ("maps.zarr", "unlabelled.zarr")]
    return data, load_teacher(directory, data), stores


def logits_of(maps):
    return maps.gather(np.arange(len(maps)))["logits"]


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


# what is stored


def test_teacher_and_student_see_the_same_pixels_and_its_network_says_what_is_stored(finished):
    data, teacher, stores = opened(finished / "run")
    folder = finished / "run/phase_a/teacher"
    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    mean, std = (np.array(each)[:, None, None] for each in (data.mean, data.std))
    seen = []
    for split, maps in zip((data.train, data.unlabelled), stores, strict=True):
        images = torch.cat([batch.images for batch in teacher.batches(split).in_order()])
        decoded = np.stack([split.image(number) for number in range(len(split))])
        pixels = (decoded.transpose(0, 3, 1, 2) / 255 - mean) / std
        assert np.allclose(images, pixels, atol=1e-5)
        with torch.no_grad():
            by_hand = network(torch.from_numpy(pixels).float()).double().numpy()
        assert np.allclose(logits_of(maps), log_softmax(by_hand), atol=1e-3)
        names = [
            row.tobytes().rstrip(b"\0").decode()
            for row in maps.gather(np.arange(len(maps)))["names"]
        ]
        assert names == split.names()
        seen.append(images)
    both = Batches(data.with_unlabelled(), data, CPU, 5).in_order()
    assert torch.equal(torch.cat([batch.images for batch in both]), torch.cat(seen))
    assert "labels" not in stores[1].schema.arrays


def test_plan_counts_their_store_and_the_students_steps(finished, in_process):
    code, out, err = in_process("plan", "--data", "mine", *SMALL, "--json", cwd=finished)
    assert code == 0, err
    planned = json.loads(out)["stages"]
    for stage, name in (("export", "maps.zarr"), ("export_unlabelled", "unlabelled.zarr")):
        path = finished / "run" / name
        arrays = zarr.open_group(path, mode="r").arrays()
        assert planned[stage]["disk_bytes"] == sum(array.nbytes for _, array in arrays)
        assert planned[stage]["files"] == sum(file.is_file() for file in path.rglob("*"))
    assert planned["phase_b"]["steps"] == 2 * -(-(19 + WITHOUT) // 5)


def test_plan_takes_the_options_of_run(finished, in_process):
    """And its numbers are those of the settings that the options stand for."""
    command = ["plan", "--data", "mine", "--unlabelled", "mine/unlabelled", *SMALL, "--json"]
    planned = []
    for teacher in (["--teacher", "vit"], sets("phase_a.teacher=vit")):
        code, out, err = in_process(*command, *teacher, cwd=finished)
        assert code == 0, err
        stages = json.loads(out)["stages"]
        planned.append([stage.get("parameters") for stage in stages.values()])
    assert planned[0] == planned[1]
    resnet = in_process("plan", "--data", "mine", *SMALL, "--json", cwd=finished)[1]
    assert json.loads(resnet)["stages"]["phase_a"]["parameters"] != planned[0][0]


def network_of(folder, num_classes, names):
    """A tiny network of convolutions of timm's, and the folder of its weights."""
    torch.manual_seed(0)
    network = timm.create_model("test_byobnet", num_classes=num_classes).eval()
    network.pretrained_cfg["input_size"] = (3, 32, 32)
    classes = {"num_classes": num_classes}
    save_for_hf(network, str(folder), model_config={"label_names": names}, model_args=classes)
    return network, f"local-dir:{folder}"


PREDICTIONS = sets(
    "phase_b.gamma=0",
    "export.kind=predictions",
    "export.features=true",
    "export.precision=float32",  # of so many features bfloat16, where the processor has it
)


def test_plan_measures_the_pass_of_a_given_teacher(finished, tmp_path, in_process):
    """It looks at each labelled image twice, once for its accuracy or a probe, and exports each
    view."""
    _, teacher = network_of(tmp_path / "network", 2, ["cat", "dog"])
    call = "plan", "--data", "mine", "--teacher", teacher, *SMALL, *PREDICTIONS, "--json"
    code, out, err = in_process(*call, *sets("export.views=3"), cwd=finished)
    assert code == 0, err
    seconds = {name: stage["seconds"] for name, stage in json.loads(out)["stages"].items()}
    assert seconds["phase_a"] > 0
    assert seconds["export"] == pytest.approx(3 * seconds["phase_a"])
    assert seconds["export_unlabelled"] == pytest.approx(seconds["export"] * WITHOUT / 19)


@pytest.mark.parametrize("head", ["of these classes", "of others"])
def test_convolutions_predict_by_their_own_head_or_by_a_probe(finished, tmp_path, in_process, head):
    own = head == "of these classes"
    names = ["dog", "cat"] if own else ["a", "b", "c"]
    network, teacher = network_of(tmp_path / "network", len(names), names)
    run = tmp_path / "run"
    call = "phase-a", "--data", "mine", "--teacher", teacher, *SMALL, *PREDICTIONS, "--run-dir"
    code, _, err = in_process(*call, run, cwd=finished)
    assert code == 0 and ("a linear probe on its features" in err) != own
    assert in_process("export-maps", "--run-dir", run)[0] == 0
    data, loaded, stores = opened(run)
    assert loaded.forms == frozenset() and loaded.predicts
    labels = None if own else data.sha256
    assert [maps.schema.extra.get("probe") for maps in stores] == [labels, labels]

    others = stores[1].gather(np.arange(WITHOUT))
    [batch] = loaded.batches(data.unlabelled, WITHOUT).in_order()
    with torch.no_grad():
        tokens = network.forward_features(batch.images)
        features = network.forward_head(tokens, pre_logits=True)
        logits = network.forward_head(tokens)[:, [1, 0]]  # in the order of the folders
    np.testing.assert_allclose(others["features"], features, rtol=1e-3, atol=1e-3)
    if not own:
        saved = torch.load(run / "phase_a/probe.pt", weights_only=True)["probe"]
        logits = features @ saved["weights"][-1].T + saved["biases"][-1]
    np.testing.assert_allclose(
        others["logits"].astype(float), logits.log_softmax(-1), rtol=1e-3, atol=1e-3
    )


def test_another_number_of_labelled_images_leaves_their_store_valid(finished, tmp_path, in_process):
    _, teacher = network_of(tmp_path / "network", 2, ["cat", "dog"])
    call = "--data", "mine", "--teacher", teacher, *SMALL, *PREDICTIONS, "--run-dir"
    few = tmp_path / "few"
    assert in_process("phase-a", *call, tmp_path / "all", cwd=finished)[0] == 0
    assert in_process("export-maps", "--run-dir", tmp_path / "all")[0] == 0
    assert in_process("phase-a", *call, few, *sets("data.train_images=8"), cwd=finished)[0] == 0
    shutil.copytree(tmp_path / "all/unlabelled.zarr", few / "unlabelled.zarr")
    written = (few / "unlabelled.zarr/zarr.json").stat().st_mtime_ns
    code, _, err = in_process("export-maps", "--run-dir", few)
    assert code == 0 and "unlabelled.zarr is complete" in err and "export: 10 images" not in err
    assert (few / "unlabelled.zarr/zarr.json").stat().st_mtime_ns == written
    assert len(store.open(few / "maps.zarr")) == 8
    assert in_process("verify", few / "unlabelled.zarr", "--teacher")[0] == 0
    assert in_process("phase-b", "--run-dir", few)[0] == 0
    [first, _] = metrics(few / "phase_b/standard/metrics.jsonl")
    assert first["loss_soft"] > 0

    # a probe, which has learned from the labels, is another one
    extra = store.open(few / "unlabelled.zarr").schema.extra
    edit_root(few / "unlabelled.zarr", extra=extra | {"probe": "of all the labels"})
    code, _, err = in_process("phase-b", "--run-dir", few, "--name", "new")
    assert code == 2 and "a probe that has learned other labels: " in err


def test_inspect_says_where_the_images_are(finished, in_process):
    code, out, _ = in_process("inspect", finished / "run/unlabelled.zarr", "--json")
    assert code == 0 and json.loads(out)["dataset"] == "mine"
    assert json.loads(out)["data"] == {
        "root": str(finished / "mine"),
        "unlabelled": None,
        "train_images": None,
        "image_size": 8,
    }


# what a student learns


def test_entries_of_two_stores_go_to_their_images(finished):
    _, _, stores = opened(finished / "run")
    expected = np.concatenate([logits_of(maps) for maps in stores])
    count = len(stores[0])
    draw = np.random.default_rng(0)
    batches = [
        draw.permutation(len(expected)),
        np.array([count + 3, 2, count, 0]),
        np.array([count + 1, count]),  # without labels
        np.array([4, 1, 3]),  # with labels
        np.array([count - 1]),
    ]
    read = {}
    for shuffled in (False, True):
        phase = PhaseBSettings(shuffle_predictions=shuffled)
        images = [StoredImages(maps, maps, phase, seed=0) for maps in stores]
        read[shuffled] = [*StoredOfEpoch(images, 0, with_maps=False).prefetch(batches)]
    for ids, entries in zip(batches, read[False], strict=True):
        assert np.array_equal(entries["logits"], expected[ids])

    # a control: an entry of the same store, and never the image's own
    others = np.empty(len(expected), int)
    others[:count] = images[0].prediction_partners
    others[count:] = images[1].prediction_partners + count
    assert not (others == np.arange(len(expected))).any()
    assert sorted(others) == [*range(len(expected))]
    assert (others[:count] < count).all()
    for ids, entries in zip(batches, read[True], strict=True):
        assert np.array_equal(entries["logits"], expected[others[ids]])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_all_images_have_predictions_and_some_have_labels(finished, temperature):
    directory = RunDirectory(finished / "run")
    settings = directory.settings().with_section(
        "phase_b", alpha=0.7, beta=0.3, soft_temperature=temperature
    )
    data, _, stores = opened(finished / "run")
    job = phase_b.build_training(settings, data, directory)
    assert len(job.images) == len(data.train) + WITHOUT
    losses = StudentLosses(job.student.eval(), settings, job.train, None)
    ids = np.array([3, len(data.train) + 2, 0, 7, len(data.train)])
    [batch] = Batches(job.images, data, CPU, 5).in_order(ids)
    stored = np.concatenate([logits_of(maps) for maps in stores])[ids]
    with torch.no_grad():
        found = losses(replace(batch, stored={"logits": stored}, whole_labelled=3), alpha=0.7)
        logits = job.student(batch.images).double().numpy()

    teacher = np.exp(log_softmax(stored.astype(np.float64) / temperature))
    soft = temperature**2 * cross_entropies(logits / temperature, teacher).mean()
    labels = batch.labels.numpy()
    assert (labels == UNLABELLED).tolist() == [False, True, False, False, True]
    known = labels != UNLABELLED
    smoothing = settings.student_training.label_smoothing
    targets = (1 - smoothing) * np.eye(2)[labels[known]] + smoothing / 2
    hard = cross_entropies(logits[known], targets).mean()
    assert found.loss_soft.item() == pytest.approx(soft, rel=1e-5)
    assert found.loss_hard.item() == pytest.approx(hard, rel=1e-5)
    assert found.loss.item() == pytest.approx(0.7 * soft + 0.3 * hard, rel=1e-5)


# exports


def command_in(folder, *arguments):
    os.chdir(folder)
    command(*arguments)


def student_of(name, *how):
    return "phase-b", "--run-dir", "run", "--set", "checkpoint_minutes=0", "--name", name, *how


def test_a_student_goes_on_where_it_was_killed(finished, run, in_process):
    folder = run.parent
    assert in_process(*student_of("whole"), cwd=folder)[0] == 0
    kill = AtCall("gaupipe.training.update:Update.backward", (9,))  # in the second epoch
    assert exit_code(command_in, folder, *student_of("killed"), kill=kill) in KILLED
    assert in_process(*student_of("killed", "--resume"), cwd=folder)[0] == 0
    whole, killed = (run / "phase_b" / name for name in ("whole", "killed"))
    assert metrics(whole / "metrics.jsonl") == metrics(killed / "metrics.jsonl")
    weights = [path / "student/model.safetensors" for path in (whole, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def write_stores(run):
    """Both stores, of several shards each."""
    write_store(run, shard_mb=0.0001)


def test_an_export_goes_on_in_and_between_the_stores(run):
    urls = [run / name for name in ("maps.zarr", "unlabelled.zarr")]
    for url in urls:
        shutil.rmtree(url)
    write_stores(run)
    shards = [len(store.open(url).shards) for url in urls]
    assert min(shards) > 1
    expected = [logits_of(store.open(url)) for url in urls]
    for url in urls:
        shutil.rmtree(url)
    for complete in (0, 1):  # killed in the first store, and in the second one
        assert exit_code(write_stores, run, kill=InWrite(2)) in KILLED
        assert sum(is_complete(str(url)) for url in urls) == complete
        if complete == 0:
            write_stores(run)
            shutil.rmtree(urls[1])
    write_stores(run)
    for url, logits in zip(urls, expected, strict=True):
        assert store.verify(url) == []
        assert np.array_equal(logits_of(store.open(url)), logits)


def test_what_an_export_finds_whole_it_leaves(run, in_process):
    call = ("export-maps", "--run-dir", run)
    code, _, err = in_process(*call)
    assert code == 2 and "maps.zarr already holds a complete store" in err
    for gone, kept in (("maps.zarr", "unlabelled.zarr"), ("unlabelled.zarr", "maps.zarr")):
        written = (run / kept / "zarr.json").stat().st_mtime_ns
        shutil.rmtree(run / gone)
        code, _, err = in_process(*call)
        assert code == 0 and f"{kept} is complete" in err
        assert (run / kept / "zarr.json").stat().st_mtime_ns == written
        assert is_complete(str(run / gone))
    assert in_process(*call, "--overwrite")[0] == 0
    for gone in ("maps.zarr", "unlabelled.zarr"):
        shutil.rmtree(run / gone)
    for part in ("1/2", "2/2"):
        assert in_process(*call, "--part", part)[0] == 0
    for name in ("maps.zarr", "unlabelled.zarr"):
        assert in_process("verify", run / name, "--teacher")[0] == 0


def test_the_predictions_of_another_teacher_are_refused(run, in_process):
    edit_root(run / "unlabelled.zarr", teacher_sha256="0" * 64)
    code, _, err = in_process("phase-b", "--run-dir", run, "--name", "new")
    assert code == 2 and err.count("\n") == 1
    assert "unlabelled.zarr: holds the images without labels of another teacher" in err
    assert not (run / "phase_b/new").exists()


def test_a_store_without_one_of_unlabelled_images_beside_it_is_refused(run, in_process):
    shutil.rmtree(run / "unlabelled.zarr")
    code, _, err = in_process("phase-b", "--run-dir", run, "--name", "new")
    assert code == 2 and err.count("\n") == 1 and "unlabelled.zarr" in err
    assert "maps.zarr: has no store" in err and "'gaupipe export-maps' writes both" in err


def test_a_comparison_learns_from_images_without_labels(in_process, tmp_path):
    photos(tmp_path / "mine/train")
    more_photos(tmp_path / "mine/unlabelled", WITHOUT)
    rows = ("--row", "distilled", "--row", "predictions of other images")
    compare = ("compare", "--data", tmp_path / "mine", "--seeds", "0", *SMALL, *SHORT, *rows)
    compare += ("--run-dir", tmp_path / "compared")
    code, out, err = in_process(*compare)
    assert code == 0 and "failed" not in out, (out, err)
    result = json.loads((tmp_path / "compared/compare.json").read_bytes())
    by_name = {row["row"]: row["runs"][0] for row in result["rows"]}
    own, other = by_name["distilled"], by_name["predictions of other images"]
    plain = by_name["plain ViT"]
    epochs = [len(run["val_acc"]) for run in (own, plain)]
    # a step costs each image the same, and 24 images with labels are 19 to train and 5 to validate
    each = own["costs"]["multiply_adds"] / epochs[0] / (19 + WITHOUT)
    assert each == pytest.approx(plain["costs"]["multiply_adds"] / epochs[1] / 19, rel=1e-6)
    assert own["costs"]["multiply_adds"] == other["costs"]["multiply_adds"]
    assert own["loss_hard"] != other["loss_hard"]
    stores = sorted((tmp_path / "compared").glob("teachers/*/*.zarr"))
    assert sorted(len(store.open(url)) for url in stores) == [WITHOUT, 19]

    more_photos(tmp_path / "mine/unlabelled", WITHOUT + 1)  # another image makes other trainings
    code, out, err = in_process(*compare)
    assert code == 0 and "2 of 3 trainings are left" in err, (out, err)
    assert len([*(tmp_path / "compared").glob("teachers/*/*.zarr")]) == 4


def test_rows_of_labels_alone_read_no_images_without_labels(in_process, tmp_path):
    photos(tmp_path / "mine/train")
    photos(tmp_path / "mine/unlabelled/copies")  # which is refused once it is read
    (tmp_path / "sweep.yaml").write_text("- {name: labels, plain: true}\n")
    # no --data: what it chooses follows from the number of these images
    folder = sets("data.name=folder", f"data.root={tmp_path / 'mine'}")
    compare = ("compare", "--run-dir", tmp_path / "compared", "--seeds", "0")
    compare += (*folder, *SMALL, *SHORT)
    code, _, err = in_process(*compare, "--sweep", tmp_path / "sweep.yaml")
    assert code == 0, err
    code, _, err = in_process(*compare)
    assert code == 2 and "are copies of training" in err


# their store, by itself


def test_verify_checks_both_stores(run, in_process):
    code, out, err = in_process("verify", "--run-dir", run)
    assert (code, out.count("complete and intact")) == (0, 2), err
    shutil.rmtree(run / "unlabelled.zarr/logits/c")
    code, out, err = in_process("verify", "--run-dir", run)
    assert code == 1 and f"{run / 'maps.zarr'}: complete and intact" in out
    assert "the shard's file is missing" in out


def test_a_store_that_names_no_data_set_is_refused_with_the_digest_asked_for(run, in_process):
    """In a run without images without labels, whose digest is empty too."""
    data, _, _ = opened(run)
    labelled = replace(data, unlabelled=None, unlabelled_sha256="")
    schema = replace(store.open(run / "maps.zarr").schema, dataset_sha256="")
    assert Exported.of(schema, labelled).split is data.train
    edit_root(run / "maps.zarr", dataset_sha256="")
    code, _, err = in_process("phase-b", "--run-dir", run, "--name", "new")
    assert code == 2 and f"(none) than asked for ({data.sha256[:16]})" in err


def test_the_images_of_their_store_are_found(run):
    data, _, (labelled, others) = opened(run)
    assert images_of(others).train.names() == data.unlabelled.names()
    assert images_of(labelled).train.names() == data.train.names()


def test_a_student_stands_beside_the_maps_of_images_without_labels(finished, tmp_path, in_process):
    teacher = sets("phase_a.teacher=vit", "phase_b.gamma=0.3")
    command = ["run", "--no-baseline", "--data", finished / "mine", *SMALL, *teacher]
    code, _, err = in_process(*command, "--run-dir", tmp_path / "run")
    assert code == 0, err
    student = load_student(tmp_path / "run", "standard", False)
    for name in ("maps.zarr", "unlabelled.zarr"):
        maps = store.open(tmp_path / "run" / name)
        found = open_maps(student, images_of(maps))
        assert found is not None and found.url == maps.url


def test_the_second_store_is_exported_as_the_first(run, in_process):
    call = "export-maps", "--run-dir", run
    assert in_process(*call, "--views", 2, "--overwrite")[0] == 0
    shutil.rmtree(run / "unlabelled.zarr")
    code, _, err = in_process(*call, "--views", 3)
    assert code == 2 and "already holds a complete store with views 2, asked 3" in err
    assert in_process(*call)[0] == 0
    assert store.open(run / "unlabelled.zarr").schema.views == 2
