"""Attention to one image: stored maps, and those that a model computes now.

Axis letters: L blocks, H heads, T patches, P class and register tokens, which come before the
patches, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

import store
from gaupipe.data.batches import Batch, Batches
from gaupipe.data.images import UNLABELLED, FileImages
from gaupipe.data.load import load_data
from gaupipe.data.loader import view_of
from gaupipe.data.prepared import PreparedImages
from gaupipe.data.splits import ImageData, Split
from gaupipe.distillation.job import MapReader, constant_maps
from gaupipe.distillation.kinds import StoredAttentionReader
from gaupipe.distillation.losses import ConstantMaps, without_keys
from gaupipe.maps.stored import StoredGaussians
from gaupipe.maps.views import without_prefix
from gaupipe.settings import DataSettings
from gaupipe.system.errors import UserError
from gaupipe.teachers import files
from gaupipe.teachers.base import outline
from gaupipe.teachers.notes import Drawing, StoreNotes
from gaupipe.vit.attention_maps import use_fused_attention
from gaupipe.vit.capture import Traced, trace
from gaupipe.vit.heads import classifies, length_of_features, names_of_tokens, probabilities
from stages.look.removal import Tested, without_patches
from stages.runs.directory import RunDirectory
from stages.runs.students import recorded_stores
from stages.runs.trained import load_student, open_maps

CPU = torch.device("cpu")
FEW = 8
"""Images that are predicted at once: who looks at one meanwhile waits for them."""
Crop = tuple[float, float, float, float]
"""Part of a picture: left, top, right and bottom in shares of its width and height."""
WHOLE: Crop = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Prediction:
    """What a model says of an image; of one without classes nothing."""

    predicted: int | None = None
    probability: float | None = None
    """Of the predicted class."""
    likely: Sequence[int] = ()
    """Some classes, the likeliest first."""
    probabilities: Sequence[float] = ()
    """Of these."""


@dataclass(frozen=True)
class Relevance:
    """What speaks for a class in an image or, of a model without classes, moves its features."""

    label: int | None
    probability: float | None
    weights: Tensor
    """For a class [L, P + T, P + T], :meth:`gaupipe.vit.capture.Traced.rollout`; for the features
    [L, 1, P + T], :meth:`gaupipe.vit.capture.Traced.legrad`, as no query reads them alone."""


@dataclass
class ImageMaps:
    """One image, and where the queries look.

    map         the map [H, P + T, P + T] float32 of a block; rows are probabilities over keys
    label       None for an image without one
    logits      [C]; None of a model without classes
    extra       names of the P class and register tokens
    gaussians   [L, H, T, 4] where the maps are those of Gaussians
    values      [L, H, P + T]: the lengths of the tokens' values, where the model tells them
    teacher     for each block the stored map [H, T, T] that a student's is compared with, without
                the keys that the student's attention hides; None for a block without one
    no_teacher  why a student's maps have none
    by          whose maps these are
    """

    grid: tuple[int, int]
    map: Callable[[int], Tensor]
    label: int | None
    logits: Tensor | None
    extra: Sequence[str] = ()
    gaussians: Tensor | None = None
    values: Tensor | None = None
    teacher: Sequence[Tensor | None] = ()
    no_teacher: str | None = None
    by: str = "teacher"

    def prediction(self, most: int = 1) -> Prediction:
        """The predicted class, and the ``most`` likely ones."""
        if self.logits is None:
            return Prediction()
        top = probabilities(self.logits).topk(min(most, len(self.logits)))
        likely = top.indices.tolist()
        shares = [round(share, 6) for share in top.values.tolist()]
        return Prediction(likely[0], shares[0], likely, shares)


class StoredMaps:
    """A store whose images are looked at one by one."""

    def __init__(self, maps: store.Store) -> None:
        self.store = maps
        schema = maps.schema
        self._reader = StoredAttentionReader(maps, CPU)
        self.images = schema.images
        self.grid, self.layers, _ = schema.maps
        self.notes = StoreNotes.of(schema)
        self.views = self.notes.views
        self.extra = self.notes.tokens or [f"token {i}" for i in range(schema.prefix_tokens)]
        self.blocks = self.notes.layers or list(range(self.layers))
        """The numbers of the blocks in the teacher."""
        self.labelled = schema.labelled
        self.explains = False

    @cached_property
    def data(self) -> ImageData:
        """The images, by :func:`images_of`."""
        return images_of(self.store)

    def see(self, image: int, view: int = 0, split: str = "train") -> ImageMaps:
        """The maps of a training image, or of a ``view`` of it."""
        schema = self.store.schema
        entry = image * schema.views + view
        stored = self.store.read(entry, entry + 1)
        attention = self._reader.attention(stored)
        seen = ImageMaps(
            grid=self.grid,
            map=lambda layer: attention.rows(layer)[0],
            label=None,
            logits=None,
            extra=self.extra,
        )
        if isinstance(attention, StoredGaussians):
            seen.gaussians = attention.gaussians[0]
        if self.notes.has_predictions:
            seen.logits = torch.from_numpy(stored["logits"][0]).float()
        if self.labelled:
            seen.label = int(stored["labels"][0])
        if self.notes.files is not None:  # which a trained ViT was given
            seen.by = str(self.notes.teacher)
        return seen


def images_of(maps: store.Store) -> ImageData:
    """The data set that a store's maps were made from. Raises UserError where the store does not
    name it, or where it is not there or another one."""
    schema = maps.schema
    notes = StoreNotes.of(schema)
    if notes.files is not None:
        data = files.images_of(notes, schema.num_classes, with_digest=True)
    else:
        try:
            settings = DataSettings.model_validate(notes.data)
        except ValidationError:
            raise UserError(
                f"{maps.url}: does not say which images its maps were made from, as stores that "
                "export-maps writes do: they cannot be drawn"
            ) from None
        data = load_data(settings, unlabelled=not schema.labelled)
        if data.unlabelled is not None:
            data = replace(data, train=data.unlabelled, sha256=data.unlabelled_sha256 or "")
    if data.sha256 != schema.dataset_sha256:
        raise UserError(
            f"{maps.url}: the images of {data.name} are not those the maps were made from"
        )
    return data


def photo(
    data: ImageData,
    image: int,
    views: Drawing | None = None,
    view: int = 0,
    split: str = "train",
) -> tuple[Image.Image, Crop]:
    """A picture of an image with all pixels of its file, and the part that a model sees. Of an
    image without a file, and of the ``view`` that ``views`` draws, all is seen."""
    images = data.split(split)
    source = images.source
    if views is None and isinstance(source, FileImages):
        pixels = source.pixels(int(images.positions[image]))  # [3, height, width]
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        return picture, source.crop(picture.width, picture.height)
    if views is None:
        shown = images.image(image)
    else:
        shown = view_of(images, image, views.augmentation(), view)
    if shown.shape[-1] == 1:
        shown = shown.squeeze(-1)
    return Image.fromarray(shown), WHOLE


class LiveMaps:
    """A ViT whose attention to the images of a data set is computed when it is asked for: to the
    images themselves or, where ``views`` draws some, to those of the training images."""

    def __init__(self, name: str, model: Any, data: ImageData) -> None:
        use_fused_attention(model)
        self.name = name
        self.model = model
        self.data = data
        self.views: Drawing | None = None
        self.grid: tuple[int, int] = tuple(model.patch_embed.grid_size)
        self.layers = len(model.blocks)
        self.blocks = list(range(self.layers))
        self.extra = names_of_tokens(model)
        given = not isinstance(data.train.source, PreparedImages)
        self.labelled = given or bool((data.train.labels != UNLABELLED).any())
        self.predicts = classifies(model)
        self.explains = True
        """Whether there is a :meth:`relevance`."""
        self._latest: tuple[object, Batch, Traced] | None = None

    @property
    def images(self) -> int:
        return len(self.data.train)

    def see(self, image: int, view: int = 0, split: str = "train") -> ImageMaps:
        """The attention to an image. Raises UserError for attention that is not finite."""
        batch, traced = self.traced(image, view, split)
        maps = [block[0].detach() for block in traced.maps]
        values = [block[0].detach().norm(dim=-1) for block in traced.values]  # [H, P + T]
        if not all(block.sum().isfinite() for block in maps):
            raise UserError(f"{self.name}: its attention has numbers that are not finite")
        seen = ImageMaps(
            grid=self.grid,
            map=maps.__getitem__,
            label=int(batch.labels[0]) if self.labelled and batch.labels[0] >= 0 else None,
            logits=traced.logits[0].detach() if self.predicts else None,
            extra=self.extra,
            by=self.name,
        )
        if [value.shape for value in values] == [block.shape[:2] for block in maps]:
            seen.values = torch.stack(values)
        return seen

    @torch.enable_grad()
    def relevance(
        self, target: int | None, image: int, view: int = 0, split: str = "train"
    ) -> Relevance:
        """What speaks for a class, by default the predicted one; of a model without classes what
        moves the length of its features."""
        self.check_class(target)
        _, traced = self.traced(image, view, split)
        if not self.predicts:
            legrad = traced.legrad(partial(length_of_features, self.model))
            return Relevance(None, None, legrad[0, :, None])
        if target is None:
            target = int(traced.logits.argmax())
        probability = round(probabilities(traced.logits[0].detach())[target].item(), 6)
        return Relevance(target, probability, traced.rollout(traced.logits[0, target])[0])

    def without(
        self,
        patches: Sequence[int],
        target: int | None,
        image: int,
        view: int = 0,
        split: str = "train",
    ) -> Tested:
        """What the model says of a class, by default the predicted one, without some patches; of a
        model without classes how like its features are."""
        self.check_class(target)
        batch = self.batch(image, view, split)
        return without_patches(self.model, batch.images, patches, target, self.grid)

    def check_class(self, target: int | None) -> None:
        """Raises UserError for a class that there is not."""
        classes = self.model.num_classes if self.predicts else 0
        if target is not None and target >= classes:
            raise UserError(f"class {target}: {self.name} has {classes} classes")

    def traced(self, image: int, view: int, split: str) -> tuple[Batch, Traced]:
        """The image, or a view of it, and the model's pass on it. The latest is kept: its maps and
        its relevance are asked for one after the other."""
        asked = image, view, split
        if self._latest is None or self._latest[0] != asked:
            self._latest = None  # frees its memory first
            batch = self.batch(image, view, split)
            try:
                traced = trace(self.model, batch.images, self.layers)
            except ValueError as error:
                raise UserError(f"{self.name}: {error}") from None
            self._latest = asked, batch, traced
        return self._latest[1:]

    def predictions(self, split: str) -> Iterator[tuple[Tensor, Tensor] | None]:
        """(logits [B, C], labels [B]) of all images of a split, a part at a time; None for an image
        that cannot be read."""
        images: Split = getattr(self.data, split)
        every = np.arange(len(images))
        for ids in np.array_split(every, every[FEW::FEW]):
            yield from self._predicted(images, ids)

    def _predicted(self, images: Split, ids: np.ndarray) -> Iterator[tuple[Tensor, Tensor] | None]:
        try:
            batch = next(Batches(images, self.data, CPU, len(ids)).in_order(ids))
        except (UserError, OSError):  # of one image: the others can be read
            if len(ids) == 1:
                yield None
                return
            for image in ids:
                yield from self._predicted(images, np.array([image]))
            return
        with torch.inference_mode():
            logits = self.model(batch.images).float()
        yield logits, batch.labels

    def batch(self, image: int, view: int = 0, split: str = "train") -> Batch:
        """The image, or a view of it, as the model takes it."""
        batches = Batches(getattr(self.data, split), self.data, CPU, batch_size=1)
        if self.views is None or split != "train":
            return next(batches.in_order(np.array([image])))
        count = view + 1  # as many views of an image as are counted here, so that this one is there
        entry = np.array([image * count + view])
        return next(batches.views(entry, self.views.augmentation(), count))


class StudentMaps(LiveMaps):
    """A student of a run, with the ``store`` that it learned from, and its ``views``; None where
    there is none that fits it. The attribute ``shares_maps`` is true if maps that all images share
    taught it instead. Raises UserError where the student is not there or damaged.

    Its maps are whole where no stored ones are beside them; else they are from patches to patches.
    """

    def __init__(self, run: RunDirectory, name: str, data: ImageData | None = None) -> None:
        student = load_student(run.path, name)
        settings = student.settings
        model = student.model
        if data is None:
            data = run.load_data(settings)
        super().__init__(student.name, model, data)
        self.explains = settings.model.attention != "gaussian"

        self.store = open_maps(student, data)
        if self.store is not None and not self.store.schema.has_maps:
            self.store = None
        if self.store is not None:
            self.views = StoreNotes.of(self.store.schema).views
        learned = student.distilled and not recorded_stores(student.folder)
        self.shares_maps = not settings.phase_a.kind.stored and learned and self.store is None

        self._teacher_maps: MapReader | ConstantMaps
        if self.shares_maps:
            self._teacher_maps = constant_maps(outline(settings, data), model)
        elif self.store is not None:
            self._teacher_maps = MapReader(self.store, model, settings.phase_b, CPU)

    def see(self, image: int, view: int = 0, split: str = "train") -> ImageMaps:
        """As :meth:`LiveMaps.see`, with the stored maps of the same image beside the student's."""
        seen = super().see(image, view, split)
        seen.no_teacher = self.no_teacher(split)
        if seen.no_teacher is None:  # whose maps are from patches to patches
            prefix = len(self.extra)
            whole = [seen.map(layer)[None] for layer in range(self.layers)]
            maps = [without_prefix(block, prefix)[0][0] for block in whole]
            seen.map = maps.__getitem__
            batch, _ = self.traced(image, view, split)
            seen.teacher = self._teacher(batch, image, view, maps)
            if seen.values is not None:
                seen.values = seen.values[..., prefix:]
            seen.extra = ()
        return seen

    def relevance(
        self, target: int | None, image: int, view: int = 0, split: str = "train"
    ) -> Relevance:
        """As :meth:`LiveMaps.relevance`; from patches to patches where :meth:`see` gives such."""
        found = super().relevance(target, image, view, split)
        if self.no_teacher(split) is None:
            prefix = len(self.extra)
            found = replace(found, weights=found.weights[:, prefix:, prefix:])
        return found

    def no_teacher(self, split: str) -> str | None:
        """Why the stored maps are not those of what the student sees; None where they are."""
        if self.shares_maps:
            return None
        if self.store is None:
            return "there is no whole store that fits the student"
        if split != "train":
            return "a store holds the maps of training images alone"
        stored = StoreNotes.of(self.store.schema).views
        if stored == self.views:
            return None
        others = "other views"
        if stored is None:
            others = "the images themselves"
        return f"{self.store.url} holds maps of {others}, which are not shown here"

    @torch.inference_mode()
    def _teacher(
        self, batch: Batch, image: int, view: int, maps: list[Tensor]
    ) -> list[Tensor | None]:
        if self.store is not None:
            entry = image * self.store.schema.views + view
            batch.stored = self.store.read(entry, entry + 1)
        stored = self._teacher_maps.of(batch)

        compared: list[Tensor | None] = []
        for layer, block in enumerate(maps):
            if stored.layers[layer] is None:  # phase_b.layer_map leaves this block out
                compared.append(None)
                continue
            teacher = stored.map(layer)[0].expand_as(block)
            hide = getattr(self.model.blocks[layer].attn, "hidden_keys", None)
            hidden = hide(block.shape[-1], CPU) if hide is not None else None
            if hidden is not None:  # a weight may also be 0 because it is too small
                teacher = without_keys(teacher, hidden)
            compared.append(teacher)
        return compared
