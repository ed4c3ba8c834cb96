"""A few Gaussians per query in place of a row of a trained teacher's map.

A *mixture* is M Gaussians of :mod:`gaupipe.gaussians` with weights: float32 [..., M, 5], (weight,
mean_x, mean_y, std_x, std_y), means and stds in normalised coordinates. The row it stands for is
the weighted mean of the Gaussians' expected rows. With M = 1 and the weight 1 these are the four
numbers that a store of kind ``gaussian`` holds.

Axis letters: B images, H heads, T tokens on a grid (h, w), M Gaussians, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gaupipe.gaussians import Geometry, expected_axes, token_stretch
from gaupipe.maps import interpolate_queries

LEAST_STD = 0.3
"""Of the Gaussians that a fit starts from, in tokens: narrower ones have no gradient two tokens
away."""
HAT_VARIANCE = 1 / 6
"""What linear interpolation adds to the variance of a point, in tokens squared, on average over
where the point lies between two tokens."""
EM_STEPS = 8
LEARNING_RATE = 0.15
"""In tokens, of log stds and of logits; falls to 0 linearly."""
ROWS_AT_ONCE = 2**11
"""On a CPU, whose cache should hold them."""
ROWS_AT_ONCE_ON_A_GPU = 2**17


def mixture_map(mixtures: Tensor, grid: tuple[int, int]) -> Tensor:
    """The map that mixtures [..., T, M, 5] stand for: [..., T, h * w], float32, rows sum to 1.

    Weights are divided by their sum.
    """
    mixtures = mixtures.float()
    weights = mixtures[..., 0] / mixtures[..., 0].sum(-1, keepdim=True)
    return _rows(weights, *expected_axes(mixtures[..., 1:], grid))


def _rows(weights: Tensor, rows_y: Tensor, rows_x: Tensor) -> Tensor:
    """Sums of outer products: weights [..., M], [..., M, h] and [..., M, w] -> [..., h * w]."""
    with torch.autocast(weights.device.type, enabled=False):
        return ((weights.unsqueeze(-1) * rows_y).mT @ rows_x).flatten(-2)


def move_mixture_map(
    mixtures: Tensor,
    geometry: Geometry | None,
    grid: tuple[int, int],
    new_grid: tuple[int, int] | None = None,
) -> Tensor:
    """Mixtures of the untransformed images [B or 1, H, T, M, 5] -> maps of their views [B, H, T',
    T'], float32, on the grid ``new_grid`` (default: the same grid).

    Every Gaussian is moved into the view's coordinates, as by :func:`gaupipe.gaussians.move`:
    attention that lies outside the view reads its border. The view's query takes the rows, not the
    Gaussians, of the stored queries around its position, as by :func:`gaupipe.maps.move_map`: the
    first Gaussian of one query has nothing to do with the first one of the next.
    """
    new_grid = new_grid or grid
    if geometry is None and new_grid == grid:
        return mixture_map(mixtures, grid)
    old, new = (mixtures.new_tensor(token_stretch(each)).float() for each in (grid, new_grid))
    ratio = torch.where(old > 0, new / old.clamp_min(1), 0.0)
    weights, mean, std = mixtures.float().split([1, 2, 2], dim=-1)
    mean, std = mean * ratio, std * ratio
    if geometry is not None:
        offset, scale = (
            values.to(mixtures.device).float()[:, None, None, None]
            for values in (geometry.offset, geometry.scale)
        )
        mean, std = (mean - offset * new) / scale, std / scale.abs()
        weights = weights.expand(*mean.shape[:-1], 1)
    rows = mixture_map(torch.cat([weights, mean, std], dim=-1), new_grid)
    return interpolate_queries(rows, geometry, grid, new_grid)


def fit(
    maps: Tensor,
    grid: tuple[int, int],
    components: int,
    *,
    steps: int = 40,
    rows_at_once: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The mixtures [..., T, M, 5] of ``components`` Gaussians that stand for maps [..., T, h * w],
    and KL(map || mixture) [..., T], float32.

    Minimises the KL divergence of each row: from the row's moments for one Gaussian, from a few
    steps of expectation maximisation for more, by ``steps`` steps of Adam on the exact divergence.
    Returns the best of all steps, so never worse than the row's moments. The largest Gaussian comes
    first. Deterministic; takes ``rows_at_once`` rows into memory at a time.
    """
    rows = maps.reshape(-1, maps.shape[-1])
    at_once = rows_at_once or (ROWS_AT_ONCE if rows.device.type == "cpu" else ROWS_AT_ONCE_ON_A_GPU)
    with torch.inference_mode(False):  # a copy that gradients may pass, wherever it comes from
        chunks = [
            _fit(chunk.detach().clone().float(), grid, components, steps)
            for chunk in rows.split(at_once)
        ]
    mixtures, divergence = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return (
        mixtures.reshape(*maps.shape[:-1], components, 5),
        divergence.reshape(maps.shape[:-1]),
    )


def _fit(rows: Tensor, grid: tuple[int, int], components: int, steps: int) -> tuple[Tensor, Tensor]:
    """Rows [R, h * w] -> (mixtures [R, M, 5], KL [R]), all at once.

    Inside, a Gaussian is (logit, mean_x, mean_y, log std_x, log std_y) with lengths in tokens.
    """
    entropy = torch.special.entr(rows).sum(-1)
    start = _moments(rows, _positions(grid, rows.device))  # [R, 1, 5]
    best = start.expand(-1, components, -1)
    lowest = _cross_entropy(rows, best, grid) - entropy
    if components > 1:
        start = _expectation_maximisation(rows, grid, components)
    raw = start.clone()
    first, second = torch.zeros_like(raw), torch.zeros_like(raw)
    for step in range(1, steps + 2):
        with torch.enable_grad():
            raw.requires_grad_()
            divergence = _cross_entropy(rows, raw, grid) - entropy
            (slope,) = torch.autograd.grad(divergence.sum(), raw)
        raw, divergence = raw.detach(), divergence.detach()
        better = divergence < lowest
        lowest = torch.where(better, divergence, lowest)
        best = torch.where(better[:, None, None], raw, best)
        # Adam, without a state of its own: torch.optim.Adam with betas .9 and .99
        first.lerp_(slope, 0.1)
        second.lerp_(slope.square(), 0.01)
        change = first / (1 - 0.9**step) / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
        raw = raw - LEARNING_RATE * (1 - (step - 1) / steps if steps else 0) * change
    mixtures = _normalised(best, grid)
    order = mixtures[..., :1].argsort(dim=1, descending=True, stable=True)
    return mixtures.take_along_dim(order, dim=1), lowest.clamp_min(0)


def _cross_entropy(rows: Tensor, raw: Tensor, grid: tuple[int, int]) -> Tensor:
    """-sum p log q of rows [R, h * w] and mixtures [R, M, 5] as they are inside of a fit: [R]."""
    mixtures = _normalised(raw, grid)
    expected = _rows(mixtures[..., 0], *expected_axes(mixtures[..., 1:], grid))
    tiny = torch.finfo(expected.dtype).tiny
    return -(rows * expected.clamp_min(tiny).log()).sum(-1)


def _normalised(raw: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mixtures [R, M, 5] as the rest of the program knows them."""
    extent = raw.new_tensor([grid[1] - 1, grid[0] - 1])
    per_token = torch.where(extent > 0, 2 / extent.clamp_min(1), 0.0)
    mean = (raw[..., 1:3] - extent / 2) * per_token
    std = raw[..., 3:].exp() * per_token
    return torch.cat([raw[..., :1].softmax(-2), mean, std], dim=-1)


def _positions(grid: tuple[int, int], device: torch.device) -> Tensor:
    """(x, y) of every token in tokens: [h * w, 2]."""
    y, x = torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij")
    return torch.stack([x, y], dim=-1).flatten(0, 1).float()


def _moments(weights: Tensor, positions: Tensor) -> Tensor:
    """The Gaussians [..., 1, 5] with mean and variance of weights [..., T] at positions [T, 2];
    logits are the logarithms of the weights' sums."""
    total = weights.sum(-1, keepdim=True).clamp_min(1e-12)
    share = weights / total
    mean = share @ positions
    variance = (share @ positions.square() - mean.square()) - HAT_VARIANCE
    log_std = variance.clamp_min(LEAST_STD**2).log() / 2
    return torch.cat([total.log(), mean, log_std], dim=-1).unsqueeze(-2)


def _expectation_maximisation(rows: Tensor, grid: tuple[int, int], components: int) -> Tensor:
    """Mixtures [R, M, 5] from ``EM_STEPS`` steps that take rows [R, T] for weights of points at the
    tokens; the first means are the largest keys that lie apart."""
    positions = _positions(grid, rows.device)
    distance = (positions[:, None] - positions).square().sum(-1)  # [T, T]
    apart, means = rows.clone(), []
    for _ in range(components):
        key = apart.argmax(-1)
        means.append(positions[key])
        apart = apart * -torch.expm1(-distance[key] / 4)
    raw = torch.stack(means, dim=1)  # [R, M, 2]
    raw = torch.cat([torch.zeros_like(raw[..., :1]), raw, torch.zeros_like(raw)], dim=-1)
    for _ in range(EM_STEPS):
        variance = (2 * raw[..., 3:]).exp() + HAT_VARIANCE  # [R, M, 2]
        log_weights = raw[..., :1] - variance.log().sum(-1, keepdim=True) / 2  # [R, M, 1]
        away = (positions - raw[..., None, 1:3]).square() / variance.unsqueeze(-2)  # [R, M, T, 2]
        shares = (log_weights - away.sum(-1) / 2).softmax(1)
        raw = _moments(shares * rows.unsqueeze(1), positions).squeeze(-2)
    return raw
