"""L_feat on a random part of the queries: what is drawn, that its expectation is L_feat on all of
them, and that rows and gradients of the chosen queries are those of the whole maps."""

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch

from gaupipe.attention import COMPARING, STUDENTS, summed_scores
from gaupipe.data.augment import Mix, draw_queries
from gaupipe.distillation.feature_loss import TeacherMaps, forward_with_feature_loss
from gaupipe.distillation.kinds import KINDS, StoredGaussians
from gaupipe.maps.gaussians import Geometry, expected_map
from gaupipe.maps.views import take_queries
from gaupipe.vit.models import forward_with_maps
from test_attention import LargestTensor
from test_distillation import GRID, PREFIXES, B, H, L, gaussians, gradients, student, teacher_maps
from test_store import make_schema

T = GRID[0] * GRID[1]


def test_a_draw_belongs_to_seed_epoch_and_image_alone():
    ids = np.array([7, 2**40, 0, 12])
    drawn = draw_queries(1, 2, ids, 196, 0.25)
    assert drawn.shape == (4, 49) and drawn.dtype == torch.int64
    for image_id, queries in zip(ids, drawn.tolist(), strict=True):
        alone = draw_queries(1, 2, np.array([image_id]), 196, 0.25)
        assert alone[0].tolist() == queries == sorted(set(queries)) and queries[0] >= 0
    assert drawn.max() < 196
    others = draw_queries(2, 2, ids, 196, 0.25), draw_queries(1, 3, ids, 196, 0.25)
    assert all((other != drawn).any(1).all() for other in others)
    assert (drawn[0] != drawn[1]).any() and (drawn[0] != drawn[2]).any()


@pytest.mark.parametrize(
    "share,tokens,count", [(0.25, 49, 12), (0.01, 16, 1), (0.99, 16, 16), (1.0, 9, 9), (0.5, 1, 1)]
)
def test_how_many_queries_a_share_is(share, tokens, count):
    assert draw_queries(0, 0, np.arange(3), tokens, share).shape == (3, count)


def test_every_set_of_queries_is_as_likely():
    drawn = draw_queries(3, 5, np.arange(20_000), 5, 0.4)  # 10 sets of 2 queries
    counts = np.array([*Counter(map(tuple, drawn.tolist())).values()])
    assert len(counts) == 10 and ((counts - 2000) ** 2 / 2000).sum() < 27.9  # 0.1 % of chi2(9)


@pytest.mark.parametrize("attention", STUDENTS)
def test_the_mean_over_all_sets_of_queries_is_the_loss_on_all_queries(attention):
    """Every set of 2 of 4 queries: loss and gradients."""
    options = dict(attention=attention, depth=2, embed_dim=32, in_chans=1, img_size=4)
    torch.manual_seed(0)
    model = timm.create_model("gauvit_pico_patch2_8", **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    images, stored = torch.randn(B, 1, 4, 4), StoredGaussians(gaussians(tokens=4), (2, 2))
    whole = TeacherMaps(stored, [0, 1], (2, 2))
    loss = forward_with_feature_loss(model, images, whole)[1]
    expected, values, slopes = gradients(model, loss), [], []
    for chosen in itertools.combinations(range(4), 2):
        part = TeacherMaps(stored, [0, 1], (2, 2), queries=torch.tensor([chosen] * B))
        of_part = forward_with_feature_loss(model, images, part)[1]
        values.append(of_part.item())
        slopes.append(gradients(model, of_part))
    assert np.mean(values) == pytest.approx(loss.item(), rel=1e-5) and np.std(values) > 1e-3
    for mine, theirs in zip(zip(*slopes, strict=True), expected, strict=True):
        slack = 1e-5 * theirs.abs().max().item() + 1e-7
        torch.testing.assert_close(sum(mine) / len(mine), theirs, rtol=1e-4, atol=slack)


QUERIES = torch.tensor([[0, 3, 9, 14], [1, 2, 3, 15], [5, 6, 8, 12]])


def by_loops(log_maps, stored, temperature, direction, hidden) -> torch.Tensor:
    """L_feat from a student's whole rows, an image and a query at a time, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for layer, log_map in enumerate(log_maps):
        teacher = expected_map(stored[:, layer].double(), GRID)
        prefix = log_map.shape[-1] - T
        for image, head in np.ndindex(B, H):
            for query in QUERIES[image].tolist():
                keys = [key for key in range(T) if not (hidden and key == query)]
                s = log_map[image, head, prefix + query, [prefix + key for key in keys]]
                p = (
                    teacher[image, head, query, keys]
                    .clamp_min(torch.finfo(torch.float32).tiny)
                    .log()
                )
                s, p = (torch.log_softmax(row / temperature, 0) for row in (s, p))
                s, p = (s, p) if direction == "student_teacher" else (p, s)
                total = total + (s.exp() * (s - p)).sum() / QUERIES.numel() / H
    return total


@pytest.mark.parametrize(
    "attention,tokens",
    [*itertools.product(COMPARING, ["patches", *PREFIXES]), ("gaussian", "patches")],
)
@pytest.mark.parametrize(
    "temperature,direction",
    [(1.0, "teacher_student"), (3.0, "teacher_student"), (2.0, "student_teacher")],
)
def test_loss_and_gradients_of_chosen_queries(attention, temperature, direction, tokens):
    model = student(attention, **PREFIXES.get(tokens, {}))
    images, stored = torch.randn(B, 1, 8, 8), gaussians()
    double = student(attention, **PREFIXES.get(tokens, {})).double()
    rows = forward_with_maps(double, images.double())[1]
    hidden = attention == "attentionx"
    expected = by_loops(rows, stored, temperature, direction, hidden)
    teacher = teacher_maps(stored, queries=QUERIES)
    logits, loss = forward_with_feature_loss(
        model, images, teacher, temperature=temperature, direction=direction
    )
    torch.testing.assert_close(logits, model(images), rtol=1e-4, atol=1e-5)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for ours, theirs in zip(gradients(model, loss), gradients(double, expected), strict=True):
        slack = 1e-4 * theirs.abs().max().item() + 1e-6
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=slack)


@pytest.mark.parametrize("attention", ["standard", "attentionx", "belief2"])
@pytest.mark.parametrize("std,sharpness", [(1e-3, 1.0), (0.5, 30.0), (1e-3, 30.0), (500.0, 1e-4)])
def test_extreme_maps(attention, std, sharpness):
    """Teachers that see one key or all alike, students whose scores reach hundreds or are 0."""
    images, stored = torch.randn(B, 1, 8, 8), gaussians()
    stored[..., 2:] = std
    models = [student(attention), student(attention).double()]
    for model in models:
        for block in model.blocks:
            block.attn.qkv.weight.data[: 2 * model.embed_dim] *= sharpness
    rows = forward_with_maps(models[1], images.double())[1]
    expected = by_loops(rows, stored, 1.0, "teacher_student", attention == "attentionx")
    teacher = teacher_maps(stored, queries=QUERIES)
    loss = forward_with_feature_loss(models[0], images, teacher)[1]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    for ours, theirs in zip(
        gradients(models[0], loss), gradients(models[1], expected), strict=True
    ):
        slack = 1e-3 * theirs.abs().max().item() + 1e-6
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=slack)


def test_a_single_token_has_nothing_to_compare():
    for attention in STUDENTS:
        model = timm.create_model(
            "gauvit_pico_patch2_8", attention=attention, in_chans=1, img_size=2, depth=1
        )
        stored = StoredGaussians(torch.ones(B, 1, 4, 1, 4), (1, 1))
        teacher = TeacherMaps(stored, [0], (1, 1), queries=torch.zeros(B, 1, dtype=torch.int64))
        loss = forward_with_feature_loss(model, torch.randn(B, 1, 2, 2), teacher)[1]
        assert loss.item() == pytest.approx(0, abs=1e-6)


def stored_attention(kind: str):
    """What a store of a kind gives of three images, from random numbers."""
    name, _, encoding = kind.partition(" ")
    schema = make_schema(
        kind=name,
        grid=GRID,
        layers=L,
        heads=H,
        k={"topk": 3, "mixture": 2}.get(name),
        **({"encoding": encoding} if encoding else {}),
    )
    maps, rng = expected_map(gaussians(), GRID), np.random.default_rng(0)
    weights, keys = maps.topk(3)
    mixtures = rng.uniform(0.1, 1, (B, L, H, T, 2, 5)).astype(np.float16)
    mixtures[..., 1:3] -= 0.5
    arrays = {
        "gaussians": gaussians().half().numpy(),
        "mixtures": mixtures,
        "maps": maps.half().numpy(),
        "keys": keys.numpy().astype(np.uint8),
        "weights": weights.half().numpy(),
    }
    return KINDS[name].reader(SimpleNamespace(schema=schema), torch.device("cpu"))(arrays)


STORED = ["gaussian", "mixture", "dense", "dense uint8", "topk"]
VIEWS = Geometry(
    torch.tensor([[0.2, -0.15], [0.0, 0.0], [1.3, 0.1]]),
    torch.tensor([[0.7, 0.6], [-1.0, 1.0], [1.0, -0.8]]),
)
MIXED = Mix(
    torch.tensor([1, 2, 0]),
    torch.tensor([1.0, 0.3, 1.0]).double(),
    torch.tensor([[0.1, 0.0, 0.6, 0.8], [0, 0, 0, 0], [0.5, 0.5, 1.0, 1.0]]).double(),
)
CASES = {
    "as they are": {},
    "heads": dict(heads=[2, 0]),
    "mean of heads": dict(mean_heads=True),
    "views": dict(geometry=VIEWS),
    "another grid": dict(grid=(3, 5)),
    "mixed": dict(mixed=MIXED),
    "all": dict(geometry=VIEWS, grid=(6, 3), mixed=MIXED, heads=[3, 1, 1]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", STORED)
def test_chosen_rows_are_those_of_the_whole_map(kind, case):
    options = {"layers": [1, 0], "grid": GRID, **CASES[case]}
    tokens = options["grid"][0] * options["grid"][1]
    queries = draw_queries(0, 0, np.arange(B), tokens, 0.3)
    for share in (queries, torch.arange(tokens).expand(B, -1)):
        teacher = TeacherMaps(stored_attention(kind), **options, queries=share)
        for layer in (0, 1):
            expected = take_queries(teacher.map(layer), share)
            torch.testing.assert_close(teacher.rows(layer), expected, atol=2e-6, rtol=1e-5)
            rows = teacher.chosen_rows(layer, share, None)
            torch.testing.assert_close(rows.make_rows(), expected, atol=2e-6, rtol=1e-5)
            assert (rows.entropy is None) == (teacher.axes(layer) is None)
            if rows.entropy is not None:
                wanted = -torch.xlogy(expected.double(), expected.double()).sum(-1).float()
                torch.testing.assert_close(rows.entropy, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", ["patches", *PREFIXES])
@pytest.mark.parametrize("attention", ["standard", "belief2"])
@pytest.mark.parametrize("kind", ["gaussian", "topk"])
def test_no_map_of_all_queries_is_made(kind, attention, tokens, monkeypatch):
    """64 tokens of width 32: a map has twice the numbers of Q, K and V together."""
    model = timm.create_model(
        "gauvit_pico_patch2_8",
        attention=attention,
        depth=2,
        embed_dim=32,
        num_heads=4,
        in_chans=1,
        img_size=16,
        mlp_ratio=1,
        **PREFIXES.get(tokens, {}),
    )
    monkeypatch.setattr(summed_scores, "CACHE_BYTES", 1)  # belief2 makes maps head by head
    whole = B * H * 64 * 64
    values = torch.rand(B, 2, H, 64, 4 if kind == "gaussian" else 3)
    if kind == "gaussian":
        stored = StoredGaussians(values, (8, 8))
    else:
        schema = make_schema(kind="topk", k=3, grid=(8, 8), layers=2, heads=H)
        keys = torch.rand(B, 2, H, 64, 64).argsort(-1)[..., :3]
        read = KINDS["topk"].reader(SimpleNamespace(schema=schema), torch.device("cpu"))
        stored = read({"keys": keys.numpy(), "weights": (values / 3).numpy()})
    queries = draw_queries(0, 0, np.arange(B), 64, 0.25)
    for chosen in (queries, None):
        teacher = TeacherMaps(stored, [0, 1], (8, 8), queries=chosen)
        with LargestTensor() as largest:
            logits, loss = forward_with_feature_loss(model, torch.randn(B, 1, 16, 16), teacher)
            (logits.sum() + loss).backward()
        assert (largest.numel < whole) == (chosen is not None)


def test_with_attention_copy_the_student_reads_whole_maps():
    model, images, stored = student(), torch.randn(B, 1, 8, 8), gaussians()
    some, all_of_them = (
        forward_with_feature_loss(model, images, teacher_maps(stored, queries=queries), copy=True)
        for queries in (QUERIES, None)
    )
    torch.testing.assert_close(some[0], all_of_them[0])
    whole = torch.arange(T).expand(B, -1)
    again = forward_with_feature_loss(model, images, teacher_maps(stored, queries=whole), copy=True)
    torch.testing.assert_close(again[1], all_of_them[1])
    assert (some[1] - all_of_them[1]).abs() > 1e-4
