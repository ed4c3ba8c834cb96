"""One Gaussian for each row of a trained teacher's map; against scipy and autograd."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import ndtr

from gaupipe.maps.fits import _cross_entropy, fit_gaussians
from gaupipe.maps.gaussians import axis_weights, expected_map

GRID = (5, 6)


def expected_axis(mean: float, std: float, n: int) -> np.ndarray:
    """Expected weights of linear interpolation, border clamped, from their closed form."""
    m, s = (mean + 1) / 2 * (n - 1), std * (n - 1) / 2

    def r(a):
        z = (m - a) / s
        return s * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) + (m - a) * ndtr(z)

    inner = [r(j - 1) - 2 * r(j) + r(j + 1) for j in range(1, n - 1)]
    return np.array([1 - r(0) + r(1), *inner, r(n - 2) - r(n - 1)])


def divergence(row: np.ndarray, gaussian: np.ndarray) -> float:
    """KL of a row [T] from the map of (mean_x, mean_y, std_x, std_y), in float64."""
    x, y, std_x, std_y = gaussian
    expected = np.outer(expected_axis(y, std_y, GRID[0]), expected_axis(x, std_x, GRID[1])).ravel()
    return (row * (np.log(row.clip(1e-300)) - np.log(expected.clip(1e-38)))).sum()


def attention(seed: int, rows: int, grid: tuple[int, int] = GRID) -> torch.Tensor:
    """Rows [rows, T] as trained heads have them: two places and something everywhere."""
    generator = torch.Generator().manual_seed(seed)
    y, x = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    place = torch.rand(rows, 2, 2, generator=generator) * (torch.tensor(grid) - 1)
    away = (torch.tensor(y) - place[..., :1]) ** 2 + (torch.tensor(x) - place[..., 1:]) ** 2
    scores = (4 * torch.exp(-away / 3)).sum(1)
    return (scores + 0.5 * torch.randn(scores.shape, generator=generator)).softmax(-1)


def test_known_gaussians_are_found():
    """The divergence that is returned is that of what is returned."""
    generator = torch.Generator().manual_seed(2)
    mean = torch.randn(40, 2, generator=generator) * 0.3
    std = torch.exp(torch.randn(40, 2, generator=generator) * 0.4 - 1)
    gaussians = torch.cat([mean, std], dim=-1)
    found, kl = fit_gaussians(expected_map(gaussians, GRID).view(2, 20, 30), GRID, steps=60)
    assert found.shape == (2, 20, 4) and kl.shape == (2, 20)
    assert kl.max() < 1e-5
    torch.testing.assert_close(found.view(40, 4), gaussians, atol=5e-3, rtol=5e-3)


def test_a_fit_is_no_worse_than_the_moments_and_as_good_as_scipys():
    """The best of several starts of a general minimiser, in float64."""
    rows, draw = attention(3, 60), np.random.default_rng(0)
    y, x = np.divmod(np.arange(30), GRID[1])
    per_token = 2 / np.array([GRID[1] - 1, GRID[0] - 1])
    moments = []
    for row in rows.double().numpy():
        mean = np.array([row @ x, row @ y])
        variance = np.array([row @ x**2, row @ y**2]) - mean**2 - 1 / 6
        std = np.sqrt(variance.clip(0.3**2)) * per_token
        moments.append(divergence(row, np.concatenate([mean * per_token - 1, std])))
    for steps in (0, 1, 8):
        gaussians, kl = fit_gaussians(rows, GRID, steps)
        assert (kl.numpy() <= np.array(moments) + 1e-5).all()
    assert kl.mean() < 0.9 * np.mean(moments)

    for row, gaussian, ours in zip(rows[:5].double().numpy(), gaussians, kl, strict=False):
        assert ours == pytest.approx(divergence(row, gaussian.double().numpy()), abs=2e-5)

        def cost(raw, row=row):
            return divergence(row, np.array([*raw[:2], *np.exp(raw[2:])]))

        starts = [draw.normal(size=4) * 0.4 - [0, 0, 0.5, 0.5] for _ in range(3)]
        best = min(minimize(cost, start, method="BFGS").fun for start in starts)
        assert ours <= best + 1e-3


def test_slopes_and_information_of_a_fit_are_those_of_autograd():
    """Narrow and wide Gaussians, inside and outside the axis, on and beside tokens; information is
    E[s s'] of keys drawn from the Gaussian, s the gradient of log q."""
    generator, n = torch.Generator().manual_seed(0), 6
    numbers = torch.randn(2, 60, generator=generator) * torch.tensor([[3.0], [0.7]]) + 1
    numbers[0, :20] = numbers[0, :20].round()
    marginal = attention(8, 60, (1, n))

    def weights(numbers):
        mean, log_std = numbers
        return axis_weights(mean * 2 / (n - 1) - 1, log_std.exp() * 2 / (n - 1), n)

    cost, slope, information = _cross_entropy(marginal, numbers)
    given = numbers.clone().requires_grad_()
    expected = -(marginal * weights(given).log()).sum(-1)
    (wanted,) = torch.autograd.grad(expected.sum(), given)
    near = expected.detach() < 10  # beyond, float32 has few digits left of keys that get e^-50
    assert near.sum() > 30
    torch.testing.assert_close(cost[near], expected.detach()[near], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(slope[:, near], wanted[:, near], atol=1e-4, rtol=1e-3)
    for row in near.nonzero().flatten().tolist():
        one = numbers[:, row]
        scores = torch.autograd.functional.jacobian(lambda pair: weights(pair).log(), one)  # [n, 2]
        likely = weights(one).unsqueeze(-1) > 1e-5
        fisher = scores.T @ (weights(one).unsqueeze(-1) * scores * likely)
        parts = torch.stack([fisher[0, 0], fisher[0, 1], fisher[1, 1]])
        torch.testing.assert_close(information[:, row], parts, atol=5e-3, rtol=2e-2)


@pytest.mark.parametrize("grid", [(4, 4), (1, 5), (1, 1)], ids=str)
def test_rows_that_look_at_one_key_or_at_all_alike(grid):
    tokens = grid[0] * grid[1]
    rows = torch.cat([torch.eye(tokens), torch.full((1, tokens), 1 / tokens)])
    gaussians, kl = fit_gaussians(rows, grid)
    assert torch.isfinite(gaussians.half()).all()
    assert (kl >= 0).all() and kl.max() < 0.1
    assert torch.equal(expected_map(gaussians, grid)[:-1].argmax(-1), torch.arange(tokens))


def test_a_fit_does_not_depend_on_what_surrounds_it():
    """Nor on gradients being switched off, nor on other rows."""
    maps = attention(6, 24).reshape(2, 12, 30).requires_grad_()
    gaussians, kl = fit_gaussians(maps, GRID)
    assert not gaussians.requires_grad
    with torch.inference_mode():
        again, _ = fit_gaussians(maps.detach().clone(), GRID)
    assert torch.equal(again, gaussians)
    alone, kl_alone = fit_gaussians(maps[1, 3:5], GRID)
    torch.testing.assert_close(kl_alone, kl[1, 3:5], atol=1e-5, rtol=0)
    torch.testing.assert_close(alone, gaussians[1, 3:5], atol=1e-3, rtol=1e-3)
