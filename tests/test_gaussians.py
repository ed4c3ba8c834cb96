"""Gaussians: the closed form against quadrature, Monte Carlo and torch's own sampler of images."""

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

GRIDS = [(4, 4), (3, 7), (1, 5), (14, 14)]


def gaussians_of(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*shape, 2, generator=generator)
    std = torch.exp(torch.randn(*shape, 2, generator=generator) - 0.5)
    return torch.cat([mean, std], dim=-1)


def quadrature_axis(mean: float, std: float, n: int) -> np.ndarray:
    """Expected hat weights of one axis by brute-force summation over the density, float64."""
    if n == 1:
        return np.ones(1)
    m, s = (mean + 1) / 2 * (n - 1), std * (n - 1) / 2
    u = np.linspace(m - 9 * s, m + 9 * s, 200_001)
    density = np.exp(-0.5 * ((u - m) / s) ** 2)
    density /= density.sum()
    clamped = np.clip(u, 0, n - 1)
    return np.array([(density * np.maximum(0, 1 - np.abs(clamped - j))).sum() for j in range(n)])


@pytest.mark.parametrize("grid", GRIDS)
def test_expected_map_equals_quadrature(grid):
    gaussians = gaussians_of(0, 12)
    rows = expected_map(gaussians, grid).numpy()
    for row, (mean_x, mean_y, std_x, std_y) in zip(rows, gaussians.double().tolist(), strict=True):
        oracle = np.outer(
            quadrature_axis(mean_y, std_y, grid[0]), quadrature_axis(mean_x, std_x, grid[1])
        ).ravel()
        np.testing.assert_allclose(row, oracle, atol=5e-6)


def test_expected_map_equals_the_mean_of_many_sampled_points():
    gaussians = gaussians_of(1, 6)
    points = sample(
        gaussians, torch.randn(400_000, 6, 2, generator=torch.Generator().manual_seed(0))
    )
    sampled = outer(*point_axes(points, (3, 5))).mean(0)
    assert (
        sampled - expected_map(gaussians, (3, 5))
    ).abs().max() < 3e-3  # 4e5 samples: 1 / sqrt(4e5) = 1.6e-3


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
    tokens = torch.randn(B, T, H * d_m)
    points = torch.randn(B, H, T, 2)
    v = attention.v(tokens).view(B, h, w, H, d_m).permute(0, 3, 4, 1, 2).reshape(B * H, d_m, h, w)
    read = F.grid_sample(
        v, points.view(B * H, T, 1, 2), mode="bilinear", padding_mode="border", align_corners=True
    )
    heads = read.view(B, H, d_m, T).permute(0, 3, 1, 2).reshape(B, T, H * d_m)
    for update in (
        attention.through(tokens, point_axes(points, grid)),
        attention.at_points(tokens, points, grid),
    ):
        torch.testing.assert_close(update, attention.proj(heads), atol=1e-5, rtol=1e-5)


def test_parametrisations_start_at_mean_0_std_1_and_mean_what_the_paper_says():
    for parametrisation in ("loc_scale", "paper"):
        torch.testing.assert_close(
            from_raw(initial_raw(parametrisation), parametrisation), torch.tensor([0.0, 0, 1, 1])
        )
    mu_s, sigma_s, mu_l, sigma_l = (0.3, -0.2), (0.5, -2.0), (0.1, 0.4), (1.5, 0.7)
    raw = torch.tensor([*mu_s, *sigma_s, *mu_l, *sigma_l])
    expected = [
        (mu_s[0] + mu_l[0]) / sigma_l[0] ** 2,
        (mu_s[1] + mu_l[1]) / sigma_l[1] ** 2,
        abs(sigma_s[0]) / sigma_l[0] ** 2,
        abs(sigma_s[1]) / sigma_l[1] ** 2,
    ]
    torch.testing.assert_close(from_raw(raw, "paper"), torch.tensor(expected))
    torch.testing.assert_close(
        from_raw(torch.tensor([0.5, -1, 0, math.log(2)]), "loc_scale"),
        torch.tensor([0.5, -1, 1, 2]),
    )


@pytest.mark.parametrize("log_std", [11.0, 88.7, 89.0, 1e4, 3e38, -88.0, -1e4, -3e38])
def test_any_log_std_gives_a_map_and_gradients(log_std):
    """exp overflows from 88.8 on; from a tenth of that on all attention is on the borders."""
    raw = torch.tensor([0.1, -0.2, log_std, log_std], requires_grad=True)
    gaussians = from_raw(raw, "loc_scale")
    assert gaussians.half().isfinite().all()  # as the store keeps them
    rows = expected_map(gaussians, (5, 7))
    rows.square().sum().backward()
    assert rows.isfinite().all() and raw.grad.isfinite().all()
    rows = rows.detach().view(5, 7)
    if log_std > 0:
        assert rows[[0, 0, -1, -1], [0, -1, 0, -1]].tolist() == pytest.approx([0.25] * 4, abs=2e-3)
    else:  # pixel (3.3, 1.6)
        assert rows[1:3, 3:5].flatten().tolist() == pytest.approx(
            [0.28, 0.12, 0.42, 0.18], abs=2e-3
        )


def weights_of_a_point(u: float, n: int) -> np.ndarray:
    """Linear interpolation of the n keys 0 ... n-1 at the pixel coordinate u, clamped."""
    u = min(max(u, 0.0), n - 1.0)
    return np.array([max(0.0, 1 - abs(u - j)) for j in range(n)])


def weights_of_a_gaussian(m: float, s: float, n: int) -> np.ndarray:
    """Expected weights in pixels from R(a) = E[max(0, u - a)], in float64."""

    def excess(a):
        z = (m - a) / s
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return s * density + (m - a) * 0.5 * math.erfc(-z / math.sqrt(2))

    R = np.array([excess(a) for a in range(n)])
    return np.concatenate([[1 - R[0] + R[1]], R[:-2] - 2 * R[1:-1] + R[2:], [R[-2] - R[-1]]])


def central_difference(function, x: float, step: float = 1e-5) -> np.ndarray:
    return (function(x + step) - function(x - step)) / (2 * step)


def axis_jacobian(axes, values: torch.Tensor) -> np.ndarray:
    """d weights / d values of the x axis: [n, numbers]."""
    return torch.autograd.functional.jacobian(lambda v: axes(v)[1], values).numpy()


ON_AND_BESIDE_TOKENS = [0.0, 3.0, 6.0, 1.0, 3.001, 2.999, 1e-3, -1e-3, 5.999, 6.001]
ON_AND_BESIDE_TOKENS += [2.5, -0.5, 6.5, -40.0, 50.0]


@pytest.mark.parametrize("pixels", ON_AND_BESIDE_TOKENS)
@pytest.mark.parametrize("std_pixels", [0.05, 0.3, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("dtype,atol", [(torch.float64, 1e-8), (torch.float32, 3e-6)])
def test_gradient_of_the_expected_weights_on_and_beside_tokens(pixels, std_pixels, dtype, atol):
    """Phase A starts with every mean on the middle token of an odd grid."""
    n = 7
    half = (n - 1) / 2  # pixels per normalised unit
    gaussian = torch.tensor([pixels / half - 1, 0.0, std_pixels / half, 1.0], dtype=dtype)
    on_pixel = (gaussian[0].item() + 1) * half  # after rounding to the dtype
    rows = expected_axes(gaussian, (1, n))[1].numpy()
    exact = weights_of_a_gaussian(on_pixel, std_pixels, n)
    np.testing.assert_allclose(rows, exact, atol=atol * max(1, std_pixels / 4))
    jacobian = axis_jacobian(lambda g: expected_axes(g, (1, n)), gaussian)
    by_mean = central_difference(lambda m: weights_of_a_gaussian(m, std_pixels, n), on_pixel)
    by_std = central_difference(lambda s: weights_of_a_gaussian(on_pixel, s, n), std_pixels)
    np.testing.assert_allclose(jacobian[:, 0], by_mean * half, atol=atol * half, rtol=1e-5)
    np.testing.assert_allclose(jacobian[:, 2], by_std * half, atol=atol * half, rtol=1e-5)
    assert not jacobian[:, [1, 3]].any()


@pytest.mark.parametrize("pixels", [0.0, 1.0, 2.0, 3.0, 4.0, 2.5, -1.0, 9.0, 2.25, 0.5])
def test_gradient_of_sampled_points_is_central_at_kinks(pixels):
    """On a token and on the border: the mean of both sides, the limit of narrow Gaussians."""
    n, half = 5, 2.0
    point = torch.tensor([pixels / half - 1, 0.0], dtype=torch.float64)  # exact for n = 5
    rows = point_axes(point, (1, n))[1]
    np.testing.assert_allclose(rows, weights_of_a_point(pixels, n), atol=1e-12)
    by_point = central_difference(lambda u: weights_of_a_point(u, n), pixels) * half
    jacobian = axis_jacobian(lambda p: point_axes(p, (1, n)), point)
    np.testing.assert_allclose(jacobian[:, 0], by_point, atol=1e-9)
    narrow = torch.tensor([*point, 1e-3, 1.0], dtype=torch.float64)
    limit = axis_jacobian(lambda g: expected_axes(g, (1, n)), narrow)
    np.testing.assert_allclose(jacobian[:, 0], limit[:, 0], atol=1e-9)


@pytest.mark.parametrize(
    "m,s", [(3.0, 0.5), (2.5, 0.4), (0.0, 1.0), (6.0, 0.7), (-2.0, 1.0), (4.2, 2.0)]
)
def test_small_weights_have_a_small_relative_error(m, s):
    """Down to 1e-30, in float32, against the integral of hat times density over each key's two
    sides."""
    n, half = 8, 3.5
    nodes, weights = np.polynomial.legendre.leggauss(300)
    expected = np.zeros(n)
    for j in range(n):
        for left, right in ((j - 1, j), (j, j + 1)):
            if left >= 0 and right < n:
                u = (nodes + left + right) / 2
                density = np.exp(-0.5 * ((u - m) / s) ** 2) / (s * math.sqrt(2 * math.pi))
                expected[j] += (weights * density * (1 - np.abs(u - j))).sum() / 2
    expected[0] += math.erfc(m / s / math.sqrt(2)) / 2
    expected[-1] += math.erfc((n - 1 - m) / s / math.sqrt(2)) / 2
    gaussian = torch.tensor([m / half - 1, 0.0, s / half, 1.0])
    found = expected_axes(gaussian, (1, n))[1].double().numpy()
    kept = expected > 1e-30
    np.testing.assert_allclose(found[kept], expected[kept], rtol=1e-3)
