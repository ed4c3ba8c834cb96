"""The store, the images and the students that a page shows, as the messages that it asks for.

Axis letters: L blocks, H heads, T tokens.
"""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import store
from gaupipe.data.cache import cache_folder
from gaupipe.data.splits import ImageData
from gaupipe.distillation.kinds import KINDS, StoredGaussians
from gaupipe.system.errors import UserError
from stages.figures.key_attention import epochs_in, read
from stages.inspect_maps import image_pixels, images_of
from stages.runs.directory import RunDirectory
from stages.student_maps import StudentMaps
from stages.view.gallery import Gallery, digest
from stages.view.wire import pack

TEACHER = "teacher"
MOST_LIKELY = 5
"""Classes whose probabilities are shown."""


@dataclass
class Snapshots:
    """The average attention of each key after each of ``epochs``, for ``images``."""

    folder: Path
    images: list[int]
    epochs: list[int]


class Viewer:
    """A store opened for looking. Raises UserError or StoreError for what cannot be looked at.

    ``run`` is the run of the store, where there is one; ``students`` are the names of those of its
    students that can be chosen.
    """

    def __init__(self, maps: store.Store, run: RunDirectory | None, students: list[str]) -> None:
        self.maps, self.run, self.students = maps, run, students
        self.token = digest(maps)[:12]
        folder = cache_folder() if run is None else run.path
        self.gallery = Gallery(maps, folder / "view" / f"{self.token}.npz")
        self.snapshots = self._snapshots()
        self.data: ImageData | None = None
        self.data_error = ""
        self._loaded: dict[str, StudentMaps] = {}
        self._one_at_a_time = threading.Lock()
        self._decode = None  # of kinds of which the page cannot make maps
        if maps.schema.kind_class.javascript is None:
            self._decode = KINDS[maps.schema.kind].reader(maps, torch.device("cpu"))

    def start(self) -> None:
        """Reads labels, predictions and the data set on threads of their own."""
        self.gallery.start()
        threading.Thread(target=self.load_images, daemon=True, name="gaupipe-view-images").start()

    def load_images(self) -> None:
        """Opens the data set; where it is not there, images are shown without their pixels."""
        try:
            self.data = images_of(self.maps)
        except (UserError, OSError) as error:
            self.data_error = str(error)

    def about(self) -> dict[str, Any]:
        """All that does not change while the page is open."""
        schema = self.maps.schema
        return {
            "store": self.maps.url,
            "token": self.token,
            "kind": schema.kind,
            "encoding": schema.encoding,
            "k": schema.k,
            "dataset": schema.dataset,
            "images": schema.images,
            "views": schema.views,
            "layers": schema.layers,
            "heads": schema.heads,
            "grid": list(schema.grid),
            "classes": schema.num_classes,
            "students": self.students,
            "snapshots": {
                who: {"images": kept.images, "epochs": kept.epochs}
                for who, kept in self.snapshots.items()
            },
        }

    @property
    def views(self) -> dict[str, Any] | None:
        """How the views that the store's maps are of were drawn; None where they are of images."""
        return self.maps.schema.extra.get("views")

    def status(self) -> dict[str, Any]:
        """How far labels, predictions and the data set have been read."""
        return {
            "labels": {
                "done": self.gallery.done,
                "total": self.maps.schema.images,
                "ready": self.gallery.all is not None,
                "error": self.gallery.error,
            },
            "pixels": {"ready": self.data is not None, "error": self.data_error},
            "class_names": [] if self.data is None else list(self.data.train.source.class_names),
        }

    def image(self, image: int, view: int = 0) -> bytes:
        """The stored arrays of an image, or of one of its views, of which the page makes maps."""
        schema = self.maps.schema
        self.check(image, view)
        entry = image * schema.views + view
        stored = self.maps.read(entry, entry + 1)
        rows, encoding = schema.kind_class.javascript, schema.encoding
        arrays = {name: stored[name][0] for name in schema.kind_class.arrays(schema)}
        if self._decode is not None:
            rows, encoding = "gaussians", "float32"
            attention = self._decode(stored)
            if isinstance(attention, StoredGaussians):
                arrays = {"gaussians": attention.gaussians[0].float().numpy()}  # [L, H, T, 4]
            else:
                blocks = [attention.map(layer)[0] for layer in range(schema.layers)]
                rows, arrays = "maps", {"maps": torch.stack(blocks).numpy()}  # [L, H, T, T]
        header = {
            "image": image,
            "view": view,
            "layers": schema.layers,
            "heads": schema.heads,
            "grid": list(schema.grid),
            "rows": rows,
            "encoding": encoding,
            "label": int(stored["labels"][0]),
            **prediction(torch.from_numpy(stored["logits"][0])),
        }
        return pack(header, arrays)

    def pixels(self, image: int, view: int = 0) -> bytes:
        """The image as PNG, in the size the teacher sees it in."""
        self.check(image, view)
        if self.data is None:
            raise UserError(self.data_error or "the data set is still being read")
        pixels = image_pixels(self.data, image, self.views, view)
        file = io.BytesIO()
        Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
        return file.getvalue()

    def student(self, name: str, image: int, view: int = 0) -> bytes:
        """Where a student looks in an image, or in the view of it that the store's maps are of, and
        the stored maps that it is compared with.

        ``maps`` [L, H, T, T] float32; ``teacher`` [blocks with a stored map, H, T, T] float32, and
        in the header ``compared``, for each block the place of its map in ``teacher`` or None.
        """
        if name not in self.students:
            raise UserError(f"student {name!r}: not one of {', '.join(self.students) or 'none'}")
        self.check(image, view)
        with self._one_at_a_time:
            student = self._load(name)
            seen = student.see(image, self.views, view)
        teacher = [block for block in seen.teacher if block is not None]
        places = iter(range(len(teacher)))
        header = {
            "image": image,
            "view": view,
            "student": name,
            "rows": "maps",
            "attention": student.attention,
            "layers": student.layers,
            "heads": seen.maps.shape[1],
            "grid": list(student.grid),
            "label": seen.label,
            "compared": [None if block is None else next(places) for block in seen.teacher],
            "no_teacher": seen.no_teacher,
            **prediction(seen.logits),
        }
        arrays = {"maps": seen.maps.numpy()}
        if teacher:
            arrays["teacher"] = torch.stack(teacher).float().numpy()
        return pack(header, arrays)

    def _load(self, name: str) -> StudentMaps:
        """Raises UserError for a student that knows other images than the store's."""
        if name not in self._loaded:
            assert self.run is not None  # who else has students
            student = StudentMaps(self.run, name)
            if student.data.sha256 != self.maps.schema.dataset_sha256:
                raise UserError(
                    f"student {name!r}: its images are not those that the store's maps are of"
                )
            self._loaded[name] = student
        return self._loaded[name]

    def epochs(self, who: str, image: int) -> bytes:
        """The snapshots of an image: ``attention`` [epochs, L, T] float32, what each key gets on
        average over heads and queries."""
        kept = self.snapshots.get(who)
        if kept is None or image not in kept.images:
            raise UserError(f"no snapshots of image {image} were kept for {who}")
        snapshots = read(kept.folder)[:, kept.images.index(image)]
        return pack({"epochs": kept.epochs, "images": kept.images}, {"attention": snapshots})

    def check(self, image: int, view: int = 0) -> None:
        """Raises UserError for an image or a view that there is not."""
        schema = self.maps.schema
        if not 0 <= image < schema.images:
            raise UserError(f"image {image}: the store has 0 to {schema.images - 1}")
        if not 0 <= view < schema.views:
            raise UserError(f"view {view}: the store has 0 to {schema.views - 1}")

    def _snapshots(self) -> dict[str, Snapshots]:
        """The kept snapshots of the teacher and of the students."""
        if self.run is None:
            return {}
        folders = {TEACHER: self.run.phase_a}
        folders |= {
            name: self.run.student(name, self.run.is_distilled(name)) for name in self.students
        }
        kept = {}
        for who, folder in folders.items():
            snapshots = read(folder)  # [epochs, images, L, T]
            if len(snapshots):
                last = self.maps.schema.images - 1
                images = np.linspace(0, last, snapshots.shape[1]).astype(np.int64).tolist()
                kept[who] = Snapshots(folder, images, epochs_in(folder))
        return kept


def prediction(logits: Tensor) -> dict[str, Any]:
    """The predicted class of logits [C], its probability, and the most likely classes."""
    probabilities = logits.float().softmax(-1)
    values, classes = probabilities.topk(min(MOST_LIKELY, len(probabilities)))
    return {
        "predicted": int(probabilities.argmax()),
        "probability": round(probabilities.max().item(), 6),
        "likely": [
            [int(name), round(value, 6)]
            for name, value in zip(classes.tolist(), values.tolist(), strict=True)
        ],
    }
