"""Gaussians that move with their image: against numpy, and the maps they stand for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gaupipe.maps.gaussians import Geometry, expected_map, move
from gaupipe.maps.stored import Seen, StoredGaussians


def gaussians_of(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mean, log_std = torch.randn(2, *shape, 2, generator=generator)
    return torch.cat([mean, torch.exp(log_std - 0.5)], dim=-1)


def centres(n: int) -> np.ndarray:
    """Token coordinates of the n tokens of an axis."""
    return np.linspace(-1, 1, n) if n > 1 else np.zeros(1)


def moved_by_numpy(stored, offset, scale, grid) -> np.ndarray:
    """Gaussians [M, T, 4] of one image -> its view; offset and scale in border coordinates."""
    h, w = grid
    stretch = np.array([n / (n - 1) if n > 1 else 0 for n in (w, h)])
    offset = offset * stretch  # now in token coordinates
    weights = []
    for axis, n in ((1, h), (0, w)):
        u = (offset[axis] + scale[axis] * centres(n) + 1) / 2 * (n - 1)
        distance = np.abs(u.clip(0, n - 1)[:, None] - np.arange(n))
        weights.append((1 - distance).clip(0))
    taken = np.einsum("yi,xj,mijc->myxc", *weights, stored.reshape(-1, h, w, 4))
    taken = taken.reshape(-1, h * w, 4)
    return np.concatenate([(taken[..., :2] - offset) / scale, taken[..., 2:] / abs(scale)], -1)


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (1, 5), (8, 8)])
@pytest.mark.parametrize("images", [3, 1], ids=["each image its own", "one prior for all"])
def test_move_equals_bilinear_interpolation(grid, images):
    """Whatever the precision around it; a move is affine, so that its gradient is exact."""
    generator = np.random.default_rng(0)
    offset = torch.from_numpy(generator.uniform(-0.7, 0.7, (3, 2))).float()
    scale = torch.from_numpy(generator.uniform(0.3, 1.4, (3, 2))).float()
    scale[1:, 0] *= -1
    where = Geometry(offset, scale)
    stored = gaussians_of(0, images, 2, 3, grid[0] * grid[1]).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        moved = move(stored, where, grid)
    assert moved.shape == (3, *stored.shape[1:]) and moved.dtype == torch.float32
    numbers = stored.detach().double().expand(3, -1, -1, -1, -1).flatten(1, 2).numpy()
    for image, view in enumerate(moved.detach().flatten(1, 2)):
        place = (tensor[image].double().numpy() for tensor in (offset, scale))
        oracle = moved_by_numpy(numbers[image], *place, grid)
        np.testing.assert_allclose(view, oracle, rtol=2e-5, atol=2e-5)
    weights, step = torch.randn_like(moved), torch.randn_like(stored)
    (moved * weights).sum().backward()
    change = ((move(stored.detach() + step, where, grid) - moved.detach()) * weights).sum()
    torch.testing.assert_close(change, (stored.grad * step).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("grid", [(1, 1), (4, 4), (3, 7), (5, 1)])
def test_a_mirrored_image_has_the_mirrored_map_and_mirroring_again_undoes_it(grid):
    flip = Geometry(torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]))
    stored = gaussians_of(1, 1, 2, grid[0] * grid[1])
    moved, image_map = move(stored, flip, grid), expected_map(stored, grid)
    mirrored = image_map.view(1, 2, *grid, *grid).flip(3, 5).view_as(image_map)
    torch.testing.assert_close(expected_map(moved, grid), mirrored, atol=2e-6, rtol=0)
    torch.testing.assert_close(move(moved, flip, grid), stored, rtol=0, atol=0)


SIDE, SHIFT = st.integers(2, 7), st.integers(-3, 3)


@given(h=SIDE, w=SIDE, x=SHIFT, y=SHIFT)
@settings(max_examples=40, deadline=None)
def test_a_shift_by_whole_tokens_takes_exactly_their_gaussians(h, w, x, y):
    stored = gaussians_of(2, 1, 2, h * w)
    where = Geometry(torch.tensor([[2 * x / w, 2 * y / h]]), torch.ones(1, 2))
    moved = move(stored, where, (h, w)).view(1, 2, h, w, 4)
    rows, columns = (np.arange(h) + y).clip(0, h - 1), (np.arange(w) + x).clip(0, w - 1)
    taken = stored.view(1, 2, h, w, 4)[:, :, rows][:, :, :, columns]
    torch.testing.assert_close(moved[..., 2:], taken[..., 2:], rtol=0, atol=0)
    by = torch.tensor([2 * x / (w - 1), 2 * y / (h - 1)])
    torch.testing.assert_close(moved[..., :2], taken[..., :2] - by, atol=1e-5, rtol=1e-5)


def test_a_student_of_a_shifted_image_learns_nothing_of_padding():
    """The view's last column is padding. A Gaussian far beyond the image counts for the image's
    border, not for the view's."""
    grid = h, w = 3, 4
    stored = gaussians_of(3, 2, 1, 2, h * w)  # [B, L, H, T, 4]
    stored[..., 0] += 2
    one_token = Geometry(torch.tensor([[2 / w, 0.0]]).expand(2, -1), torch.ones(2, 2))
    seen = StoredGaussians(stored, grid).map(0, Seen(geometry=one_token)).view(2, 2, h, w, h, w)

    image = expected_map(stored[:, 0], grid).view(2, 2, h, w, h, w)
    shifted = torch.zeros_like(image)
    shifted[:, :, :, :-1, :, :-1] = image[:, :, :, 1:, :, 1:]
    shifted[:, :, :, -1, :, :-1] = image[:, :, :, -1, :, 1:]  # padding sees as its neighbour does
    shifted /= shifted.sum((-2, -1), keepdim=True)
    torch.testing.assert_close(seen, shifted, atol=1e-5, rtol=0)
