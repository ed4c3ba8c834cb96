"""Checkpoints, per-image parameters and students: what changed after it was written is
refused in one line, and a process killed at any moment leaves what the next one reads."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from damage import flip
from gaupipe.data.buckets import Buckets
from gaupipe.models import save_student
from gaupipe.settings import OptimSettings
from gaupipe.system import digests
from gaupipe.system import files as folders
from gaupipe.system.errors import UserError, mistake_of
from gaupipe.teachers.image_state import ImageState
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.state import TrainingState
from gaupipe.vit.saving import check_digest
from killing import KILLED, each_operation, forked

PICO = "gauvit_pico_patch2_8"


# ---- checkpoints ---------------------------------------------------------------------------------


def make_state(width: int = 16, finished: bool = False) -> TrainingState:
    torch.manual_seed(0)
    model = timm.create_model(PICO, embed_dim=width, depth=1, num_heads=2)
    optimizer, schedule = build_optimizer(model, OptimSettings(), epochs=2, steps_per_epoch=3)
    return TrainingState(
        model, optimizer, schedule, OptimSettings(), metrics=[{"epoch": 1}], finished=finished
    )


def weights(state: TrainingState) -> dict:
    return {name: value.clone() for name, value in state.network.state_dict().items()}


def test_one_flipped_bit_of_a_checkpoint_is_refused(tmp_path):
    """Or it lies between the tensors, where nothing is read."""
    sound_state, refused = make_state(), 0
    sound_state.save(tmp_path)
    path = tmp_path / "state.pt"
    sound, right = path.read_bytes(), weights(sound_state)
    for where in np.linspace(0, 1, 40):
        flip(path, where)
        state = make_state()
        for parameter in state.network.parameters():
            torch.nn.init.zeros_(parameter)
        try:
            state.load(tmp_path)
        except UserError as error:
            refused += 1
            said = str(error)
            assert "damaged" in said and "\n" not in said and str(tmp_path) in said
        else:
            read = weights(state)
            torch.testing.assert_close(read, right, rtol=0, atol=0)
            assert state.metrics == sound_state.metrics
        path.write_bytes(sound)
    assert refused > 20
    make_state().load(tmp_path)


PARTS = ("modules", "optimizer", "scaler", "ema", "rows", "metrics", "identity", "finished")


@pytest.mark.parametrize(
    "content",
    [
        *(b"hello", b"PK\x05\x06" + bytes(18), [1, 2], None),
        dict.fromkeys(PARTS, 3),
        dict(zip(PARTS, ({}, {}, {}, None, None, [1], {}, False), strict=True)),
    ],
    ids=lambda content: str(content)[:20],
)
def test_a_foreign_checkpoint_is_refused(tmp_path, content):
    path = tmp_path / "state.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(UserError, match="damaged, or not a checkpoint of this run") as error:
        make_state().load(tmp_path)
    assert "\n" not in str(error.value)


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    make_state(width=32).save(tmp_path)
    with pytest.raises(UserError, match="size mismatch"):
        make_state().load(tmp_path)


def test_a_save_that_is_killed_at_any_step_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    folder, seen = tmp_path / "checkpoint", set()
    make_state().save(folder)
    first = shutil.copytree(folder, tmp_path / "first")
    new = make_state(finished=True)
    for kill in each_operation(folder, 0, 1, 1000, 10_000):
        shutil.rmtree(folder)
        shutil.copytree(first, folder)
        killed = forked(lambda: new.save(folder), kill) in KILLED
        assert killed or kill.byte is None, kill
        assert (folder / "state.pt").is_file()
        state = make_state()
        state.load(folder)
        seen.add(state.finished)
        new.save(folder)  # and the next one goes on from there
        make_state().load(folder)
        if not killed:
            break
    assert seen == {False, True} and kill.operation > 3
    assert [path.name for path in folder.iterdir()] == ["state.pt"]


# ---- per-image parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "[" * 10**5, '{"commits": []}', "\udcff"])
def test_a_damaged_files_json_is_refused(tmp_path, text):
    images = ImageState(Buckets(6), torch.zeros(5), lr=0.1, folder=tmp_path)
    images.update(torch.arange(6), torch.ones(6, 5))
    images.commit()
    checkpoint = images.save(tmp_path, "1")
    (tmp_path / "bucket-0000" / "files.json").write_bytes(text.encode(errors="surrogateescape"))
    again = ImageState(Buckets(6), torch.zeros(5), lr=0.1, folder=tmp_path)
    with pytest.raises(UserError) as error:
        again.load(tmp_path, checkpoint)
    assert "\n" not in str(error.value)


# ---- students ------------------------------------------------------------------------------------


@pytest.fixture
def run(copied_run) -> Path:
    """A run whose student has no digests, as a folder that another program wrote."""
    folder = copied_run()
    without_digest(folder / "phase_b/standard/student")
    return folder


def without_digest(student: Path) -> None:
    config = json.loads((student / "config.json").read_text())
    del config["sha256"]
    (student / "config.json").write_text(json.dumps(config))


def assert_refused(run: Path, message: str, in_process) -> None:
    code, out, err = in_process("evaluate", "--run-dir", run, "--student", "standard")
    assert (code, err.count("\n"), out) == (2, 1, "") and message in err and "student" in err, err


@pytest.mark.parametrize("changes", [{"more": torch.ones(1)}, {"head.bias": torch.ones(3)}])
def test_a_student_with_other_weights_is_refused(run, changes, in_process):
    path = run / "phase_b/standard/student/model.safetensors"
    save_file(load_file(path) | changes, path)
    assert_refused(run, "in model.safetensors", in_process)


def test_the_student_of_other_images_is_refused(run, in_process):
    student = run / "phase_b/standard/student"
    save_student(timm.create_model(PICO, in_chans=3, num_classes=4), student)
    without_digest(student)
    assert_refused(run, "is for 3 channels, 8 x 8 pixels and 4 classes", in_process)


@pytest.mark.parametrize("littered", [False, True], ids=["", "after another kill"])
def test_a_student_that_is_replaced_by_a_killed_process(tmp_path, littered):
    """At every moment there is the old student or the new one, but between the two renames; and the
    next save puts the old one back, and leaves nothing else behind."""
    old, new = (
        timm.create_model(PICO, embed_dim=8, depth=1, num_heads=2, num_classes=classes)
        for classes in (4, 5)
    )
    parent, first, seen = tmp_path / "runs", tmp_path / "first", []
    folder = parent / "student"
    save_student(old, folder)
    if littered:
        shutil.copytree(folder, parent / ".student.partial-abc")
    shutil.copytree(parent, first)
    for kill in each_operation(parent, 0, 1000):
        shutil.rmtree(parent)
        shutil.copytree(first, parent)
        killed = forked(lambda: save_student(new, folder), kill) in KILLED
        seen.append(classes_of(folder) if folder.is_dir() else None)
        with folders.replaced(folder) as fresh:  # puts an earlier student back first
            assert classes_of(folder) == (seen[-1] or 4)
            (fresh / "config.json").touch()
        assert [path.name for path in parent.iterdir()] == ["student"]
        if not killed:
            break
    assert set(seen) == {4, 5, None}
    assert seen.count(None) == 1 and len(seen) > 8


def classes_of(student: Path) -> int:
    """Classes of a student, which is whole."""
    check_digest(student)
    return json.loads((student / "config.json").read_text())["num_classes"]


def test_a_student_takes_no_place_of_something_else(tmp_path):
    model = timm.create_model(PICO)
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.tex").write_text("precious")
    for name in ("file", "folder"):
        with pytest.raises(UserError, match="is not the folder of a student"):
            save_student(model, tmp_path / name)
    for name in ("file", "folder/thesis.tex"):
        assert (tmp_path / name).read_text() == "precious"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    save_student(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "config.json").is_file()


def test_a_full_disk_is_said_in_one_line():
    with pytest.raises(OSError, match="No space") as refused:
        digests.save({"weights": torch.zeros(10_000)}, Path("/dev/full"))
    assert mistake_of(refused.value) == "/dev/full: No space left on device"
