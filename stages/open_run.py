"""A run in Python: its images, stored maps, students and metrics."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import store
from gaupipe.data.batches import Batches
from gaupipe.data.splits import ImageData, load_data
from gaupipe.distillation.kinds import KINDS
from gaupipe.distillation.local import local_maps
from gaupipe.system.errors import UserError
from gaupipe.system.progress import read_metrics
from gaupipe.training.student import build_student
from stages.look.image_maps import drawn
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_student


class Run:
    """A run directory, read only, as ``gaupipe.open_run(path)`` opens it. Everything is on the CPU,
    and read when it is asked for. Raises UserError for a folder that is no run."""

    def __init__(self, path: str | Path) -> None:
        self.directory = RunDirectory(Path(path))
        self.settings = self.directory.settings()

    @cached_property
    def data(self) -> ImageData:
        """The data set of the run, with its splits ``train``, ``val`` and ``test``."""
        return load_data(self.settings.data)

    @cached_property
    def store(self) -> store.Store:
        """The store of the teacher's maps. Raises StoreError where there is none, and UserError for
        the teacher local, which has none."""
        url, teacher_sha256 = str(self.directory.stored()), self.directory.teacher_digest()
        return store.open(url, dataset_sha256=self.data.sha256, teacher_sha256=teacher_sha256)

    def images(self, ids: Iterable[int], split: str = "train", view: int | None = None) -> Tensor:
        """Images [B, channels, height, width] float32, normalised as a model gets them, by their
        ids in a split; with ``view`` in that view, counted from 0, of a store of views."""
        image_ids = np.fromiter(ids, np.int64)
        of_split = self.data.split(split)
        if not (len(image_ids) and image_ids.min() >= 0 and image_ids.max() < len(of_split)):
            raise UserError(f"image ids: should be one or more of 0 to {len(of_split) - 1}")
        images = Batches(of_split, self.data, torch.device("cpu"), len(image_ids))
        if view is None:
            return next(images.in_order(image_ids)).images
        views = self.store.schema.extra.get("views")
        if views is None or split != "train":
            raise UserError(
                f"view {view}: only the training images of a store of views have views: leave it "
                "out"
            )
        count = self.store.schema.views
        return next(images.views(image_ids * count + view, drawn(views), count)).images

    def maps(self, ids: Iterable[int], view: int | None = None) -> list[Tensor]:
        """The teacher's maps of training images: for each stored block [B, H, T, T] float32, rows
        sum to 1. Raises UserError for a store of views where ``view`` is None."""
        if self.settings.phase_a.is_local:
            student = build_student(
                self.settings, self.data, self.settings.student_training, "meta"
            )
            maps = local_maps(self.settings, student)
            images = len(np.fromiter(ids, np.int64))
            return [maps.map(layer).expand(images, -1, -1, -1) for layer in range(maps.layers)]
        schema = self.store.schema
        if view is None and schema.views > 1:
            raise UserError(
                f"{self.store.url}: holds maps of {schema.views} views of each image: name one, as "
                "in maps(ids, view=0), and see it with images(ids, view=0)"
            )
        stored = self.store.gather(np.fromiter(ids, np.int64) * schema.views + (view or 0))
        attention = KINDS[schema.kind].reader(self.store, torch.device("cpu"))(stored)
        return [attention.map(layer) for layer in range(schema.layers)]

    def student(self, name: str | None = None, plain: bool = False) -> VisionTransformer:
        """A student in eval mode; None is the one trained last, ``plain`` the one of this name that
        was trained without a teacher. Raises UserError where it is not there or damaged."""
        return load_student(self.directory.path, name, False if plain else None).model

    def metrics(self, name: str, plain: bool = False) -> list[dict[str, Any]]:
        """The metrics of each epoch of a student, or of the teacher for ``phase_a``. Raises
        UserError for one that was not trained."""
        folder = self.directory.phase_a
        if name != "phase_a":
            distilled = not plain and self.directory.is_distilled(name)
            folder = self.directory.student(name, distilled)
        if not (folder / "metrics.jsonl").is_file():
            raise UserError(f"{folder} has no metrics.jsonl: nothing of this name was trained")
        return read_metrics(folder / "metrics.jsonl")
