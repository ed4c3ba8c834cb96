"""A few Gaussians per query in place of a row of a trained teacher's map.

A *mixture* is M Gaussians of :mod:`gaupipe.maps.gaussians` with weights: float32 [..., M, 5],
(weight, mean_x, mean_y, std_x, std_y), means and stds in normalised coordinates. The row it stands
for is the weighted mean of the Gaussians' expected rows. With M = 1 and the weight 1 these are the
four numbers that a store of kind ``gaussian`` holds.

Axis letters: B images, H heads, T tokens on a grid (h, w), M Gaussians, R rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gaupipe.maps.gaussians import (
    MAX_STD_PIXELS,
    MIN_STD_PIXELS,
    Geometry,
    expected_axes,
    token_stretch,
)
from gaupipe.maps.views import interpolate_chosen_queries, interpolate_queries, take_queries

LEAST_STD = 0.3
"""Of the Gaussians that a fit starts from, in tokens: narrower ones have no gradient two tokens
away."""
HAT_VARIANCE = 1 / 6
"""What linear interpolation adds to the variance of a point, in tokens squared, on average over
where the point lies between two tokens."""
EM_STEPS = 8
LONGEST_STEP = (1.5, 1.0)
"""Of a mean, in tokens, and of the logarithm of a std."""
FASTER = 1.4
"""What a step that lowered the divergence makes the next one longer: steps of expectation
maximisation, which these are, are short where Gaussians overlap."""
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
    queries: Tensor | None = None,
) -> Tensor:
    """Mixtures of the untransformed images [B or 1, H, T, M, 5] -> maps of their views [B, H, T',
    T'], float32, on the grid ``new_grid`` (default: the same grid); or, of B images, the rows [B,
    H, Q, T'] of the ``queries`` [B, Q] of the views, int64.

    Every Gaussian is moved into the view's coordinates, as by :func:`gaupipe.maps.gaussians.move`:
    attention that lies outside the view reads its border. The view's query takes the rows, not the
    Gaussians, of the stored queries around its position, as by
    :func:`gaupipe.maps.views.move_map`: the first Gaussian of one query has nothing to do with the
    first one of the next.
    """
    new_grid = new_grid or grid
    if geometry is None and new_grid == grid:
        return mixture_map(take_queries(mixtures, queries), grid)
    old, new = (
        torch.tensor(token_stretch(each), device=mixtures.device) for each in (grid, new_grid)
    )
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
    moved = torch.cat([weights, mean, std], dim=-1)
    if queries is None:
        return interpolate_queries(mixture_map(moved, new_grid), geometry, grid, new_grid)

    def rows(stored: Tensor) -> Tensor:
        return mixture_map(take_queries(moved, stored), new_grid)

    return interpolate_chosen_queries(rows, queries, geometry, grid, new_grid)


@torch.no_grad()
def fit(
    maps: Tensor,
    grid: tuple[int, int],
    components: int,
    *,
    steps: int = 8,
    rows_at_once: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The mixtures [..., T, M, 5] of ``components`` Gaussians that stand for maps [..., T, h * w],
    and KL(map || mixture) [..., T], float32.

    Minimises the KL divergence of each row by ``steps`` steps of Fisher scoring on the exact
    divergence. The start is the row's moments for one Gaussian, and for more what expectation
    maximisation makes of the row's keys as points. Never worse than the row's moments. The largest
    Gaussian comes first. Deterministic; takes ``rows_at_once`` rows into memory at a time.
    """
    rows = maps.reshape(-1, maps.shape[-1])
    at_once = rows_at_once or (ROWS_AT_ONCE if rows.device.type == "cpu" else ROWS_AT_ONCE_ON_A_GPU)
    chunks = [_fit(chunk.float(), grid, components, steps) for chunk in rows.split(at_once)]
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
    start = _moments(rows, _powers(grid, rows.device)).unsqueeze(1)  # [R, 1, 5]
    raw = _expectation_maximisation(rows, grid, components) if components > 1 else start
    loss, slope, information = _cross_entropy(rows, raw, grid)
    damping, length = torch.full_like(loss, 0.1), torch.ones_like(loss)
    for _ in range(steps):
        tried = raw + _step(raw, slope, information, damping, length)
        tried[..., 3:] = tried[..., 3:].clamp(math.log(MIN_STD_PIXELS), math.log(MAX_STD_PIXELS))
        there = _cross_entropy(rows, tried, grid)
        better = there[0] < loss
        raw, loss, slope, information = (
            torch.where(better.view(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip((tried, *there), (raw, loss, slope, information), strict=True)
        )
        damping = torch.where(better, 0.3 * damping, 5 * damping)
        length = torch.where(better, FASTER * length, torch.where(length > 1, 1.0, length / 2))
    if components > 1:
        alike = start.expand_as(raw)
        of_alike = _cross_entropy(rows, alike, grid)[0]
        raw = torch.where((of_alike < loss)[:, None, None], alike, raw)
        loss = torch.minimum(loss, of_alike)
    mixtures = _normalised(raw, grid)
    order = mixtures[..., :1].argsort(dim=1, descending=True, stable=True)
    return mixtures.take_along_dim(order, dim=1), (loss - entropy).clamp_min(0)


def _step(
    raw: Tensor, slope: Tensor, information: Tensor, damping: Tensor, length: Tensor
) -> Tensor:
    """How a fit changes mixtures [R, M, 5] with this gradient and information.

    Of each Gaussian, mean and std of an axis take a step of Fisher scoring with the keys that the
    Gaussian answers for, damped as by Levenberg and Marquardt; weights become the Gaussians' shares
    in the row. ``damping`` and ``length`` [R] are of a row.
    """
    damping, length = damping[:, None, None], length[:, None, None]
    weights = raw[..., 0].softmax(-1)
    shares = (weights - slope[..., 0]).clamp_min(1e-12)  # expectation maximisation
    mean, both, std = (shares[..., None, None] * information).unbind(-1)  # [R, M, 2]
    least = 1e-4 * shares.unsqueeze(-1) + 1e-9
    mean, std = (one * (1 + damping) + least for one in (mean, std))
    by_mean, by_std = -slope[..., 1:3], -slope[..., 3:]
    scale = length / (mean * std - both.square())
    of_mean, of_std = (
        (step * scale).clamp(-longest, longest)
        for step, longest in zip(
            (std * by_mean - both * by_std, mean * by_std - both * by_mean),
            LONGEST_STEP,
            strict=True,
        )
    )
    of_logit = length * (shares.log() - raw[..., 0].log_softmax(-1)).unsqueeze(-1)
    return torch.cat([of_logit, of_mean, of_std], dim=-1)


def _cross_entropy(
    rows: Tensor, raw: Tensor, grid: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """-sum p log q [R] of rows p [R, h * w] and mixtures q [R, M, 5] as they are inside of a fit;
    its gradient in the mixtures [R, M, 5]; and the Fisher information that a key says of the
    Gaussian that it came from [R, M, 2, 3]: of x and y, in (mean, mean), (mean, log std) and (log
    std, log std). There is none between the axes, in which the Gaussians are independent.

    The gradient is written out, as a fit does little else than this.
    """
    weights = raw[..., 0].softmax(-1)  # [R, M]
    x, y = (_axis(raw[..., 1 + axis], raw[..., 3 + axis], grid[1 - axis]) for axis in (0, 1))
    weighted = weights.unsqueeze(-1) * y[0]  # [R, M, h]
    tiny = torch.finfo(rows.dtype).tiny
    expected = (weighted.mT @ x[0]).clamp_min(tiny)  # [R, h, w]
    rows = rows.unflatten(-1, grid)
    loss = -(rows * expected.log()).sum((-2, -1))
    ratio = rows / expected
    of_x = weighted @ ratio  # [R, M, w], for weights * rows of x
    of_y = x[0] @ ratio.mT  # [R, M, h], for rows of y
    share = (of_y * y[0]).sum(-1)  # [R, M]
    slope_x = [(of_x * change).sum(-1) for change in x[1:]]
    slope_y = [weights * (of_y * change).sum(-1) for change in y[1:]]
    slope_logit = weights * (share - (weights * share).sum(-1, keepdim=True))
    slopes = [slope_logit, slope_x[0], slope_y[0], slope_x[1], slope_y[1]]
    information = [_information(*axis) for axis in (x, y)]
    return loss, -torch.stack(slopes, dim=-1), torch.stack(information, dim=-2)


def _information(rows: Tensor, by_mean: Tensor, by_std: Tensor) -> Tensor:
    """The Fisher information [..., 3] of a key that is drawn with the weights ``rows`` [..., n],
    whose derivatives the other two are."""
    over = rows.clamp_min(1e-6).reciprocal()
    products = (by_mean.square(), by_mean * by_std, by_std.square())
    return torch.stack([(product * over).sum(-1) for product in products], dim=-1)


def _axis(mean: Tensor, log_std: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Expected weights of the n tokens of an axis, [..., n], for Gaussians with lengths in tokens
    [...], and their derivatives in the mean and in the logarithm of the std.

    :func:`gaupipe.maps.gaussians.expected_axes` has the same weights. As there,
    R(a) = E[max(0, u - a)] is split into its kink and an even rest; its derivatives are Phi, a
    step and an odd rest, and phi. Weights and derivatives are second differences, in which the
    kink and the step are exact.
    """
    if n == 1:
        same = torch.ones_like(mean).unsqueeze(-1)
        return same, torch.zeros_like(same), torch.zeros_like(same)
    std = log_std.exp().clamp(MIN_STD_PIXELS, MAX_STD_PIXELS).unsqueeze(-1)
    tokens = torch.arange(n, device=mean.device)
    distance = mean.unsqueeze(-1) - tokens
    far, side = distance.abs(), distance.sign()
    z = far / (std * math.sqrt(2))
    tail, bell = torch.erfc(z) / 2, std * torch.exp(-z.square()) / math.sqrt(2 * math.pi)
    inside = mean.clamp(0, n - 1).unsqueeze(-1)
    kink = (1 - (inside - tokens).abs()).clamp_min(0)
    rows = (kink + _second_difference(bell - far * tail)).clamp_min(0)
    by_mean = _second_difference(side) / 2 - _second_difference(side * tail)
    return rows, by_mean, _second_difference(bell)


def _second_difference(values: Tensor) -> Tensor:
    """v[j-1] - 2 v[j] + v[j+1] along the last axis [..., n], the borders repeated beyond it; n is
    at least 2."""
    steps = values.diff(dim=-1)
    return torch.cat([steps[..., :1], steps.diff(dim=-1), -steps[..., -1:]], dim=-1)


def _normalised(raw: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mixtures [R, M, 5] as the rest of the program knows them."""
    extent = raw.new_tensor([grid[1] - 1, grid[0] - 1])
    per_token = torch.where(extent > 0, 2 / extent.clamp_min(1), 0.0)
    mean = (raw[..., 1:3] - extent / 2) * per_token
    std = raw[..., 3:].exp() * per_token
    return torch.cat([raw[..., :1].softmax(-2), mean, std], dim=-1)


def _powers(grid: tuple[int, int], device: torch.device) -> Tensor:
    """(1, x, y, x^2, y^2) of every token in tokens: [h * w, 5]."""
    y, x = torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij")
    return torch.stack([torch.ones_like(x), x, y, x**2, y**2], dim=-1).flatten(0, 1).float()


def _moments(weights: Tensor, powers: Tensor) -> Tensor:
    """The Gaussians [..., 5] with mean and variance of weights [..., T] at tokens with ``powers``
    [T, 5]; logits are the logarithms of the weights' sums."""
    total, mean, square = (weights @ powers).split([1, 2, 2], dim=-1)
    total = total.clamp_min(1e-12)
    mean = mean / total
    variance = square / total - mean.square() - HAT_VARIANCE
    log_std = variance.clamp_min(LEAST_STD**2).log() / 2
    return torch.cat([total.log(), mean, log_std], dim=-1)


def _expectation_maximisation(rows: Tensor, grid: tuple[int, int], components: int) -> Tensor:
    """Mixtures [R, M, 5] from ``EM_STEPS`` steps that take rows [R, T] for weights of points at the
    tokens; the first means are the largest keys that lie apart."""
    powers = _powers(grid, rows.device)
    positions = powers[:, 1:3]
    distance = (positions[:, None] - positions).square().sum(-1)  # [T, T]
    apart, means = rows, []
    for _ in range(components):
        key = apart.argmax(-1)
        means.append(positions[key])
        apart = apart * -torch.expm1(-distance[key] / 4)
    mean = torch.stack(means, dim=1)  # [R, M, 2]
    raw = torch.cat([torch.zeros_like(mean[..., :1]), mean, torch.zeros_like(mean)], dim=-1)
    for _ in range(EM_STEPS):
        logit, mean, log_std = raw.split([1, 2, 2], dim=-1)
        inverse = 1 / ((2 * log_std).exp() + HAT_VARIANCE)  # of the variances
        constant = logit + ((inverse.log() - mean.square() * inverse) / 2).sum(-1, keepdim=True)
        density = torch.cat([constant, mean * inverse, -inverse / 2], dim=-1) @ powers.mT
        shares = density.softmax(1)  # [R, M, T]: of the Gaussians in a key
        raw = _moments(shares * rows.unsqueeze(1), powers)
    return raw
