"""Mixup and CutMix: images, targets and attention maps of a batch that are mixed alike.

Axis letters: B images, C channels, H heads, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.draws import MIXING, PAIRING, uniforms
from gaupipe.settings.augment import AugmentSettings


@dataclass
class Mix:
    """The images of a batch that were mixed, and the boxes. On the CPU.

    partner   int64 [B]: position in the batch of the image mixed in
    blend     float64 [B]: an image's own share outside the box; 1 for CutMix
    box       float64 [B, 4]: (left, top, right, bottom) of the part taken from the partner
              alone, as fractions of width and height; empty for Mixup
    """

    partner: Tensor
    blend: Tensor
    box: Tensor

    @property
    def weight(self) -> Tensor:
        """An image's own share in its target, float32 [B]: by blend for Mixup, by area for
        CutMix."""
        return self.own_share((1, 1))[:, 0]

    def own_share(self, grid: tuple[int, int], device: torch.device | str = "cpu") -> Tensor:
        """An image's own share in each cell of a grid, by area: float32 [B, T], row-major, made on
        a ``device``."""
        h, w = grid
        box = self.box.to(device)
        covered_x = covered_cells(box[:, 0], box[:, 2], w)
        covered_y = covered_cells(box[:, 1], box[:, 3], h)
        covered = covered_y.unsqueeze(-1) * covered_x.unsqueeze(-2)  # [B, h, w]
        return (self.blend.to(device)[:, None] * (1 - covered.flatten(1))).float()

    def main_labels(self, labels: Tensor) -> Tensor:
        """For each image the label of the one that has the larger share of it, int64 [B]."""
        partners = labels[self.partner.to(labels.device)]
        return torch.where(self.weight.to(labels.device) < 0.5, partners, labels)

    def blended(self, values: Tensor, share: Tensor) -> Tensor:
        """share * an image's own values + (1 - share) * its partner's."""
        return torch.lerp(values[self.partner.to(values.device)], values, share.to(values))


def covered_cells(first: Tensor, last: Tensor, n: int) -> Tensor:
    """Share [B, n] of each of n cells of an axis that a box from ``first`` to ``last`` [B], as
    fractions of the axis, covers."""
    cells = torch.arange(n, dtype=first.dtype, device=first.device)
    end = torch.minimum(last[:, None] * n, cells + 1)
    return (end - torch.maximum(first[:, None] * n, cells)).clamp(0, 1)


def mix(
    images: Tensor,
    image_ids: Tensor | np.ndarray,
    seed: int,
    epoch: int,
    settings: AugmentSettings,
    kinds: np.ndarray | None = None,
) -> tuple[Tensor, Mix | None]:
    """Mixup and CutMix of a batch: (mixed images, what was mixed), or the images and None when both
    are off.

    images      floating point [B, C, height, width], normalised or not: mixing is linear
    image_ids   int64 [B], as :meth:`gaupipe.data.splits.Split.drawn_ids` gives them
    kinds       [B, N] numbers: images are mixed with those that are alike in all N; None for all

    The images of a batch are put in an order drawn from (seed, epoch, image id), and each is mixed
    with the next of its kind: partners depend on which images are in the batch, not on their
    places, and none is its own unless it is alone. Mixup (arXiv 1710.09412) is share * own +
    (1 - share) * partner; CutMix (arXiv 1905.04899) puts a box of the partner over the image, of
    the drawn area, its centre anywhere and the part outside cut off; its share is the area that
    stays.
    """
    if not (settings.mixup or settings.cutmix):
        return images, None
    pairing = uniforms(seed, epoch, image_ids, 1, PAIRING)[:, 0]
    partner = np.empty(len(image_ids), dtype=np.int64)
    if kinds is None:
        kinds = np.zeros((len(image_ids), 1))
    for kind in np.unique(kinds, axis=0):
        members = np.flatnonzero((kinds == kind).all(axis=1))
        # by the draws, and equal ones by id: the places in the batch play no part
        order = members[np.lexsort((np.asarray(image_ids)[members], pairing[members]))]
        partner[order] = np.roll(order, -1)
    draws = uniforms(seed, epoch, image_ids, 4, MIXING)
    if settings.mixup and settings.cutmix:
        cut = draws[:, 0] < 0.5
    else:
        cut = np.full(len(draws), bool(settings.cutmix))
    share = np.where(cut, _beta(draws[:, 1], settings.cutmix), _beta(draws[:, 1], settings.mixup))
    height, width = images.shape[-2:]
    boxes = _cutmix_boxes(share, draws[:, 2:], (height, width))
    mixed = Mix(
        torch.from_numpy(partner),
        torch.from_numpy(np.where(cut, 1.0, share)),
        torch.from_numpy(np.where(cut[:, None], boxes, 0.0)),
    )
    share_of_pixels = mixed.own_share((height, width), images.device).view(-1, 1, height, width)
    return mixed.blended(images, share_of_pixels), mixed


def _beta(draws: np.ndarray, alpha: float) -> np.ndarray:
    """Uniform draws turned into draws from Beta(alpha, alpha)."""
    from scipy.special import betaincinv

    if not alpha:  # nobody reads them
        return draws
    return betaincinv(alpha, alpha, draws)


def _cutmix_boxes(share: np.ndarray, centres: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(left, top, right, bottom) [B, 4] over about 1 - share of the image, as fractions."""
    pixels = np.array(size[::-1])
    extent = np.floor(pixels * np.sqrt(1 - share)[:, None])
    start = np.floor(centres * pixels) - extent // 2
    corners = np.clip([start, start + extent], 0, pixels) / pixels
    return np.concatenate(list(corners), axis=-1)


def mixed_map(
    maps: Tensor, mixed: Mix | None, grid: tuple[int, int], queries: Tensor | None = None
) -> Tensor:
    """Attention maps [B, H, T, T] that a mixed batch should show, from those of its images, each
    moved with its own view; or their rows [B, H, Q, T] of the ``queries`` int64 [Q].

    The attention of a query is the mean of that in its two sources, weighted by the share of the
    query's area that each source has: one share for all queries with Mixup; with CutMix the
    partner's attention inside the box, the image's outside, and the mean of both in tokens that the
    box cuts. Keys are neither weighted nor renormalised: a query keeps looking where its source
    looked, also where the mixed image now shows the other one. So it still sums to 1.
    """
    if mixed is None:
        return maps
    own_share = mixed.own_share(grid, maps.device)  # [B, T]
    if queries is not None:
        own_share = own_share[:, queries]
    return mixed.blended(maps, own_share[:, None, :, None])


def mixed_targets(probabilities: Tensor, mixed: Mix | None) -> Tensor:
    """Probabilities of classes [B, C] for a mixed batch: one-hot labels, or the teacher's
    softmax (never its logits)."""
    if mixed is None:
        return probabilities
    return mixed.blended(probabilities, mixed.weight[:, None])
