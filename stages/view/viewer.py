"""The store, the images and the models that a page shows, as the messages that it asks for.

Axis letters: L blocks, H heads, T patches, P class and register tokens.
"""

from __future__ import annotations

import io
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from PIL import Image

import store
from gaupipe.data.splits import ImageData
from gaupipe.system.errors import UserError
from stages.look.image_maps import ImageMaps, LiveMaps, StoredMaps, image_pixels, images_of
from stages.runs.directory import RunDirectory
from stages.view.gallery import Gallery, Page, stored_gallery
from stages.view.wire import pack

MOST_LIKELY = 5
"""Classes whose probabilities are shown."""
LARGE = 16_000_000
"""Weights of an image above which they are sent as float16."""
Load = Callable[[ImageData | None], LiveMaps]
"""Opens a model on a data set; on its own where that is None."""


class Reading(TypedDict):
    """Progress in labels and predictions, in images."""

    done: int
    total: int
    reading: bool
    error: str | None


class Pixels(TypedDict):
    ready: bool
    error: str | None


class Status(TypedDict):
    """What the page asks again for, until all is read."""

    labels: Reading
    pixels: Pixels
    splits: dict[str, int]
    class_names: list[str]


class Viewer:
    """What there is to look at. Raises UserError or StoreError for what cannot be looked at.

    models  by name how each is opened that computes maps now: students of a run, or any ViT
    maps    a store, of whose images the page shows the stored maps; None where there is none
    run     the run of these, where there is one
    data    the data set of the first model; None where the store names it
    split   whose images the page shows first
    note    shown above the page
    """

    def __init__(
        self,
        title: str,
        models: dict[str, Load],
        maps: store.Store | None = None,
        run: RunDirectory | None = None,
        data: ImageData | None = None,
        split: str = "train",
        note: str = "",
    ) -> None:
        self.title, self.models, self.run = title, models, run
        self.stored = StoredMaps(maps) if maps else None
        self.schema = maps.schema if maps else None
        self.split, self.note, self._data = split, note, data
        self.students = list(models) if run else []
        self.token = secrets.token_hex(6)
        self.data_error = ""
        self._opened: dict[str, LiveMaps] = {}
        self._galleries: dict[tuple[str, str], Gallery] = {}
        self._one_at_a_time = threading.RLock()

    @property
    def data(self) -> ImageData:
        """The data set. Raises UserError where it is not there, or not yet."""
        if self._data is None:
            raise UserError(self.data_error or "the data set is still being read")
        return self._data

    def start(self) -> None:
        """Reads the labels of a store and its data set on threads of their own."""
        if self.stored:
            self.gallery("train", "").start()
            threading.Thread(target=self.load_images, daemon=True).start()

    def load_images(self) -> None:
        """Opens the data set; where it is not there, images are shown without their pixels."""
        try:
            if self.stored and not self._data:
                self._data = images_of(self.stored.maps)
        except (UserError, OSError) as error:
            self.data_error = str(error)

    def about(self) -> dict[str, object]:
        """All that does not change while the page is open."""
        schema = self.schema
        return {
            "title": self.title,
            "token": self.token,
            "stored": schema is not None,
            "kind": schema.kind if schema else "computed now",
            "k": schema.k if schema else None,
            "views": schema.views if schema else 1,
            "classes": (schema or self.data).num_classes,
            "labelled": self.labelled,
            "split": self.split,
            "students": self.students,
            "run": self.run is not None,
            "note": self.note,
        }

    @property
    def labelled(self) -> bool:
        """True unless the images are files without labels."""
        return (self.stored or self.model("")).labelled

    def sizes(self) -> dict[str, int]:
        """The number of images of each split, as far as they are known; that to begin with is
        first."""
        if not self._data or not self.students:
            return {"train": self.schema.images if self.schema else len(self.data.train)}
        names = ("train", "val", "test") if self.schema else ("val", "train", "test")
        splits = self._data.splits
        return {name: len(splits[name]) for name in names if name in splits}

    def status(self, split: str = "train", name: str = "") -> Status:
        """Progress of reading labels, predictions and the data set."""
        gallery = self.gallery(split, name)
        return {
            "labels": {
                "done": gallery.done,
                "total": gallery.images,
                "reading": gallery.reading,
                "error": gallery.error,
            },
            "pixels": {"ready": self._data is not None, "error": self.data_error},
            "splits": self.sizes(),
            "class_names": list(self._data.train.source.class_names) if self._data else [],
        }

    def gallery(self, split: str, name: str) -> Gallery:
        """The images of a split with a model's predictions or, without a ``name``, the store's."""
        with self._one_at_a_time:
            if (split, name) not in self._galleries:
                self._galleries[split, name] = self._gallery(split, name)
            return self._galleries[split, name]

    def _gallery(self, split: str, name: str) -> Gallery:
        if self.stored and split == "train" and not name:
            return stored_gallery(self.stored.maps, self.labelled)
        live = self.model(name)
        images = live.data.split(split)
        labels = images.labels if self.labelled else None
        parts = partial(live.predictions, split)
        return Gallery(len(images), live.data.num_classes, parts, labels, self.labelled)

    def page(self, split: str, name: str, order: str, label: int | None, number: int) -> Page:
        """A page of :meth:`gallery`; images without labels have the names of their files."""
        page = self.gallery(split, name).page(order, label, number)
        if not self.labelled and self._data:
            for item in page["items"] or ():
                item["title"] = self._names(split)[item["id"]]
        return page

    def model(self, name: str) -> LiveMaps:
        """A model that computes maps now; without a ``name`` the first."""
        name = name or next(iter(self.models), "")
        if name not in self.models:
            raise UserError(f"student {name!r}: not one of {', '.join(self.models) or 'none'}")
        with self._one_at_a_time:
            if name not in self._opened:
                live = self.models[name](self._data)
                if self.schema and live.data.sha256 != self.schema.dataset_sha256:
                    raise UserError(
                        f"student {name!r}: its images are not those that the store's maps are of"
                    )
                self._opened[name] = live
            return self._opened[name]

    def image(self, image: int, view: int = 0) -> bytes:
        """The stored arrays of an image, or of one of its views, of which the page makes maps."""
        if self.stored is None:
            raise UserError("there is no store of maps here")
        self.check(image, view)
        with self._one_at_a_time:
            seen, arrays = self.stored.see(image, view)
        schema = self.stored.maps.schema
        rows, encoding = schema.kind_class.javascript, schema.encoding
        if rows is None:
            rows, encoding, numbers = "gaussians", "float32", seen.gaussians
            if numbers is None:
                blocks = [seen.map(layer) for layer in range(schema.layers)]
                rows, numbers = "maps", torch.stack(blocks)
            arrays = {rows: numbers.numpy()}
        shape = {"layers": schema.layers, "heads": schema.heads}
        header = {"rows": rows, "encoding": encoding, **shape}
        return pack({**header, **self.described(seen, image, "train")}, arrays)

    def described(self, seen: ImageMaps, image: int, split: str) -> dict[str, object]:
        """Whose the maps are, grid, extra tokens, label and prediction for an image; of a file
        without a label its name."""
        title = {} if self.labelled or not self._data else {"title": self._names(split)[image]}
        shape = {"name": seen.by, "grid": list(seen.grid), "extra": seen.extra}
        return {**shape, "label": seen.label, **title, **seen.prediction(MOST_LIKELY)}

    def _names(self, split: str) -> list[str]:
        source: Any = getattr(self.data, split).source
        return [Path(name).name for name in source.names]

    def pixels(self, image: int, view: int = 0, split: str = "train") -> bytes:
        """The image as PNG, in the size the model sees it in."""
        self.check(image, view, split)
        pixels = image_pixels(self.data, image, *self._which(view, split))
        file = io.BytesIO()
        Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
        return file.getvalue()

    def student(self, name: str, image: int, view: int = 0, split: str = "train") -> bytes:
        """The attention of a model to an image, or to the view of it that the maps are of,
        and the stored maps that it is compared with.

        ``maps`` [L, H, P + T, P + T]; ``teacher`` [blocks with a stored map, H, T, T] float32, and
        in the header ``compared``, for each block the place of its map in ``teacher`` or None.
        """
        live = self.model(name)
        self.check(image, view, split)
        with self._one_at_a_time:
            seen = live.see(image, *self._which(view, split))
        maps = torch.stack([seen.map(layer) for layer in range(live.layers)])
        if maps.numel() > LARGE:
            maps = maps.half()
        teacher = [block for block in seen.teacher if block is not None]
        places = iter(range(len(teacher)))
        header = {
            "rows": "maps",
            "layers": live.layers,
            "heads": maps.shape[1],
            "compared": [None if block is None else next(places) for block in seen.teacher],
            "no_teacher": seen.no_teacher if self.stored else None,
            "explains": live.explains,
            **self.described(seen, image, split),
        }
        arrays = {"maps": maps.numpy()}
        if teacher:
            arrays["teacher"] = torch.stack(teacher).float().numpy()
        return pack(header, arrays)

    def relevance(
        self, name: str, image: int, target: int | None, view: int = 0, split: str = "train"
    ) -> bytes:
        """Gradient-weighted rollout for a class, by default the predicted one: ``relevance`` [L, P
        + T, P + T] float32."""
        live = self.model(name)
        self.check(image, view, split)
        with self._one_at_a_time:
            target, rollout = live.relevance(target, image, *self._which(view, split))
        return pack({"class": target}, {"relevance": rollout.numpy()})

    def check(self, image: int, view: int = 0, split: str = "train") -> None:
        """Raises UserError for an image or a view that there is not."""
        if split not in ("train", "val", "test"):
            raise UserError(f"split {split!r}: should be train, val or test")
        if split != "train":
            self.load_images()
        sizes = self.sizes()
        if split not in sizes:
            raise UserError(f"split {split}: there is {' and '.join(sizes)}")
        if not 0 <= image < sizes[split]:
            where = "the store has" if self.stored and split == "train" else f"{split} has"
            raise UserError(f"image {image}: {where} 0 to {sizes[split] - 1}")
        views = self.schema.views if self.schema and split == "train" else 1
        if not 0 <= view < views:
            raise UserError(f"view {view}: the store has 0 to {views - 1}")

    def _which(self, view: int, split: str) -> tuple[dict[str, Any] | None, int, str]:
        views = self.stored.views if self.stored and split == "train" else None
        return views, view, split
