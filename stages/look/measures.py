"""What is made of an image's maps to be looked at: means, rollout, and numbers of each head.

Axis letters: L blocks, H heads, T patches, N all tokens: class and register tokens, then patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SINK = 0.5
"""The share of attention from which on a key is a sink, and the length of its value, in lengths of
the mean value, up to which the head does nothing."""


def with_mean_and_rollout(blocks: Sequence[Tensor | None]) -> Tensor:
    """The maps [H, N, N] of each block, their mean over heads, and the rollout: [L, H + 2, N, N].

    Rollout (*Abnar and Zuidema 2020, Quantifying Attention Flow in Transformers, eq. 1*) is the
    product of the mean maps of the blocks up to this one, each averaged with the identity for the
    residual connection. A block without maps is 0, and the rollout begins anew after it.
    """
    first = next(block for block in blocks if block is not None)
    heads, size, _ = first.shape
    columns = first.new_zeros(len(blocks), heads + 2, size, size)

    identity = torch.eye(size)
    rollout = identity
    for layer, maps in enumerate(blocks):
        if maps is None:
            rollout = identity
            continue
        mean = maps.mean(0)
        rollout = (mean + identity) / 2 @ rollout
        columns[layer, :heads] = maps
        columns[layer, heads] = mean
        columns[layer, heads + 1] = rollout
    return columns


def divergence(teacher: Tensor, maps: Tensor) -> Tensor:
    """KL divergence [H, N] of each query's row of ``maps`` [H, N, N] from the ``teacher``'s, in
    nats."""
    ratio = teacher / maps.clamp_min(torch.finfo(torch.float32).tiny)
    return torch.xlogy(teacher, ratio).sum(-1)


def numbers(maps: Tensor, grid: tuple[int, int], values: Tensor | None) -> dict[str, Tensor]:
    """Numbers of each head, [L, H], from its maps [L, H, N, N].

    entropy   of a query's attention in nats, mean over queries: 0 for one key, ln N for all alike
    distance  from query to key in patches, mean over attention and patches
    share     the attention that the key which gets the most has, mean over queries
    value     the length of that key's value in lengths of the mean value, from the ``values``
              [L, H, N] of the tokens
    idle      whether the head does nothing: its attention goes to a key without a value (*Fesser
              et al. 2026, A Unifying View of Attention Sinks, arXiv 2606.08105*; the thresholds
              are :data:`SINK`)
    """
    height, width = grid
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([y.flatten(), x.flatten()], dim=-1).float()
    distances = torch.cdist(places, places)  # [T, T]
    patches = maps[..., -height * width :, -height * width :]
    share, key = maps.mean(-2).max(-1)
    found = {
        "entropy": torch.special.entr(maps).sum(-1).mean(-1),
        "distance": (patches * distances).sum((-1, -2)) / patches.sum((-1, -2)),
        "share": share,
    }
    if values is not None:
        value = values.gather(-1, key[..., None]).squeeze(-1) / values.mean(-1)
        found |= {"value": value, "idle": (share >= SINK) & (value <= SINK)}
    return found
