"""Phase A with a trained ViT: from images to a student, for every kind of store, shape and view."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from timm.data import create_transform, resolve_data_config
from timm.models.vision_transformer import ResPostBlock, VisionTransformer

import store
from arguments import sets
from exports import write_store
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.distillation.job import identity_of_maps
from gaupipe.distillation.kinds import StoredAttentionReader
from gaupipe.distillation.reading import StoredImages, StoredOfEpoch
from gaupipe.distillation.store_choice import choose_store
from gaupipe.distillation.student import layer_map
from gaupipe.distillation.warm_start import start_from_teacher, warm_start
from gaupipe.maps.views import from_top_k, top_k
from gaupipe.models import forward_with_maps, save_student
from gaupipe.settings import PhaseBSettings
from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.load import dump, load
from gaupipe.system.errors import UserError
from gaupipe.system.progress import processor_seconds, read_metrics
from gaupipe.teachers.base import outline
from gaupipe.teachers.notes import Drawing, StoreNotes
from gaupipe.teachers.probe import fit_probe
from gaupipe.teachers.readable_vit import has_standard_attention
from gaupipe.vit.slicing import slice_weights, spread_of_stream
from pictures import photos
from runs import metrics
from stages import evaluate, export, phase_a, phase_b
from stages.compare import costs
from stages.compare.rows import Row
from stages.look import inspect
from stages.look.image_maps import images_of, photo
from stages.look.live_maps import LiveMaps, StudentMaps
from stages.publish import folder as publish
from stages.run import Line, run_all, table
from stages.runs import resources
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_teacher
from stages.verify import against_teacher
from stages.view.serve import open_viewer
from viewing import unpacked

SETTINGS = [
    "data.train_images=120",
    "data.batch_size=40",
    "phase_a.teacher=vit",
    "phase_a.max_epochs=2",
    "phase_a.stop_accuracy=1",
    "phase_a.optim.lr=4e-3",
    "train.epochs=2",
    "phase_b.alpha=0.2",
    "phase_b.gamma=0.3",
    "model.args={depth: 2, embed_dim: 32, num_heads: 2}",
    "model.init=mimetic",
    "threads=1",
]


def settings_with(*overrides: str):
    return load("digits_expected", [*SETTINGS, *overrides])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose teacher is a ViT that phase A trained."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    phase_a.run(settings_with(), folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def with_settings(run: Path, *overrides: str) -> Path:
    (run / "config.yaml").write_text(dump(settings_with(*overrides)))
    return run


def teachers_maps(run: Path, images: torch.Tensor) -> torch.Tensor:
    """[B, L, H, T, T] of the run's teacher, by the library's own forward pass."""
    model = timm.create_model(f"local-dir:{run / 'phase_a' / 'teacher'}", pretrained=True).eval()
    with torch.inference_mode():
        _, log_maps = forward_with_maps(model, images)
    return torch.stack(log_maps, dim=1).exp()


def first_images(run: Path, count: int) -> torch.Tensor:
    settings = RunDirectory(run).settings()
    data = load_data(settings.data)
    batches = Batches(data.train, data, torch.device("cpu"), count)
    return next(batches.in_order(np.arange(count))).images


def test_the_teacher_learns_as_the_baseline_does(tmp_path):
    """Two loops, one training: the same seed, optimizer and epochs give the same metrics."""
    settings = settings_with()
    optim = {"optim": settings.phase_a.optim, "epochs": settings.train.epochs}
    rows = run_all(settings.with_section("train", **optim), tmp_path / "run")
    models = ["teacher (phase A)", "standard, distilled", "standard, plain"]
    assert [row.model for row in rows] == models
    assert (rows[0].epochs, rows[0].val_acc) == (rows[2].epochs, rows[2].val_acc)
    assert rows[1].val_acc != rows[2].val_acc
    assert rows[0].parameters == rows[1].parameters and all(row.images_per_s for row in rows)
    trained = [tmp_path / "run" / place for place in ("phase_a", "plain/standard")]
    teacher, plain = (read_metrics(at / "metrics.jsonl") for at in trained)
    assert [each["train_acc"] for each in teacher] == [each["train_acc"] for each in plain]
    assert rows[0].core_seconds > processor_seconds(teacher)  # the export counts
    assert rows[2].core_seconds == processor_seconds(plain)


def test_the_table_with_sizes_explains_its_columns():
    costs = {"parameters": 1200, "images_per_s": 3000.4}
    lines = [
        Line("student", 2, val_acc=0.5, val_images=10, core_seconds=seconds, **costs)
        for seconds in (0.46, 9.04, 12.3)
    ]
    shown = table(lines, "")
    cells = {column.header: [*column.cells] for column in shown.columns}
    assert cells["core s"] == ["0.5", "9.0", "12"] and cells["images/s"] == 3 * ["3,000"]
    assert "\ncore s: of the processor, " in shown.caption
    assert shown.caption.endswith("; images/s: predictions")


@pytest.mark.parametrize(
    "kind,encoding,k,most",
    [
        ("dense", "float16", None, 1e-3),
        ("dense", "uint8", None, 6e-3),
        ("topk", "float16", 16, 1e-3),
        ("topk", "uint8", 3, 6e-3),
    ],
)
def test_maps_come_back_from_the_store(run, kind, encoding, k, most):
    write_store(run, {"kind": kind, "encoding": encoding, "k": k})
    maps = store.open(run / "maps.zarr")
    read = StoredAttentionReader(maps, torch.device("cpu")).attention(maps.gather(np.arange(20)))
    oracle = teachers_maps(run, first_images(run, 20))
    assert oracle.std() > 0.01  # maps that differ from uniform ones
    if k == 3:
        oracle = from_top_k(*top_k(oracle, k), 16)
    for layer in range(2):
        stored = read.map(layer)
        torch.testing.assert_close(stored.sum(-1), torch.ones(20, 2, 16), atol=1e-3, rtol=0)
        assert (stored - oracle[:, layer]).abs().max() < most


@pytest.mark.parametrize("kind", ["topk", "dense"])
def test_a_store_is_verified_against_its_teacher(run, kind, in_process):
    assert in_process("export-maps", "--run-dir", run, "--kind", kind)[0] == 0
    url = run / "maps.zarr"
    assert in_process("verify", url, "--teacher")[0] == 0
    maps = store.open(url)
    arrays = maps.gather(np.arange(120))
    main = next(iter(arrays))
    arrays[main] = np.roll(arrays[main], 1, axis=0)
    writer = store.create(url, maps.schema, overwrite=True)
    for shard in writer.pending():
        writer.write(shard, {key: part[shard.start : shard.stop] for key, part in arrays.items()})
    writer.finish()
    code, out, _ = in_process("verify", url, "--teacher")
    assert code == 1 and "maps are not the teacher's" in out


@pytest.mark.parametrize("kind,attention", [("dense", "standard"), ("topk", "attentionx")])
def test_every_kind_teaches_students_of_other_shapes(run, kind, attention):
    with_settings(
        run,
        "augment={flip: true, crop_padding: 1, mixup: 0.2}",
        "model.student_args={depth: 3, num_heads: 4, patch_size: 4}",
        "phase_b.head_map=[0, 1, 1, 0]",
    )
    write_store(run, {"kind": kind, "k": 4 if kind == "topk" else None})
    metrics = phase_b.run(run, attention)
    assert metrics[-1]["loss_feat"] > 0 and np.isfinite(metrics[-1]["train_loss"])


def test_blocks_are_compared_evenly_spaced():
    phase = settings_with().phase_b
    spaced = [layer_map(phase, depth, of) for depth, of in ((2, 12), (4, 7), (7, 4), (1, 5))]
    assert spaced == [[0, 11], [0, 2, 4, 6], [0, 1, 1, 2, 2, 3, 3], [4]]
    assert layer_map(settings_with("phase_b.layer_map=[3, null]").phase_b, 2, 4) == [3, None]


@pytest.fixture
def drawn(monkeypatch):
    """(view, whether with stored maps) of every epoch whose batches are read."""
    epochs, epoch_of = [], Batches.epoch

    def watched(self, number, augment, stored=None, first=0):
        epochs.append((stored and stored.view, stored is not None))
        return epoch_of(self, number, augment, stored, first)

    monkeypatch.setattr(Batches, "epoch", watched)
    return epochs


def test_views_are_stored_and_drawn_again(run, drawn):
    """The maps of a view are the teacher's on the very image that phase B trains on."""
    views = 3
    with_settings(run, "augment={flip: true, crop_padding: 1}", "phase_b.alpha=0")
    write_store(run, {"kind": "dense", "views": views})
    maps = store.open(run / "maps.zarr")
    assert (maps.schema.views, maps.schema.images, len(maps)) == (views, 120, 120 * views)
    settings = RunDirectory(run).settings()
    data = load_data(settings.data)
    batches = Batches(data.train, data, torch.device("cpu"), 40)
    for epoch in (1, 4):
        whole = StoredImages(maps, maps, PhaseBSettings(), 0)
        stored = StoredOfEpoch([whole], epoch, with_maps=True)
        augment = Augment(settings.augment, settings.seed)
        batch = next(batches.epoch(epoch, augment, stored))
        assert batch.geometry is None
        oracle = teachers_maps(run, batch.images)
        read = StoredAttentionReader(maps, torch.device("cpu")).attention(batch.stored)
        assert (read.map(0) - oracle[:, 0]).abs().max() < 1e-3
        entries = maps.gather(batch.ids.numpy() * views + epoch % views)
        assert np.array_equal(entries["labels"], batch.labels.numpy())
        assert np.array_equal(entries["logits"], batch.stored["logits"])
    drawn.clear()
    phase_b.run(run, "standard")
    assert drawn == [(0, True), (1, True)]
    assert all(kl > 0 for kl in evaluate.run(run, "standard")["map_kl"])
    for change in ("seed=1", "augment={flip: false, crop_padding: 1}"):
        with pytest.raises(UserError, match="another augmentation, seed or image size"):
            phase_b.run(run, "standard", name="other", overrides=[change])


def test_a_student_is_compared_with_the_store_that_it_learned_from(run, tmp_path, monkeypatch):
    write_store(run, {"k": 2})
    other = tmp_path / "dense.zarr"
    write_store(run, {"kind": "dense"}, out=str(other))
    monkeypatch.chdir(tmp_path)
    phase_b.run(run, "standard", name="x", maps_url="dense.zarr")
    folder = run / "phase_b" / "x"
    assert json.loads((folder / "maps.json").read_text())[0]["url"] == str(other)
    student = evaluate.load_student(run, "x")
    there = student, load_data(student.settings.data)
    assert evaluate.open_maps(*there).schema.kind == "dense"
    write_store(run, {"kind": "dense", "encoding": "uint8"}, out=str(other), overwrite=True)
    with pytest.raises(UserError, match="encoding of the store float16, now it is uint8"):
        phase_b.run(run, "standard", name="x", maps_url="dense.zarr", resume=True)
    shutil.rmtree(other)
    assert evaluate.open_maps(*there) is None


def test_a_named_kind_that_is_the_usual_one_keeps_the_settings_k():
    teacher = outline(settings_with("export.k=3"), load_data(settings_with().data))
    assert choose_store(teacher, given={"kind": "topk"}).k == choose_store(teacher).k == 3
    assert choose_store(teacher, given={"kind": "topk", "k": 5}).k == 5


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_fresh_views_are_drawn_once_the_store_has_nothing_more_to_say(run, alpha, drawn):
    weights = ["phase_b.gamma_schedule=stop_after", "phase_b.gamma_epochs=3", "phase_b.beta=0.5"]
    augment = "augment={flip: true, crop_padding: 1}"
    with_settings(run, augment, *weights, f"phase_b.alpha={alpha}", "train.epochs=5")
    write_store(run, {"views": 2})
    metrics = phase_b.run(run, "standard")
    stored = [(0, True), (1, True), (0, True), (1, True), (0, True)]
    assert drawn == (stored if alpha else [*stored[:3], (None, False), (None, False)])
    for entry in metrics[3:]:
        soft = entry["loss_soft"]
        assert (soft is None) == (not alpha)
        assert entry["train_loss"] == pytest.approx(0.5 * entry["loss_hard"] + alpha * (soft or 0))


def test_predictions_end_and_their_weight_is_the_labels(run, drawn):
    weights = ["phase_b.gamma_epochs=1", "phase_b.alpha=0.4", "phase_b.beta=0.5"]
    augment = "augment={flip: true, crop_padding: 1}"
    with_settings(run, augment, *weights, "phase_b.alpha_epochs=3", "train.epochs=4")
    write_store(run, {"views": 2})
    metrics = phase_b.run(run, "standard")
    assert drawn == [(0, True), (1, True), (0, True), (None, False)]
    soft = [entry["loss_soft"] for entry in metrics]
    assert None not in soft[:3] and soft[3] is None
    for entry in metrics[1:3]:
        expected = 0.5 * entry["loss_hard"] + 0.4 * entry["loss_soft"]
        assert entry["train_loss"] == pytest.approx(expected)
    assert metrics[3]["train_loss"] == pytest.approx(0.9 * metrics[3]["loss_hard"])


def test_predictions_may_end_before_the_maps(run):
    """The store still gives the predictions, but they weigh nothing."""
    weights = ["phase_b.gamma=0.3", "phase_b.gamma_epochs=2", "phase_b.alpha=0.4"]
    with_settings(run, *weights, "phase_b.beta=0.5", "phase_b.alpha_epochs=1", "train.epochs=2")
    write_store(run)
    first, last = phase_b.run(run, "standard")
    assert (first["alpha"], last["alpha"]) == (0.4, 0)
    expected = 0.9 * last["loss_hard"] + 0.3 * last["loss_feat"]
    assert last["train_loss"] == pytest.approx(expected)


def test_a_student_becomes_the_teacher_of_the_next(run, tmp_path, in_process):
    """A folder as the teacher: phase A scores it, and a student may start from its weights."""
    name = f"local-dir:{run / 'phase_a' / 'teacher'}"
    settings = settings_with(f"phase_a.teacher={name}", "phase_b.warm_start=teacher")
    rows = run_all(settings, tmp_path / "next")
    before = [json.loads(line) for line in (run / "phase_a" / "metrics.jsonl").open()]
    assert rows[0].epochs == 0 and rows[0].val_acc == before[-1]["val_acc"]
    assert run_all(settings, tmp_path / "next")[0] == rows[0]
    scores = evaluate.run(tmp_path / "next", "standard")
    assert scores["teacher_top1"] == rows[0].val_acc and scores["teacher_loss"] > 0
    inspect = ("inspect", "--run-dir", tmp_path / "next", "--student", "standard", "--image", 2)
    assert "KL of standard from the teacher" in in_process(*inspect)[1]
    seen = json.loads(in_process(*inspect, "--layer", 1, "--json")[1])
    assert np.shape(seen["teacher"]) == (4, 4) and seen["kl"] > 0 and "no_teacher" not in seen


def test_saved_models_say_how_their_images_were_prepared(tmp_path):
    """timm prepares an image file by a student's or a teacher's config.json as training did."""
    photos(tmp_path / "images" / "train", count=4, size=(17, 24))
    images = [f"data.root={tmp_path / 'images'}", "data.name=folder", "data.image_size=8"]
    count = ["data.train_images=null", "data.val_fraction=0.25", "train.epochs=1"]
    settings = settings_with(*images, *count)
    phase_a.run(settings, tmp_path / "run")
    phase_b.run(tmp_path / "run", distilled=False)
    data = load_data(settings.data)
    batch = next(Batches(data.train, data, torch.device("cpu"), len(data.train)).in_order())
    paths = sorted((tmp_path / "images" / "train").rglob("*.png"))
    for saved in ("phase_a/teacher", "plain/standard/student"):
        model = timm.create_model(f"local-dir:{tmp_path / 'run' / saved}", pretrained=True)
        prepare = create_transform(**resolve_data_config(model=model))
        prepared = torch.stack([prepare(Image.open(paths[i])) for i in data.train.positions])
        torch.testing.assert_close(prepared, batch.images, rtol=0, atol=1.5 / 255 / 0.22)


def test_a_warm_start_takes_queries_and_keys_too(run):
    with_settings(run, "phase_b.warm_start=teacher", "phase_b.gamma=0", "phase_b.alpha=0")
    settings = RunDirectory(run).settings()
    data = load_data(settings.data)
    write_store(run, {"kind": "topk"})
    job = phase_b.build_training(settings, data, RunDirectory(run))
    teacher = load_teacher(RunDirectory(run), data).network
    warm_start(job.student, teacher.weights())
    images = first_images(run, 8)
    torch.testing.assert_close(job.student.eval()(images), teacher(images))


def test_a_warm_start_leaves_no_part_out_without_a_word():
    """A last norm has either of timm's names; what the student lacks is refused."""

    def vit(**more):
        sizes = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3)
        made = VisionTransformer(**sizes, class_token=False, global_pool="avg", **more)
        for part in made.parameters():
            torch.nn.init.normal_(part)
        return made.eval()

    student = vit(fc_norm=True)
    teacher = vit(fc_norm=False)
    start_from_teacher(student, "teacher", teacher.state_dict(), 2, (2, 2))
    assert torch.equal(student.fc_norm.weight, teacher.norm.weight)
    for part, without, lacking in (
        ({"init_values": 0.1}, {}, "ls1.gamma"),
        ({"qk_norm": True}, {}, "attn.q_norm.weight"),
        ({"pre_norm": True}, {}, "norm_pre.weight"),
        ({"scale_attn_norm": True}, {}, "attn.norm.weight"),
        ({"scale_mlp_norm": True}, {}, "mlp.norm.weight"),
        ({}, {"qkv_bias": False}, "attn.qkv.bias"),
        ({}, {"final_norm": False}, "norm.weight"),
    ):
        weights = vit(**part).state_dict()
        with pytest.raises(UserError, match=rf"has \S*{lacking}, which the student lacks"):
            start_from_teacher(vit(**without), "teacher", weights, 2, (2, 2))
        same = vit(**part)
        start_from_teacher(same, "teacher", weights, 2, (2, 2))
        assert all(torch.equal(weights[name], tensor) for name, tensor in same.state_dict().items())


def test_a_vit_with_its_norms_behind_attention_is_no_teacher_of_weights():
    sizes = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2)
    assert has_standard_attention(VisionTransformer(**sizes))
    assert not has_standard_attention(VisionTransformer(**sizes, block_fn=ResPostBlock))


def test_views_are_those_of_a_drawing_only_with_all_that_they_are_drawn_by():
    moves = "augment={crop_padding: 1, geometry: ignore}"
    operations = "augment.randaugment={ops: 1}"
    still = Drawing.of(settings_with("augment={crop_padding: 1}"), 8)
    assert still == Drawing.of(settings_with(moves, "augment.mixup=0.2"), 8)
    assert still != Drawing.of(settings_with("augment={crop_padding: 1}"), 16)
    # RandAugment draws from more operations where geometry is ignored
    follow = Drawing.of(settings_with("augment={crop_padding: 1}", operations), 8)
    ignore = Drawing.of(settings_with(moves, operations), 8)
    assert follow != ignore
    assert ignore.augmentation().settings.operations != follow.augmentation().settings.operations


def test_settings_that_may_change_at_any_time_reach_every_stage(run, monkeypatch):
    seen = []
    load_as_before = export.load_teacher

    def loaded(*args, settings, **more):
        seen.append(settings)
        return load_as_before(*args, settings=settings, **more)

    monkeypatch.setattr(export, "load_teacher", loaded)
    now = ["log.every=1", "checkpoint_minutes=null", "data.cache=none"]
    run_all(settings_with(*now), run)
    seen += [load(run / stage / "standard/config.yaml") for stage in ("phase_b", "plain")]
    assert len(seen) == 3
    for settings in seen:
        now = (settings.log.every, settings.checkpoint_minutes, settings.data.cache)
        assert now == (1, None, "none")
    assert (run / "phase_b/standard/steps.jsonl").read_text()


def test_a_store_is_verified_by_the_views_that_it_says(run):
    """In a comparison its teacher may have been trained without an augmentation."""
    with_settings(run, "augment={crop_padding: 1, flip: true}")
    write_store(run, {"kind": "topk", "views": 2})
    with_settings(run)
    assert against_teacher(str(run / "maps.zarr")) == []


def test_nothing_is_learned_from_a_store_without_predictions(run, monkeypatch, capsys):
    """Its logits are zeros, from which a loss can be computed all the same."""
    write_store(run, {"kind": "topk"})
    monkeypatch.setattr(StoreNotes, "has_predictions", False)
    settings = ["phase_b.alpha=0.5", "phase_b.beta=1", "train.epochs=1"]
    [epoch] = phase_b.run(run, name="x", overrides=settings)
    assert "so phase_b.alpha is 0" in capsys.readouterr().err
    phase = RunDirectory(run).student_settings("x").phase_b
    assert phase.alpha == 0 and epoch["loss_soft"] is None
    expected = epoch["loss_hard"] + phase.gamma * epoch["loss_feat"]
    assert epoch["train_loss"] == pytest.approx(expected, rel=1e-5)


def test_costs_are_of_images_that_have_not_moved_from_stored_views(run, monkeypatch):
    with_settings(run, "augment={crop_padding: 1, flip: true}")
    write_store(run, {"kind": "topk", "views": 2})
    batches = []

    def counted(losses):
        batches.append(losses.args[0])
        return 1

    monkeypatch.setattr(costs, "multiply_adds", counted)
    training: Any = SimpleNamespace(
        settings=RunDirectory(run).settings(),
        row=Row(name="distilled"),
        teacher_run=RunDirectory(run),
        maps_url=str(run / "maps.zarr"),
    )
    epoch: Any = {"epoch": 1, "seconds": 1.0, "processor_seconds": 1.0}
    costs.student_costs(training, load_data(training.settings.data), [epoch])
    assert [batch.geometry for batch in batches] == [None]


def test_a_checkpoint_belongs_to_the_blocks_of_its_store(run):
    write_store(run, {"kind": "topk"})
    schema = store.open(run / "maps.zarr").schema
    others = [
        dataclasses.replace(schema, extra=schema.extra | {"layers": [0]}),
        dataclasses.replace(schema, extra=schema.extra | {"precision": "bfloat16"}),
        dataclasses.replace(schema, extra=schema.extra | {"probe": "0" * 64}),
        dataclasses.replace(schema, grid=(2, 8)),
    ]
    identities = [identity_of_maps(one) for one in (schema, *others)]
    assert all(first != other for first, other in itertools.combinations(identities, 2))


def test_a_run_begins_its_student_with_a_slice_of_the_teacher(tmp_path, in_process):
    """Which shows in a student that has hardly learned since."""
    settings = settings_with(
        "phase_a.teacher_args={embed_dim: 64, depth: 3}",
        "phase_b.warm_start=slice",
        "phase_b.optim={lr: 1.0e-9, min_lr: 0}",
        "phase_b.optim.weight_decay=0",
    )
    run_all(settings, tmp_path / "run", baseline=False)
    folders = ("phase_a/teacher", "phase_b/standard/student")
    teacher, student = (
        timm.create_model(f"local-dir:{tmp_path / 'run' / folder}", pretrained=True)
        for folder in folders
    )
    # biases of every second hidden unit of the last block, with the norm's before it
    last = teacher.eval().blocks[2]
    biases = last.mlp.fc1.bias + last.mlp.fc1.weight @ last.norm2.bias
    every_second = biases[:: len(biases) // len(student.blocks[1].mlp.fc1.bias)]
    torch.testing.assert_close(student.blocks[1].mlp.fc1.bias, every_second)
    spread = spread_of_stream(teacher, [first_images(tmp_path / "run", 120)])
    weights = slice_weights(teacher.state_dict(), 2, (4, 4), student, "test", spread)
    for name, part in weights.items():
        torch.testing.assert_close(student.state_dict()[name], part, atol=1e-4, rtol=1e-3)
    larger = ("--run-dir", tmp_path / "new", *sets("phase_a.teacher_args={embed_dim: 16}"))
    changes = sets(*SETTINGS, "phase_b.warm_start=slice")
    code, _, err = in_process("phase-a", "digits", *changes, *larger)
    assert code == 2 and "channels: 32, the trained ViT 16: a slice is at most" in err
    assert not (tmp_path / "new").exists()


def test_a_teacher_that_has_changed_is_refused(run, tmp_path):
    folder = Path(shutil.copytree(run / "phase_a" / "teacher", tmp_path / "vit"))
    settings = settings_with(f"phase_a.teacher=local-dir:{folder}")
    phase_a.run(settings, tmp_path / "next")
    other = timm.create_model(f"local-dir:{folder}", pretrained=True)
    with torch.no_grad():
        other.head.weight += 0.01
    save_student(other, folder)
    with pytest.raises(UserError, match="has changed since"):
        write_store(tmp_path / "next")
    with pytest.raises(UserError, match="has changed since"):
        phase_a.run(settings, tmp_path / "next", resume=True)


def test_another_teacher_can_be_adapted(run, tmp_path, in_process):
    other = timm.create_model(f"local-dir:{run / 'phase_a' / 'teacher'}", num_classes=7)
    save_student(other, tmp_path / "seven", mean=(0.5,), std=(0.5,))
    out = tmp_path / "seven.zarr"
    exporting = ["export-maps", "--run-dir", run, "--teacher", f"local-dir:{tmp_path / 'seven'}"]
    advice = "phase_a.teacher_args={num_classes: 0}"
    for wrong in (
        ["--set", "phase_a.teacher_args={num_classes:0}"],
        ["--set", "phase_a.teacher_args=5"],
        ["--set", "phase_a.teacher_args = {num_classes: 0}"],
    ):
        code, _, err = in_process(*exporting, "--out", out, *wrong)
        assert (code, err.count("\n")) == (2, 1) and "teacher_args" in err and not out.exists()
    code, _, err = in_process(*exporting, "--out", tmp_path / "with-a-head.zarr")
    assert code == 0 and "seven: its 7 classes are not the 10 of digits: a linear probe" in err
    assert store.open(tmp_path / "with-a-head.zarr").schema.extra["predicts"] is True
    assert in_process(*exporting, "--out", out, "--set", advice)[0] == 0
    assert in_process("verify", out, "--teacher", "--run-dir", run)[0] == 0
    settings = sets("phase_b.alpha=0", "phase_b.beta=1", "train.epochs=1")
    student = ["phase-b", "--run-dir", run, "--maps", out, "--name", "seven"]
    assert in_process(*student, *settings)[0] == 0
    scores = evaluate.run(run, "seven")  # beside the run's own teacher it would say nothing
    assert "another teacher" in scores["no_teacher"] and "teacher_top1" not in scores
    assert len(scores["map_kl"]) == 2
    published = publish.published_settings(evaluate.load_student(run, "seven")).phase_a
    assert (published.teacher, published.teacher_args) == ("local-dir:seven", {"num_classes": 0})
    write_store(run)
    shutil.rmtree(out)
    assert "map_kl" not in evaluate.run(run, "seven")


def test_a_run_with_gaussians_can_export_a_trained_vit_too(run, tmp_path, in_process):
    """The other teacher does not have to fit what phase B was to do with the run's own."""
    folder = tmp_path / "gaussians"
    gaussian = ("phase_a.teacher=gaussian", "phase_a.per_image=none", "phase_b.warm_start=exact")
    option = "model.attention_options={prior: true}"
    phase_a.run(settings_with(*gaussian, option), folder)
    out = tmp_path / "vit.zarr"
    vit = f"local-dir:{run / 'phase_a' / 'teacher'}"
    exporting = ["export-maps", "--run-dir", folder, "--teacher", vit, "--kind", "topk"]
    assert in_process(*exporting, "--out", out)[0] == 0
    assert in_process("verify", out, "--teacher", "--run-dir", folder)[0] == 0


def test_a_student_of_views_is_shown_the_view_that_the_maps_are_of(tmp_path, in_process):
    settings = settings_with(
        "augment.flip=true",
        "augment.crop_padding=1",
        "phase_b.alpha=0",
        "export.views=2",
        "export.kind=dense",
    )
    run = tmp_path / "run"
    run_all(settings, run, baseline=False)
    maps, image = store.open(run / "maps.zarr"), 2
    data, views = images_of(maps), StoreNotes.of(maps.schema).views
    folder = run / "phase_b" / "standard" / "student"
    student = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    viewer = open_viewer(None, run)
    for view in (0, 1):
        pixels = torch.from_numpy(np.array(photo(data, image, views, view)[0]))  # [height, width]
        scaled = (pixels[None, None] / 255 - data.mean[0]) / data.std[0]
        with torch.inference_mode():
            log_maps = torch.stack(forward_with_maps(student, scaled)[1])[:, 0]  # [L, H, T, T]
        message = viewer.image(image, view, name="standard")
        header, shown = unpacked(message, "maps")
        assert header["no_teacher"] is None
        heads = log_maps.shape[1]
        np.testing.assert_allclose(shown[:, :heads], log_maps.exp(), atol=1e-5)
        stored = maps.gather([image * 2 + view])["maps"][0].astype(np.float32)
        teacher = unpacked(message, "teacher")[1][:, :heads]
        np.testing.assert_allclose(teacher, stored, atol=1e-6)
        one = ["--run-dir", run, "--student", "standard", "--image", image, "--view", view]
        one += ["--layer", 0, "--query", "mean"]
        seen = json.loads(in_process("inspect", *one, "--json")[1])
        np.testing.assert_allclose(np.ravel(seen["teacher"]), stored[0].mean((0, 1)), atol=1e-6)
        wanted = log_maps[0].exp().mean((0, 1))
        np.testing.assert_allclose(np.ravel(seen["map"]), wanted, atol=1e-5)
    plain = write_store(run, {"kind": "dense", "views": None}, out=str(tmp_path / "plain.zarr"))
    assert store.open(plain).schema.views == 2  # as the run's settings say
    shutil.rmtree(run / "maps.zarr")
    one = ["inspect", "--run-dir", run, "--student", "standard", "--image", image]
    assert "no whole store" in json.loads(in_process(*one, "--json")[1])["no_teacher"]
    assert "no teacher beside it" in in_process(*one)[1]


def test_a_students_gradient_is_of_patches_as_its_maps_are(run):
    """Beside a store, whose maps are from patches to patches; alone it has the class token too."""
    write_store(run, {"kind": "dense"})
    token = "model.student_args={class_token: true, global_pool: token}"
    phase_b.run(run, overrides=[token])
    student = StudentMaps(RunDirectory(run), "standard")
    assert (student.see(1).extra, student.see(1, split="val").extra) == ((), ["class"])
    found = student.relevance(None, 1)
    target, beside = found.label, found.weights
    tokens = student.grid[0] * student.grid[1]
    assert beside.shape[1:] == (tokens, tokens)
    whole = LiveMaps.relevance(student, target, 1).weights
    assert torch.equal(beside, whole[:, 1:, 1:])
    assert student.relevance(None, 1, split="val").weights.shape[1:] == (tokens + 1, tokens + 1)


def test_a_weight_too_small_for_a_number_is_no_hidden_key(run):
    """The teacher's map beside it is the stored one, and the student's weights of 0 count."""
    write_store(run, {"kind": "dense"})
    phase_b.run(run)
    student = StudentMaps(RunDirectory(run), "standard")
    for block in student.model.blocks:
        block.attn.qkv.weight.data.mul_(1e3)
    seen = student.see(1)
    stored = store.open(run / "maps.zarr").gather([1])["maps"][0].astype(np.float32)
    assert (seen.map(1) == 0).any()
    np.testing.assert_allclose(seen.teacher[1], stored[1], atol=1e-6)


def test_agreement_is_with_predictions(run, monkeypatch):
    write_store(run, {"kind": "dense"})
    phase_b.run(run, overrides=["phase_b.alpha=0", "phase_b.beta=1", "train.epochs=1"])
    for predicts in (True, False):
        monkeypatch.setattr(StoreNotes, "has_predictions", predicts)
        scores = evaluate.run(run, "standard")
        assert ("teacher_agreement" in scores) == predicts and scores["map_kl"]


def test_a_student_of_other_views_or_images_says_why_it_is_not_compared(run, tmp_path):
    url = write_store(run, {"kind": "dense"})
    phase_b.run(run)
    student = StudentMaps(RunDirectory(run), "standard")
    assert student.see(1).no_teacher is None
    student.views = Drawing(0, AugmentSettings(flip=True).model_dump(mode="json"), 8)
    seen = student.see(1)
    assert "maps of the images themselves" in seen.no_teacher and not seen.teacher
    viewer = open_viewer(url, run)
    viewer.schema = dataclasses.replace(viewer.schema, dataset_sha256="0" * 64)
    with pytest.raises(UserError, match="its images are not those that the store's maps are of"):
        viewer.image(1, name="standard")


def test_a_lost_teacher_is_written_again(run):
    digest = RunDirectory(run).teacher_digest()
    weights = run / "phase_a" / "teacher" / "model.safetensors"
    before = weights.read_bytes()
    weights.unlink()
    with pytest.raises(UserError, match="'gaupipe phase-a --resume' writes it again"):
        write_store(run)
    phase_a.run(RunDirectory(run).settings(), run, resume=True)
    assert weights.read_bytes() == before and RunDirectory(run).teacher_digest() == digest
    write_store(run)


def test_a_student_can_be_scored_without_its_teacher(run, tmp_path):
    vit = shutil.copytree(run / "phase_a" / "teacher", tmp_path / "vit")
    run_all(settings_with(f"phase_a.teacher=local-dir:{vit}"), tmp_path / "next")
    assert "teacher_top1" in evaluate.run(tmp_path / "next")
    alone = evaluate.run(tmp_path / "next", alone=True)
    assert not {"teacher_top1", "teacher_agreement", "map_kl"} & set(alone)
    shutil.rmtree(vit)
    scores = evaluate.run(tmp_path / "next")
    assert "teacher_top1" not in scores and scores["teacher_agreement"] <= 1
    assert "there is no folder" in scores["no_teacher"]


def test_a_store_of_another_kind_is_not_taken_for_the_one_asked_for(run):
    write_store(run, {"kind": "dense"})
    with pytest.raises(UserError, match="with kind dense, asked topk.*--overwrite"):
        export.ensure(run, export=settings_with("export.kind=topk").export)


def test_a_store_may_have_some_blocks_on_the_students_grid(run, tmp_path):
    """And a student with these patches learns from it, each block from one of those stored."""
    vit = f"phase_a.teacher=local-dir:{run / 'phase_a' / 'teacher'}"
    student = "model.student_args={patch_size: 4, depth: 1}"
    settings = settings_with(vit, "export={grid: [2, 2], layers: [1], kind: dense}", student)
    rows = run_all(settings, tmp_path / "next")
    assert np.isfinite(rows[1].val_acc)
    maps = store.open(tmp_path / "next" / "maps.zarr")
    assert (maps.schema.grid, maps.schema.layers) == ((2, 2), 1)
    url = str(tmp_path / "next" / "maps.zarr")
    seen = inspect.attention(0, url=url)
    assert (seen.layer, seen.block) == (0, 1) and "block 1, head" in inspect.title(seen)
    described = inspect.summary(url)
    assert (described["layers"], described["blocks"]) == (1, [1])
    assert "(numbers 1 of the teacher" in (tmp_path / "next/maps.zarr/README.md").read_text()
    header, _ = unpacked(open_viewer(url, None).image(0), "maps")
    assert header["blocks"] == [1]  # so that the page has no rollout
    stored = torch.from_numpy(maps.gather(np.arange(20))["maps"]).float()
    whole = teachers_maps(run, first_images(run, 20))[:, 1]  # [20, H, 16, 16]
    tokens = whole.unflatten(-1, (2, 2, 2, 2)).sum((-3, -1))  # (y, 2, x, 2) of the keys
    tokens = tokens.unflatten(2, (2, 2, 2, 2)).mean((3, 5)).reshape(20, 2, 4, 4)
    torch.testing.assert_close(stored[:, 0], tokens, atol=1e-3, rtol=0)
    assert against_teacher(str(tmp_path / "next" / "maps.zarr")) == []
    assert run_all(settings, tmp_path / "next")[1].val_acc == rows[1].val_acc
    with pytest.raises(UserError, match=r"export.grid: should be at most the teacher's, 4 x 4"):
        phase_a.run(settings_with("export.grid=[5, 4]"), tmp_path / "larger")
    with pytest.raises(UserError, match="export.layers: should be blocks from 0 to 1"):
        phase_a.run(settings_with("export.layers=[0, 2]"), tmp_path / "deeper")
    with pytest.raises(UserError, match="export.layers: has a block twice"):
        phase_a.run(settings_with("export.layers=[1, 1]"), tmp_path / "deeper")
    gaussian = settings_with("phase_a.teacher=gaussian", "export.layers=[0]")
    with pytest.raises(UserError, match="for stored maps that are no Gaussians"):
        phase_a.run(gaussian, tmp_path / "gaussian")


def test_a_probe_predicts_what_its_teacher_does_not(run, tmp_path, capsys):
    """By scikit-learn's own regression on the features that timm gives, out of fold, for each view;
    and a student learns from it."""
    folder = run / "phase_a" / "teacher"
    settings = settings_with(
        f"phase_a.teacher=local-dir:{folder}",
        "phase_a.teacher_args={num_classes: 0}",
        "augment={flip: true}",
        "export={views: 2, kind: dense}",
    )
    rows = run_all(settings, tmp_path / "next")
    said = f"a linear probe on its features predicts them: {100 * rows[0].val_acc:.1f} %"
    assert capsys.readouterr().err.count(said) == 1  # in phase A, and not once more in the export
    assert np.isfinite(rows[1].val_acc)
    stored = store.open(tmp_path / "next" / "maps.zarr").gather(np.arange(240))
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0).eval()
    data = load_data(settings.data)
    batches = Batches(data.train, data, torch.device("cpu"), 240)
    with torch.inference_mode():
        features = model(next(batches.in_order()).images).numpy()
        views = batches.views(np.arange(240), Augment(settings.augment, 0), 2)
        view_features = model(next(views).images).numpy()
    job = load_teacher(RunDirectory(tmp_path / "next"), data)
    probe = job.probe  # as phase A stored it
    again = fit_probe(job)
    for name, value in vars(again).items():
        assert torch.equal(torch.as_tensor(getattr(probe, name)), torch.as_tensor(value)), name
    scaler, folds = StandardScaler().fit(features), probe.folds.numpy()
    for fold in range(5):
        inside = np.repeat(folds == fold, 2)
        model = LogisticRegression(C=probe.strength, max_iter=1000)
        model.fit(scaler.transform(features)[folds != fold], data.train.labels[folds != fold])
        expected = model.predict_log_proba(scaler.transform(view_features)[inside])
        np.testing.assert_allclose(stored["logits"][inside], expected, atol=0.03, rtol=0.01)
    assert against_teacher(str(tmp_path / "next" / "maps.zarr")) == []
    assert evaluate.run(tmp_path / "next")["teacher_top1"] == rows[0].val_acc


def test_the_probe_of_phase_a_is_read_by_the_export(run, tmp_path, in_process, monkeypatch):
    settings = settings_with(
        f"phase_a.teacher=local-dir:{run / 'phase_a' / 'teacher'}",
        "phase_a.teacher_args={num_classes: 0}",
        "export.kind=dense",
    )
    phase_a.run(settings, tmp_path / "next")
    stored = tmp_path / "next" / "phase_a" / "probe.pt"
    with monkeypatch.context() as patch:
        patch.setattr("gaupipe.teachers.model.fit_probe", None)  # not called
        write_store(tmp_path / "next")
    whole = stored.read_bytes()
    saved = torch.load(stored, weights_only=True)
    folds = whole.index(saved["probe"]["folds"].numpy().tobytes())
    saved["source"]["seed"] = 1  # of another run
    torch.save(saved, stored)
    assert load_teacher(RunDirectory(tmp_path / "next")).probe is None
    stored.write_bytes(whole[:folds] + bytes([whole[folds] ^ 1]) + whole[folds + 1 :])
    command = ["export-maps", "--run-dir", str(tmp_path / "next"), "--overwrite"]
    code, _out, err = in_process(*command)
    assert code == 2 and f"{stored} is damaged (" in err and "remove it" in err
    stored.unlink()
    code, _out, err = in_process(*command)
    assert code == 0 and "a linear probe on its features predicts them" in err


def test_classes_of_a_teacher_are_those_of_the_folders_by_name(tmp_path, in_process):
    """With the names the other way round a teacher is right where it was wrong."""
    photos(tmp_path / "photos", size=(8, 8))
    sizes = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=2)
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", **sizes)
    model = "model.args={embed_dim: 16, depth: 1, num_heads: 2}"
    changes = sets("phase_b.alpha=0.5", "threads=1", "data.batch_size=8", model)
    accuracies = {}
    for first, second in (("cat", "dog"), ("dog", "cat"), ("fox", "dog")):
        save_student(vit, tmp_path / first, label_names=[first, second])
        teacher = ["--teacher", f"local-dir:{tmp_path / first}"]
        run = tmp_path / f"run-{first}"
        command = ["phase-a", "--data", tmp_path / "photos", "--run-dir", run, *teacher, *changes]
        code, _, err = in_process(*command)
        said = "fox: its 2 classes are not the 2 of photos: a linear probe on its features"
        assert (said in err) == (first == "fox")
        assert code == 0, err
        accuracies[first] = metrics(run / "phase_a/metrics.jsonl")[0]["train_acc"]
    assert accuracies["cat"] + accuracies["dog"] == pytest.approx(1) != 2 * accuracies["cat"]
    assert accuracies["fox"] is None


def test_a_teacher_without_names_knows_folders_of_numbers_or_is_refused(tmp_path, in_process):
    """As text, "10" comes before "2", and a teacher that is always right would be right for 0 and 1
    alone."""
    draw = np.random.default_rng(0)
    patterns = draw.integers(2, 254, size=(12, 1, 8, 8, 3))
    pixels = (patterns + draw.integers(-2, 3, size=(12, 4, 8, 8, 3))).astype(np.uint8)
    for label, images in enumerate(pixels):
        folder = tmp_path / "photos" / str(label)
        folder.mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / f"{number}.png")

    torch.manual_seed(0)
    sizes = dict(img_size=8, patch_size=4, embed_dim=48, depth=1, num_heads=2, num_classes=12)
    vit = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    inputs = torch.from_numpy(pixels.reshape(-1, 8, 8, 3)).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.inference_mode():
        features = vit.forward_head(vit.forward_features(inputs), pre_logits=True)
    right = torch.eye(12).repeat_interleave(4, 0)
    weights = torch.linalg.lstsq(features, right).solution.T

    def phase_a(run, *changes):
        save_student(vit, tmp_path / "vit", mean=(0.5,) * 3, std=(0.5,) * 3)
        command = ["phase-a", "--data", tmp_path / "photos", "--run-dir", tmp_path / run]
        model = "model.args={embed_dim: 16, depth: 1, num_heads: 2}"
        teacher = ["--teacher", f"local-dir:{tmp_path / 'vit'}"]
        return in_process(*command, *teacher, *sets("threads=1", model, *changes))

    for run, numbers in (("right", np.arange(12)), ("text", sorted(range(12), key=str))):
        vit.head.weight.data = weights[numbers]
        code, _, err = phase_a(run)
        if run == "right":
            assert code == 0 and "matched by number: 100.0 % of the validation images" in err, err
        else:
            assert (
                code == 2 and "matched by number, for want of names, and it is right for 6" in err
            )
            assert "phase_a.teacher_args={num_classes: 0}" in err
            assert not (tmp_path / run).exists()
    code, _, err = phase_a("text", "phase_a.teacher_args={num_classes: 0}")
    assert code == 0 and "a linear probe on its features" in err, err


@pytest.mark.parametrize("what", ["free_disk", "available_memory"])
def test_an_export_that_does_not_fit_is_refused(run, monkeypatch, what):
    monkeypatch.setattr(resources, what, lambda *_: 1000)
    with pytest.raises(UserError, match="export needs .* of (disk|memory), 0.0 MB are"):
        write_store(run)
    assert not (run / "maps.zarr").exists()
    write_store(run, force=True)
