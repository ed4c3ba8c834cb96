"""Accuracies and cross-entropies, of a batch and of a split over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from gaupipe.data.augment import Mix, mixed_targets
from gaupipe.data.batches import Batches
from gaupipe.system import distributed


@torch.no_grad()
def score(log_probabilities: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Accuracy and cross-entropy of batches of (log-probabilities or logits [B, C], labels [B]),
    over those of all ranks."""
    sums = torch.zeros(3, dtype=torch.float64)  # right, images, loss
    for logits, labels in log_probabilities:
        logits = logits.float()
        loss = cross_entropy(logits, labels, reduction="sum").item()
        right = int((logits.argmax(-1) == labels).sum())
        sums += torch.tensor([right, len(labels), loss], dtype=torch.float64)
    right, count, loss = distributed.all_reduce_sum(sums).tolist()
    return {"acc": right / count, "loss": loss / count}


def score_model(model: nn.Module, batches: Batches) -> dict[str, float]:
    """:func:`score` of a model in eval mode over a split."""
    model.eval()
    with torch.inference_mode():
        return score((model(batch.images), batch.labels) for batch in batches.of_rank())


def label_targets(labels: Tensor, mixed: Mix | None, logits: Tensor) -> Tensor:
    """Labels [B], or for a mixed batch the probabilities [B, C] that their mix stands for."""
    if mixed is None:
        return labels
    return mixed_targets(one_hot(labels, logits.shape[-1]).to(logits.dtype), mixed)


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the batch whose largest logit is its label."""
    return (logits.argmax(-1) == labels).float().mean()
