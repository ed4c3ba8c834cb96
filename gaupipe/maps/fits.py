"""One Gaussian for each row of a trained teacher's map.

A Gaussian's expected row is the product of weights along y and x. So KL(row || Gaussian) is the
entropy that the row's two marginals do not share, which no Gaussian changes, and for each axis
KL(marginal || weights): two fits of two numbers each.

Axis letters: T tokens on a grid (h, w), R rows, n tokens of an axis.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gaupipe.maps.gaussians import MAX_STD_PIXELS, MIN_STD_PIXELS, axis_weights

LEAST_STD = 0.3
"""Of the Gaussians that a fit starts from, in tokens: narrower ones have no gradient two tokens
away."""
HAT_VARIANCE = 1 / 6
"""The mean variance, in tokens squared, that linear interpolation adds to a point."""
LONGEST_STEP = (1.5, 1.0)
"""Of a mean, in tokens, and of the logarithm of a std."""


@torch.no_grad()
def fit_gaussians(maps: Tensor, grid: tuple[int, int], steps: int = 8) -> tuple[Tensor, Tensor]:
    """The Gaussians [..., 4] that are nearest to the rows of maps [..., h * w], and
    KL(row || Gaussian's expected row) [...], both float32.

    Minimises the divergence by Fisher scoring, from the row's moments and never worse than these.
    """
    rows = maps.float()
    marginals = rows.unflatten(-1, grid).sum(-2), rows.unflatten(-1, grid).sum(-1)  # along x and y
    (mean_x, std_x, cost_x), (mean_y, std_y, cost_y) = (
        _fit_axis(marginal.flatten(0, -2), steps) for marginal in marginals
    )
    gaussians = torch.stack([mean_x, mean_y, std_x, std_y], dim=-1)
    entropy = torch.special.entr(rows).sum(-1)
    divergence = (cost_x + cost_y).view_as(entropy) - entropy
    return gaussians.view(*maps.shape[:-1], 4), divergence.clamp_min(0)


def _fit_axis(marginal: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means and stds [R] in normalised coordinates, and cross-entropies [R], of the Gaussians that
    are nearest to marginals [R, n] of an axis."""
    n = marginal.shape[-1]
    extent = (n - 1) / 2
    if n == 1:
        return (marginal.new_zeros(len(marginal)),) * 3
    numbers = _moments(marginal)  # [2, R]: mean and log std, in tokens
    cost, slope, information = _cross_entropy(marginal, numbers)
    damping = torch.full_like(cost, 0.1)
    for _ in range(steps):
        trial = numbers + _step(slope, information, damping)
        trial[1].clamp_(math.log(MIN_STD_PIXELS), math.log(MAX_STD_PIXELS))
        there = _cross_entropy(marginal, trial)
        better = there[0] < cost
        numbers, cost, slope, information = (
            torch.where(better, new, old)
            for new, old in zip((trial, *there), (numbers, cost, slope, information), strict=True)
        )
        damping = torch.where(better, 0.3 * damping, 5 * damping)
    mean, log_std = numbers
    return (mean - extent) / extent, log_std.exp() / extent, cost


def _moments(marginal: Tensor) -> Tensor:
    """Mean and log std [2, R], in tokens, of weights [R, n]."""
    tokens = torch.arange(marginal.shape[-1], device=marginal.device, dtype=marginal.dtype)
    total = marginal.sum(-1).clamp_min(1e-12)
    mean = marginal @ tokens / total
    variance = marginal @ tokens.square() / total - mean.square() - HAT_VARIANCE
    return torch.stack([mean, variance.clamp_min(LEAST_STD**2).log() / 2])


def _cross_entropy(marginal: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-sum p log q [R] of marginals p and the weights q of Gaussians (mean, log std) [2, R] in
    tokens, its gradient [2, R], and the Fisher information [3, R] of (mean, mean), (mean, log std)
    and (log std, log std)."""
    n = marginal.shape[-1]
    extent, (mean, log_std) = (n - 1) / 2, numbers
    q = axis_weights((mean - extent) / extent, log_std.exp() / extent, n)  # [R, n]
    by_mean, by_std = _derivatives(mean, log_std.exp(), n)
    q = q.clamp_min(torch.finfo(q.dtype).tiny)
    ratio, over = marginal / q, 1 / q.clamp_min(1e-6)
    slope = -torch.stack([(ratio * by).sum(-1) for by in (by_mean, by_std)])
    products = (by_mean.square(), by_mean * by_std, by_std.square())
    information = torch.stack([(product * over).sum(-1) for product in products])
    return -(marginal * q.log()).sum(-1), slope, information


def _derivatives(mean: Tensor, std: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Derivatives [R, n] of an axis's weights in the mean and in the log std, in tokens [R].

    The weights are second differences of R(a) = E[max(0, u - a)]. Its derivatives are Phi, here a
    step and an odd rest so that small ones keep their digits, and std * phi.
    """
    distance = mean.unsqueeze(-1) - torch.arange(n, device=mean.device)
    z = distance / (std.unsqueeze(-1) * math.sqrt(2))
    side, tail = distance.sign(), torch.erfc(z.abs()) / 2
    bell = std.unsqueeze(-1) * torch.exp(-z.square()) / math.sqrt(2 * math.pi)
    by_mean = _second_difference(side) / 2 - _second_difference(side * tail)
    return by_mean, _second_difference(bell)


def _second_difference(values: Tensor) -> Tensor:
    """v[j-1] - 2 v[j] + v[j+1] along the last axis [..., n], the borders repeated beyond it; n is
    at least 2."""
    steps = values.diff(dim=-1)
    return torch.cat([steps[..., :1], steps.diff(dim=-1), -steps[..., -1:]], dim=-1)


def _step(slope: Tensor, information: Tensor, damping: Tensor) -> Tensor:
    """The step [2, R] of Fisher scoring, damped as by Levenberg and Marquardt."""
    mean, both, std = information
    mean, std = (each * (1 + damping) + 1e-4 for each in (mean, std))
    by_mean, by_std = -slope
    scale = 1 / (mean * std - both.square())
    steps = (std * by_mean - both * by_std) * scale, (mean * by_std - both * by_mean) * scale
    longest = zip(steps, LONGEST_STEP, strict=True)
    return torch.stack([step.clamp(-most, most) for step, most in longest])
