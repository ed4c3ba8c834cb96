"""Images as the gallery shows them: labels and predictions of all, read once, and their orders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

import store
from gaupipe.system.errors import UserError

ORDERS = ("id", "wrong", "sure", "unsure")
"""By image id, wrong predictions first and among them the surest first, by falling and by rising
probability of the prediction."""
PAGE = 60
"""Images of a page."""
READERS = 8
"""Shards that are read at the same time."""


class Item(TypedDict):
    """An image of a page, as far as it is known."""

    id: int
    label: NotRequired[int]
    predicted: NotRequired[int]
    probability: NotRequired[float]
    title: NotRequired[str]


class Page(TypedDict):
    """Some images of the ``total`` in an order; ``items`` is None while that is not known."""

    items: list[Item] | None
    total: int
    page: int
    size: int


class Predictions(NamedTuple):
    """Of images [N]: labels and predicted classes, and the probability of these, float32."""

    labels: np.ndarray
    predicted: np.ndarray
    probability: np.ndarray


class Gallery:
    """``images`` of ``classes`` classes, page by page.

    parts   gives (logits [B, C], labels [B]) of all images in order, a part at a time. A thread
            that :meth:`start` starts reads them, ``done`` images so far. Until then images are
            listed by their number alone
    labels  [N], where they are known before
    labelled
            False for images without labels
    """

    def __init__(
        self,
        images: int,
        classes: int,
        parts: Callable[[], Iterator[tuple[Tensor, Tensor]]],
        labels: np.ndarray | None = None,
        labelled: bool = True,
    ) -> None:
        self.images = images
        self.classes = classes
        self.parts = parts
        self.labels = labels
        self.labelled = labelled
        self.done = 0
        self.error = ""
        self.all: Predictions | None = None
        self.thread: threading.Thread | None = None
        self._ids = lru_cache(maxsize=8)(self._ordered)

    @property
    def reading(self) -> bool:
        """True while the thread reads."""
        return self.thread is not None and self.all is None and not self.error

    def start(self) -> None:
        """Starts to read labels and predictions, unless that has been done."""
        if self.thread is None:
            self.thread = threading.Thread(target=self.read_all, daemon=True)
            self.thread.start()

    def read_all(self) -> None:
        """Reads labels and predictions of all images."""
        columns = []
        try:
            for logits, labels in self.parts():
                probability, predicted = logits.float().softmax(-1).max(-1)
                columns.append((labels.numpy(), predicted.numpy(), probability.numpy()))
                self.done += len(labels)
        except (store.StoreError, UserError, OSError) as error:
            self.error = str(error)
            return
        self.all = Predictions(*map(np.concatenate, zip(*columns, strict=True)))
        self.labels = self.all.labels if self.labelled else None

    def page(self, order: str = "id", label: int | None = None, number: int = 0) -> Page:
        """One page of images. Raises UserError for an order or a class that there is not."""
        if order not in ORDERS:
            raise UserError(f"order {order!r}: should be one of {', '.join(ORDERS)}")
        if label is not None and not 0 <= label < self.classes:
            raise UserError(f"class {label}: there are 0 to {self.classes - 1}")
        if self.all is None and (order != "id" or (label is not None and self.labels is None)):
            self.start()
            return {"items": None, "total": 0, "page": number, "size": PAGE}
        known = self.all is not None or self.labels is not None
        ids = self._ids(order, label, known)
        items = [self._item(int(image)) for image in ids[number * PAGE : (number + 1) * PAGE]]
        return {"items": items, "total": len(ids), "page": number, "size": PAGE}

    def _item(self, image: int) -> Item:
        item: Item = {"id": image}
        if self.labels is not None:
            item["label"] = int(self.labels[image])
        if self.all is not None:
            item["predicted"] = int(self.all.predicted[image])
            item["probability"] = round(float(self.all.probability[image]), 6)
        return item

    def _ordered(self, order: str, label: int | None, _known: bool) -> np.ndarray:
        """Image ids of a class, or of all, in an order."""
        ids = np.arange(self.images)
        if label is not None and self.labels is not None:
            ids = np.flatnonzero(self.labels == label)
        if order == "id" or self.all is None:
            return ids
        labels, predicted, probability = (column[ids] for column in self.all)
        keys = {
            "sure": -probability,
            "unsure": probability,
            "wrong": -probability + 2 * (labels == predicted),
        }
        return ids[np.argsort(keys[order], kind="stable")]


def stored_gallery(maps: store.Store, labelled: bool = True) -> Gallery:
    """The images of a store, with the predictions of the first view of each."""
    schema = maps.schema

    def read(shard: store.Shard) -> tuple[Tensor, Tensor]:
        stored = maps.read(shard.start, shard.stop, ("labels", "logits"))
        first = slice(-shard.start % schema.views, None, schema.views)
        logits, labels = (torch.from_numpy(stored[name][first]) for name in ("logits", "labels"))
        return logits, labels

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        with ThreadPoolExecutor(READERS) as pool:
            yield from pool.map(read, maps.shards)

    return Gallery(schema.images, schema.num_classes, parts, labelled=labelled)
