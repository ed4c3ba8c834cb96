"""What a prediction, or features, lose without some of an image's patches.

Axis letters: B images, T patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from gaupipe.vit.heads import classifies, probabilities

SHARE = 0.2
"""Of the patches that are removed: those in which a map is largest, or random ones."""
RANDOM = 8
"""Times that random patches are removed."""


@dataclass(frozen=True)
class Tested:
    """Probabilities of a class: of the whole image, without some patches, and without as many
    random ones, the mean of :data:`RANDOM` draws. Of a model without classes, whose ``label`` is
    None, cosines of the features with those of the whole image."""

    label: int | None
    whole: float
    without: float
    random: float


def painted(
    images: Tensor, hidden: Tensor, grid: tuple[int, int], filling: Tensor | float = 0.0
) -> Tensor:
    """Images [B, channels, height, width] in which the patches where ``hidden`` [B, T] is true have
    the pixels of a ``filling``, by default 0, the mean colour of what the model was trained on."""
    height, width = images.shape[-2:]
    mask = hidden.view(-1, 1, *grid)
    mask = mask.repeat_interleave(height // grid[0], 2).repeat_interleave(width // grid[1], 3)
    return torch.where(mask, filling, images)


@torch.inference_mode()
def without_patches(
    model: Any, image: Tensor, patches: Sequence[int], label: int | None, grid: tuple[int, int]
) -> Tested:
    """What a model says of a class, by default the predicted one, or how like its features are,
    without ``patches`` of an image [1, channels, height, width]. The random ones are the same at
    every call."""
    count = grid[0] * grid[1]
    draw = torch.Generator().manual_seed(0)
    hidden = torch.zeros(RANDOM + 2, count, dtype=torch.bool)  # the first hides nothing
    hidden[1, list(patches)] = True
    for row in hidden[2:]:
        row[torch.randperm(count, generator=draw)[: len(patches)]] = True
    outputs = model(painted(image, hidden, grid))  # [RANDOM + 2, C], or features
    if classifies(model):
        if label is None:
            label = int(outputs[0].argmax())
        shares = probabilities(outputs)[:, label]
    else:
        shares = cosine_similarity(outputs.float(), outputs[:1].float())
    whole, without, *random = shares.tolist()
    return Tested(label, round(whole, 6), round(without, 6), round(sum(random) / RANDOM, 6))
