"""Gaussians that move with their image: against pixel arithmetic, loops, and the maps they stand
for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gaupipe.maps.gaussians import Geometry, expected_map, move

GRIDS = [(4, 4), (3, 7), (1, 5), (8, 8)]


def gaussians_of(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*shape, 2, generator=generator)
    return torch.cat([mean, torch.exp(torch.randn(*shape, 2, generator=generator) - 0.5)], dim=-1)


def geometry(*rows: tuple[tuple[float, float], tuple[float, float]]) -> Geometry:
    """One ((offset x, y), (scale x, y)) an image, in border coordinates."""
    offset, scale = zip(*rows, strict=True)
    return Geometry(torch.tensor(offset), torch.tensor(scale))


def inverse(where: Geometry) -> Geometry:
    """The geometry of the image in its view."""
    return Geometry(-where.offset / where.scale, 1 / where.scale)


def token_shift(grid: tuple[int, int], x: int, y: int) -> Geometry:
    """The view starts x tokens to the right of the image's first and y below it: two borders are
    w tokens apart."""
    return geometry(((2 * x / grid[1], 2 * y / grid[0]), (1.0, 1.0)))


def centres(grid: tuple[int, int]) -> torch.Tensor:
    """(x, y) of every token in token coordinates, [T, 2], row-major."""
    h, w = grid
    return torch.tensor(
        [
            [2 * x / max(w - 1, 1) - (w > 1), 2 * y / max(h - 1, 1) - (h > 1)]
            for y in range(h)
            for x in range(w)
        ]
    )


FLIP = geometry(((0.0, 0.0), (-1.0, 1.0)))


def move_by_loops(
    stored: np.ndarray, offset: np.ndarray, scale: np.ndarray, grid: tuple[int, int]
) -> np.ndarray:
    """Gaussians [T, 4] of one image -> its view, offset and scale in token coordinates, float64."""
    h, w = grid
    moved = np.zeros_like(stored)
    stored = stored.reshape(h, w, 4)
    for token in range(h * w):
        taken = np.zeros(4)
        u = []
        for place, n, axis in ((token % w, w, 0), (token // w, h, 1)):
            s = -1 + 2 * place / (n - 1) if n > 1 else 0.0
            u.append(min(max((offset[axis] + scale[axis] * s + 1) / 2 * (n - 1), 0), n - 1))
        for y in range(h):
            for x in range(w):
                taken += stored[y, x] * max(0, 1 - abs(u[0] - x)) * max(0, 1 - abs(u[1] - y))
        moved[token] = [*(taken[:2] - offset) / scale, *taken[2:] / abs(scale)]
    return moved


@pytest.mark.parametrize("grid", GRIDS)
def test_move_equals_bilinear_interpolation_written_as_loops(grid):
    generator = np.random.default_rng(0)
    offset, scale = generator.uniform(-0.7, 0.7, (3, 2)), generator.uniform(0.3, 1.4, (3, 2))
    scale[1:, 0] *= -1
    where = Geometry(torch.tensor(offset).float(), torch.tensor(scale).float())
    stored = gaussians_of(0, 3, 2, 3, grid[0] * grid[1])
    moved = move(stored, where, grid)
    assert moved.shape == stored.shape and moved.dtype == torch.float32
    n = np.array([grid[1], grid[0]])
    offset = where.offset.double().numpy() * np.where(n > 1, n / np.maximum(n - 1, 1), 0)
    for image in range(3):
        for block in range(2):
            for head in range(3):
                oracle = move_by_loops(
                    stored[image, block, head].double().numpy(),
                    offset[image],
                    where.scale[image].double().numpy(),
                    grid,
                )
                np.testing.assert_allclose(moved[image, block, head], oracle, rtol=2e-5, atol=2e-5)


@given(seed=st.integers(0, 1000), h=st.integers(1, 6), w=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_a_mirrored_image_has_the_mirrored_map_and_mirroring_again_undoes_it(seed, h, w):
    stored = gaussians_of(seed, 1, 2, h * w)
    moved = move(stored, FLIP, (h, w))
    image_map = expected_map(stored, (h, w)).view(1, 2, h, w, h, w)
    mirrored = image_map.flip(3, 5).reshape(1, 2, h * w, h * w)
    torch.testing.assert_close(expected_map(moved, (h, w)), mirrored, atol=2e-6, rtol=0)
    assert torch.equal(move(moved, FLIP, (h, w)), stored)


@given(
    seed=st.integers(0, 1000),
    h=st.integers(2, 7),
    w=st.integers(2, 7),
    x=st.integers(-3, 3),
    y=st.integers(-3, 3),
)
@settings(max_examples=40, deadline=None)
def test_a_shift_by_whole_tokens_takes_exactly_their_gaussians_and_back_is_the_identity(
    seed, h, w, x, y
):
    grid, where = (h, w), token_shift((h, w), x, y)
    stored = gaussians_of(seed, 1, 2, h * w)
    moved = move(stored, where, grid).view(1, 2, h, w, 4)
    rows, columns = (np.arange(h) + y).clip(0, h - 1), (np.arange(w) + x).clip(0, w - 1)
    taken = stored.view(1, 2, h, w, 4)[:, :, rows][:, :, :, columns]
    assert torch.equal(
        moved[..., 2:], taken[..., 2:]
    )  # the widths bit for bit: no neighbour had a part
    by = torch.tensor([2 * x / (w - 1), 2 * y / (h - 1)])
    torch.testing.assert_close(moved[..., :2], taken[..., :2] - by, atol=1e-5, rtol=1e-5)

    back = move(moved.view_as(stored), inverse(where), grid).view(1, 2, h, w, 4)
    kept = (slice(max(y, 0), max(h + min(y, 0), 0)), slice(max(x, 0), max(w + min(x, 0), 0)))
    torch.testing.assert_close(
        back[:, :, *kept], stored.view(1, 2, h, w, 4)[:, :, *kept], atol=1e-5, rtol=1e-5
    )


def test_images_of_a_batch_move_independently_and_one_prior_serves_them_all():
    where = geometry(((0.1, 0.0), (-0.5, 0.7)), ((0.0, 0.3), (1.0, 1.2)), ((0.0, 0.0), (1.0, 1.0)))
    prior = gaussians_of(5, 1, 2, 3, 16)
    moved = move(prior, where, (4, 4))
    assert moved.shape == (3, 2, 3, 16, 4)
    for image in range(3):
        alone = Geometry(where.offset[image : image + 1], where.scale[image : image + 1])
        torch.testing.assert_close(
            moved[image : image + 1], move(prior, alone, (4, 4)), atol=0, rtol=0
        )
    assert torch.equal(moved[2:], prior)


def test_no_geometry_returns_the_gaussians_themselves():
    stored = gaussians_of(1, 2, 16)
    assert move(stored, None, (4, 4)) is stored


def test_gradients_reach_the_stored_gaussians():
    """A move is affine, so a step in any direction changes it by the gradient times the step,
    whatever its length."""
    where = geometry(((0.1, -0.2), (-0.6, 0.8)), ((0.4, 0.0), (1.0, 1.0)))
    stored = gaussians_of(2, 2, 3, 12).requires_grad_()
    weights, step = torch.randn(2, 3, 12, 4), torch.randn(2, 3, 12, 4)
    value = (move(stored, where, (3, 4)) * weights).sum()
    value.backward()
    changed = (move(stored.detach() + step, where, (3, 4)) * weights).sum()
    torch.testing.assert_close(
        changed - value.detach(), (stored.grad * step).sum(), rtol=1e-4, atol=1e-4
    )


def test_mixed_precision_does_not_round_coordinates():
    where = geometry(((0.13, 0.27), (0.9, -0.8)))
    stored = gaussians_of(4, 1, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        moved = move(stored, where, (4, 4))
    assert moved.dtype == torch.float32 and torch.equal(moved, move(stored, where, (4, 4)))


def borders(grid: tuple[int, int], points: np.ndarray) -> np.ndarray:
    """Points (x, y) in token coordinates of a grid -> positions in the image, whose borders are
    0 and 1."""
    n = np.array([grid[1], grid[0]])
    return ((points + 1) / 2 * (n - 1) + 0.5) / n


@pytest.mark.parametrize(
    "grid,new_grid",
    [((4, 4), (8, 8)), ((7, 7), (14, 7)), ((6, 8), (3, 5)), ((3, 3), (9, 15)), ((2, 5), (5, 2))],
)
def test_queries_of_another_grid_look_at_the_same_places_of_the_image(grid, new_grid):
    """Means that are an affine function of the query's place in the image stay that, between the
    outermost centres."""
    here = borders(grid, centres(grid).numpy())  # [T, 2], positions in the image
    matrix, shift = np.array([[0.7, -0.2], [0.1, 0.5]]), np.array([0.05, 0.2])
    std = np.array([0.13, 0.3])
    n, m = np.array([grid[1], grid[0]]), np.array([new_grid[1], new_grid[0]])

    def gaussian(positions: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Token coordinates, on a grid of n tokens, of what the queries at these positions look
        at."""
        mean = ((positions @ matrix.T + shift) * n - 0.5) / (n - 1) * 2 - 1
        return np.concatenate([mean, np.broadcast_to(std * n / (n - 1) * 2, mean.shape)], axis=1)

    stored = torch.from_numpy(gaussian(here, n)).float()
    found = move(stored.expand(2, 3, -1, 4), None, grid, new_grid)
    assert found.shape == (2, 3, new_grid[0] * new_grid[1], 4)
    there = borders(new_grid, centres(new_grid).numpy())
    nearest = there.clip(0.5 / n, 1 - 0.5 / n)  # no query was learned further out
    np.testing.assert_allclose(found[1, 2], gaussian(nearest, m), atol=2e-6)


def test_queries_of_the_same_grid_keep_their_gaussians_and_back_is_the_identity():
    stored = gaussians_of(0, 2, 12)
    torch.testing.assert_close(move(stored, None, (3, 4), (3, 4)), stored)
    finer = move(stored, None, (3, 4), (9, 12))  # every third token's centre is an old one's
    old = finer.view(2, 9, 12, 4)[:, 1::3, 1::3].flatten(1, 2)
    factor = torch.tensor([3 / 4 * 12 / 11, 2 / 3 * 9 / 8]).repeat(2)
    torch.testing.assert_close(old, stored * factor)


def test_gaussians_along_an_axis_of_one_token():
    stored = gaussians_of(1, 1, 5)
    found = move(stored, None, (1, 5), (2, 10))
    assert not found[..., [1, 3]].any() and found.isfinite().all()
    assert move(found, None, (2, 10), (1, 5)).isfinite().all()
    torch.testing.assert_close(expected_map(found, (2, 10)).sum(-1), torch.ones(1, 20))
