"""L_feat without maps in memory, against the loss on explicit maps; what is compared with what."""

import copy

import numpy as np
import pytest
import timm
import torch
from torch.nn.functional import cross_entropy

import gaupipe.vit.models  # noqa: F401
from gaupipe.attention import STUDENTS, comparing
from gaupipe.attention.standard import in_steps
from gaupipe.distillation.feature_loss import FeatureLoss, TeacherMaps
from gaupipe.distillation.kinds import StoredGaussians, StoredRows
from gaupipe.distillation.losses import feature_loss
from gaupipe.maps.gaussians import expected_map
from gaupipe.models import forward_with_maps, run_blocks

B, L, H, GRID = 3, 2, 4, (4, 4)


def student(attention: str = "standard", depth: int = L, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    if attention == "prior":
        attention, options = "standard", {**options, "attention_options": {"prior": True}}
    model = timm.create_model(
        "gauvit_pico_patch2_8",
        attention=attention,
        depth=depth,
        embed_dim=32,
        in_chans=1,
        **options,
    )
    for parameter in model.parameters():  # away from a start at which all rows are uniform
        torch.nn.init.normal_(parameter, std=0.2)
    return model


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
        attention = StoredRows(lambda layer, heads: maps[:, layer], GRID)
    return TeacherMaps(attention, **{"layers": [0, 1], "grid": GRID, **options})


def gradients(model, loss) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("attention", [*STUDENTS, "prior"])
@pytest.mark.parametrize(
    "temperature,direction",
    [(1.0, "teacher_student"), (2.0, "teacher_student"), (1.0, "student_teacher")],
)
@pytest.mark.parametrize("form", ["gaussian", "maps"])
def test_loss_and_gradients_equal_those_on_explicit_maps(attention, temperature, direction, form):
    model, images, labels = student(attention), torch.randn(B, 1, 8, 8), torch.tensor([1, 2, 3])
    stored = gaussians()
    hidden = torch.eye(16, dtype=torch.bool) if attention == "attentionx" else None
    logits, rows = forward_with_maps(model, images)
    expected = sum(
        feature_loss(row, expected_map(stored[:, layer], GRID), temperature, direction, hidden)
        for layer, row in enumerate(rows)
    )
    oracle = gradients(model, cross_entropy(logits, labels) + expected)
    pass_with_loss = FeatureLoss(model, temperature, direction)
    logits, loss = pass_with_loss(images, teacher_maps(stored, form))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, model(images), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(
        gradients(model, cross_entropy(logits, labels) + loss), oracle, strict=True
    ):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item() + 1e-6
        )


@pytest.mark.parametrize("attention", ["standard", "attentionx", "gaussian", "prior"])
def test_the_pass_compiles_without_graph_breaks(attention):
    model, images, stored = student(attention), torch.randn(B, 1, 8, 8), gaussians()

    def loss(images: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        return FeatureLoss(model)(images, teacher_maps(stored))[1]

    oracle = gradients(model, loss(images, stored))
    for ours, theirs in zip(
        gradients(model, torch.compile(loss, backend="eager", fullgraph=True)(images, stored)),
        oracle,
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_teacher_that_looks_only_at_what_is_hidden():
    model, images, stored = student("attentionx"), torch.randn(B, 1, 8, 8), gaussians()
    along = torch.linspace(-1, 1, 4)
    stored[:, :, :2, :, 0], stored[:, :, :2, :, 1] = (
        along.repeat(4),
        along.repeat_interleave(4),
    )  # two heads at themselves
    stored[..., 2:] = 1e-3
    _, rows = forward_with_maps(model, images)
    expected = sum(
        feature_loss(
            row, expected_map(stored[:, layer], GRID), hidden=torch.eye(16, dtype=torch.bool)
        )
        for layer, row in enumerate(rows)
    )
    oracle = gradients(model, expected)
    _, loss = FeatureLoss(model)(images, teacher_maps(stored))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(gradients(model, loss), oracle, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item() + 1e-6
        )


def rows_by_loops(model, images) -> list[np.ndarray]:
    """Every block's attention of patches to patches, [B, H, 16, 16] float64: the softmax over
    all keys, in loops, without the prefix tokens and divided by what is left."""
    model, prefix, found = copy.deepcopy(model).double(), model.num_prefix_tokens, []

    def attend(layer, attention, tokens):
        q, k, _ = (x.detach().numpy() for x in in_steps(attention).project(tokens))
        scores = q @ k.swapaxes(-1, -2) * attention.scale
        if getattr(attention, "mask_diagonal", False):
            scores[..., np.arange(scores.shape[-1]), np.arange(scores.shape[-1])] = -np.inf
        rows = np.exp(scores - scores.max(-1, keepdims=True))
        rows = (rows / rows.sum(-1, keepdims=True))[..., prefix:, prefix:]
        found.append(rows / rows.sum(-1, keepdims=True))
        return attention(tokens)

    run_blocks(model, images.double(), attend)
    return found


PREFIXES = {
    "class token": dict(class_token=True, global_pool="token"),
    "registers": dict(class_token=True, reg_tokens=3, global_pool="avg", no_embed_class=True),
}


@pytest.mark.parametrize("tokens", PREFIXES)
@pytest.mark.parametrize("attention", comparing())
def test_class_and_register_tokens_are_left_out_of_the_comparison(attention, tokens):
    """The value against loops, the gradient against a difference along a random direction."""
    model, images, stored = (
        student(attention, **PREFIXES[tokens]).double(),
        torch.randn(B, 1, 8, 8),
        gaussians(),
    )
    images = images.double()
    teacher = [expected_map(stored[:, layer], GRID).double().numpy() for layer in range(L)]

    def by_loops() -> float:
        total = 0.0
        for rows, wanted in zip(rows_by_loops(model, images), teacher, strict=True):
            if attention == "attentionx":
                wanted = wanted * (1 - np.eye(16))
                wanted = wanted / wanted.sum(-1, keepdims=True)
            seen = wanted > 0
            total += (wanted[seen] * np.log(wanted[seen] / rows[seen])).sum() / (B * H * 16)
        return total

    logits, loss = FeatureLoss(model)(images, teacher_maps(stored))
    assert loss.item() == pytest.approx(by_loops(), rel=1e-5)
    torch.testing.assert_close(logits, model(images))
    loss.backward()
    slope, eps, weights = 0.0, 1e-5, [p for p in model.parameters() if p.grad is not None]
    along = [torch.randn_like(p) for p in weights]
    slope = sum(
        (p.grad * direction).sum().item() for p, direction in zip(weights, along, strict=True)
    )
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, direction in zip(weights, along, strict=True):
                p.add_(direction, alpha=sign * eps)
            values.append(by_loops())
            for p, direction in zip(weights, along, strict=True):
                p.sub_(direction, alpha=sign * eps)
    assert slope == pytest.approx((values[0] - values[1]) / (2 * eps), rel=1e-3)


def test_a_layer_map_and_mean_heads_and_a_dense_store():
    images, stored = torch.randn(B, 1, 8, 8), gaussians(heads=2)
    model = student(depth=3)
    _, rows = forward_with_maps(model, images)
    expected = sum(
        feature_loss(
            rows[own],
            expected_map(stored[:, theirs], GRID).mean(1, keepdim=True).expand(B, H, 16, 16),
        )
        for own, theirs in ((0, 1), (2, 0))
    )
    for form in ("gaussian", "maps"):
        teacher = teacher_maps(stored, form, layers=[1, None, 0], heads="mean")
        _, loss = FeatureLoss(model)(images, teacher)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_grid_of_another_shape_gives_rows():
    fine = TeacherMaps(StoredGaussians(gaussians(tokens=9), (3, 3)), [0, 1], (5, 4)).map(0)
    assert fine.shape == (B, H, 20, 20)
    torch.testing.assert_close(fine.sum(-1), torch.ones(B, H, 20), atol=1e-4, rtol=0)
