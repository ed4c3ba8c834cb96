"""Maps of trained teachers: kept keys, dropped tokens, and views; against loops in numpy."""

import numpy as np
import pytest
import torch

from gaupipe.maps.gaussians import Geometry, expected_axes, expected_map
from gaupipe.maps.views import from_top_k, move_map, top_k, without_prefix
from gaupipe.teachers import gaussian
from gaupipe.teachers.vit import VitMaps

GRIDS = [(4, 4), (3, 5), (1, 6), (5, 1)]


def random_maps(seed: int, images: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(images, heads, queries, keys, generator=generator)).softmax(-1)


def geometry(*views: tuple[tuple[float, float], tuple[float, float]]) -> Geometry:
    """One ((offset x, y), (scale x, y)) an image, in border coordinates."""
    offset, scale = zip(*views, strict=True)
    return Geometry(torch.tensor(offset), torch.tensor(scale))


def moved_by_loops(stored, offset, scale, grid, new_grid) -> np.ndarray:
    """The map [T', T'] of one view, a key and a query at a time. Lengths are in parts of the image:
    the image is [0, 1] along both axes."""
    (h, w), (new_h, new_w) = grid, new_grid
    stored = stored.reshape(h, w, h, w).astype(np.float64)

    def place(axis, view):  # view and result in [0, 1]
        return (offset[axis] + scale[axis] * (2 * view - 1) + 1) / 2

    def row(y, x):
        """Bilinear between the four queries around a place, borders clamped."""
        y, x = np.clip(y * h - 0.5, 0, h - 1), np.clip(x * w - 0.5, 0, w - 1)
        y0, x0 = min(int(y), max(h - 2, 0)), min(int(x), max(w - 2, 0))
        y1, x1, fy, fx = min(y0 + 1, h - 1), min(x0 + 1, w - 1), y - y0, x - x0
        return (
            (1 - fy) * (1 - fx) * stored[y0, x0]
            + (1 - fy) * fx * stored[y0, x1]
            + fy * (1 - fx) * stored[y1, x0]
            + fy * fx * stored[y1, x1]
        )

    def part(axis, n, new_n, key, cell):
        ends = sorted([place(axis, key / new_n) * n, place(axis, (key + 1) / new_n) * n])
        return max(0.0, min(ends[1], cell + 1) - max(ends[0], cell))

    area = np.zeros((new_h, new_w, h, w))
    for ky, kx, cy, cx in np.ndindex(area.shape):
        area[ky, kx, cy, cx] = part(1, h, new_h, ky, cy) * part(0, w, new_w, kx, cx)
    result = np.zeros((new_h, new_w, new_h, new_w))
    for qy, qx in np.ndindex(new_h, new_w):
        taken = row(place(1, (qy + 0.5) / new_h), place(0, (qx + 0.5) / new_w))
        seen = (area * taken).sum((2, 3))
        if seen.sum() < 1e-4:
            seen = area.sum((2, 3)) if area.sum() else np.ones((new_h, new_w))
        result[qy, qx] = seen / seen.sum()
    return result.reshape(new_h * new_w, new_h * new_w)


VIEWS = {
    "crop": ((0.2, -0.15), (0.7, 0.6)),
    "crop, mirrored": ((-0.11, 0.3), (-0.63, 0.6)),
    "shift": ((0.23, 0.4), (1.0, 1.0)),
    "upside down": ((0.0, 0.0), (1.0, -1.0)),
    "small, with a border around it": ((0.3, -0.2), (1.7, 1.4)),
    "hardly inside": ((1.98, 0.0), (1.0, 1.0)),
    "outside": ((5.0, 0.0), (1.0, 1.0)),
    "tiny": ((0.13, 0.17), (1e-3, 1e-3)),
    "nothing": ((0.13, 0.17), (1e-30, 1e-30)),
}


@pytest.mark.parametrize("new_grid", [None, (3, 4), (7, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_views_are_those_of_the_definition(grid, new_grid):
    tokens, views = grid[0] * grid[1], list(VIEWS.values())
    maps = random_maps(0, len(views), 2, tokens, tokens)
    moved = move_map(maps, geometry(*views), grid, new_grid)
    assert moved.dtype == torch.float32
    assert (moved >= 0).all()
    torch.testing.assert_close(moved.sum(-1), torch.ones(moved.shape[:-1]), atol=1e-6, rtol=0)
    for image, (offset, scale) in enumerate(views):
        for head in range(2):
            expected = moved_by_loops(
                maps[image, head].numpy(), offset, scale, grid, new_grid or grid
            )
            np.testing.assert_allclose(
                moved[image, head], expected, atol=3e-6, err_msg=list(VIEWS)[image]
            )


@pytest.mark.parametrize("new_grid", [(2, 2), (6, 6), (5, 3), (1, 1)], ids=str)
def test_another_grid_without_a_view(new_grid):
    maps = random_maps(1, 2, 3, 12, 12)
    moved = move_map(maps, None, (3, 4), new_grid)
    for image, head in np.ndindex(2, 3):
        expected = moved_by_loops(maps[image, head].numpy(), (0, 0), (1, 1), (3, 4), new_grid)
        np.testing.assert_allclose(moved[image, head], expected, atol=3e-7)


def test_a_map_that_needs_no_move_is_returned_itself():
    maps = random_maps(2, 2, 1, 12, 12)
    assert move_map(maps, None, (3, 4)) is maps
    assert move_map(maps, None, (3, 4), (3, 4)) is maps
    identity = geometry(((0.0, 0.0), (1.0, 1.0)), ((0.0, 0.0), (1.0, 1.0)))
    assert torch.equal(move_map(maps, identity, (3, 4)), maps)


def test_one_map_of_all_images():
    maps = random_maps(3, 1, 2, 12, 12)
    views = geometry(VIEWS["crop"], VIEWS["shift"])
    moved = move_map(maps, views, (3, 4))
    assert torch.equal(moved, move_map(maps.expand(2, -1, -1, -1), views, (3, 4)))


@pytest.mark.parametrize("grid", [*GRIDS, (14, 14)], ids=str)
@pytest.mark.parametrize("axis", ["x", "y", "both"])
def test_a_flip_is_a_permutation(grid, axis):
    """To the last bit, also of maps that do not quite sum to 1; twice is nothing."""
    tokens = grid[0] * grid[1]
    maps = random_maps(4, 2, 2, tokens, tokens).half().float()
    flip = (0.0, 0.0), (-1.0 if axis != "y" else 1.0, -1.0 if axis != "x" else 1.0)
    views = geometry(flip, flip)
    dims = {"x": (3, 5), "y": (2, 4), "both": (2, 3, 4, 5)}[axis]
    expected = maps.reshape(2, 2, *grid, *grid).flip(dims).reshape(maps.shape)
    moved = move_map(maps, views, grid)
    assert torch.equal(moved, expected)
    assert torch.equal(move_map(moved, views, grid), maps)


def test_half_precision_around_it_changes_nothing():
    maps, views = random_maps(7, 1, 2, 16, 16), geometry(VIEWS["crop"])
    expected = move_map(maps, views, (4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(move_map(maps, views, (4, 4)), expected)


@pytest.mark.parametrize("k", [1, 4, 11, 12])
def test_the_largest_keys_keep_their_weights(k):
    maps = random_maps(8, 2, 3, 12, 12)
    keys, weights = top_k(maps, k)
    assert keys.dtype == torch.int64
    order = np.argsort(-maps.numpy(), axis=-1, kind="stable")[..., :k]
    assert np.array_equal(keys, order)
    assert np.array_equal(weights, np.take_along_axis(maps.numpy(), order, -1))
    expected = np.zeros(maps.shape)
    for row in np.ndindex(2, 3, 12):
        rest = 1 - weights[row].double().sum().item()
        expected[row] = rest / (12 - k) if k < 12 else 0
        expected[row][order[row]] = weights[row]
    restored = from_top_k(keys, weights, 12)
    np.testing.assert_allclose(restored, expected, atol=2e-7)
    np.testing.assert_allclose(restored.sum(-1), 1, atol=5e-7)


def test_weights_that_rounding_made_too_large():
    """As they come from a store: small integers and float16, their sum 1.1."""
    keys = torch.tensor([[0, 2], [3, 1]], dtype=torch.uint8)
    weights = torch.tensor([[0.6, 0.5], [0.25, 0.25]], dtype=torch.float16)
    restored = from_top_k(keys, weights, 4)
    expected = torch.tensor([[0.6 / 1.1, 0, 0.5 / 1.1, 0], [0.25, 0.25, 0.25, 0.25]])
    torch.testing.assert_close(restored, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(restored.sum(-1), torch.ones(2))


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_class_and_register_tokens_are_dropped(prefix):
    maps = random_maps(9, 2, 3, 8 + prefix, 8 + prefix)
    maps[0, 1, prefix + 2] = 0
    maps[0, 1, prefix + 2, 0] = 1  # looks at the class token and nowhere else
    patches, dropped = without_prefix(maps, prefix)
    kept = maps.numpy().astype(np.float64)[:, :, prefix:, prefix:]
    np.testing.assert_allclose(dropped, (1 - kept.sum(-1)).mean(-1), atol=1e-6)
    sums = kept.sum(-1, keepdims=True)
    expected = np.where(sums > 0, kept / np.where(sums > 0, sums, 1), 1 / 8)
    np.testing.assert_allclose(patches, expected, rtol=1e-5)


@pytest.mark.parametrize("at_once", [1, 50, 2**18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_shown_maps_are_rounded_once_whatever_is_computed_at_once(monkeypatch, at_once, dtype):
    monkeypatch.setattr(gaussian, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    gaussians = torch.randn(3, 2, 2, 12, 4, generator=generator)
    gaussians[..., 2:] = gaussians[..., 2:].exp()
    expected = expected_map(gaussians, (3, 4))
    axes = [expected_axes(gaussians[:, layer], (3, 4)) for layer in (0, 1)]
    for attention in (
        gaussian.GaussianMaps((3, 4), gaussians.requires_grad_()),
        gaussian.GaussianMaps((3, 4), gaussians.detach() * torch.nan, axes=axes),
        VitMaps(expected.unbind(1), (3, 4), torch.zeros(2, 2)),
    ):
        maps = attention.maps(dtype)
        assert maps.dtype == dtype and maps.is_contiguous()
        torch.testing.assert_close(maps.float(), expected.to(dtype).float(), rtol=1e-3, atol=1e-6)
        assert (maps != expected.to(dtype)).float().mean() < 1e-3
