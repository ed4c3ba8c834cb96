"""The store, the images and the models that a page shows, as the messages that it asks for.

Axis letters: L blocks, H heads, T patches, P class and register tokens.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import store
from gaupipe.data.decoding import check, refusing
from gaupipe.data.splits import ImageData
from gaupipe.system.errors import UserError, one_line
from gaupipe.teachers.notes import Drawing
from gaupipe.vit.heads import reads_class_token
from stages.look.colours import colours
from stages.look.image_maps import WHOLE, Crop, StoredMaps, photo
from stages.look.live_maps import LiveMaps
from stages.look.measures import divergence, numbers, with_mean_and_rollout
from stages.look.removal import Tested
from stages.view.answers import Answers
from stages.view.gallery import Gallery, Page, stored_gallery
from stages.view.messages import About, Pack, Pixels, Reading, Start, Status, pack
from stages.view.names import Names, ending
from stages.view.pictures import encoded

MOST_LIKELY = 5
"""Classes that are offered first where a class is explained."""
LARGE = 1_000_000
"""Weights of an image above which they are sent as float16."""
PHOTO = 1600
"""Pixels a side of the largest picture of an image."""
THUMBNAIL = 160
"""Pixels a side of a picture in the gallery, as in static/gallery.js."""
Load = Callable[[ImageData | None], LiveMaps]
"""Opens a model on a data set; on its own where that is None."""


class Viewer:
    """What there is to look at. Raises UserError or StoreError for what cannot be looked at.

    models  by name how each is opened that computes maps now: students of a run, or any ViT
    maps    a store, of whose images the page shows the stored maps; None where there is none
    students
            those of the models that are students of a run, among which the page offers a choice
    data    the data set of the first model; None where the store names it
    split   whose images the page shows first
    note    shown above the page
    extend  makes the data set of image files anew, so that some can be added; None where they
            cannot
    """

    def __init__(
        self,
        title: str,
        models: dict[str, Load],
        maps: store.Store | None = None,
        students: Sequence[str] = (),
        data: ImageData | None = None,
        split: str = "train",
        note: str = "",
        extend: Callable[[list[Path]], ImageData] | None = None,
    ) -> None:
        self.title = ending(title)
        self.note = note
        self.command = ""
        self.token = secrets.token_hex(16)

        self.models = models
        self.students = list(students)
        self.stored = None
        self.schema = None
        if maps is not None:
            self.stored = StoredMaps(maps)
            self.schema = maps.schema

        self._data = data
        self.data_error = ""
        self.split = split
        self.extend = extend

        self._dropped: tempfile.TemporaryDirectory[str] | None = None
        self._photo = lru_cache(maxsize=2)(self._open_photo)  # maps and pixels are asked for apart
        self._opened: dict[str, LiveMaps] = {}
        self._galleries: dict[tuple[str, str], Gallery] = {}
        self._names: Names | None = None
        self.answers = Answers()
        self._one_at_a_time = threading.RLock()

    @property
    def data(self) -> ImageData:
        """The data set. Raises UserError where it is not there, or not yet."""
        if self._data is None:
            raise UserError(self.data_error or "the data set is still being read")
        return self._data

    @property
    def names(self) -> Names:
        """By which names its images are found."""
        names = self._names  # another thread may add photos meanwhile
        data = self.data
        if names is None or names.data is not data:
            names = self._names = Names(data)
        return names

    def start(self) -> None:
        """Reads the labels of a store and its data set on threads of their own."""
        if self.stored:
            self.gallery("train", "").start()
            threading.Thread(target=self.load_images, daemon=True).start()

    def stop(self) -> None:
        """Reads no more labels and predictions: Python would wait for all shards before it ends."""
        for gallery in self._galleries.values():
            gallery.stopped = True

    def load_images(self) -> None:
        """Opens the data set; where it is not there, images are shown without their pixels."""
        try:
            if self.stored and not self._data:
                self._data = self.stored.data
        except (UserError, OSError) as error:
            self.data_error = str(error)

    def about(self) -> About:
        """All that does not change while the page is open."""
        schema = self.schema
        return About(
            title=self.title,
            colours=colours().tobytes().hex(),
            stored=schema is not None,
            kind=schema.kind if schema else "computed now",
            k=schema.k if schema else None,
            start=self.start_state(),
            adds=self.extend is not None,
            command=self.command,
            views=schema.views if schema else 1,
            classes=(schema or self.data).num_classes,
            labelled=self.shown().labelled,
            predicts=self.gallery("train", "").predicts,
            split=self.split,
            students=self.students,
            note=self.note,
        )

    def start_state(self) -> Start:
        """What the page opens with: the last block; what speaks for the predicted class, or moves
        the features, where a model computes the maps, else the mean over heads; for the class token
        where the model's head reads it, else for all patches. docs/results/maps.md says why."""
        shown = self.shown()
        height, width = shown.grid
        query: str | int = height // 2 * width + width // 2
        reads_others = isinstance(shown, LiveMaps) and not reads_class_token(shown.model)
        if "class" in shown.extra and not reads_others:
            query = "x0"
        elif shown.explains:
            query = "mean"
        head = "gradient" if shown.explains else "mean"
        student = self.students[0] if self.students and self.stored else ""  # beside its teacher
        return Start(shown.layers - 1, head, query, student)

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
        return Status(
            Reading(gallery.done, gallery.images, gallery.reading, gallery.error),
            Pixels(self._data is not None, self.data_error),
            self.sizes(),
            self._data.class_names if self._data else [],
        )

    def gallery(self, split: str, name: str) -> Gallery:
        """The images of a split with a model's predictions or, without a ``name``, the store's."""
        with self._one_at_a_time:
            if (split, name) in self._galleries:
                return self._galleries[split, name]
            shown = self.shown(split, name)
            if isinstance(shown, StoredMaps):
                made = stored_gallery(shown.store)
            else:
                images = shown.data.split(split)
                labels = images.labels if shown.labelled else None
                parts = partial(shown.predictions, split)
                classes = shown.data.num_classes
                made = Gallery(
                    len(images),
                    classes,
                    parts,
                    labels,
                    shown.labelled,
                    shown.predicts,
                    self.answers.wait_until_idle,
                )
            self._galleries[split, name] = made
            return made

    def page(self, split: str, name: str, *which: Any) -> Page:
        """A page of :meth:`gallery`, with the names of the images' files."""
        gallery = self.gallery(split, name)
        page = gallery.page(*which)
        if self.extend is not None and gallery.predicts:
            gallery.start()  # the predictions come in behind the page
        if page.items is None:
            return page
        titled = [replace(item, title=self._title(item.id, split)) for item in page.items]
        return replace(page, items=titled)

    def shown(self, split: str = "train", name: str = "") -> StoredMaps | LiveMaps:
        """What shows the images of a split: a model or, without a ``name``, the store where there
        is one and the split is its own."""
        if self.stored and split == "train" and not name:
            return self.stored
        return self.model(name)

    def model(self, name: str) -> LiveMaps:
        """A model that computes maps now; without a ``name`` the first."""
        name = name or next(iter(self.models), "")
        if name not in self.models:
            raise UserError(f"student {name!r}: not one of {', '.join(self.models) or 'none'}")
        with self._one_at_a_time:
            if name not in self._opened:
                self.load_images()  # a student of itself has the training images of its run
                live = self.models[name](self._data)
                if self.schema and live.data.sha256 != self.schema.dataset_sha256:
                    raise UserError(
                        f"student {name!r}: its images are not those that the store's maps are of"
                    )
                live.views = self._views("train")
                self._opened[name] = live
            return self._opened[name]

    def image(
        self,
        image: int,
        view: int = 0,
        split: str = "train",
        name: str = "",
        packed: Pack = pack,
    ) -> bytes:
        """The attention of a model to an image, or to a view of it; without a ``name`` the stored
        attention or, where there is none, that of the first model.

        Arrays: ``maps`` [L, H + 2, P + T, P + T], the heads' maps, their mean and the rollout;
        ``teacher`` in the same form, the stored maps that a student's are compared with, and ``kl``
        [L, H, T] their divergence, both 0 in blocks without a stored map; ``gaussians`` [L, H, T,
        4] where the maps are those of Gaussians. Maps of more than :data:`LARGE` weights are
        float16.
        """
        self.check(image, view, split)
        stored = None
        with self._one_at_a_time:
            shown = self.shown(split, name)
            seen = shown.see(image, view, split)
            if self.stored and split == "train" and name:
                beside = self.stored.see(image, view)
                stored = {"name": beside.by, "label": beside.label, **asdict(beside.prediction())}
        maps = with_mean_and_rollout([seen.map(layer) for layer in range(shown.layers)])
        heads = maps.shape[1] - 2
        measured = numbers(maps[:, :heads], seen.grid, seen.values)
        known: dict[str, list[Any]] = {name: each.tolist() for name, each in measured.items()}
        arrays = {"maps": maps}
        compared = [block is not None for block in seen.teacher]
        if any(compared):
            teacher = with_mean_and_rollout(seen.teacher)
            kl = torch.stack([divergence(*pair) for pair in zip(teacher, maps, strict=True)])
            arrays |= {"teacher": teacher, "kl": kl[:, :heads]}
            means = kl[:, :heads].mean(-1).tolist()
            known["kl"] = [m if has else None for m, has in zip(means, compared, strict=True)]
        if maps.numel() > LARGE:
            arrays = {name: each.half() for name, each in arrays.items()}
        if seen.gaussians is not None:
            arrays["gaussians"] = seen.gaussians.float()
        header = {
            "name": ending(seen.by),
            "title": self._title(image, split),
            "file": self.names.unique(split)[image] if self._data else None,
            "label": seen.label,
            **asdict(seen.prediction(MOST_LIKELY)),
            "stored": stored,
            "grid": seen.grid,
            "extra": seen.extra,
            "layers": shown.layers,
            "blocks": shown.blocks,
            "heads": heads,
            "numbers": known,
            "compared": compared,
            "no_teacher": seen.no_teacher if self.stored else None,
            "explains": shown.explains,
            "tests": isinstance(shown, LiveMaps),
            "crop": self._photo(image, view, split)[1] if self._data else WHOLE,
        }
        return packed(header, {name: array.numpy() for name, array in arrays.items()})

    def likely(self, name: str, image: int, view: int = 0, split: str = "train") -> Sequence[Any]:
        """The likeliest classes of an image, as a model sees it; None in place of classes where it
        has none."""
        seen = self.model(name).see(image, view, split)
        return seen.prediction(MOST_LIKELY).likely or [None]

    def pixels(
        self, image: int, view: int = 0, split: str = "train", side: int = PHOTO
    ) -> tuple[bytes, str]:
        """The picture of an image, see :func:`stages.view.pictures.encoded`."""
        self.check(image, view, split)
        taken = self._photo if side > THUMBNAIL else self._open_photo  # of which a page has many
        picture, _ = taken(image, view, split)
        return encoded(picture, side)

    def _open_photo(self, image: int, view: int, split: str) -> tuple[Image.Image, Crop]:
        return photo(self.data, image, self._views(split), view, split)

    def _title(self, image: int, split: str) -> str | None:
        return self.names.title(image, split) if self._data else None

    def find(self, text: str, split: str = "train") -> int:
        """The image of a split that a file's name stands for. Raises UserError where there is
        none."""
        self.load_images()
        return self.names.find(text, split)

    def find_or_add(self, text: str) -> int:
        """The image that a file's name, or its path, stands for. Another file of this machine is
        added to the images. Raises UserError where there is neither."""
        with contextlib.suppress(UserError):
            return self.find(text)
        for image in range(len(self.data.train)):
            if text == self.data.train.path(image):
                return image
        path = os.path.expanduser(text)
        if not os.path.isfile(path):  # which says so of what can be no path, too
            raise UserError(f"{text}: neither the name of an image here, nor the path of a file")
        return self.add(Path(path))

    def drop(self, name: str, content: bytes) -> int:
        """Adds an image file, which lives as long as the server does, and returns its number."""
        if self._dropped is None:
            self._dropped = tempfile.TemporaryDirectory(prefix="gaupipe-view-")
        folder = Path(self._dropped.name) / secrets.token_hex(4)
        folder.mkdir()
        path = folder / (Path(name).name or "image")
        try:
            path.write_bytes(content)
        except (OSError, ValueError) as error:
            raise UserError(f"the image cannot be kept ({one_line(error)})") from None
        return self.add(path)

    def add(self, path: Path) -> int:
        """Adds an image file, and returns its number. Raises UserError for a file that is no image,
        and where the images are those of a store or a run."""
        if self.extend is None:
            raise UserError(
                "images can be added to a page of --model alone; a student is one too: "
                "gaupipe view --model RUN/phase_b/NAME/student --images PHOTO"
            )
        with refusing(str(path)), path.open("rb") as file:
            check(file)
        with self._one_at_a_time:
            data = self.data
            known = [Path(data.train.path(image)) for image in range(len(data.train))]
            self.stop()
            self._galleries.clear()
            self._data = self.model("").data = self.extend([*known, path])
            return len(known)

    def relevance(
        self,
        name: str,
        image: int,
        target: int | None,
        view: int = 0,
        split: str = "train",
        packed: Pack = pack,
        whole: bool = True,
    ) -> bytes:
        """What speaks for a class, by default the predicted one, or moves the features:
        ``relevance`` [L, P + T, P + T] float32, or [L, 1, P + T], what the query reads that the
        page opens with, of features and where the ``whole`` is not asked for."""
        live = self.model(name)
        self.check(image, view, split)
        with self._one_at_a_time:
            found = live.relevance(target, image, view, split)
        weights = found.weights
        if not whole and found.label is not None:
            extra = weights.shape[-1] - math.prod(live.grid)  # 0 beside a teacher's patches
            if extra and self.start_state().query == "x0":
                weights = weights[:, :1]
            else:
                weights = weights[:, extra:].mean(1, keepdim=True)
        header = {"class": found.label, "probability": found.probability}
        return packed(header, {"relevance": weights.contiguous().numpy()})

    def test(
        self,
        name: str,
        image: int,
        target: int | None,
        patches: Sequence[int],
        view: int = 0,
        split: str = "train",
    ) -> Tested:
        """What a model says of an image without some patches, and without random ones."""
        live = self.model(name)
        self.check(image, view, split)
        count = math.prod(live.grid)
        if not patches or max(patches) >= count:
            raise UserError(f"patches: should be some of 0 to {count - 1}")
        with self._one_at_a_time:
            return live.without(patches, target, image, view, split)

    def check(self, image: int, view: int = 0, split: str = "train") -> None:
        """Raises UserError for an image or a view that there is not."""
        if split != "train":
            self.load_images()
        sizes = self.sizes()
        if split not in sizes:
            raise UserError(f"split {split}: there is {' and '.join(sizes)}")
        if not 0 <= image < sizes[split]:
            where = "the store has" if self.stored and split == "train" else "there are"
            raise UserError(f"image {image}: {where} 0 to {sizes[split] - 1}")
        views = self.schema.views if self.schema and split == "train" else 1
        if not 0 <= view < views:
            raise UserError(f"view {view}: the store has 0 to {views - 1}")

    def _views(self, split: str) -> Drawing | None:
        """Draws the views of a split, as the store has them."""
        return self.stored.views if self.stored and split == "train" else None
