"""What phase B reads of stores in an epoch: of each image its entry for one view.

Axis letters: N images of a split, B of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

import store
from gaupipe.settings import PhaseBSettings
from store.reader import read_ahead

PRELOAD_BYTES = 2 * 10**9
"""The size of the largest store that is read into memory whole."""


class StoresOfSplit(NamedTuple):
    """What phase B reads of the images of one split."""

    maps: store.Store
    predictions: store.Store
    """The same store, unless the predictions are those of a second one."""


class StoredImages:
    """The maps and predictions of images, of one store or two, and for a control the image whose
    maps, or whose predictions, each of them gets."""

    def __init__(
        self, maps: store.Store, predictions: store.Store, phase: PhaseBSettings, seed: int
    ) -> None:
        self.maps = maps
        self.predictions = predictions
        self.count = len(maps) // maps.schema.views
        self.map_partners: np.ndarray | None = None
        self.prediction_partners: np.ndarray | None = None
        if phase.shuffle_maps:
            self.map_partners = other_images(self.count, seed)
        if phase.shuffle_predictions:
            self.prediction_partners = other_images(self.count, seed)

    def views(self, with_maps: bool) -> int:
        """The number of views that epochs use in turn, with or without their maps."""
        if with_maps and self.maps.schema.views > 1:
            return self.maps.schema.views
        return self.predictions.schema.views

    def gather(self, image_ids: np.ndarray, view: int, with_maps: bool) -> dict[str, np.ndarray]:
        """The stored arrays of one of the views of these images. Without ``with_maps`` predictions
        are read alone: maps are by far the largest arrays."""
        schema = self.maps.schema
        names = [*schema.store_kind.arrays(schema)] if with_maps else []
        entries = entries_of(image_ids, self.maps, view, self.map_partners)
        if self.maps is self.predictions and self.map_partners is self.prediction_partners is None:
            return self.maps.gather(entries, [*names, "logits"])  # in one read
        maps = self.maps.gather(entries, names)
        entries = entries_of(image_ids, self.predictions, view, self.prediction_partners)
        return maps | self.predictions.gather(entries, ["logits"])


def entries_of(
    image_ids: np.ndarray, stored: store.Store, view: int, partners: np.ndarray | None
) -> np.ndarray:
    """The entries of a view of these images, or of the ``partners`` of these images, in a store."""
    if partners is not None:
        image_ids = partners[image_ids]
    views = stored.schema.views
    # a store of the images themselves says the same of every view
    return image_ids * views + view % views


class StoredOfEpoch:
    """The stored entries of one epoch: of each image its entry for one of the views, which take
    turns. The ids of the images of several splits follow each other."""

    def __init__(self, splits: Sequence[StoredImages], epoch: int, with_maps: bool) -> None:
        self.splits = splits
        self.with_maps = with_maps
        views = splits[0].views(with_maps)
        self.view = epoch % views if views > 1 else None

    def prefetch(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """:meth:`gather` of each batch of image ids, read ahead on a thread."""
        return read_ahead(self.gather, batches)

    def gather(self, image_ids: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays [B, ...] of these images, which may lie in several splits."""
        view = self.view or 0
        if len(self.splits) == 1:
            return self.splits[0].gather(image_ids, view, self.with_maps)
        arrays: dict[str, np.ndarray] = {}
        for images in self.splits:
            here = (image_ids >= 0) & (image_ids < images.count)
            for name, part in images.gather(image_ids[here], view, self.with_maps).items():
                if name not in arrays:
                    arrays[name] = np.empty((len(image_ids), *part.shape[1:]), part.dtype)
                arrays[name][here] = part
            image_ids = image_ids - images.count  # in the next split
        return arrays


def other_images(images: int, seed: int) -> np.ndarray:
    """For each of so many images another one, int64 [N], always the same: one cycle through all, so
    that none keeps its own maps."""
    # a stream of its own: default_rng(seed) draws the order of the first epoch, whose batches
    # would hold almost all the images whose maps they get
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
    order = generator.permutation(images)
    others = np.empty_like(order)
    others[order] = np.roll(order, 1)
    return others
