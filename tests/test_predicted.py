"""A teacher whose tokens predict their Gaussians: against an independent computation, and as a
whole from phase A to the student."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import gaupipe.vit.models  # noqa: F401
import store
from arguments import sets
from gaupipe.data.splits import load_data
from gaupipe.maps.gaussians import Geometry, raw_at_tokens
from gaupipe.settings import load as config
from gaupipe.teachers.gaussian import Teacher
from stages import evaluate, export_maps, phase_b, verify
from stages.phase_a import gaussian as phase_a
from stages.runs.directory import RunDirectory

TINY = [
    "phase_a.per_image=predicted",
    "model.args={depth: 2, embed_dim: 32, num_heads: 2}",
    "data.batch_size=64",
    "phase_a.max_epochs=4",
    "phase_a.optim.lr=4e-3",
    "phase_b.epochs=1",
    "threads=1",
]


def teacher_of(parametrisation: str = "loc_scale", **options) -> Teacher:
    torch.manual_seed(0)
    vit = timm.create_model(
        "gauvit_pico_patch2_8", attention="gaussian", depth=2, embed_dim=32, in_chans=1
    )
    return Teacher(vit, parametrisation, predicts=True, **options).eval()


@pytest.mark.parametrize("parametrisation", ["loc_scale", "paper"])
def test_a_teacher_starts_with_a_gaussian_on_each_token(parametrisation):
    teacher, images = teacher_of(parametrisation), torch.randn(3, 1, 8, 8)
    logits, gaussians = teacher.look(images)
    here = torch.tensor([-1, -1 / 3, 1 / 3, 1])
    y, x = torch.meshgrid(here, here, indexing="ij")
    torch.testing.assert_close(gaussians[2, 1, 3, :, 0], x.flatten())
    torch.testing.assert_close(gaussians[2, 1, 3, :, 1], y.flatten())
    torch.testing.assert_close(gaussians[..., 2:], torch.full((3, 2, 4, 16, 2), 2 / 3))
    torch.testing.assert_close(teacher(images, None), logits)
    torch.testing.assert_close(teacher(images, gaussians), logits)
    assert teacher.predictor.shape == (2, 4 * gaussians.new_zeros(teacher.raw_shape).shape[-1], 32)


def test_predicted_gaussians_are_of_the_view_that_the_teacher_sees():
    """So a batch's geometry moves nothing, and each image of a batch is by itself."""
    settings = config.load(
        "digits", [*TINY, "phase_a.augment=true", "augment.flip=true", "data.train_images=64"]
    )
    data = load_data(settings.data)
    job = phase_a.build(settings, Path("unused"), data)
    torch.nn.init.normal_(job.teacher.predictor, std=0.3)
    batch = next(job.batches(data.train, 8).in_order(np.arange(8)))
    moved = Geometry(torch.zeros(8, 2), torch.tensor([[-1.0, 1.0]]).expand(8, 2))
    loss = phase_a.TeacherLoss(job)
    flipped = dataclasses.replace(batch, images=batch.images.flip(-1), geometry=moved)
    alone = dataclasses.replace(flipped, geometry=None)
    assert torch.equal(loss(flipped, None, None), loss(alone, None, None))
    assert not torch.equal(loss(flipped, None, None), loss(batch, None, None))
    one = job.teacher.look(batch.images[3:4])[1]
    torch.testing.assert_close(job.teacher.look(batch.images)[1][3:4], one)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predicted") / "run"
    phase_a.run(config.load("digits", TINY), folder)
    export_maps.run(folder)
    return folder


def test_the_teacher_knows_unseen_images_and_keeps_nothing_of_seen_ones(run_dir):
    lines = (run_dir / "phase_a/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert metrics[-1]["val_acc"] > 0.6 and metrics[-1]["train_loss"] < metrics[0]["train_loss"]
    state = torch.load(run_dir / "phase_a/checkpoint/state.pt", weights_only=True)
    assert state["rows"] is None and not (run_dir / "phase_a/rows").exists()
    assert state["modules"]["predictor"].abs().sum() > 0
    start = raw_at_tokens("loc_scale", (4, 4), 1.0).expand_as(state["modules"]["prior"])
    assert not torch.equal(state["modules"]["prior"], start)


def test_its_store_holds_the_gaussians_that_it_predicts(run_dir, in_process):
    maps = store.open(str(run_dir / "maps.zarr"))
    assert maps.schema.kind == "gaussian"
    job = phase_a.load(RunDirectory(run_dir))
    ids = np.array([700, 3, 41])
    batch = next(job.batches(job.data.train).in_order(ids))
    logits, gaussians = job.teacher.look(batch.images)
    stored = maps.gather(ids)
    np.testing.assert_allclose(
        stored["gaussians"], gaussians.detach().numpy(), rtol=2e-3, atol=2e-3
    )
    np.testing.assert_allclose(
        stored["logits"], logits.log_softmax(-1).detach().numpy(), rtol=2e-3, atol=5e-3
    )
    assert np.abs(stored["gaussians"][0] - stored["gaussians"][1]).max() > 0.01
    assert verify.against_teacher(str(run_dir / "maps.zarr"), run_dir) == []
    for kind, word in (("prior", "per_image"), ("embedding", "per_image")):
        code, _, err = in_process(
            "export-maps", "--run-dir", run_dir, "--kind", kind, "--overwrite"
        )
        assert code == 2 and word in err and err.count("\n") == 1


def test_students_learn_from_it_and_are_shown_beside_it(run_dir):
    for name, changes in {
        "moved": ["augment={flip: true, crop_padding: 1}"],
        "warm": ["phase_b.warm_start=teacher"],
        "fitted": ["phase_b.warm_start=prior"],
    }.items():
        metrics = phase_b.run(run_dir, name=name, overrides=changes)
        assert 0 < metrics[-1]["loss_feat"] < 3
    scores = evaluate.run(run_dir, "fitted")
    metrics = (run_dir / "phase_a/metrics.jsonl").read_text().splitlines()
    assert scores["teacher_top1"] == pytest.approx(json.loads(metrics[-1])["val_acc"])
    assert scores["map_kl"][0] < evaluate.run(run_dir, "warm")["map_kl"][0]


def test_its_maps_of_views_can_be_stored(run_dir, tmp_path):
    """The teacher sees views, so the store holds what it predicts for them, and nothing moves."""
    changes = ["augment={flip: true}", *TINY, "data.train_images=40", "phase_a.max_epochs=1"]
    phase_a.run(config.load("digits", changes), tmp_path / "run")
    url = export_maps.run(tmp_path / "run", views=3)
    stored = store.open(url).gather(np.arange(120))["gaussians"].reshape(40, 3, -1)
    assert (stored[:, 0] != stored[:, 1]).any(1).sum() > 5  # some views are flipped, others not
    assert any((stored[:, a] == stored[:, b]).all(1).any() for a, b in ((0, 1), (1, 2)))
    assert phase_b.run(tmp_path / "run")[-1]["loss_feat"] > 0


@pytest.mark.parametrize(
    "change, message",
    [
        ("phase_a.mode=stochastic", "needs mode: expected"),
        ("phase_a.teacher=vit", "has no Gaussians"),
        ("model.args={class_token: true}", "class or register token"),
    ],
)
def test_what_cannot_be_predicted_is_refused(change, message, in_process, tmp_path):
    changes = sets(*TINY, change)
    code, _, err = in_process("phase-a", "digits", "--run-dir", tmp_path / "run", *changes)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()
