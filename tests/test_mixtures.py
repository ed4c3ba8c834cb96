"""A few Gaussians per query: the maps they stand for, their fits, and their views; against scipy
and numpy."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import ndtr

from gaupipe.maps.fits import _cross_entropy, _normalised, fit, mixture_map, move_mixture_map
from gaupipe.maps.gaussians import Geometry, expected_map, move

GRID = (5, 6)


def expected_axis(mean: float, std: float, n: int) -> np.ndarray:
    """Expected weights of linear interpolation, border clamped, from their closed form."""
    if n == 1:
        return np.ones(1)
    m, s = (mean + 1) / 2 * (n - 1), std * (n - 1) / 2

    def r(a):
        z = (m - a) / s
        return s * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) + (m - a) * ndtr(z)

    inner = [r(j - 1) - 2 * r(j) + r(j + 1) for j in range(1, n - 1)]
    return np.array([1 - r(0) + r(1), *inner, r(n - 2) - r(n - 1)])


def map_by_numpy(mixture: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The row [h * w] of one query's mixture [M, 5]."""
    weights = mixture[:, 0] / mixture[:, 0].sum()
    rows = [
        np.outer(expected_axis(y, std_y, grid[0]), expected_axis(x, std_x, grid[1]))
        for _, x, y, std_x, std_y in mixture
    ]
    return sum(w * row for w, row in zip(weights, rows, strict=True)).ravel()


def divergence(rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    rows, expected = rows.astype(np.float64), expected.astype(np.float64).clip(1e-38)
    return (rows * (np.log(rows.clip(1e-300)) - np.log(expected))).sum(-1)


def random_mixtures(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = 0.2 + torch.rand(*shape, 1, generator=generator)
    mean = torch.randn(*shape, 2, generator=generator) * 0.6
    std = torch.exp(torch.randn(*shape, 2, generator=generator) * 0.4 - 1)
    return torch.cat([weights, mean, std], dim=-1)


def attention(seed: int, rows: int, grid: tuple[int, int]) -> torch.Tensor:
    """Rows [rows, T] as trained heads have them: two places and something everywhere."""
    generator = torch.Generator().manual_seed(seed)
    y, x = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    place = torch.rand(rows, 2, 2, generator=generator) * (torch.tensor(grid) - 1)
    away = (torch.tensor(y) - place[..., :1]) ** 2 + (torch.tensor(x) - place[..., 1:]) ** 2
    scores = (4 * torch.exp(-away / 3)).sum(1)
    return (scores + 0.5 * torch.randn(scores.shape, generator=generator)).softmax(-1)


@pytest.mark.parametrize("grid", [(5, 6), (1, 4), (4, 1), (1, 1)], ids=str)
def test_maps_of_mixtures_follow_the_closed_form(grid):
    mixtures = random_mixtures(0, 4, 3)
    maps = mixture_map(mixtures, grid)
    assert maps.dtype == torch.float32
    for row, mixture in zip(maps, mixtures.double().numpy(), strict=True):
        np.testing.assert_allclose(row, map_by_numpy(mixture, grid), atol=1e-6)
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-6)


def test_one_gaussian_is_that_of_a_store_of_gaussians():
    mixtures = random_mixtures(1, 2, 3, 30, 1).half()
    expected = expected_map(mixtures[..., 0, 1:], GRID)
    torch.testing.assert_close(mixture_map(mixtures, GRID), expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("components", [1, 2])
def test_a_known_mixture_is_found(components):
    """Of Gaussians that lie apart; the divergence that is returned is that of what is returned."""
    mixtures = random_mixtures(2, 40, components)
    mixtures[..., 1:3] *= 0.5
    if components == 2:
        mixtures[:, 0, 1] -= 0.7
        mixtures[:, 1, 1] += 0.7
        mixtures[..., 3:] *= 0.6
    rows = mixture_map(mixtures, (8, 8))
    found, kl = fit(rows, (8, 8), components, steps=150)
    assert found.shape == (40, components, 5)
    assert kl.median() < (1e-5 if components == 1 else 1e-4)
    assert kl.max() < 0.02
    expected = divergence(rows.numpy(), mixture_map(found, (8, 8)).numpy())
    np.testing.assert_allclose(kl, expected, atol=2e-6)


@pytest.mark.parametrize("components", [1, 2, 3])
def test_a_fit_is_no_worse_than_the_moments(components):
    rows = attention(3, 60, GRID)
    y, x = np.divmod(np.arange(30), GRID[1])
    weights = rows.double().numpy()
    moments = []
    for row in weights:
        mean = np.array([row @ x, row @ y])
        variance = np.array([row @ x**2, row @ y**2]) - mean**2 - 1 / 6
        per_token = 2 / np.array([GRID[1] - 1, GRID[0] - 1])
        std = np.sqrt(variance.clip(0.3**2)) * per_token
        mixture = np.concatenate([[1], mean * per_token - 1, std])[None]
        moments.append(divergence(row, map_by_numpy(mixture, GRID)))
    for steps in (0, 1, 40):
        _, kl = fit(rows, GRID, components, steps=steps)
        assert (kl.numpy() <= np.array(moments) + 1e-5).all()
    assert kl.mean() < 0.9 * np.mean(moments)


@pytest.mark.parametrize("grid", [(5, 6), (4, 1), (1, 1)], ids=str)
def test_the_gradient_of_a_fit_is_that_of_autograd(grid):
    """Narrow and wide Gaussians, inside and outside the grid, on and beside tokens."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(50, 3, 5, generator=generator) * torch.tensor([1, 3, 3, 0.7, 0.7])
    raw[:20, :, 1:3] = raw[:20, :, 1:3].round()
    rows = attention(8, 50, grid)
    raw.requires_grad_()
    loss, slope, _ = _cross_entropy(rows, raw.detach(), grid)
    expected = -(rows * mixture_map(_normalised(raw, grid), grid).log()).sum(-1)
    (wanted,) = torch.autograd.grad(expected.sum(), raw)
    near = expected.detach() < 10  # beyond, float32 has few digits left of keys that get e^-50
    assert near.sum() > 30
    torch.testing.assert_close(loss[near], expected.detach()[near], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(slope[near], wanted[near], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("grid", [(5, 6), (4, 1), (1, 1)], ids=str)
def test_the_information_of_a_fit_is_the_mean_of_squared_scores(grid):
    """Of keys that are drawn from one Gaussian: E[s s'] with s the gradient of log q."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.randn(30, 1, 5, generator=generator) * torch.tensor([0, 1, 1, 0.4, 0.4])
    _, _, information = _cross_entropy(torch.ones(30, math.prod(grid)), raw, grid)
    for one, found in zip(raw[:, 0, 1:], information[:, 0], strict=True):

        def log_map(lengths):
            return mixture_map(
                _normalised(torch.cat([raw.new_zeros(1), lengths])[None], grid), grid
            ).log()

        scores = torch.autograd.functional.jacobian(log_map, one)  # [T, 4]: x, y, log std x, y
        wanted = scores.T @ (log_map(one).exp().unsqueeze(-1) * scores)
        for axis in (0, 1):
            parts = torch.stack(
                [wanted[axis, axis], wanted[axis, 2 + axis], wanted[2 + axis, 2 + axis]]
            )
            torch.testing.assert_close(found[axis], parts, atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(wanted[::2, 1::2], torch.zeros(2, 2), atol=1e-4, rtol=0)


def test_one_gaussian_against_scipy():
    """The best of several starts of a general minimiser, in float64."""
    rows = attention(4, 4, GRID)
    _, kl = fit(rows, GRID, 1, steps=100)
    draw = np.random.default_rng(0)

    def cost(raw, row):
        mixture = np.array([[1, *raw[:2], *np.exp(raw[2:])]])
        return divergence(row, map_by_numpy(mixture, GRID))

    for row, ours in zip(rows.double().numpy(), kl, strict=True):
        starts = [draw.normal(size=4) * [0.4, 0.4, 0.4, 0.4] - [0, 0, 0.5, 0.5] for _ in range(3)]
        best = min(minimize(cost, start, args=(row,), method="BFGS").fun for start in starts)
        assert best - 1e-4 <= ours <= best + 1e-3


def test_more_gaussians_fit_better():
    rows = attention(5, 100, (7, 7))
    divergences = [fit(rows, (7, 7), components)[1].mean() for components in (1, 2, 3)]
    assert divergences[1] < 0.6 * divergences[0]
    assert divergences[2] < 0.95 * divergences[1]


@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize("grid", [(4, 4), (1, 5), (1, 1)], ids=str)
def test_rows_that_look_at_one_key_or_at_all_alike(grid, components):
    tokens = grid[0] * grid[1]
    rows = torch.cat([torch.eye(tokens), torch.full((1, tokens), 1 / tokens)])
    mixtures, kl = fit(rows, grid, components)
    assert torch.isfinite(mixtures).all()
    assert torch.isfinite(mixtures.half()).all()
    assert (kl >= 0).all()
    assert kl[:-1].max() < 0.1
    assert kl[-1] < 0.1
    torch.testing.assert_close(mixtures[..., 0].sum(-1), torch.ones(len(rows)))
    assert torch.equal(mixture_map(mixtures, grid)[:-1].argmax(-1), torch.arange(tokens))


def test_a_fit_does_not_depend_on_what_surrounds_it():
    """Nor on gradients being switched off, nor on how many rows are fitted at once."""
    maps = attention(6, 24, GRID).reshape(2, 12, 30)
    mixtures, kl = fit(maps, GRID, 2)
    assert mixtures.shape == (2, 12, 2, 5)
    assert kl.shape == (2, 12)
    assert not mixtures.requires_grad
    with torch.no_grad():
        again, _ = fit(maps, GRID, 2)
    assert torch.equal(again, mixtures)
    with torch.inference_mode():
        again, _ = fit(maps.clone(), GRID, 2)
    assert torch.equal(again, mixtures)
    parts, kl_parts = fit(maps, GRID, 2, rows_at_once=7)
    torch.testing.assert_close(kl_parts, kl, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        mixture_map(parts, GRID), mixture_map(mixtures, GRID), atol=1e-2, rtol=0
    )


def test_the_largest_gaussian_comes_first():
    mixtures, _ = fit(attention(7, 30, GRID), GRID, 3)
    assert (mixtures[:, :-1, 0] >= mixtures[:, 1:, 0]).all()


def geometry(offset: tuple[float, float], scale: tuple[float, float]) -> Geometry:
    return Geometry(torch.tensor([offset]), torch.tensor([scale]))


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (1, 6)], ids=str)
def test_a_flip_is_a_permutation(grid):
    tokens = grid[0] * grid[1]
    mixtures = random_mixtures(8, 1, 2, tokens, 3)
    moved = move_mixture_map(mixtures, geometry((0.0, 0.0), (-1.0, 1.0)), grid)
    expected = mixture_map(mixtures, grid).reshape(1, 2, *grid, *grid).flip(3, 5)
    torch.testing.assert_close(moved, expected.reshape(moved.shape), atol=2e-6, rtol=0)


def test_no_view_is_the_map_itself():
    mixtures = random_mixtures(9, 2, 2, 30, 2)
    expected = mixture_map(mixtures, GRID)
    assert torch.equal(move_mixture_map(mixtures, None, GRID), expected)
    identity = move_mixture_map(mixtures, geometry((0.0, 0.0), (1.0, 1.0)), GRID)
    torch.testing.assert_close(identity, expected, atol=2e-6, rtol=0)


def test_aligned_views_of_one_gaussian_are_those_of_gaussians():
    """Where no query lies between two others, rows and Gaussians are interpolated alike."""
    mixtures = random_mixtures(10, 1, 2, 30, 1)
    view = geometry((2 / 6, -2 / 5), (-1.0, 1.0))
    expected = expected_map(move(mixtures[..., 0, 1:], view, GRID), GRID)
    torch.testing.assert_close(move_mixture_map(mixtures, view, GRID), expected, atol=2e-6, rtol=0)


def test_a_crop_moves_gaussians_and_interpolates_rows():
    """A query of the view between four stored ones, in numpy."""
    mixtures = random_mixtures(11, 1, 1, 30, 2)
    (offset, scale), (h, w) = ((0.1, -0.2), (0.7, -0.6)), GRID
    moved = move_mixture_map(mixtures, geometry(offset, scale), GRID)[0, 0]
    stored = mixtures[0, 0].double().numpy().reshape(h, w, 2, 5)
    stretch = np.array([w / (w - 1), h / (h - 1)])
    for query in (7, 14, 22):
        qy, qx = divmod(query, w)
        y = (offset[1] + scale[1] * ((2 * qy + 1) / h - 1) + 1) / 2 * h - 0.5
        x = (offset[0] + scale[0] * ((2 * qx + 1) / w - 1) + 1) / 2 * w - 0.5
        expected = 0
        for sy in range(h):
            for sx in range(w):
                share = max(0, 1 - abs(y - sy)) * max(0, 1 - abs(x - sx))
                mixture = stored[sy, sx].copy()
                mixture[:, 1:3] = (mixture[:, 1:3] - offset * stretch) / scale
                mixture[:, 3:] /= np.abs(scale)
                expected = expected + share * map_by_numpy(mixture, GRID)
        np.testing.assert_allclose(moved[query], expected, atol=2e-6)


@pytest.mark.parametrize("view", [None, geometry((0.1, 0.0), (0.8, 0.9))], ids=["whole", "crop"])
def test_another_grid(view):
    """A blob of attention stays where it was in the image, to a part of a token."""
    mixtures = torch.tensor([1.0, 0.2, -0.3, 0.25, 0.25]).expand(1, 1, 64, 2, 5)
    offset, scale = (0, 0), (1, 1)
    if view is not None:
        offset, scale = view.offset[0].numpy(), view.scale[0].numpy()
    moved = move_mixture_map(mixtures, view, (8, 8), (12, 10))[0, 0]
    assert moved.shape == (120, 120)
    np.testing.assert_allclose(moved.sum(-1), 1, atol=1e-6)
    keys = moved[0].reshape(12, 10).numpy()
    centre_x = keys.sum(0) @ ((2 * np.arange(10) + 1) / 10 - 1)
    centre_y = keys.sum(1) @ ((2 * np.arange(12) + 1) / 12 - 1)
    expected = (np.array([0.2, -0.3]) * 7 / 8 - offset) / scale
    np.testing.assert_allclose([centre_x, centre_y], expected, atol=0.01)


def test_views_of_one_map_for_all_images():
    mixtures = random_mixtures(12, 1, 2, 30, 2)
    views = Geometry(torch.tensor([[0.1, 0.0], [0.0, 0.2]]), torch.tensor([[0.8, 1.0], [1.0, 0.7]]))
    moved = move_mixture_map(mixtures, views, GRID)
    assert torch.equal(moved, move_mixture_map(mixtures.expand(2, -1, -1, -1, -1), views, GRID))
