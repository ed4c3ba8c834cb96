"""A query's divergence is weighed by the teacher's attention to patches: against numpy."""

import numpy as np
import pytest
import torch

from gaupipe.distillation.kinds import StoredRows
from gaupipe.distillation.losses import FeatureLoss, TeacherMaps
from gaupipe.maps.views import pool_map
from gaupipe.models import forward_with_maps
from test_distillation import GRID, B, L, gradients, student

T = 16


def teacher(prefix: int, heads=None, weighted=True, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = (3 * torch.randn(B, L, 4, prefix + T, prefix + T, generator=generator)).softmax(-1)
    stored = StoredRows(lambda layer: rows[:, layer], GRID, prefix)
    return rows, TeacherMaps(stored, [0, 1], GRID, heads=heads, weighted=weighted)


def by_numpy(model, images, rows, prefix, mean):
    total = 0.0
    for layer, log_map in enumerate(forward_with_maps(model, images)[1]):
        s = log_map.detach().double().numpy()
        patches = rows[:, layer, :, prefix:, prefix:].double().numpy()
        if mean:
            patches = patches.mean(1, keepdims=True)
        shares = patches.sum(-1)
        p = patches / shares[..., None]
        total += (shares * (p * (np.log(p) - s)).sum(-1)).mean()
    return total


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("heads", [None, "mean"])
def test_value(heads, fused):
    model, images = student(), torch.randn(B, 1, 8, 8)
    rows, maps = teacher(2, heads)
    loss = FeatureLoss(model)
    assert loss.fused
    loss.fused = fused
    value = loss(images, maps)[1]
    assert value.item() == pytest.approx(
        by_numpy(model, images, rows, 2, heads == "mean"), rel=1e-4
    )


@pytest.mark.parametrize("heads", [None, "mean"])
def test_gradients_of_both_ways_agree(heads):
    model, images = student(), torch.randn(B, 1, 8, 8)
    loss, _maps = FeatureLoss(model), None
    _, maps = teacher(1, heads)
    fused = gradients(model, loss(images, maps)[1])
    loss.fused = False
    explicit = gradients(model, loss(images, maps)[1])
    for mine, theirs in zip(fused, explicit, strict=True):
        close = 1e-4 * theirs.abs().max().item() + 1e-6
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=close)


@pytest.mark.parametrize("fused", [True, False])
def test_shares_of_one_change_nothing(fused):
    model, images = student(), torch.randn(B, 1, 8, 8)
    loss = FeatureLoss(model)
    loss.fused = fused
    one, other = (loss(images, teacher(0, "mean", weighted)[1])[1] for weighted in (True, False))
    torch.testing.assert_close(one, other)
    mine, theirs = gradients(model, one), gradients(model, other)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_pooling_keeps_the_prefix_and_the_sums():
    rows, _ = teacher(1)
    pooled = pool_map(rows, GRID, (2, 2), 1)
    torch.testing.assert_close(pooled.sum(-1), torch.ones(B, L, 4, 5))
    mean = rows[..., 1:, 0].reshape(B, L, 4, 2, 2, 2, 2).mean((-1, -3)).flatten(-2)
    torch.testing.assert_close(pooled[..., 1:, 0], mean)
    patches = rows[..., 1:, 1:]
    torch.testing.assert_close(pooled[..., 1:, 1:], pool_map(patches, GRID, (2, 2)))
