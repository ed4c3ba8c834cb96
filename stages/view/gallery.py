"""Images as the gallery shows them: labels and predictions of all, read once, and their orders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import store
from gaupipe.data.images import UNLABELLED
from gaupipe.system.errors import UserError
from gaupipe.teachers.notes import StoreNotes
from gaupipe.vit.heads import probabilities

ORDERS = ("id", "wrong", "sure", "unsure")
"""By image id, wrong predictions first and among them the surest first, by falling and by rising
probability of the prediction."""
PAGE = 60
"""Images of a page."""
NOT_READ = -1
"""The prediction of an image that cannot be read."""
READERS = 8
"""Shards that are read at the same time."""


@dataclass(frozen=True)
class Item:
    """An image of a page. What is not known of it is None."""

    id: int
    label: int | None
    predicted: int | None
    probability: float | None
    """Of the predicted class."""
    title: str | None = None
    """The name of its file."""


@dataclass(frozen=True)
class Page:
    """Some images in an order."""

    items: list[Item] | None
    """None while the order is not known."""
    total: int
    """Images in this order."""
    page: int
    size: int = PAGE


class Gallery:
    """``images`` of ``classes`` classes, page by page.

    parts   gives (logits [B, C], labels [B]) of all images in order, a part at a time, and None for
            an image that cannot be read. A thread that :meth:`start` starts reads them, ``done``
            images so far. Until then images are listed by their number alone
    labels  [N], where they are known before
    labelled
            False for images without labels; a single one may be :data:`UNLABELLED`
    predicts
            False for logits that predict nothing
    wait    is called before each part: it returns when there is nothing better to do
    """

    def __init__(
        self,
        images: int,
        classes: int,
        parts: Callable[[], Iterator[tuple[Tensor, Tensor] | None]],
        labels: np.ndarray | None = None,
        labelled: bool = True,
        predicts: bool = True,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.images = images
        self.classes = classes
        self.parts = parts
        self.labels = labels
        self.labelled = labelled
        self.predicts = predicts
        self.wait = wait
        self.done = 0
        self.stopped = False
        """Set when the images are no longer those: nothing more is read."""
        self.error = ""
        self.predicted = np.zeros(images, np.int64)  # with their probabilities, of those done
        self.probability = np.zeros(images, np.float32)
        self.thread: threading.Thread | None = None

    @property
    def reading(self) -> bool:
        """True while the thread reads."""
        return self.thread is not None and not self.complete and not self.error

    @property
    def complete(self) -> bool:
        """True when labels and predictions of all images have been read."""
        return self.done == self.images

    def start(self) -> None:
        """Starts to read labels and predictions, unless that has been done."""
        if self.thread is None:
            self.thread = threading.Thread(target=self.read_all, daemon=True)
            self.thread.start()

    def read_all(self) -> None:
        """Reads labels and predictions of all images."""
        labels = np.full(self.images, UNLABELLED)
        try:
            self.wait()
            for read in self.parts():
                if self.stopped:
                    return
                if read is None:
                    self.predicted[self.done] = NOT_READ
                    self.done += 1
                    continue
                logits, truth = read
                sure, likeliest = probabilities(logits).max(-1)
                part = slice(self.done, self.done + len(truth))
                labels[part] = truth
                self.predicted[part] = likeliest
                self.probability[part] = sure
                if part.stop == self.images and self.labels is None and self.labelled:
                    self.labels = labels
                self.done = part.stop  # last, as it says that these are known
                self.wait()
        except (store.StoreError, UserError, OSError) as error:
            self.error = str(error)

    def page(self, order: str = "id", label: int | None = None, number: int = 0) -> Page:
        """One page, of a class or of all. Raises UserError for an order or a class that there is
        not."""
        if order not in ORDERS:
            raise UserError(f"order {order!r}: should be one of {', '.join(ORDERS)}")
        if label is not None and not 0 <= label < self.classes:
            raise UserError(f"class {label}: there are 0 to {self.classes - 1}")
        ids = self._ordered(order, label)
        if ids is None:
            self.start()
            return Page(None, 0, number)
        items = [self._item(int(image)) for image in ids[number * PAGE : (number + 1) * PAGE]]
        return Page(items, len(ids), number)

    def _item(self, image: int) -> Item:
        label = predicted = probability = None
        if self.labels is not None and self.labels[image] != UNLABELLED:
            label = int(self.labels[image])
        if image < self.done and self.predicts and self.predicted[image] != NOT_READ:
            predicted = int(self.predicted[image])
            probability = round(float(self.probability[image]), 6)
        return Item(image, label, predicted, probability)

    def _ordered(self, order: str, label: int | None) -> np.ndarray | None:
        """Image ids of a class, or of all, in an order; None while that is not known. Images
        without labels are of the class that is predicted."""
        ids = np.arange(self.images)
        if label is not None and (self.labelled or self.predicts):
            classes = self.labels if self.labelled else self.predicted
            if classes is None or not (self.labelled or self.complete):
                return None
            ids = np.flatnonzero(classes == label)
        if order == "id" or not self.predicts:
            return ids

        if not self.complete:
            return None
        ids = ids[self.predicted[ids] != NOT_READ]
        key = self.probability[ids]
        if order != "unsure":
            key = -key
        if order == "wrong" and self.labels is not None:
            right = (self.predicted[ids] == self.labels[ids]) | (self.labels[ids] == UNLABELLED)
            key = key + 2 * right  # a probability is at most 1: those come after all wrong ones
        return ids[np.argsort(key, kind="stable")]


def stored_gallery(maps: store.Store) -> Gallery:
    """The images of a store, with the predictions of the first view of each."""
    schema = maps.schema

    def read(shard: store.Shard) -> tuple[Tensor, Tensor]:
        names = ("labels", "logits") if schema.labelled else ("logits",)
        stored = maps.read(shard.start, shard.stop, names)
        first = slice(-shard.start % schema.views, None, schema.views)
        logits = torch.from_numpy(stored["logits"][first])
        if not schema.labelled:
            return logits, torch.full((len(logits),), -1)
        return logits, torch.from_numpy(stored["labels"][first])

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        with ThreadPoolExecutor(READERS) as pool:
            yield from pool.map(read, maps.shards)

    predicts = StoreNotes.of(schema).has_predictions
    return Gallery(
        schema.images, schema.num_classes, parts, labelled=schema.labelled, predicts=predicts
    )
