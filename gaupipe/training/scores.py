"""How good predictions are, over all ranks.

Axis letters: N images, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gaupipe.data.batches import Batch, Batches
from gaupipe.data.splits import ImageData, Split
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.device import prepare_device


class Metrics(TypedDict):
    """How good predictions are."""

    top1: float
    top1_interval: tuple[float, float]
    top5: NotRequired[float]
    """Of more than ten classes."""
    loss: float
    """Cross-entropy."""
    calibration_error: float


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


@torch.inference_mode()
def predictions(
    model: nn.Module, images: Split, data: ImageData, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Logits [N, C] float32 and labels [N] of a split, on the CPU, in canonical order. The device
    is that of the settings. Ranks share the work, and every one gets all of it."""
    device = prepare_device(settings.device, settings.threads)
    model = model.to(device)
    sizes = settings.data
    world = distributed.world_size()
    batches = Batches(images, data, device, sizes.eval_batch_size, sizes.workers, world)
    return predictions_of(lambda batch: model(batch.images), batches)


def predictions_of(predict: Callable[[Batch], Tensor], batches: Batches) -> tuple[Tensor, Tensor]:
    """As :func:`predictions`, by a function that gives the logits [B, C] of a batch."""
    mine = [
        (batch.ids, predict(batch).float().cpu(), batch.labels.cpu())
        for batch in batches.rank_batches()
    ]
    parts = chain.from_iterable(distributed.all_gather_object(mine))
    ids, logits, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = ids.argsort()  # the ranks took the batches in turn
    return logits[order], labels[order]


def classification_metrics(logits: Tensor, labels: Tensor) -> Metrics:
    """top1 and its 95 % interval, top5 (of more than ten classes), loss (cross-entropy) and
    calibration_error of logits [N, C] for labels [N].

    The calibration error is the expected one: over 15 equal intervals of confidence, the mean
    distance of accuracy from confidence, weighted by the images in the interval.
    """
    bins = 15
    best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels.unsqueeze(-1)
    right = best[:, 0]
    confidence = logits.softmax(-1).amax(-1)
    which = (confidence * bins).ceil().long().clamp(1, bins)
    # the mean of a bin times its share of the images is the bin's sum over their number
    gaps = torch.zeros(bins + 1).double().index_add(0, which, right.double() - confidence.double())
    top1 = right.double().mean().item()
    scores: Metrics = {
        "top1": top1,
        "top1_interval": wilson_interval(top1, len(labels)),
        "loss": cross_entropy(logits, labels, reduction="sum").item() / len(labels),
        "calibration_error": gaps.abs().sum().item() / len(labels),
    }
    if logits.shape[-1] > 10:
        scores["top5"] = best.any(-1).double().mean().item()
    return scores


def packed(right: np.ndarray) -> str:
    """Which images were right, bool [N], as the hexadecimal digits of a bit each."""
    return np.packbits(right).tobytes().hex()


def unpacked(digits: str, count: int) -> np.ndarray:
    """The bool [``count``] of :func:`packed`."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8))[:count].astype(bool)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of Wilson for a ``share`` of ``count`` independent images."""
    z = 1.959964
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / (1 + z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)  # which rounding may leave


def percent(share: float, count: int) -> str:
    """A ``share`` of ``count`` images in percent, with its 95 % interval: how much of it is chance
    where there are few images."""
    low, high = (100 * end for end in wilson_interval(share, count))
    return f"{100 * share:.1f} % ({low:.1f} to {high:.1f} %)"
