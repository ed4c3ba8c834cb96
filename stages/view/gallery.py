"""The images that the gallery shows: labels and predictions of all images, read once, and their
orders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import store
from gaupipe.system.errors import UserError
from gaupipe.system.files import whole_file

ORDERS = ("id", "wrong", "sure", "unsure")
"""By image id, wrong predictions first and among them the surest first, by falling and by rising
probability of the prediction."""
PAGE = 60
"""Images of a page."""
READERS = 8
"""Shards that are read at the same time."""


class Predictions(NamedTuple):
    """Of images [N]: labels and predicted classes, int32, and the probability of these, float32."""

    labels: np.ndarray
    predicted: np.ndarray
    probability: np.ndarray


class Gallery:
    """The images of a store, page by page.

    A thread that :meth:`start` starts reads labels and predictions of the whole store, shard by
    shard, ``done`` images so far. Until then images are listed by id only. ``cache`` is a file that
    keeps what was read; one that cannot be written is done without.
    """

    def __init__(self, maps: store.Store, cache: Path | None) -> None:
        self.maps, self.cache = maps, cache
        self.done, self.error = 0, ""
        self.all: Predictions | None = None
        self._ids = lru_cache(maxsize=8)(self._ordered)

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.read_all, daemon=True, name="gaupipe-view-labels")
        thread.start()
        return thread

    def read_all(self) -> None:
        """Reads labels and predictions of all images, from the cache where it has them."""
        try:
            self.all = self._cached() or self._read_shards()
        except (store.StoreError, OSError) as error:
            self.error = str(error)
            return
        self.done = self.maps.schema.images

    def page(self, order: str = "id", label: int | None = None, number: int = 0) -> dict[str, Any]:
        """One page of images: ``items`` with id, label, predicted and probability, and the
        ``total`` in this order. ``items`` is None while labels and predictions are still read, if
        the order needs them. Raises UserError for an order or a class that there is not."""
        schema = self.maps.schema
        if order not in ORDERS:
            raise UserError(f"order {order!r}: should be one of {', '.join(ORDERS)}")
        if label is not None and not 0 <= label < schema.num_classes:
            raise UserError(f"class {label}: the store has 0 to {schema.num_classes - 1}")
        first, page = number * PAGE, {"page": number, "size": PAGE}
        if self.all is not None:
            ids = self._ids(order, label)
            total, ids = len(ids), ids[first : first + PAGE]
            columns = Predictions(*(column[ids] for column in self.all))
        elif order == "id" and label is None:
            total, last = schema.images, min(first + PAGE, schema.images)
            ids = np.arange(first, last)
            if not len(ids):
                return {"items": [], "total": total, **page}
            columns = self._read(first * schema.views, last * schema.views)
        else:
            return {"items": None, "total": 0, **page}
        items = [
            {"id": int(i), "label": int(a), "predicted": int(b), "probability": round(float(p), 6)}
            for i, a, b, p in zip(ids, *columns, strict=True)
        ]
        return {"items": items, "total": total, **page}

    def _ordered(self, order: str, label: int | None) -> np.ndarray:
        """Image ids of a class, or of all, in an order."""
        assert self.all is not None
        labels, predicted, probability = self.all
        ids = np.arange(len(labels)) if label is None else np.flatnonzero(labels == label)
        keys = {
            "id": ids,
            "sure": -probability[ids],
            "unsure": probability[ids],
            "wrong": -probability[ids] + 2 * (labels[ids] == predicted[ids]),
        }
        return ids[np.argsort(keys[order], kind="stable")]

    def _read(self, start: int, stop: int) -> Predictions:
        """Of the first views of images whose entries in the store are start <= entry < stop."""
        stored = self.maps.read(start, stop, ("labels", "logits"))
        first = -start % self.maps.schema.views
        labels, logits = (
            stored[name][first :: self.maps.schema.views] for name in ("labels", "logits")
        )
        logits = logits.astype(np.float32)
        predicted = logits.argmax(-1)
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        probability = 1 / shifted.sum(-1)  # the largest is exp(0)
        return Predictions(labels.astype(np.int32), predicted.astype(np.int32), probability)

    def _read_shards(self) -> Predictions:
        parts = []
        with ThreadPoolExecutor(READERS, "gaupipe-view") as pool:
            for part in pool.map(lambda shard: self._read(*shard[1:]), self.maps.shards):
                self.done += len(part.labels)
                parts.append(part)
        whole = Predictions(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        if self.cache is not None:
            with contextlib.suppress(OSError):  # a run that may only be read
                self.cache.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(self.cache) as partial:
                    np.savez(partial, of=digest(self.maps), **whole._asdict())
        return whole

    def _cached(self) -> Predictions | None:
        """Those of an earlier look at the same store; None where they cannot be read."""
        if self.cache is None or not self.cache.is_file():
            return None
        try:
            with np.load(self.cache) as file:
                columns = Predictions(*(file[name] for name in Predictions._fields))
                same = str(file["of"]) == digest(self.maps)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        whole = {len(column) for column in columns} == {self.maps.schema.images}
        return columns if same and whole else None


def digest(maps: store.Store) -> str:
    """Says which store this is: whose maps, of which images, stored how."""
    return hashlib.sha256(json.dumps(maps.schema.to_attributes()).encode()).hexdigest()
