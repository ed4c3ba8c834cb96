"""Maps of trained teachers: kept keys, dropped tokens, and views; against numpy."""

import numpy as np
import pytest
import torch

from gaupipe.maps.gaussians import Geometry, expected_map
from gaupipe.maps.views import from_top_k, move_map, pool_map, top_k, without_prefix
from gaupipe.teachers import gaussian_vit as gaussian
from gaupipe.teachers.base import ShownMaps

GRIDS = [(4, 4), (3, 5), (1, 6), (5, 1)]


def random_maps(seed: int, images: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(images, heads, queries, keys, generator=generator)).softmax(-1)


def geometry(*views: tuple[tuple[float, float], tuple[float, float]]) -> Geometry:
    """One ((offset x, y), (scale x, y)) an image, in border coordinates."""
    offset, scale = zip(*views, strict=True)
    return Geometry(torch.tensor(offset), torch.tensor(scale))


def along_an_axis(offset: float, scale: float, n: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Of an axis with n stored tokens, seen by ``new`` ones: the weights of the queries, and the
    part of each stored cell that a new cell covers, both [new, n]."""

    def pixels(view):  # of places in [0, 1] of the view
        return (offset + scale * (2 * view - 1) + 1) / 2 * n

    u = (pixels((np.arange(new) + 0.5) / new) - 0.5).clip(0, n - 1)
    queries = (1 - np.abs(u[:, None] - np.arange(n))).clip(0)
    borders = pixels(np.arange(new + 1) / new)[:, None]
    low, high = np.minimum(borders[1:], borders[:-1]), np.maximum(borders[1:], borders[:-1])
    covered = np.minimum(high, np.arange(n) + 1) - np.maximum(low, np.arange(n))
    return queries, covered.clip(0)


def moved_by_numpy(stored, offset, scale, grid, new_grid) -> np.ndarray:
    """The maps [H, T', T'] of one view of maps [H, T, T], float64."""
    (queries_y, cells_y), (queries_x, cells_x) = (
        along_an_axis(offset[axis], scale[axis], grid[1 - axis], new_grid[1 - axis])
        for axis in (1, 0)
    )
    rows = stored.reshape(len(stored), *grid, *grid).astype(np.float64)
    rows = np.einsum("ai,bj,hijkl->habkl", queries_y, queries_x, rows)
    seen = np.einsum("habkl,yk,xl->habyx", rows, cells_y, cells_x)
    area = np.outer(cells_y.sum(1), cells_x.sum(1))
    uniform = area if area.sum() else np.ones(new_grid)
    seen = np.where(seen.sum((-2, -1), keepdims=True) < 1e-4, uniform, seen)
    tokens = new_grid[0] * new_grid[1]
    return (seen / seen.sum((-2, -1), keepdims=True)).reshape(-1, tokens, tokens)


VIEWS = {
    "whole": ((0.0, 0.0), (1.0, 1.0)),
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
    """Whatever the precision around it; also of one map of all images, and without a view."""
    tokens, views = grid[0] * grid[1], list(VIEWS.values())
    new_grid = new_grid or grid
    maps, where = random_maps(0, len(views), 2, tokens, tokens), geometry(*views)
    with torch.autocast("cpu", torch.bfloat16):
        moved = move_map(maps, where, grid, new_grid)
        moved_first = move_map(maps[:1], where, grid, new_grid)
    assert moved.dtype == torch.float32 and (moved >= 0).all()
    for image, (name, view) in enumerate(VIEWS.items()):
        for ours, stored in ((moved[image], maps[image]), (moved_first[image], maps[0])):
            expected = moved_by_numpy(stored.numpy(), *view, grid, new_grid)
            np.testing.assert_allclose(ours, expected, atol=3e-6, err_msg=name)
    torch.testing.assert_close(move_map(maps[:1], None, grid, new_grid), moved[:1])


@pytest.mark.parametrize("grid", [*GRIDS, (14, 14)], ids=str)
@pytest.mark.parametrize("dims", [(), (3, 5), (2, 4), (2, 3, 4, 5)], ids=["none", "x", "y", "both"])
def test_a_flip_is_a_permutation(grid, dims):
    """To the last bit, also of maps that do not quite sum to 1; twice is nothing."""
    tokens = grid[0] * grid[1]
    maps = random_maps(4, 2, 2, tokens, tokens).half().float()
    flip = (0.0, 0.0), (-1.0 if 3 in dims else 1.0, -1.0 if 2 in dims else 1.0)
    views = geometry(flip, flip)
    expected = maps.reshape(2, 2, *grid, *grid).flip(dims).reshape(maps.shape)
    moved = move_map(maps, views, grid)
    torch.testing.assert_close(moved, expected, rtol=0, atol=0)
    torch.testing.assert_close(move_map(moved, views, grid), maps, rtol=0, atol=0)


@pytest.mark.parametrize("k", [1, 4, 11, 12])
def test_the_largest_keys_keep_their_weights_and_the_rest_is_spread_evenly(k):
    maps = random_maps(8, 2, 3, 12, 12)
    keys, weights = top_k(maps, k)
    order = np.argsort(-maps.numpy(), axis=-1, kind="stable")[..., :k]
    largest = np.take_along_axis(maps.double().numpy(), order, -1)
    assert np.array_equal(keys, order)
    rest = (1 - largest.sum(-1, keepdims=True)) / max(12 - k, 1)
    expected = np.broadcast_to(rest, maps.shape).copy()
    np.put_along_axis(expected, order, largest, -1)
    np.testing.assert_allclose(from_top_k(keys, weights, 12), expected, atol=2e-6)


def test_weights_that_rounding_made_too_large():
    """As they come from a store: small integers and float16, their sum 1.1."""
    keys = torch.tensor([[0, 2], [3, 1], [1, 0]], dtype=torch.uint8)
    weights = torch.tensor([[0.6, 0.5], [0.25, 0.25], [1.0, 0.0]], dtype=torch.float16)
    restored = from_top_k(keys, weights, 4)
    least = 2**-25
    expected = torch.tensor(
        [
            [0.6 / 1.1, least / 1.1, 0.5 / 1.1, least / 1.1],
            [0.25, 0.25, 0.25, 0.25],
            [least, 1.0, least, least],
        ]
    )
    torch.testing.assert_close(restored, expected, atol=0, rtol=1e-3)
    torch.testing.assert_close(restored.sum(-1), torch.ones(3))


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
    for attention in (
        gaussian.GaussianMaps((3, 4), gaussians.requires_grad_()),
        ShownMaps(expected.unbind(1), (3, 4), torch.zeros(2, 2)),
    ):
        maps = attention.maps(dtype)
        assert maps.dtype == dtype and maps.is_contiguous()
        torch.testing.assert_close(maps.float(), expected.to(dtype).float(), rtol=1e-3, atol=1e-6)
        assert (maps != expected.to(dtype)).float().mean() < 1e-3


@pytest.mark.parametrize("grid, new", [((4, 4), (2, 2)), ((3, 4), (2, 3)), ((5, 3), (5, 2))])
def test_pooled_maps_are_means_over_queries_and_sums_over_keys_by_area(grid, new):
    """Against squares so small that both grids consist of whole ones."""
    (h, w), (new_h, new_w) = grid, new
    maps = torch.rand(2, 3, h * w, h * w, dtype=torch.float64).softmax(-1)
    pooled = pool_map(maps, grid, new)
    torch.testing.assert_close(pooled.sum(-1), torch.ones(2, 3, new_h * new_w).double())

    def cells(rows: int, columns: int) -> np.ndarray:
        """[squares] the token of each of (h new_h) x (w new_w) small squares."""
        y = np.arange(h * new_h) * rows // (h * new_h)
        x = np.arange(w * new_w) * columns // (w * new_w)
        return (y[:, None] * columns + x).ravel()

    old, coarse = cells(h, w), cells(new_h, new_w)
    fine = maps.numpy()[..., old, :][..., :, old] / (
        new_h * new_w
    )  # of a key's squares each a share
    expected = np.empty((2, 3, new_h * new_w, new_h * new_w))
    for query in range(new_h * new_w):
        for key in range(new_h * new_w):
            block = fine[..., coarse == query, :][..., :, coarse == key]
            expected[..., query, key] = block.sum(-1).mean(-1)
    np.testing.assert_allclose(pooled.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_keys_are_those_of_a_stable_sort(dtype):
    """Exactly, but for the last 6 bits of a float32 number, as 49 has 6: also of subnormal weights,
    of zeros and of equal ones, of which the first come."""
    maps = random_maps(5, 2, 3, 40, 50)
    maps[0, 0, :, ::2] = 0.0
    maps[0, 1] = 1 / 50
    maps[0, 2] *= 1e-42
    maps = maps.to(dtype)
    numbers = maps.float().numpy()
    if dtype == torch.float32:
        unit = np.spacing(numbers) * 2**6
        numbers = np.floor(numbers / unit) * unit
    order = np.argsort(-numbers, axis=-1, kind="stable")
    for k in (1, 8, 50):
        keys, weights = top_k(maps, k)
        assert np.array_equal(keys, order[..., :k])
        assert weights.dtype == dtype
        assert np.array_equal(weights.float(), np.take_along_axis(numbers, order[..., :k], -1))
