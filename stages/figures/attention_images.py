"""Images with the attention of a model over them, for the loggers."""

from __future__ import annotations

import numpy as np
import torch

from gaupipe.data.batches import Batches
from gaupipe.data.buckets import Buckets
from gaupipe.data.splits import ImageData
from gaupipe.training.step_log import StepLog
from stages.figures.key_attention import Attention, of_keys

IMAGES = 4
"""Training images, evenly spaced, that are shown."""

LEAST_PIXELS = 96
"""Height at which a small image is shown, or a little more."""


@torch.no_grad()
def show(steps: StepLog, data: ImageData, buckets: int, attention: Attention, grid: tuple) -> None:
    """Shows the attention of a model to a few training images, if a logger is there to see it: a
    line for each image, first the image, then for each block the attention that each key of the
    ``grid`` (h, w) gets, mean over heads and queries. Of several ranks the first shows images of
    its own."""
    if not steps.wants_images:
        return
    places = Buckets(len(data.train), buckets)
    mine = np.concatenate([places.members(bucket) for bucket in places.of_rank()])
    ids = mine[np.linspace(0, len(mine) - 1, min(IMAGES, len(mine))).astype(np.int64)]
    lines = []
    for batch in Batches(data.train, data, torch.device("cpu"), IMAGES).in_order(ids):
        keys = of_keys(attention, batch)  # [B, L, T]
        keys = keys.reshape(*keys.shape[:2], *grid)
        images = [data.train.image(image_id) for image_id in batch.ids.tolist()]
        lines += [line(image, maps) for image, maps in zip(images, keys, strict=True)]
    steps.image("attention", np.concatenate(lines))


def line(image: np.ndarray, maps: np.ndarray) -> np.ndarray:
    """The image uint8 [height, width, C] and beside it each of the ``maps`` [L, h, w] over it, red
    where attention goes: uint8 [height', (L + 1) width', 3]."""
    times = -(-LEAST_PIXELS // image.shape[0])
    shown = np.broadcast_to(image, (*image.shape[:2], 3)).repeat(times, 0).repeat(times, 1)
    height, width = shown.shape[:2]
    parts = [shown]
    for keys in maps / maps.max((1, 2), keepdims=True):  # [h, w], at most 1
        y = np.arange(height) * len(keys) // height
        x = np.arange(width) * keys.shape[1] // width
        share = 0.7 * keys[np.ix_(y, x)][..., None]
        parts.append((shown * (1 - share) + np.array([255, 0, 0]) * share).astype(np.uint8))
    return np.concatenate(parts, axis=1)
