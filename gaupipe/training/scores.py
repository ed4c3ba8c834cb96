"""Accuracy and cross-entropy of a split over all ranks."""

from __future__ import annotations

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
