"""A run in Python, and the example of its page."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from sklearn.datasets import load_digits

import gaupipe
from arguments import sets, tiny
from exports import write_store
from gaupipe.data.load import load_data
from gaupipe.distillation.job import StudentLosses
from gaupipe.settings import DataSettings
from gaupipe.system.errors import UserError
from stages import phase_a, phase_b
from stages.runs.trained import load_teacher

PAGE = Path(__file__).parent.parent / "docs" / "own-loop.md"


def test_the_example_of_the_page_measures_maps(copied_run, tmp_path, monkeypatch, capsys):
    copied_run(name="runs/steps")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    section = PAGE.read_text().split("## A run in Python")[1]
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], names := {})
    lines = [line.split(" ", 2) for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [["0", "teacher"], ["0", "student"]]
    maps = names["run"].maps(range(32))[0].numpy()  # [B, H, T, T]
    rows, columns = np.divmod(np.arange(16), 4)
    apart = np.hypot(rows[:, None] - rows, columns[:, None] - columns)
    expected = np.einsum("bhqk,qk->h", maps, apart) / (32 * 16)
    assert json.loads(lines[0][2]) == pytest.approx(expected.tolist(), rel=1e-5)


def test_the_loop_of_the_page_trains_a_student(copied_run, tmp_path, monkeypatch):
    copied_run(name="runs/steps")
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().split("## Train a student in your own loop")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    code = code.replace('attention="belief"', 'attention="belief", depth=1, num_heads=2')
    code = code.replace("range(5)", "range(20)").replace("lr=1e-3", "lr=1e-2")
    exec(code, names := {})
    assert names["loss"] < 2  # 2.3 is that of ten classes of which nothing is known


def test_batches_of_an_epoch_are_those_of_phase_b(run, monkeypatch):
    """Images, labels and stored maps, seen where the loop of phase B gets them."""
    opened = gaupipe.open_run(run)
    seen = []
    compute = StudentLosses.forward

    def watched(self, batch, gamma=0.0, alpha=0.0):
        if self.teacher_maps is not None:
            seen.append((batch, self.teacher_maps.of(batch).map(0)))
        return compute(self, batch, gamma, alpha)

    monkeypatch.setattr(StudentLosses, "forward", watched)
    phase_b.run(run, "standard", name="watched")
    batches = list(opened.train_loader(0))
    assert len(batches) == len(seen) > 1
    for batch, (theirs, maps) in zip(batches, seen, strict=True):
        assert torch.equal(batch.images, theirs.images)
        assert torch.equal(batch.labels, theirs.labels) and torch.equal(batch.ids, theirs.ids)
        torch.testing.assert_close(batch.maps[0], maps)
        torch.testing.assert_close(batch.maps[0], opened.maps(batch.ids)[0])
        assert torch.allclose(
            batch.predictions.exp().sum(-1), torch.ones(len(batch.ids)), atol=1e-2
        )
    labels = opened.data.train.labels
    assert all(np.array_equal(labels[batch.ids], batch.labels) for batch in batches)
    (first, *_) = opened.train_loader(1, maps=False)
    assert first.maps == [] and not torch.equal(first.ids, batches[0].ids)


def test_images_maps_students_and_metrics_are_those_of_the_run(small_run, in_process):
    run = gaupipe.open_run(small_run)
    student, ids = run.student("standard"), [7, 3]
    pixels = np.rint(load_digits().images * (255 / 16))
    data = load_data(DataSettings(name="digits", train_images=40))
    for split in ("train", "val"):
        positions = getattr(data, split).positions[ids]
        mean, std = (student.pretrained_cfg[name][0] for name in ("mean", "std"))
        images = torch.tensor((pixels[positions] / 255 - mean) / std, dtype=torch.float32)
        torch.testing.assert_close(run.images(ids, split), images[:, None])
    (maps,) = run.maps(ids)
    assert maps.shape == (2, 2, 16, 16) and torch.allclose(maps.sum(-1), torch.ones(2, 2, 16))
    seen = in_process("inspect", small_run / "maps.zarr", "--image", 7, "--head", 1, "--json")[1]
    # the last block and the patch in the middle of 4 x 4, unless others are asked for
    last = run.maps(ids)[-1]
    np.testing.assert_allclose(np.ravel(json.loads(seen)["map"]), last[0, 1, 10], atol=1e-6)
    said = f"run {small_run}: digits, gauvit_pico_patch2_8, teacher gaussian\n  distilled: standard"
    assert str(run) == said
    same = timm.create_model(f"local-dir:{small_run}/phase_b/standard/student", pretrained=True)
    torch.testing.assert_close(
        same.eval()(run.images(ids)), student(run.images(ids)), rtol=0, atol=0
    )
    assert [row["epoch"] for row in run.metrics("standard")] == [1]
    assert run.metrics("phase_a")[0]["train_loss"] > 0


@pytest.mark.parametrize("ids", [[-1], [1.5], [True], [40], [], [[1, 2]], ["a"], range(39, 42)])
def test_images_that_there_are_not_are_refused(small_run, ids):
    run = gaupipe.open_run(small_run)
    for ask in (run.images, run.maps):
        with pytest.raises(
            UserError, match=r"ids of .*images in .*: should be one or more whole n"
        ):
            ask(ids)


def test_any_whole_numbers_are_ids(small_run):
    run = gaupipe.open_run(small_run)
    images, maps = run.images([7, 3]), run.maps([7, 3])[0]
    for ids in (np.array([7, 3], np.uint8), torch.tensor([7, 3]), {7: 0, 3: 0}):
        torch.testing.assert_close(run.images(ids), images, rtol=0, atol=0)
        torch.testing.assert_close(run.maps(ids)[0], maps, rtol=0, atol=0)
    torch.testing.assert_close(run.images(iter([7, 3])), images, rtol=0, atol=0)
    for ask in (run.images, run.maps):
        with pytest.raises(UserError, match="view=7: holds maps of the images themselves, not of"):
            ask([0], view=7)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda run: run.images([0], "nope"), "digits has no split 'nope': train, val"),
        (lambda run: run.images([0], "test"), "digits has no split 'test': train, val"),
        (lambda run: run.train_loader(-1), "epoch -1: epochs are counted from 0"),
        (lambda run: run.metrics("belief"), "belief has no metrics.jsonl"),
        (lambda run: run.metrics("standard", plain=True), "plain/standard has no metrics.jsonl"),
    ],
)
def test_mistakes_are_refused(small_run, call, message):
    with pytest.raises(UserError, match=message):
        call(gaupipe.open_run(small_run))


def test_a_view_and_its_maps_belong_together(tmp_path):
    from gaupipe.settings.load import load

    changes = ["phase_a.teacher=vit", "data.train_images=40", "phase_a.max_epochs=1", "threads=1"]
    changes += ["augment.flip=true", "model.args={embed_dim: 16, depth: 1, num_heads: 2}"]
    phase_a.run(load("digits_expected", changes), tmp_path / "run")
    write_store(tmp_path / "run", {"kind": "dense", "views": 3})
    run = gaupipe.open_run(tmp_path / "run")
    with pytest.raises(UserError, match=r"3 views of each image.*maps\(ids, view=0\)"):
        run.maps([5])
    teacher = load_teacher(run.directory).network
    ids = range(8)
    for view in range(3):
        maps = teacher.forward_with_maps(run.images(ids, view=view))[2].maps()[:, 0]
        torch.testing.assert_close(run.maps(ids, view=view)[0], maps, atol=2e-3, rtol=1e-2)
    assert not torch.equal(run.images(ids, view=0), run.images(ids, view=1))
    for view in (3, -1, True, 1.5):
        for ask in (run.images, run.maps):
            with pytest.raises(UserError, match="ids of views in .* from 0 to 2"):
                ask(ids, view=view)


def test_a_run_of_labels_alone_has_no_maps_of_a_teacher(in_process, tmp_path):
    settings = sets(*tiny(40, 20, 1, depth=1))
    code, _, err = in_process("train", "--run-dir", tmp_path / "run", *settings, cwd=tmp_path)
    assert code == 0, err
    with pytest.raises(UserError, match="has no teacher"):
        gaupipe.open_run(tmp_path / "run").maps([0])
    with pytest.raises(UserError, match="has no teacher"):
        gaupipe.open_run(tmp_path / "run").train_loader()
