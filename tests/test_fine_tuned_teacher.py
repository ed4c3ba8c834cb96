"""``phase_a.fine_tune_epochs``: a model that was trained before learns the labels, then teaches."""

import numpy as np
import pytest
import timm
import torch
from timm.models import save_for_hf

import store
from arguments import sets
from gaupipe.models import save_student
from gaupipe.settings.load import parse, with_overrides
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import outline
from gaupipe.teachers.fine_tuned import check_batch_norm
from killing import KILLED, AtCall, exit_code
from pictures import facts, more_photos, photos
from runs import metrics, run_main
from stages.runs.choices import choose
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_teacher
from vits import small
from worlds import command

SMALL = sets(
    "data.image_size=8",
    "data.batch_size=5",
    "model.args={embed_dim: 16, depth: 1, num_heads: 2, patch_size: 4, mlp_ratio: 2}",
    "phase_a.fine_tune_epochs=2",
    "phase_b.epochs=1",
    "threads=1",
)


def save_convolutions(folder, seed=0):
    torch.manual_seed(seed)
    model = timm.create_model("test_resnet", num_classes=7)
    model.pretrained_cfg["input_size"] = (3, 32, 32)
    save_for_hf(model, str(folder), model_args={"num_classes": 7})


@pytest.fixture(params=["vit", "convolutions"])
def given(request, tmp_path):
    """(``local-dir:`` of a model of 7 other classes for 32 pixels, whether it shows maps)."""
    folder = tmp_path / "given"
    if request.param == "vit":
        model = small(num_classes=7, init_values=1.0)
        save_student(model, folder, mean=(0.2,) * 3, std=(0.3,) * 3)
    else:
        save_convolutions(folder)
    return f"local-dir:{folder}", request.param == "vit"


@pytest.fixture
def images(tmp_path):
    photos(tmp_path / "mine/train")
    more_photos(tmp_path / "mine/unlabelled", 10)
    return tmp_path / "mine"


def test_it_learns_the_labels_and_predicts_the_rest(given, images, tmp_path, in_process):
    teacher, shows_maps = given
    command = ["run", "--no-baseline", "--data", images, "--teacher", teacher, *SMALL]
    code, _, err = in_process(*command, "--run-dir", tmp_path / "run")
    assert code == 0, err
    assert "which its student lacks" not in err  # its maps are those of a training for this student
    run = RunDirectory(tmp_path / "run")
    assert [entry["epoch"] for entry in metrics(run.phase_a / "metrics.jsonl")] == [1, 2]
    settings = run.settings()
    assert settings.phase_a.optim.name == "adamw"
    data = run.load_data(settings, unlabelled=True)
    loaded = load_teacher(run, data)
    assert loaded.forms == ({"maps"} if shows_maps else frozenset())
    assert loaded.network.takes.size == 32
    asked = timm.create_model(teacher).pretrained_cfg["mean"]
    assert loaded.network.takes.mean == tuple(asked) != tuple(data.mean)

    # what is stored is what timm makes of the saved model
    model = timm.create_model(f"local-dir:{run.phase_a / 'teacher'}", pretrained=True).eval()
    [batch] = loaded.batches(data.unlabelled, 10).in_order(np.arange(10))
    with torch.no_grad():
        logits = model(batch.images).log_softmax(-1)
    stored = store.open(run.path / "unlabelled.zarr").gather(np.arange(10))["logits"]
    np.testing.assert_allclose(torch.from_numpy(stored).float().log_softmax(-1), logits, atol=1e-2)

    before = timm.create_model(teacher, pretrained=True).state_dict()
    moved = [name for name, value in model.state_dict().items() if name in before]
    moved = [name for name in moved if not torch.equal(before[name], model.state_dict()[name])]
    assert any("head" not in name and "fc" not in name for name in moved)
    assert model.num_classes == data.num_classes


def test_another_teacher_of_its_run_is_taken_as_it_is(training, tmp_path, in_process):
    assert in_process(*training, "--run-dir", tmp_path / "run")[0] == 0
    save_convolutions(tmp_path / "other", seed=1)
    export = ["export-maps", "--run-dir", tmp_path / "run", "--kind", "predictions"]
    other = ["--teacher", f"local-dir:{tmp_path / 'other'}", "--out", tmp_path / "other.zarr"]
    code, _, err = in_process(*export, *other)
    assert code == 0, err
    run = ["--run-dir", tmp_path / "run", "--teacher"]
    code, _, err = in_process("verify", tmp_path / "other.zarr", *run)
    assert code == 0, err


def test_it_is_shifted_by_the_same_part_of_its_larger_images(given, images, tmp_path, in_process):
    teacher, _ = given
    command = ["phase-a", "--data", images, "--teacher", teacher, *SMALL]
    code, _, err = in_process(
        *command, *sets("augment.crop_padding=1"), "--run-dir", tmp_path / "run"
    )
    assert code == 0, err
    run = RunDirectory(tmp_path / "run")
    settings = run.settings()
    begun = outline(settings, run.load_data(settings)).begin(run.phase_a)
    assert settings.augment.crop_padding == 1
    assert begun.training().augment.crop_padding == 4  # of 32 pixels, where the student has 8


@pytest.fixture
def training(images, tmp_path):
    """A phase A that fine-tunes convolutions, whose folder is ``given``."""
    save_convolutions(tmp_path / "given")
    teacher = sets(f"phase_a.teacher=local-dir:{tmp_path / 'given'}")
    return ["phase-a", "--data", str(images), *teacher, *SMALL]


def test_a_kill_between_epochs_loses_nothing(training, tmp_path):
    run_dir = ["--run-dir", str(tmp_path / "whole")]
    assert run_main(*training, *run_dir) == 0
    run_dir = ["--run-dir", str(tmp_path / "cut")]
    kill = AtCall("gaupipe.training.update:Update.backward", (6,))  # in the second epoch
    assert exit_code(command, *training, *run_dir, kill=kill) in KILLED
    assert run_main(*training, *run_dir, "--resume") == 0
    whole, cut = (RunDirectory(tmp_path / name) for name in ("whole", "cut"))
    assert whole.teacher_digest() == cut.teacher_digest()


def test_other_weights_are_not_resumed(training, tmp_path, in_process):
    assert in_process(*training, "--run-dir", tmp_path / "run")[0] == 0
    save_convolutions(tmp_path / "given", seed=1)
    code, _, err = in_process(*training, "--run-dir", tmp_path / "run", "--resume")
    assert code == 2 and "the weights in" in err


def test_no_student_starts_from_convolutions(images, tmp_path, in_process):
    save_convolutions(tmp_path / "given")
    command = ["phase-a", "--data", images, "--teacher", f"local-dir:{tmp_path / 'given'}", *SMALL]
    changes = sets("phase_b.gamma=0", "export.kind=predictions", "phase_b.warm_start=teacher")
    code, _, err = in_process(*command, *changes, "--run-dir", tmp_path / "run")
    assert code == 2 and "is no ViT: take phase_b.warm_start=none" in err
    assert not (tmp_path / "run").exists()


def test_batch_norm_of_a_published_model_needs_one_process(monkeypatch):
    network = timm.create_model("test_byobnet")
    check_batch_norm(network, "test_byobnet")
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    check_batch_norm(timm.create_model("test_vit"), "test_vit")
    with pytest.raises(UserError, match="test_byobnet .* in one process"):
        check_batch_norm(network, "test_byobnet")


def test_only_a_trained_model_is_fine_tuned(images, tmp_path, in_process):
    command = ["phase-a", "--data", images, *sets("phase_a.teacher=resnet"), *SMALL]
    code, _, err = in_process(*command, "--run-dir", tmp_path / "run")
    assert code == 2 and "fine_tune_epochs" in err and "resnet is none" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("unlabelled", [0, 5_000])
def test_its_optimizer_is_that_of_fine_tuning(unlabelled):
    given = with_overrides({}, ["phase_a.teacher=local-dir:given", "phase_a.fine_tune_epochs=2"])
    images = facts(unlabelled=unlabelled)
    choices = choose(images, {"name": "folder", "root": "photos"}, False, given)
    phase = parse(choices.tree, "test").phase_a
    assert (phase.optim.name, phase.optim.lr, phase.stop_accuracy) == ("adamw", 2e-4, 1.0)
    assert phase.optim.args == {"layer_decay": 0.75} and phase.augment
