"""L_feat, against the loss on explicit maps; what is compared with what."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

import gaupipe.vit.models  # noqa: F401
from gaupipe.attention import STUDENTS, comparing
from gaupipe.attention.standard import in_steps
from gaupipe.data.mixing import Mix
from gaupipe.distillation.losses import FeatureLoss, TeacherMaps, drawn_queries, feature_loss
from gaupipe.maps.gaussians import Geometry, expected_map
from gaupipe.maps.stored import StoredGaussians, StoredRows, select_queries
from gaupipe.models import forward_with_maps, run_blocks
from gaupipe.teachers.base import MapShape
from gaupipe.teachers.local import LocalMaps
from oracles import divergence, equation_9
from vits import gradients, pico

B, L, H, GRID = 3, 2, 4, (4, 4)


def gaussians(heads: int = H, tokens: int = 16) -> torch.Tensor:
    values = torch.randn(B, L, heads, tokens, 4, generator=torch.Generator().manual_seed(1))
    values[..., 2:] = values[..., 2:].abs() + 0.1
    return values


def teacher_maps(stored: torch.Tensor, form: str = "gaussian", **options) -> TeacherMaps:
    """Gaussians [B, L, H, T, 4], or the maps they stand for, as a store gives them."""
    if form == "gaussian":
        attention = StoredGaussians(stored, GRID)
    else:
        maps = expected_map(stored, GRID)
        attention = StoredRows(lambda layer, tokens: select_queries(maps[:, layer], tokens), GRID)
    return TeacherMaps(attention, **{"layers": [0, 1], "grid": GRID, **options})


@pytest.mark.parametrize("attention", [*STUDENTS, "prior"])
@pytest.mark.parametrize(
    "temperature,name",
    [(1, "teacher_student"), (2, "teacher_student"), (1, "student_teacher"), (1, "printed")],
)
@pytest.mark.parametrize("form", ["gaussian", "maps"])
def test_loss_and_gradients_equal_those_on_explicit_maps(attention, temperature, name, form):
    model, images, labels = pico(attention), torch.randn(B, 1, 8, 8), torch.tensor([1, 2, 3])
    stored, hidden = gaussians(), None
    if attention == "attentionx":
        hidden = torch.eye(16, dtype=torch.bool)
        y, x = torch.meshgrid(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4), indexing="ij")
        stored[:, :, :2, :, :2] = torch.stack([x, y], -1).flatten(0, 1)  # two heads at what is
        stored[:, :, :2, :, 2:] = 1e-3  # hidden alone
    logits, rows = forward_with_maps(model, images)
    expected = sum(
        feature_loss(row, expected_map(stored[:, layer], GRID), temperature, name, hidden)
        for layer, row in enumerate(rows)
    )
    oracle = gradients(model, cross_entropy(logits, labels) + expected)
    logits, loss = FeatureLoss(model, temperature, name)(images, teacher_maps(stored, form))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, model(images), rtol=1e-4, atol=1e-5)
    ours = gradients(model, cross_entropy(logits, labels) + loss)
    for mine, theirs in zip(ours, oracle, strict=True):
        close = 1e-4 * theirs.abs().max().item() + 1e-6
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=close)


@pytest.mark.parametrize("attention", ["attentionx", "gaussian", "prior"])
def test_the_pass_compiles_without_graph_breaks(attention):
    model, images, stored = pico(attention, depth=1), torch.randn(B, 1, 8, 8), gaussians()

    def loss(images: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        return FeatureLoss(model)(images, teacher_maps(stored, layers=[1]))[1]

    oracle = gradients(model, loss(images, stored))
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, compiled(images, stored)), oracle)


def rows_by_numpy(model, images) -> list[np.ndarray]:
    """Every block's attention of patches to patches, [B, H, 16, 16] float64: the softmax over
    all keys, without the prefix tokens and divided by what is left."""
    prefix, maps = model.num_prefix_tokens, []

    def attend(layer, attention, tokens):
        q, k, _ = (x.detach().numpy() for x in in_steps(attention).project(tokens))
        scores = q @ k.swapaxes(-1, -2) * attention.scale
        if getattr(attention, "mask_diagonal", False):
            scores[..., np.arange(scores.shape[-1]), np.arange(scores.shape[-1])] = -np.inf
        rows = np.exp(scores - scores.max(-1, keepdims=True))
        rows = (rows / rows.sum(-1, keepdims=True))[..., prefix:, prefix:]
        maps.append(rows / rows.sum(-1, keepdims=True))
        return attention(tokens)

    run_blocks(model, images, attend)
    return maps


PREFIXES = {
    "class token": dict(class_token=True, global_pool="token"),
    "registers": dict(class_token=True, reg_tokens=3, global_pool="avg", no_embed_class=True),
}


@pytest.mark.parametrize("name", ["teacher_student", "printed"])
@pytest.mark.parametrize("tokens", PREFIXES)
@pytest.mark.parametrize("attention", comparing())
def test_class_and_register_tokens_are_left_out_of_the_comparison(attention, tokens, name):
    """The value against numpy, the gradient against a difference along a random direction."""
    model, stored = pico(attention, **PREFIXES[tokens]).double(), gaussians()
    images = torch.randn(B, 1, 8, 8).double()
    teacher = [expected_map(stored[:, layer], GRID).double().numpy() for layer in range(L)]

    def by_numpy() -> float:
        hide_own = attention == "attentionx"
        total = 0.0
        for theirs, ours in zip(teacher, rows_by_numpy(model, images), strict=True):
            if name == "printed":
                total += equation_9(ours, theirs, hide_own)
            else:
                total += divergence(theirs, ours, hide_own)
        return total

    logits, loss = FeatureLoss(model, divergence=name)(images, teacher_maps(stored))
    assert loss.item() == pytest.approx(by_numpy(), rel=1e-5)
    torch.testing.assert_close(logits, model(images))
    slopes = gradients(model, loss)
    along, values = [torch.randn_like(slope) for slope in slopes], []
    for step in (1e-5, -2e-5):  # forth, and back beyond the start
        with torch.no_grad():
            for parameter, direction in zip(model.parameters(), along, strict=True):
                parameter.add_(direction, alpha=step)
        values.append(by_numpy())
    slope = sum((one * other).sum().item() for one, other in zip(slopes, along, strict=True))
    assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-3)


def test_a_layer_map_and_mean_heads_and_a_dense_store():
    images, stored, model = torch.randn(B, 1, 8, 8), gaussians(heads=2), pico(depth=3)
    rows, expected = forward_with_maps(model, images)[1], 0.0
    for own, theirs in ((0, 1), (2, 0)):
        mean = expected_map(stored[:, theirs], GRID).mean(1, keepdim=True)
        expected += feature_loss(rows[own], mean.expand(B, H, 16, 16)).item()
    for form in ("gaussian", "maps"):
        teacher = teacher_maps(stored, form, layers=[1, None, 0], heads="mean")
        _, loss = FeatureLoss(model)(images, teacher)
        assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_a_grid_of_another_shape_gives_rows():
    fine = TeacherMaps(StoredGaussians(gaussians(tokens=9), (3, 3)), [0, 1], (5, 4)).map(0)
    assert fine.shape == (B, H, 20, 20)
    torch.testing.assert_close(fine.sum(-1), torch.ones(B, H, 20), atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", [*comparing(), "prior", "class token", "registers"])
@pytest.mark.parametrize(
    "temperature,direction", [(1.0, "teacher_student"), (2.0, "student_teacher")]
)
def test_the_mean_over_all_draws_of_queries_is_the_loss_over_all(attention, temperature, direction):
    """And its gradient: each of the 16 queries alone, and none of them, which is all."""
    model = pico(**PREFIXES[attention]) if attention in PREFIXES else pico(attention)
    images = torch.randn(B, 1, 8, 8)
    loss = FeatureLoss(model.double(), temperature, direction)
    results = []
    for queries in (None, *torch.arange(16).split(1)):
        teacher = teacher_maps(gaussians(), queries=queries)
        _, value = loss(images.double(), teacher)
        results.append([value, *gradients(model, value)])
    of_all, *of_one = results
    for whole, *parts in zip(of_all, *of_one, strict=True):
        torch.testing.assert_close(torch.stack(parts).mean(0), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("queries", [None, torch.arange(8)], ids=["all", "some"])
def test_no_map_is_kept_for_the_gradient(queries):
    model = pico(img_size=32)  # 256 tokens
    maps = LocalMaps(MapShape.of(model), [1.0] * H)
    teacher = TeacherMaps(maps, [0, 1], maps.grid, queries=queries)
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()), id):
        FeatureLoss(model)(torch.randn(B, 1, 32, 32), teacher)
    assert max(kept) < B * H * 256 * 256 / 4


@pytest.mark.parametrize("form", ["gaussian", "maps"])
@pytest.mark.parametrize("options", [{}, {"heads": "mean"}, {"heads": [3, 0]}, {"grid": (5, 3)}])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_rows_of_some_queries_are_those_of_the_whole_map(form, options, moved, mixed):
    geometry = mix = None
    if moved:
        geometry = Geometry(torch.rand(B, 2) / 4, torch.tensor([[0.7, -0.6], [-1, 1], [1, 1]]))
    if mixed:  # one by Mixup, two by CutMix
        box = torch.tensor([[0, 0, 0, 0], [0.1, 0, 0.6, 0.7], [0, 0.4, 0.5, 1]]).double()
        mix = Mix(torch.tensor([1, 2, 0]), torch.tensor([0.3, 1, 1]).double(), box)
    queries = torch.tensor([1, 2, 7, 14])
    more = {"geometry": geometry, "mixed": mix, **options}
    whole = teacher_maps(gaussians(), form, **more).map(1)
    some = teacher_maps(gaussians(), form, **more, queries=queries).map(1)
    torch.testing.assert_close(some, whole[..., queries, :], rtol=1e-5, atol=1e-7)


def test_every_set_of_queries_is_as_likely_and_the_batch_alone_draws_it():
    places = [(0, epoch, number) for epoch in range(30) for number in range(200)]
    draws = [drawn_queries(2, place, 4) for place in places]
    counts = Counter(tuple(draw.tolist()) for draw in draws)
    assert len(counts) == 6  # of 4 queries, two
    assert all(abs(count - 1000) < 5 * (1000 * 5 / 6) ** 0.5 for count in counts.values())
    assert torch.equal(drawn_queries(2, (0, 7, 3), 4), draws[7 * 200 + 3])
    assert drawn_queries(4, (0, 0, 0), 4) is None and drawn_queries(None, (0, 0, 0), 4) is None
