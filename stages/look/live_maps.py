"""The attention of a model, computed when it is asked for.

Axis letters as in :mod:`stages.look.image_maps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.batches import Batch, Batches
from gaupipe.data.images import UNLABELLED, FileImages
from gaupipe.data.prepared import PreparedImages
from gaupipe.data.splits import ImageData, Split
from gaupipe.distillation.job import MapReader, constant_maps
from gaupipe.distillation.losses import ConstantMaps, without_keys
from gaupipe.maps.views import without_prefix
from gaupipe.system.errors import UserError
from gaupipe.system.files import utf8
from gaupipe.teachers.base import outline
from gaupipe.teachers.notes import Drawing, StoreNotes
from gaupipe.vit.attention_maps import use_fused_attention
from gaupipe.vit.capture import Traced, trace
from gaupipe.vit.heads import classifies, length_of_features, names_of_tokens, probabilities
from stages.look.image_maps import CPU, ImageMaps
from stages.look.removal import Tested, without_patches
from stages.runs.directory import RunDirectory
from stages.runs.students import recorded_stores
from stages.runs.trained import load_student, open_maps

FEW = 8
"""Images that are predicted at once: who looks at one meanwhile waits for them."""


@dataclass(frozen=True)
class Relevance:
    """What speaks for a class in an image or, of a model without classes, moves its features."""

    label: int | None
    probability: float | None
    weights: Tensor
    """For a class [L, P + T, P + T], :meth:`gaupipe.vit.capture.Traced.rollout`; for the features
    [L, 1, P + T], :meth:`gaupipe.vit.capture.Traced.legrad`, as no query reads them alone."""


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
        images = self.data.split(split)
        if isinstance(images.source, FileImages):
            seen.file = utf8(images.path(image))
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
