"""The three losses of phase B and the schedule of gamma (*GauTransformer, eqs 9-11*)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gaupipe.data.augment import Mix, mixed_targets


def hard_loss(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, mixed: Mix | None = None
) -> Tensor:
    """Cross-entropy of logits [B, C] with labels [B] (*eq. 1*), optionally smoothed. For a mixed
    batch labels are the probabilities that its mix stands for."""
    if mixed is not None:
        labels = mixed_targets(F.one_hot(labels, logits.shape[-1]).to(logits.dtype), mixed)
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def soft_loss(logits: Tensor, teacher_probabilities: Tensor) -> Tensor:
    """Cross-entropy of the student's logits [B, C] with the teacher's probabilities [B, C] (*eq.
    10*)."""
    return F.cross_entropy(logits, teacher_probabilities)


def feature_loss(
    student_log_map: Tensor,
    teacher_map: Tensor,
    temperature: float = 1.0,
    direction: str = "teacher_student",
    hidden: Tensor | None = None,
) -> Tensor:
    """KL divergence between the attention maps of one block (*eq. 9*), mean over images, heads and
    queries.

    student_log_map  [B, H, T, T] log-probabilities over keys
    teacher_map      [B, H, T, T] probabilities over keys
    temperature      both maps become softmax(log p / temperature) before they are compared
    direction        ``teacher_student`` is KL(teacher || student), which makes the student cover
                     the teacher's map; ``student_teacher`` is KL(student || teacher), eq. 9's order
    hidden           keys that the student cannot see, bool broadcastable to [B, H, T, T]: the
                     teacher's map loses them too and is renormalised

    A key that the teacher gives nothing adds nothing to KL(teacher || student). In KL(student ||
    teacher) it counts as the smallest normal number of the map's type, 1.2e-38 in float32.
    """
    if hidden is not None:
        teacher_map = without_keys(teacher_map, hidden)
    if temperature != 1.0:
        student_log_map = (student_log_map / temperature).log_softmax(-1)
    if hidden is not None:  # both sides get a 0 there, so that a hidden key adds nothing
        student_log_map = student_log_map.masked_fill(hidden, 0.0)
    if direction == "teacher_student":
        if temperature != 1.0:
            teacher_map = (teacher_map.log() / temperature).softmax(-1)
        divergence = F.kl_div(student_log_map, teacher_map, reduction="sum")
    else:
        teacher_log_map = teacher_map.clamp_min(torch.finfo(teacher_map.dtype).tiny).log()
        if hidden is not None:
            teacher_log_map = teacher_log_map.masked_fill(hidden, -torch.inf)
        teacher_log_map = (teacher_log_map / temperature).log_softmax(-1)
        if hidden is not None:
            teacher_log_map = teacher_log_map.masked_fill(hidden, 0.0)
        divergence = F.kl_div(teacher_log_map, student_log_map, log_target=True, reduction="sum")
    return divergence / student_log_map[..., 0].numel()


def without_keys(maps: Tensor, hidden: Tensor) -> Tensor:
    """Attention maps [..., T, T] without their ``hidden`` keys, summing to 1 again over the keys. A
    query that looks only at hidden keys looks at all the others alike."""
    maps = maps.masked_fill(hidden, 0.0)
    left = maps.sum(-1, keepdim=True)
    maps = torch.where(left == 0, (~hidden).to(maps.dtype), maps)
    return maps / maps.sum(-1, keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)


def gamma_at(epoch: int, gamma: float, schedule: str, epochs: int) -> float:
    """gamma during an epoch counted from 0.

    ``constant`` (the paper); ``linear`` and ``cosine`` fall from gamma to 0 over ``epochs``;
    ``stop_after`` is gamma for ``epochs`` epochs, then 0.
    """
    progress = min(epoch / epochs, 1.0)
    factors = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "stop_after": float(epoch < epochs),
    }
    return gamma * factors[schedule]
