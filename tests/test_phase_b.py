"""Phase B as a whole, small: students learn from every kind of store, under augmentation, and
export to ONNX."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from timm.layers import Mlp

import store
from exports import write_store
from gaupipe.attention import STUDENTS
from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.distillation.job import remarks_on_maps
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.distillation.reading import StoredImages, StoredOfEpoch, other_images
from gaupipe.distillation.student import check_student
from gaupipe.maps.gaussians import expected_map
from gaupipe.models import forward_with_maps
from gaupipe.settings import OptimSettings, PhaseBSettings
from gaupipe.settings.load import dump, load
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import outline
from gaupipe.training import job as training_job
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import classification_metrics
from stages import evaluate, phase_a, phase_b
from stages.cli import train as command_line
from stages.publish import export_student
from stages.runs import opening, students
from stages.runs.directory import RunDirectory
from stages.runs.students import StudentRequest
from stores import make_schema
from vits import small

TEACHER = [
    "phase_a.max_epochs=3",
    "train.epochs=5",
    "data.batch_size=64",
    "train.optim.lr=4e-3",
    "model.args={depth: 2, embed_dim: 32, num_heads: 2}",
    "threads=1",
    "phase_b.alpha=0.1",
    "phase_b.gamma_schedule=constant",
    "phase_b.gamma_epochs=null",
    "model.match_params=true",
]


def make(run_dir: Path, *overrides: str, kind: str = "gaussian") -> Path:
    phase_a.run(load("digits_expected", [*TEACHER, *overrides]), run_dir)
    write_store(run_dir, {"kind": kind})
    return run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make(tmp_path_factory.mktemp("phase_b") / "run")


@contextlib.contextmanager
def changed(run_dir: Path, *overrides: str):
    """The same run with other settings of phase B, for a while."""
    path = run_dir / "config.yaml"
    before = path.read_text()
    path.write_text(dump(load(path, list(overrides))))
    try:
        yield run_dir
    finally:
        path.write_text(before)


@pytest.mark.parametrize("key", ["standard", "belief2", "attentionx", "gaussian"])
def test_a_student_learns(run_dir, key):
    """The gradients of all attentions are tested in test_distillation."""
    rows = phase_b.run(run_dir, key)
    for loss in ("loss_feat", "loss_hard"):
        assert rows[-1][loss] < rows[0][loss], loss
    assert rows[-1]["val_acc"] > 0.5  # chance is 0.1
    scores = evaluate.run(run_dir, key)
    assert scores["top1"] == pytest.approx(rows[-1]["val_acc"])
    assert scores["loss"] == pytest.approx(rows[-1]["val_loss"], 1e-4)
    assert 0 <= scores["calibration_error"] <= 1 and scores["teacher_agreement"] > 0.3
    assert len(scores["map_kl"]) == 2 and all(0 < kl < 5 for kl in scores["map_kl"])


def test_gradient_checkpointing_changes_no_metric(run_dir, tmp_path):
    """By the blocks that L_feat runs one by one."""
    losses = []
    for on in ("false", "true"):
        changes = [f"grad_checkpointing={on}", "train.epochs=1", "phase_b.gamma=1"]
        settings = load(run_dir / "config.yaml", changes)
        request = StudentRequest(settings, tmp_path / on, teacher_run=RunDirectory(run_dir))
        [row] = phase_b.run_request(request)
        losses.append((row["train_loss"], row["val_loss"]))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("distilled", [False, True])
def test_patches_are_dropped_in_the_first_half_where_no_maps_are_compared(
    run_dir, tmp_path, monkeypatch, distilled
):
    changes = ["train.patch_drop_rate=0.7", "phase_b.gamma_schedule=stop_after"]
    settings = load(run_dir / "config.yaml", [*changes, "phase_b.gamma_epochs=1"])
    trained: list[set[int]] = []  # of each epoch the numbers of tokens that FFNs get
    scored: set[int] = set()
    forward, drop_patches = Mlp.forward, training_job.drop_patches

    def noted(mlp, x):
        (trained[-1] if mlp.training else scored).add(x.shape[1])
        return forward(mlp, x)

    def begun(student, share):
        trained.append(set())
        drop_patches(student, share)

    monkeypatch.setattr(Mlp, "forward", noted)
    monkeypatch.setattr(training_job, "drop_patches", begun)
    teacher = RunDirectory(run_dir) if distilled else None
    phase_b.run_request(
        StudentRequest(settings, tmp_path / "run/plain/standard", teacher_run=teacher)
    )
    assert trained == [{16} if distilled else {4}, {4}, {16}, {16}, {16}] and scored == {16}


@pytest.mark.parametrize(
    "changes,drops",
    [
        (["phase_b.gamma_schedule=constant"], False),
        (["phase_b.gamma_schedule=stop_after", "phase_b.gamma_epochs=2"], False),
        (["phase_b.gamma_schedule=stop_after", "phase_b.gamma_epochs=1"], True),
    ],
)
def test_a_rate_that_drops_no_patches_is_said(run_dir, changes, drops):
    changes = [*changes, "train.patch_drop_rate=0.5", "train.epochs=4"]
    settings = load(run_dir / "config.yaml", changes)
    job = phase_b.build_training(settings, load_data(settings.data), RunDirectory(run_dir))
    assert any("patch_drop_rate=0.5 drops nothing" in line for line in job.remarks) != drops


def test_export_to_onnx_agrees_in_onnxruntime(run_dir, capfd):
    onnxruntime = pytest.importorskip("onnxruntime")
    phase_b.run(run_dir, "belief2", resume=True)
    path, difference, use = export_student.export_student(run_dir, "belief2")
    assert difference < 1e-4
    images = torch.randn(7, 1, 8, 8)
    logits = onnxruntime.InferenceSession(str(path)).run(None, {"images": images.numpy()})[0]
    student = evaluate.load_student(run_dir, "belief2").model
    torch.testing.assert_close(
        torch.from_numpy(logits), student(images).detach(), atol=1e-4, rtol=1e-4
    )
    capfd.readouterr()
    exec(use)
    said = np.fromstring(capfd.readouterr().out.strip(" []\n"), sep=" ")
    of_zeros = student(torch.zeros(1, 1, 8, 8)).detach()[0]
    np.testing.assert_allclose(said, of_zeros, atol=1e-3)


@pytest.mark.long
def test_programs_of_torch_export_are_the_students_without_gaupipe(run_dir, tmp_path):
    for key in STUDENTS:
        phase_b.run(run_dir, key, resume=True)
        path, difference, _ = export_student.export_student(
            run_dir, key, out=tmp_path / f"{key}.pt2"
        )
        assert path == tmp_path / f"{key}.pt2" and difference < 1e-4
    images = [torch.randn(count, 1, 8, 8) for count in (1, 7)]
    torch.save(images, tmp_path / "images")
    code = f"""
import sys, torch
for key in {list(STUDENTS)}:
    program = torch.export.load(f"{{key}}.pt2").module()
    torch.save([program(batch) for batch in torch.load("images")], f"{{key}}.logits")
assert "gaupipe" not in sys.modules and "timm" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    for key in STUDENTS:
        student = evaluate.load_student(run_dir, key).model
        for logits, batch in zip(torch.load(tmp_path / f"{key}.logits"), images, strict=True):
            torch.testing.assert_close(logits, student(batch), atol=1e-4, rtol=1e-4)


AUGMENT = "flip: true, crop_padding: 1, erasing: 0.2, mixup: 0.2, cutmix: 0.2"
WAYS = {
    "augmented-muon-wsd": [
        "phase_a.augment=true",
        f"augment={{{AUGMENT}, randaugment: {{ops: 1}}}}",
        "train.optim={name: muon, schedule: wsd, lr: 1e-3}",
    ],
    "embedding-float16-accumulate-ema": [
        "phase_a.per_image=embedding",
        "phase_a.compression={embedding: 8, hidden: 16}",
        "phase_b.warm_start=teacher",
        "precision=float16",
        "phase_a.optim.clip_grad=0.5",
        "train.optim={lr: 4e-3, accumulate: 2, ema: 0.8}",
    ],
    "dense-bfloat16-paper-other-grid-rezero": [
        "phase_b.divergence=student_teacher",
        "phase_b.temperature=2",
        "precision=bfloat16",
        "phase_a.parametrisation=paper",
        "phase_a.mode=stochastic",
        "model.student_args={patch_size: 1, rezero: true}",
    ],
    "prior-other-depth-and-heads": [
        "phase_a.per_image=none",
        "model.student_args={depth: 3, num_heads: 4}",
        "phase_b.layer_map=[0, null, 1]",
        "phase_b.head_map=mean",
    ],
}
"""Settings that stand in no other's way are in one training."""


@pytest.mark.parametrize("way", WAYS)
def test_the_ways_to_distil(tmp_path, way):
    kind = way.split("-")[0] if way.split("-")[0] in MAP_KINDS else "gaussian"
    short = ["data.train_images=400", "phase_a.max_epochs=1", "train.epochs=3"]
    changes = [*short, "phase_b.gamma=1", *WAYS[way]]
    rows = phase_b.run(make(tmp_path / "run", *changes, kind=kind), "standard")
    for name in ("train_loss", "loss_feat"):
        assert rows[-1][name] < rows[0][name], name
    assert np.isfinite([[row["train_loss"], row["val_loss"]] for row in rows]).all()


@pytest.mark.long
def test_compiled_passes_learn_the_same(tmp_path, monkeypatch):
    """Traced by torch.compile, run without its code generator, which takes a minute a model."""
    traced = []

    def compile_eagerly(function):
        traced.append(function)
        return torch_compile(function, backend="eager")

    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    overrides = [
        "data.train_images=200",
        "phase_a.max_epochs=1",
        "train.epochs=2",
        "phase_b.gamma_schedule=stop_after",
        "phase_b.gamma_epochs=1",
        "augment={flip: true, mixup: 0.5}",
    ]
    losses = []
    for compiled in ("false", "true"):
        run_dir = make(tmp_path / compiled, *overrides, f"compile={compiled}")
        losses.append([row["train_loss"] for row in phase_b.run(run_dir, "belief2")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(traced) == 1 + 2


def test_cosine_with_restarts_inside_the_epochs_of_the_phase():
    args = {"num_epochs": 3, "cycle_limit": 2, "cycle_mul": 2, "cycle_decay": 0.5}
    optim = OptimSettings(lr=1e-2, min_lr=0.0, warmup_epochs=1, schedule_args=args)
    optimizer, schedule = build_optimizer(
        timm.create_model("gauvit_pico_patch2_8"), optim, epochs=10, steps_per_epoch=4
    )
    rates = []
    for update in range(40):
        schedule.step_update(update)
        rates.append(optimizer.param_groups[0]["lr"])
    rates = np.array(rates)
    assert rates[[0, 4, 10, 16, 28]] == pytest.approx(
        [0, 1e-2, 5e-3, 5e-3, 2.5e-3]
    )  # the second cycle is updates 16 to 39
    assert np.flatnonzero(np.diff(rates) > 0).tolist() == [0, 1, 2, 3, 15] and rates[39] < 1e-4


@pytest.mark.parametrize(
    "overrides,message",
    [
        (["train.optim.schedule=cosinus"], "timm cannot make 'cosinus'"),
        (["train.optim.schedule=none"], "'constant' holds"),
        (["phase_b.head_map=[0, 2]"], "phase_b.head_map: should have 2 entries, each 0 to 1"),
        (["model.attention_options={gama: 2}"], "gama"),
    ],
)
def test_what_cannot_be_compared_is_refused(run_dir, overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        phase_b.run(run_dir, "attentionx", name="refused", overrides=overrides)
    assert not (run_dir / "phase_b" / "refused").exists()


def test_maps_that_all_images_share_cannot_be_shuffled(tmp_path):
    folder = make(tmp_path / "run", "phase_a.per_image=none", "phase_a.max_epochs=1", kind="prior")
    with pytest.raises(UserError, match="phase_b.shuffle_maps: no image has maps of its own in"):
        phase_b.run(folder, name="x", overrides=["phase_b.shuffle_maps=true"])


def test_maps_are_read_in_the_epochs_that_compare_them(run_dir):
    settings = RunDirectory(run_dir).settings()
    phase = {"epochs": 3, "gamma": 0.3, "gamma_schedule": "stop_after", "gamma_epochs": 1}
    settings = settings.with_section("phase_b", **phase)
    job = phase_b.build_training(settings, load_data(settings.data), RunDirectory(run_dir))
    for epoch, names in enumerate([{"gaussians"}, set(), set()]):
        (read,) = job.epochs[epoch].stored.prefetch([np.arange(5)])
        assert set(read) == names | {"logits"}


def test_shuffled_maps_are_seldom_those_of_the_same_batch():
    """As almost all would be if the cycle through the images were drawn as the order of an
    epoch."""
    others = other_images(1000, seed=3)
    for epoch in range(3):
        order = np.random.default_rng((3, epoch)).permutation(1000)
        batch_of = np.empty(1000, dtype=int)
        batch_of[order] = np.arange(1000) // 50  # twenty batches
        assert (batch_of == batch_of[others]).mean() < 0.2


def test_shuffled_maps_are_those_of_other_images_always_the_same(run_dir):
    maps = store.open(run_dir / "maps.zarr")
    images = StoredImages(maps, maps, PhaseBSettings(shuffle_maps=True), seed=0)
    shuffled = StoredOfEpoch([images], 0, with_maps=True)
    first, second = np.random.default_rng(1).permutation(1437), np.arange(1437)
    (one,), (other,) = list(shuffled.prefetch([first])), list(shuffled.prefetch([second]))
    own = maps.gather(second)
    assert images.map_partners is not None and not (images.map_partners == second).any()
    assert not (other["gaussians"] == own["gaussians"]).reshape(1437, -1).all(1).any()
    assert np.array_equal(one["gaussians"], other["gaussians"][first])  # whatever the order
    assert np.array_equal(other["logits"], own["logits"])
    taken, all_of_them = (
        np.sort(entries["gaussians"].reshape(1437, -1), axis=0) for entries in (other, own)
    )
    assert np.array_equal(taken, all_of_them)  # each is taken once


@pytest.mark.parametrize(
    "key,tokens",
    [
        ("standard", "class_token: true, global_pool: token"),
        ("attentionx", "class_token: true, reg_tokens: 2"),
    ],
)
def test_a_student_with_class_and_register_tokens(run_dir, key, tokens, tmp_path):
    settings = load(
        run_dir / "config.yaml",
        [
            f"model.student_args={{{tokens}}}",
            "phase_b.warm_start=teacher",
            "train.epochs=2",
            "phase_b.gamma=1",
        ],
    )
    settings = settings.with_section("model", attention=key)
    data = load_data(settings.data)
    check_student(outline(settings, data))
    rows = phase_b.run_request(
        StudentRequest(settings, tmp_path / key, teacher_run=RunDirectory(run_dir))
    )
    assert rows[-1]["val_acc"] > 0.4  # chance is 0.1
    assert 0 < rows[-1]["loss_feat"] < rows[0]["loss_feat"]
    student = timm.create_model(f"local-dir:{tmp_path / key / 'student'}", pretrained=True).eval()
    assert student.num_prefix_tokens == (1 if key == "standard" else 3)

    maps = store.open(str(run_dir / "maps.zarr"))
    found = evaluate.teacher_agreement(student, maps, data, settings)["map_kl"]
    ids = np.arange(len(data.train))
    images = torch.cat(
        [batch.images for batch in Batches(data.train, data, torch.device("cpu"), 512).in_order()]
    )
    with torch.no_grad():
        maps_of_student = forward_with_maps(student, images)[1]
    prefix, gaussians = (
        student.num_prefix_tokens,
        torch.from_numpy(maps.gather(ids)["gaussians"]).float(),
    )
    for layer, row in enumerate(maps_of_student):
        row, wanted = (
            row.double().exp()[..., prefix:, prefix:],
            expected_map(gaussians[:, layer], (4, 4)).double(),
        )
        if key == "attentionx":
            wanted = wanted * (1 - torch.eye(16))
        row, wanted = row / row.sum(-1, keepdim=True), wanted / wanted.sum(-1, keepdim=True)
        seen = wanted > 0
        expected = (wanted[seen] * (wanted[seen] / row[seen]).log()).sum() / wanted[..., 0].numel()
        assert found[layer] == pytest.approx(expected.item(), rel=1e-3)


def test_calibration_error_by_hand():
    """Ten images with confidence 0.8 of which 6 are right, ten with 0.6 of which all are: (0.2 +
    0.4) / 2."""
    sure, unsure = torch.log(torch.tensor([0.8, 0.2])), torch.log(torch.tensor([0.6, 0.4]))
    logits = torch.stack([sure] * 10 + [unsure] * 10)
    labels = torch.tensor([0] * 6 + [1] * 4 + [0] * 10)
    assert classification_metrics(logits, labels)["calibration_error"] == pytest.approx(
        0.3, abs=1e-6
    )


def test_a_student_without_a_name_is_called_like_its_attention(run_dir):
    asked = {"student": "xsa"}, {"overrides": ["model.attention=xsa"]}
    for how in asked:
        request = students.resolve(run_dir, **how)
        assert request.folder == run_dir / "phase_b" / "xsa"
        assert request.settings.model.attention == "xsa"


def test_plain_training_refuses_a_setting_of_distillation(run_dir):
    command = dict(student="standard", name="y", distilled=False)
    with pytest.raises(UserError, match=r"^phase_b\.optim\.lr: .* set train\.optim\.lr"):
        phase_b.run(run_dir, **command, overrides=["phase_b.optim.lr=0.5"])
    assert not (run_dir / "plain" / "y").exists()
    for given in ("train.epochs=1", "train={epochs: 1}"):
        how = dict(name="y", distilled=False, overrides=[given])
        settings = students.resolve(run_dir, **how).settings
        assert settings.train.epochs == 1
    phase_b.run(run_dir, **command, overrides=["train.optim.lr=0.5", "train.epochs=1"])
    settings = RunDirectory(run_dir).student_settings("y", distilled=False)
    assert settings.train.optim.lr == 0.5
    assert len((run_dir / "plain/y/metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("moment", ["starts", "build_student", "train"])
def test_interrupted_before_its_first_step_a_student_is_resumed_as_it_was_asked_for(
    run_dir, tmp_path, monkeypatch, in_process, moment
):
    """The command that goes on is said whole, so it is the same before there is a folder."""
    write_store(run_dir, {"kind": "dense"}, out=str(tmp_path / "dense.zarr"))

    def interrupted(*_arguments, **_more):
        raise KeyboardInterrupt

    name = f"at_{moment}"
    command = ["phase-b", "--run-dir", run_dir, "--name", name]
    with monkeypatch.context() as patch:
        module = {"starts": command_line, "build_student": phase_b}.get(moment, opening)
        patch.setattr(module, moment, interrupted)
        asked = "--set", "train.epochs=2", "--student", "belief2", "--maps", "dense.zarr"
        code, _, err = in_process(*command, *asked, cwd=tmp_path)
    goes_on = f"{name} --set train.epochs=2 --student belief2 --maps dense.zarr --resume"
    assert (code, err.splitlines()[-1][-len(goes_on) :]) == (130, goes_on)
    code, _, said = in_process(*command, *asked, "--resume", cwd=tmp_path)
    whose = "it was begun with" if moment == "train" else "of this command"
    assert f"{name}: nothing was saved to resume: starts afresh with the settings {whose}" in said
    assert code == 0 and f"{name} epoch 2/2: " in said and "next: gaupipe evaluate" in said
    learned = json.loads((run_dir / "phase_b" / name / "maps.json").read_text())
    assert learned[0]["url"] == str(tmp_path / "dense.zarr")


def test_maps_of_another_teacher_are_refused(run_dir, tmp_path):
    """In the run's own place, however it is named."""
    other = make(tmp_path / "other", "seed=7", "phase_a.max_epochs=1")
    write_store(other, out=str(run_dir / "maps.zarr"), overwrite=True)
    (tmp_path / "link").symlink_to(run_dir)
    named = str(run_dir / "maps.zarr")
    try:
        for url in (None, named, os.path.relpath(named), f"{tmp_path}/link/maps.zarr/"):
            with pytest.raises(ValueError, match="teacher"):
                phase_b.run(run_dir, "belief_star", resume=True, maps_url=url)
    finally:
        write_store(run_dir, overwrite=True)


@pytest.mark.parametrize(
    "augment, teacher, views, said",
    [
        ("{crop_padding: 1}", "vit", 1, True),
        ("{resized_crop: {scale: [0.5, 1.0]}}", "local-dir:vit", 1, True),
        ("{crop_padding: 1}", "gaussian", 1, False),  # Gaussians move with their image
        ("{flip: true}", "vit", 1, False),
        ("{crop_padding: 1, geometry: ignore}", "vit", 1, False),
        ("{crop_padding: 1}", "vit", 2, False),
    ],
)
def test_maps_that_shifts_and_crops_would_move_are_spoken_of(augment, teacher, views, said):
    extra = {"teacher": teacher}
    schema = make_schema(kind="dense", layers=1, num_images=24, views=views, extra=extra)
    settings = load("digits_expected", [f"augment={augment}", "phase_b.gamma=0.5"])
    remarks = remarks_on_maps(settings, schema, small(depth=1))
    assert any("'gaupipe export-maps --views' stores" in line for line in remarks) == said
