"""The teacher ``local``: its maps, its loss, and the commands on a run with it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

import gaupipe
from gaupipe.attention.base import StudentAttention
from gaupipe.distillation.job import constant_maps
from gaupipe.distillation.losses import ConstantMaps, FeatureLoss
from gaupipe.maps.gaussians import local_map
from gaupipe.models import forward_with_maps
from gaupipe.settings.load import load
from gaupipe.system.errors import UserError
from gaupipe.system.progress import read_metrics
from gaupipe.teachers.base import MapShape
from gaupipe.teachers.local import LocalMaps, LocalTeacher, wrong_places
from vits import gradients, pico

STDS = [0.7, 1.5, 3.0, 0.7]


def oracle(grid: tuple[int, int], stds: list[float]) -> np.ndarray:
    """[H, T, T] by the definition, key by key."""
    tokens = [(y, x) for y in range(grid[0]) for x in range(grid[1])]
    maps = np.zeros((len(stds), len(tokens), len(tokens)))
    for head, std in enumerate(stds):
        for i, (y, x) in enumerate(tokens):
            for j, (v, u) in enumerate(tokens):
                maps[head, i, j] = math.exp(-((y - v) ** 2 + (x - u) ** 2) / (2 * std**2))
    return maps / maps.sum(-1, keepdims=True)


@pytest.mark.parametrize("grid", [(4, 4), (2, 5), (1, 3)])
def test_maps_are_gaussians_round_the_tokens(grid):
    stds = [0.3, 0.7, 1.5, 3.0]
    maps = local_map(grid, stds).numpy()
    np.testing.assert_allclose(maps, oracle(grid, stds), rtol=1e-5, atol=1e-7)


def test_an_infinite_std_is_uniform_and_a_tiny_one_the_token_itself():
    uniform, sharp = local_map((2, 3), [math.inf, 1e-9])
    torch.testing.assert_close(uniform, torch.full((6, 6), 1 / 6))
    torch.testing.assert_close(sharp, torch.eye(6))


def test_wrong_places_are_a_permutation_that_moves_every_query():
    for tokens in (2, 5, 64):
        places = wrong_places(tokens, torch.Generator().manual_seed(0))
        assert sorted(places.tolist()) == list(range(tokens))
        assert (places != torch.arange(tokens)).all()


TOKENS = dict(class_token=True, reg_tokens=2)


@pytest.mark.parametrize(
    "attention, options, grid",
    [
        ("standard", {}, (4, 4)),
        ("belief2", TOKENS, (4, 4)),
        ("standard", dict(img_size=(4, 10)), (2, 5)),
        ("attentionx", {}, (4, 4)),
        ("attentionx", dict(img_size=(10, 4), **TOKENS), (5, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [None, "mean"])
def test_loss_and_gradients_are_those_of_the_definition(attention, options, grid, heads):
    model, labels = pico(attention, **options), torch.tensor([1, 2, 3])
    images = torch.randn(3, 1, *model.patch_embed.img_size)
    prefix = model.num_prefix_tokens
    target = torch.from_numpy(oracle(grid, STDS))
    if heads == "mean":
        target = target.mean(0, keepdim=True)
    if attention == "attentionx":  # a student that hides a query from itself
        target = target * (1 - torch.eye(target.shape[-1]))
        target = target / target.sum(-1, keepdim=True)
    logits, rows = forward_with_maps(model, images)
    expected = torch.zeros((), dtype=torch.float64)
    for row in rows:  # log-probabilities [B, H, P + T, P + T]
        maps = row.double().exp()[..., prefix:, prefix:]
        maps = maps / maps.sum(-1, keepdim=True)
        ratio = torch.where(target > 0, target / maps.clamp_min(1e-300), 1.0).log()
        expected = expected + (target * ratio).sum(-1).mean()
    truth = gradients(model, cross_entropy(logits, labels) + expected)

    maps = LocalMaps(MapShape.of(model), STDS)
    teacher = ConstantMaps(maps, [0, 1], grid, heads=heads)
    logits, loss = FeatureLoss(model)(images, teacher)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
    ours = gradients(model, cross_entropy(logits, labels) + loss)
    for mine, theirs in zip(ours, truth, strict=True):
        close = 1e-4 * theirs.abs().max().item() + 1e-6
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=close)


SMALL = [
    "data.train_images=60",
    "phase_a.teacher=local",
    "train.epochs=2",
    "model.args={embed_dim: 16, depth: 2, num_heads: 2}",
    "phase_a.local.std=[0.8, 2.0]",
    "threads=1",
]


def sets(*settings: str) -> list[str]:
    return [part for setting in (*SMALL, *settings) for part in ("--set", setting)]


@pytest.fixture(scope="module")
def local_run(tmp_path_factory) -> Path:
    from stages import run

    run_dir = tmp_path_factory.mktemp("local") / "run"
    settings = load("digits_expected", [*SMALL, "phase_b.alpha=0.2", "phase_b.gamma=0.25"])
    run.run_all(settings.with_section("model", attention="attentionx"), run_dir, baseline=False)
    return run_dir


def test_the_phases_say_in_one_line_that_nothing_is_trained_or_stored(tmp_path, in_process):
    run = tmp_path / "run"
    code, _, err = in_process("phase-a", "--run-dir", run, *sets("phase_b.alpha=0.2"))
    assert code == 0 and err.count("\n") == 2 and "needs no training" in err
    assert f"next: gaupipe phase-b --run-dir {run}" in err
    code, out, err = in_process("export-maps", "--run-dir", run)
    assert (code, out) == (0, "") and err.count("\n") == 1 and "needs no store" in err
    assert not (run / "maps.zarr").exists()
    code, _, err = in_process("phase-b", "--run-dir", run, "--student", "belief")
    assert code == 0 and "it predicts nothing, so phase_b.alpha is 0" in err
    saved = yaml.safe_load((run / "phase_b/belief/config.yaml").read_text())
    assert saved["phase_b"]["alpha"] == 0.0
    entry = read_metrics(run / "phase_b/belief/metrics.jsonl")[0]
    assert entry["loss_feat"] > 0 and entry["loss_soft"] is None
    assert entry["train_loss"] == pytest.approx(
        saved["phase_b"]["beta"] * entry["loss_hard"] + entry["gamma"] * entry["loss_feat"],
        rel=1e-5,
    )


def teacher_of(settings):
    return LocalTeacher(settings, None, torch.device("cpu"))


def maps_of(settings, student):
    return teacher_of(settings).constant_maps(student)


def test_a_student_is_pulled_towards_the_gaussians(local_run):
    settings = load(local_run / "config.yaml")
    run = gaupipe.open_run(local_run)
    maps = run.maps([0, 1, 2])
    assert [tuple(block.shape) for block in maps] == [(3, 2, 16, 16)] * 2
    expected = torch.from_numpy(oracle((4, 4), [0.8, 2.0])).float()
    torch.testing.assert_close(maps[1][2], expected, rtol=1e-5, atol=1e-7)
    assert maps_of(settings, run.student()).heads == 2
    first, last = run.metrics("attentionx")
    assert last["loss_feat"] < first["loss_feat"]
    assert run.metrics("phase_a")[0]["train_acc"] is None


def test_wrong_places_are_the_same_for_one_seed_and_others_for_another(local_run):
    def maps(*overrides: str) -> torch.Tensor:
        settings = load("digits_expected", [*SMALL, *overrides])
        return maps_of(settings, gaupipe.open_run(local_run).student()).map(0)

    right, wrong = maps(), maps("phase_a.local.permuted=true")
    torch.testing.assert_close(wrong, maps("phase_a.local.permuted=true"), rtol=0, atol=0)
    assert not torch.equal(wrong, maps("phase_a.local.permuted=true", "seed=1"))
    rows = [sorted(map(tuple, one[0, 0].tolist())) for one in (wrong, right)]
    assert rows[0] == rows[1]
    assert not (wrong == right).all(-1).any()


def test_inspect_shows_the_gaussians_beside_the_student(local_run, in_process):
    code, out, _ = in_process(
        *("inspect", "--run-dir", local_run, "--student", "attentionx", "--image", 3),
        *("--head", 1, "--query", 5, "--json"),
    )
    assert code == 0
    seen = yaml.safe_load(out)
    expected = oracle((4, 4), [0.8, 2.0])[1, 5]
    expected[5] = 0  # what the student hides from itself
    teacher = np.array(seen["teacher"]).ravel()
    np.testing.assert_allclose(teacher, expected / expected.sum(), rtol=1e-5, atol=1e-6)


def test_view_shows_the_students_of_a_run_without_a_store(local_run, tmp_path, in_process):
    page = tmp_path / "maps.html"
    assert in_process("view", "--run-dir", local_run, "--html", page, "--image", 3)[0] == 0
    assert page.stat().st_size > 10_000


def test_an_interrupted_student_goes_on_with_the_same_numbers(local_run, tmp_path):
    from stages import phase_b
    from stages.runs.directory import RunDirectory

    run = RunDirectory(local_run)
    settings = load(local_run / "config.yaml")
    job = phase_b.build_training(settings, gaupipe.open_run(local_run).data, run)
    assert job.settings.phase_b.alpha == 0 and not job.sources
    again = load(local_run / "phase_b/attentionx/config.yaml")
    assert job.identity == phase_b.build_training(again, job.data, run).identity | {
        "model.attention": settings.model.attention
    }


def test_a_comparison_has_wrong_places_and_uniform_maps_as_controls(tmp_path):
    from stages import compare

    settings = load("digits_expected", [*SMALL, "model.attention=standard", "phase_b.alpha=0.1"])
    folder = tmp_path / "all"
    options: dict = {"sweep": None, "only": [], "jobs": 1}
    compare.compare(settings, folder, students=["standard"], seeds=[0], **options)
    trained = [load(path) for path in (folder / "students").glob("*/config.yaml")]
    local = [one.phase_a.local for one in trained if one.phase_a.teacher == "local"]
    kinds = sorted((one.permuted, one.std) for one in local)
    assert kinds == [(False, [0.8, 2.0]), (False, [math.inf]), (True, [0.8, 2.0])]
    assert {one.phase_b.alpha for one in trained} == {0.0}
    assert not list(folder.glob("teachers/*/*.zarr"))


def test_an_attention_without_maps_is_refused():
    class Blind(StudentAttention):
        compares = False

    model = pico("standard")
    model.blocks[0].attn = Blind(32, 4)
    with pytest.raises(UserError, match=r"Blind compares no queries .* set phase_b.gamma=0"):
        constant_maps(teacher_of(load("digits_expected", ["phase_a.teacher=local"])), model)
