"""Gaussians: the closed form and its gradient against integrals, and torch's sampler of images."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gaupipe.attention.gaussian import GaussianAttention
from gaupipe.maps.gaussians import (
    expected_axes,
    expected_map,
    from_raw,
    initial_raw,
    outer,
    point_axes,
    sample,
)
from oracles import map_of, weights_of_a_gaussian


def gaussians_of(seed: int, count: int) -> torch.Tensor:
    mean, log_std = torch.randn(2, count, 2, generator=torch.Generator().manual_seed(seed))
    return torch.cat([mean, torch.exp(log_std - 0.5)], dim=-1)


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (1, 5), (14, 14)])
def test_expected_map_is_the_integral_and_the_mean_of_sampled_points(grid):
    gaussians = gaussians_of(0, 12)
    rows = expected_map(gaussians, grid)
    np.testing.assert_allclose(rows, map_of(gaussians.double().numpy(), grid), atol=5e-6)
    if grid == (3, 7):
        noise = torch.randn(100_000, 12, 2, generator=torch.Generator().manual_seed(0))
        sampled = outer(*point_axes(sample(gaussians, noise), grid)).mean(0)
        assert (sampled - rows).abs().max() < 6e-3  # 1 / sqrt(1e5) = 3e-3


@pytest.mark.parametrize(
    "mean,std", [(0.0, 1e-9), (50.0, 1e-3), (-1e6, 1.0), (0.3, 1e6), (1e6, 1e6)]
)
def test_extreme_gaussians_stay_finite_and_normalised(mean, std):
    rows = expected_map(torch.tensor([[mean, -mean, std, std]]), (14, 14))
    assert rows.isfinite().all() and (rows >= 0).all()
    torch.testing.assert_close(rows.sum(-1), torch.ones(1), atol=2e-3, rtol=0)


@pytest.mark.parametrize("grid", [(4, 4), (3, 7)])
def test_sampled_attention_equals_grid_sample(grid):
    """W V with W the bilinear weights is torch's grid_sample of V with aligned corners and
    border padding."""
    torch.manual_seed(0)
    B, H, d_m, (h, w) = 2, 3, 5, grid
    T = h * w
    attention = GaussianAttention(H * d_m, num_heads=H, qkv_bias=True)
    tokens, points = torch.randn(B, T, H * d_m), torch.randn(B, H, T, 2)
    v = attention.v(tokens).view(B, h, w, H, d_m).permute(0, 3, 4, 1, 2).reshape(B * H, d_m, h, w)
    heads = F.grid_sample(v, points.view(B * H, T, 1, 2), "bilinear", "border", True)
    heads = heads.view(B, H, d_m, T).permute(0, 3, 1, 2).reshape(B, T, H * d_m)
    for update in (
        attention.through(tokens, point_axes(points, grid)),
        attention.at_points(tokens, points, grid),
    ):
        torch.testing.assert_close(update, attention.proj(heads), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wide", ["tokens", "points", "both"])
def test_points_are_read_in_float64_too(wide):
    torch.manual_seed(0)
    attention, tokens, points = (
        GaussianAttention(8, 2),
        torch.randn(1, 6, 8),
        torch.randn(1, 2, 6, 2),
    )
    expected = attention.at_points(tokens, points, (2, 3))
    if wide != "points":
        attention, tokens = attention.double(), tokens.double()
    if wide != "tokens":
        points = points.double()
    update = attention.at_points(tokens, points, (2, 3))
    assert update.dtype == tokens.dtype
    torch.testing.assert_close(update.float(), expected)


def test_parametrisations_start_at_mean_0_std_1_and_mean_what_the_paper_says():
    for name in ("loc_scale", "paper"):
        start = from_raw(initial_raw(name), name)
        torch.testing.assert_close(start, torch.tensor([0.0, 0, 1, 1]))
    numbers = [[0.3, -0.2], [0.5, -2.0], [0.1, 0.4], [1.5, 0.7]]
    mu_s, sigma_s, mu_l, sigma_l = np.array(numbers)
    expected = [*(mu_s + mu_l) / sigma_l**2, *abs(sigma_s) / sigma_l**2]
    gaussian = from_raw(torch.tensor(numbers).flatten(), "paper")
    np.testing.assert_allclose(gaussian, expected, rtol=1e-6)
    gaussian = from_raw(torch.tensor([0.5, -1, 0, math.log(2)]), "loc_scale")
    torch.testing.assert_close(gaussian, torch.tensor([0.5, -1, 1, 2]))


@pytest.mark.parametrize("log_std", [11.0, 88.7, 89.0, 1e4, 3e38, -88.0, -1e4, -3e38])
def test_any_log_std_gives_a_map_and_gradients(log_std):
    """exp overflows from 88.8 on; from a tenth of that on all attention is on the borders."""
    raw = torch.tensor([0.1, -0.2, log_std, log_std], requires_grad=True)
    gaussians = from_raw(raw, "loc_scale")
    assert gaussians.half().isfinite().all()  # as the store keeps them
    rows = expected_map(gaussians, (5, 7))
    rows.square().sum().backward()
    assert raw.grad.isfinite().all()
    rows = rows.detach().view(5, 7)
    corners, near = rows[[0, 0, -1, -1], [0, -1, 0, -1]], rows[1:3, 3:5].flatten()
    if log_std > 0:
        assert corners.tolist() == pytest.approx([0.25] * 4, abs=2e-3)
    else:  # pixel (3.3, 1.6)
        assert near.tolist() == pytest.approx([0.28, 0.12, 0.42, 0.18], abs=2e-3)


def central_difference(function, x: float, step: float = 1e-5) -> np.ndarray:
    return (function(x + step) - function(x - step)) / (2 * step)


def axis_jacobian(axes, values: torch.Tensor) -> np.ndarray:
    """d weights / d values of the x axis: [n, numbers]."""
    return torch.autograd.functional.jacobian(lambda v: axes(v)[1], values).numpy()


ON_AND_BESIDE_TOKENS = [0.0, 3.0, 6.0, 1.0, 3.001, 2.999, 1e-3, -1e-3, 5.999, 6.001]
ON_AND_BESIDE_TOKENS += [2.5, -0.5, 6.5, -40.0, 50.0]


@pytest.mark.parametrize("std_pixels", [0.05, 0.3, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("dtype,atol", [(torch.float64, 1e-8), (torch.float32, 3e-6)])
def test_expected_weights_and_their_gradients_on_and_beside_tokens(std_pixels, dtype, atol):
    """Phase A starts with every mean on the middle token of an odd grid."""
    n, half = 7, 3.0  # pixels per normalised unit
    for pixels in ON_AND_BESIDE_TOKENS:
        gaussian = torch.tensor([pixels / half - 1, 0.0, std_pixels / half, 1.0], dtype=dtype)
        m = (gaussian[0].item() + 1) * half  # after rounding to the dtype
        weights = expected_axes(gaussian, (1, n))[1].double().numpy()
        exact = weights_of_a_gaussian(m, std_pixels, n)
        np.testing.assert_allclose(weights, exact, atol=atol * max(1, std_pixels / 4))
        if std_pixels in (0.3, 1.0):  # small weights, too, have a small relative error
            seen = exact > 1e-30
            np.testing.assert_allclose(weights[seen], exact[seen], rtol=1e-3)
        jacobian = axis_jacobian(lambda g: expected_axes(g, (1, n)), gaussian)
        by_mean = central_difference(lambda m: weights_of_a_gaussian(m, std_pixels, n), m)
        by_std = central_difference(lambda s, m=m: weights_of_a_gaussian(m, s, n), std_pixels)
        np.testing.assert_allclose(jacobian[:, 0], by_mean * half, atol=atol * half, rtol=1e-5)
        np.testing.assert_allclose(jacobian[:, 2], by_std * half, atol=atol * half, rtol=1e-5)
        assert not jacobian[:, [1, 3]].any()


@pytest.mark.parametrize("pixels", [0.0, 1.0, 2.0, 3.0, 4.0, 2.5, -1.0, 9.0, 2.25, 0.5])
def test_gradient_of_sampled_points_is_central_at_kinks(pixels):
    """On a token and on the border: the mean of both sides, the limit of narrow Gaussians."""

    def weights_of_a_point(u: float) -> np.ndarray:
        return (1 - np.abs(np.clip(u, 0, 4) - np.arange(5))).clip(0)

    point = torch.tensor([pixels / 2 - 1, 0.0], dtype=torch.float64)
    weights = point_axes(point, (1, 5))[1]
    np.testing.assert_allclose(weights, weights_of_a_point(pixels), atol=1e-12)
    jacobian = axis_jacobian(lambda p: point_axes(p, (1, 5)), point)
    by_point = central_difference(weights_of_a_point, pixels) * 2
    np.testing.assert_allclose(jacobian[:, 0], by_point, atol=1e-9)
