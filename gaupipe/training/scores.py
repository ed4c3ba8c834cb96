"""Accuracy and cross-entropy of a split over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gaupipe.data.batches import Batches
from gaupipe.system import distributed


@dataclass(frozen=True)
class Score:
    """Accuracy and cross-entropy, means over the images of all ranks."""

    acc: float
    loss: float


@torch.no_grad()
def score(log_probabilities: Iterable[tuple[Tensor, Tensor]]) -> Score:
    """Accuracy and cross-entropy of batches of (log-probabilities or logits [B, C], labels [B]),
    over those of all ranks."""
    sums = torch.zeros(3, dtype=torch.float64)  # right, images, loss
    for logits, labels in log_probabilities:
        logits = logits.float()
        loss = cross_entropy(logits, labels, reduction="sum").item()
        right = int((logits.argmax(-1) == labels).sum())
        sums += torch.tensor([right, len(labels), loss], dtype=torch.float64)
    right, count, loss = distributed.all_reduce_sum(sums).tolist()
    return Score(acc=right / count, loss=loss / count)


def score_model(model: nn.Module, batches: Batches) -> Score:
    """:func:`score` of a model in eval mode over a split."""
    model.eval()
    with torch.inference_mode():
        return score((model(batch.images), batch.labels) for batch in batches.rank_batches())


def wilson_interval(share: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of Wilson for a ``share`` of ``count`` independent images."""
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / (1 + z**2 / count)
    return middle - half, middle + half


def percent(share: float, count: int) -> str:
    """A ``share`` of ``count`` images in percent, with its 95 % interval: how much of it is chance
    where there are few images."""
    low, high = (100 * end for end in wilson_interval(share, count))
    return f"{100 * share:.1f} % ({low:.1f} to {high:.1f} %, 95 % interval of {count:,} images)"
