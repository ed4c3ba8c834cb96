"""The three losses of phase B and the schedule of gamma (*GauTransformer, eqs 9-11*)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def hard_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of logits [B, C] with labels [B], or with probabilities [B, C] (*eq. 1*),
    optionally smoothed."""
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def soft_loss(logits: Tensor, teacher_probabilities: Tensor) -> Tensor:
    """Cross-entropy of the student's logits [B, C] with the teacher's probabilities [B, C] (*eq.
    10*)."""
    return F.cross_entropy(logits, teacher_probabilities)


def feature_loss(
    student_rows: Tensor,
    teacher_map: Tensor,
    temperature: float = 1.0,
    direction: str = "teacher_student",
    hidden: Tensor | None = None,
) -> Tensor:
    """KL divergence between the attention maps of one block (*eq. 9*), mean over images, heads and
    queries.

    student_rows  [B, H, T, T] log-probabilities over keys
    teacher_map   [B, H, T, T] probabilities over keys
    temperature   both rows become softmax(log p / temperature) before they are compared
    direction     ``teacher_student`` is KL(teacher || student), which makes the student cover the teacher's map;
                  ``student_teacher`` is KL(student || teacher), eq. 9's order
    hidden        keys that the student cannot see, bool broadcastable to [B, H, T, T]: the teacher's rows lose them too
                  and are renormalised

    A key that the teacher gives nothing adds nothing to KL(teacher || student). KL(student ||
    teacher) would be infinite there: such a key counts as having the smallest normal number of the
    map's type, 1.2e-38 in float32.
    """
    if hidden is not None:
        teacher_map = without_keys(teacher_map, hidden)
    if temperature != 1.0:
        student_rows = (student_rows / temperature).log_softmax(-1)
    if hidden is not None:  # both sides get a 0 there, so that a hidden key adds nothing
        student_rows = student_rows.masked_fill(hidden, 0.0)
    if direction == "teacher_student":
        if temperature != 1.0:
            teacher_map = (teacher_map.log() / temperature).softmax(-1)
        divergence = F.kl_div(student_rows, teacher_map, reduction="sum")
    else:
        teacher_rows = teacher_map.clamp_min(torch.finfo(teacher_map.dtype).tiny).log()
        if hidden is not None:
            teacher_rows = teacher_rows.masked_fill(hidden, -torch.inf)
        teacher_rows = (teacher_rows / temperature).log_softmax(-1)
        if hidden is not None:
            teacher_rows = teacher_rows.masked_fill(hidden, 0.0)
        divergence = F.kl_div(teacher_rows, student_rows, log_target=True, reduction="sum")
    return divergence / student_rows[..., 0].numel()


def without_keys(rows: Tensor, hidden: Tensor) -> Tensor:
    """Rows [..., T] of a map without their ``hidden`` keys, summing to 1 again. What looks only at
    hidden keys looks at all the others alike."""
    rows = rows.masked_fill(hidden, 0.0)
    left = rows.sum(-1, keepdim=True)
    rows = torch.where(left == 0, (~hidden).to(rows.dtype), rows)
    return rows / rows.sum(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


def gamma_at(epoch: int, gamma: float, schedule: str, epochs: int) -> float:
    """gamma during an epoch counted from 0.

    ``constant`` (the paper); ``linear`` and ``cosine`` fall from gamma to 0 over ``epochs``;
    ``stop_after`` is gamma for ``epochs`` epochs, then 0.
    """
    progress = min(epoch / epochs, 1.0)
    match schedule:
        case "constant":
            return gamma
        case "linear":
            return gamma * (1 - progress)
        case "cosine":
            return gamma * 0.5 * (1 + math.cos(math.pi * progress))
        case "stop_after":
            return gamma if epoch < epochs else 0.0
    raise ValueError(f"unknown gamma schedule {schedule!r}")
