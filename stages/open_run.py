"""A run in Python: its images, stored maps, students and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import store
from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.mixing import Mix
from gaupipe.data.splits import ImageData
from gaupipe.distillation.job import MapReader, constant_maps
from gaupipe.distillation.kinds import StoredAttentionReader
from gaupipe.distillation.losses import ConstantMaps, TeacherMaps
from gaupipe.distillation.reading import StoredImages, StoredOfEpoch
from gaupipe.maps.gaussians import Geometry
from gaupipe.system.errors import UserError
from gaupipe.system.progress import EpochMetrics, read_metrics
from gaupipe.teachers.base import outline
from gaupipe.teachers.notes import Drawing, StoreNotes
from gaupipe.training.student import untrained_student
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_student

CPU = torch.device("cpu")


@dataclass
class TrainBatch:
    """Training images with what the teacher says of them, all in one order.

    images       float32 [B, channels, height, width], normalised
    labels, ids  int64 [B]
    maps         for each block of the student the teacher's map [B or 1, H or 1, T, T] float32,
                 moved as the image was, or None where the block is compared with none; empty where
                 no maps were asked for
    predictions  the teacher's log-probabilities float32 [B, C]; None where it predicts nothing
    geometry     where each view lies in its image; None where nothing moved
    mixed        which images Mixup or CutMix mixed, and where, of the labels and predictions too;
                 None where none were
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    maps: list[Tensor | None]
    predictions: Tensor | None
    geometry: Geometry | None
    mixed: Mix | None


class Run:
    """A run directory, read only, as ``gaupipe.open_run(path)`` opens it. Everything is on the CPU,
    and read when it is asked for. Raises UserError for a folder that is no run."""

    def __init__(self, path: str | Path) -> None:
        self.directory = RunDirectory(Path(path))
        self.settings = self.directory.settings()

    def __repr__(self) -> str:
        settings = self.settings
        lines = [
            f"run {self.directory.path}: {settings.data.title}, "
            f"{settings.model.name}, teacher {settings.phase_a.teacher}"
        ]
        for kind, distilled in (("distilled", True), ("plain", False)):
            names = self.directory.students(distilled)
            if names:
                lines.append(f"  {kind}: {', '.join(names)}")
        return "\n".join(lines)

    @cached_property
    def data(self) -> ImageData:
        """The data set of the run, with its splits ``train``, ``val`` and ``test``. Raises
        UserError for other training or validation images than those that the run began with."""
        return self.directory.load_data(self.settings)

    @cached_property
    def store(self) -> store.Store:
        """The store of the teacher's maps. Raises StoreError where there is none, and UserError for
        a teacher that needs none."""
        url = self.directory.stored()
        teacher_sha256 = self.directory.teacher_digest()
        return store.open(url, dataset_sha256=self.data.sha256, teacher_sha256=teacher_sha256)

    def images(self, ids: Iterable[int], split: str = "train", view: int | None = None) -> Tensor:
        """Images [B, channels, height, width] float32, normalised as a model gets them, by their
        ids in a split; with ``view`` in that view, counted from 0, of a store of views. Raises
        UserError for ids and views that there are not."""
        images_of_split = self.data.split(split)
        image_ids = check_ids(ids, len(images_of_split), f"{split} images in {self.directory.path}")
        images = Batches(images_of_split, self.data, CPU, len(image_ids))
        if view is None:
            return next(images.in_order(image_ids)).images
        augment = self._check_view(view).augmentation()
        count = self.store.schema.views
        return next(images.views(image_ids * count + view, augment, count)).images

    def maps(self, ids: Iterable[int], view: int | None = None) -> list[Tensor]:
        """The teacher's maps of training images: for each stored block [B, H, T, T] float32, rows
        sum to 1. Raises UserError for ids and views that there are not, for a store of views where
        ``view`` is None, and for a run of students without a teacher."""
        self._check_teacher()
        if not self.settings.phase_a.kind.stored:
            if view is not None:
                raise UserError(f"view={view}: all views have the same maps")
            student = untrained_student(self.settings, self.data)
            maps = outline(self.settings, self.data).constant_maps(student)
            assert maps is not None
            image_ids = check_ids(ids, len(self.data.train), f"images in {self.directory.path}")
            return [
                maps.map(layer).expand(len(image_ids), -1, -1, -1) for layer in range(maps.layers)
            ]
        schema = self.store.schema
        if view is None and schema.views > 1:
            raise UserError(
                f"{self.store.url}: holds maps of {schema.views} views of each image: name one, as "
                "in maps(ids, view=0), and see it with images(ids, view=0)"
            )
        if view is not None:
            self._check_view(view)
        image_ids = check_ids(ids, schema.images, f"images in {self.store.url}")
        stored = self.store.gather(image_ids * schema.views + (view or 0))
        attention = StoredAttentionReader(self.store, CPU).attention(stored)
        return [attention.map(layer) for layer in range(schema.maps.layers)]

    def train_loader(self, epoch: int = 0, *, maps: bool = True) -> Iterator[TrainBatch]:
        """The batches of an epoch, counted from 0: the training images in the order and the views
        in which phase B sees those with labels, and the maps, of all queries, that it would
        compare with a student of the run's settings; ``maps`` False leaves them unread. Raises
        UserError for a run whose students have no teacher, for a store without maps, and for an
        ``epoch`` below 0."""
        self._check_teacher()
        if epoch < 0:
            raise UserError(f"epoch {epoch}: epochs are counted from 0")
        stored = self.settings.phase_a.kind.stored
        if maps and stored and not self.store.schema.has_maps:
            raise UserError(f"{self.store.url}: holds no maps, only predictions: say maps=False")
        return self._train_batches(epoch, maps)

    def _train_batches(self, epoch: int, with_maps: bool) -> Iterator[TrainBatch]:
        settings = self.settings
        data = self.data
        student = untrained_student(settings, data)
        stored = None
        predicts = False
        teacher_maps: MapReader | ConstantMaps | None = None
        if not settings.phase_a.kind.stored:
            teacher_maps = constant_maps(outline(settings, data), student)
        else:
            predicts = StoreNotes.of(self.store.schema).has_predictions
            images = StoredImages(self.store, self.store, settings.phase_b, settings.seed)
            stored = StoredOfEpoch([images], epoch, with_maps)
            if with_maps:
                teacher_maps = MapReader(self.store, student, settings.phase_b, CPU)
        sizes = settings.data
        batches = Batches(data.train, data, CPU, sizes.batch_size, 0, sizes.num_buckets)
        augment = Augment(settings.augment, settings.seed)
        for batch in batches.epoch(epoch, augment, stored):
            maps: list[Tensor | None] = []
            if with_maps and teacher_maps is not None:
                maps = maps_of_blocks(teacher_maps.of(batch))
            predictions = None
            if predicts and batch.stored is not None:
                predictions = torch.from_numpy(batch.stored["logits"]).float()
            yield TrainBatch(
                images=batch.images,
                labels=batch.labels,
                ids=batch.ids,
                maps=maps,
                predictions=predictions,
                geometry=batch.geometry,
                mixed=batch.mixed,
            )

    def _check_teacher(self) -> None:
        """Raises UserError for a run of students that learned from labels alone."""
        directory = self.directory
        if directory.students(distilled=False) and not (
            directory.phase_a.exists() or directory.students() or directory.maps.exists()
        ):
            raise UserError(
                f"{directory.path} has no teacher, whose maps these would be: its students were "
                "trained on labels alone"
            )

    def _check_view(self, view: int) -> Drawing:
        """The drawing of the views. Raises UserError for a view that the store does not have."""
        schema = self.store.schema
        drawing = StoreNotes.of(schema).views
        if drawing is None:
            raise UserError(
                f"{self.store.url}: view={view}: holds maps of the images themselves, not of views"
            )
        check_ids([view], schema.views, f"views in {self.store.url}")
        return drawing

    def student(self, name: str | None = None, plain: bool = False) -> VisionTransformer:
        """A student in eval mode; None is the one trained last, ``plain`` the one of this name that
        was trained without a teacher. Raises UserError where it is not there or damaged."""
        return load_student(self.directory.path, name, plain).model

    def metrics(self, name: str, plain: bool = False) -> list[EpochMetrics]:
        """The metrics of each epoch of a student, or of the teacher for ``phase_a``. Raises
        UserError for one that was not trained."""
        folder = self.directory.phase_a
        if name != "phase_a":
            distilled = not plain and self.directory.is_distilled(name)
            folder = self.directory.student(name, distilled)
        if not (folder / "metrics.jsonl").is_file():
            raise UserError(f"{folder} has no metrics.jsonl: nothing of this name was trained")
        return read_metrics(folder / "metrics.jsonl")


def maps_of_blocks(teacher_maps: TeacherMaps) -> list[Tensor | None]:
    """The maps of a batch by block of the student, as :class:`TrainBatch` has them."""
    return [
        None if layer is None else teacher_maps.map(block)
        for block, layer in enumerate(teacher_maps.layers)
    ]


def check_ids(ids: Iterable[int], count: int, what: str) -> np.ndarray:
    """Ids as int64 [B]. Raises UserError, naming ``what`` they are ids of, unless they are whole
    numbers from 0 to ``count`` - 1."""
    if not hasattr(ids, "__array__"):
        ids = [*ids]  # of a set or a generator numpy would make one object
    numbers = np.asarray(ids)
    is_whole = numbers.ndim == 1 and numbers.dtype.kind in "iu"
    if not (is_whole and len(numbers) and numbers.min() >= 0 and numbers.max() < count):
        right = f"should be one or more whole numbers from 0 to {count - 1}"
        raise UserError(f"ids of {what}: {right}, got {numbers.tolist()!s:.100}")
    return numbers.astype(np.int64)
