"""The training of phase B: a ViT that learns from the labels, the teacher's predictions and the
stored attention maps, in the loop of :mod:`gaupipe.training.job`.

Axis letters: B images, L blocks, H heads, T tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

import store
from gaupipe.data.batches import Batch
from gaupipe.data.mixing import mixed_targets
from gaupipe.distillation.export import drawing
from gaupipe.distillation.kinds import MAP_KINDS, Reader
from gaupipe.distillation.losses import FeatureLoss, TeacherMaps, gamma_at, soft_loss
from gaupipe.distillation.student import layer_map
from gaupipe.settings import Settings
from gaupipe.system.errors import UserError
from gaupipe.training.job import LabelLosses, StepLosses, Training

PRELOAD_BYTES = 2 * 10**9
"""The size of the largest store that is read into memory whole."""


@dataclass
class PhaseB(Training):
    """A student that learns from a store of ``maps``, too."""

    maps: store.Store

    def label(self, folder: Path) -> str:
        return folder.name

    def identity(self) -> dict[str, object]:
        schema = self.maps.schema
        kind = schema.kind
        if schema.k:
            kind += f" k {schema.k}"
        if schema.views > 1:
            kind += f" views {schema.views}"
        return super().identity() | {
            "the teacher of the maps": schema.teacher_sha256,
            "the kind of store": kind,
            "the encoding of the store": schema.encoding,
        }

    def losses(self) -> StudentLosses:
        return StudentLosses(self)

    def gamma(self, epoch: int) -> float:
        phase = self.settings.phase_b
        return gamma_at(epoch, phase.gamma, phase.gamma_schedule, phase.gamma_ends(self.epochs))

    def maps_of_epoch(self, epoch: int) -> tuple[MapsOfEpoch | None, int | None]:
        phase = self.settings.phase_b
        views = self.maps.schema.views
        compares_maps = self.gamma(epoch) > 0
        view = None
        if views > 1:
            # once a store of views has nothing to say, there is no need to see its views again
            if not compares_maps and not phase.alpha:
                return None, None
            view = epoch % views
        names = None
        if not compares_maps:  # the maps are by far the largest arrays
            names = ("logits", "labels")
        shuffled = None
        if compares_maps and phase.shuffle_maps:
            shuffled = self.settings.seed
        return MapsOfEpoch(self.maps, view or 0, shuffled, names), view

    def source_of_maps(self) -> tuple[str, str]:
        return self.maps.url, self.maps.schema.teacher_sha256

    def remarks(self) -> list[str]:
        schema = self.maps.schema
        phase = self.settings.phase_b
        augment = self.settings.augment
        remarks = super().remarks()
        if len(self.student.blocks) != schema.layers:
            remarks.append(f"its blocks are compared with the stored blocks {self.layers}")
        if phase.warm_start == "slice" and self.settings.model.stem == "conv":
            remarks.append("its convolutional stem is no part of the slice and keeps its start")
        moved = augment.geometry == "follow" and (augment.crop_padding or augment.resized_crop)
        if schema.extra.get("teacher") and schema.views == 1 and moved and phase.gamma:
            remarks.append(
                "shifts and crops move the stored maps; a trained ViT would not show them so: "
                "'gaupipe export-maps --views' stores the maps of the views"
            )
        return remarks

    def teacher_maps(self, batch: Batch) -> TeacherMaps:
        """The stored attention of a batch, on the device, moved and mixed as its images were."""
        assert batch.stored is not None  # read with the images, from the same store
        return TeacherMaps(
            self.read(batch.stored),
            self.layers,
            tuple(self.student.patch_embed.grid_size),
            heads=self.settings.phase_b.head_map,
            geometry=batch.geometry,
            mixed=batch.mixed,
        )

    @cached_property
    def layers(self) -> list[int | None]:
        """For each block of the student the stored block that it is compared with."""
        depth = len(self.student.blocks)
        layers = self.maps.schema.layers
        return layer_map(self.settings.phase_b, depth, layers)

    @cached_property
    def read(self) -> Reader:
        """A function that makes the attention of a batch of arrays read from the store."""
        maps = self.maps
        return MAP_KINDS[maps.schema.kind].reader(maps, self.device)


class StudentLosses(LabelLosses):
    """The losses of phase B for a batch."""

    def __init__(self, job: PhaseB) -> None:
        super().__init__(job)
        self.job = job
        phase = job.settings.phase_b
        compile = job.settings.compile
        if phase.gamma:
            with_loss = FeatureLoss(job.student, phase.temperature, phase.direction, compile)
            self.forward_with_loss = torch.compile(with_loss) if compile else with_loss

    def forward(self, batch: Batch, gamma: float = 0.0) -> StepLosses:
        """Losses of a batch, with their weighted sum (*GauTransformer, eq. 11*). L_feat is there
        unless ``gamma``, its weight, is 0."""
        phase = self.job.settings.phase_b
        loss_soft = loss_feat = None
        if gamma:
            maps = self.job.teacher_maps(batch)
            logits, loss_feat = self.forward_with_loss(batch.images, maps)  # [B, C], scalar
        else:
            logits = self.forward_student(batch.images)  # [B, C]
        logits = logits.float()
        losses = self.label_losses(logits, batch)
        loss = phase.beta * losses.loss_hard
        if batch.stored is not None:
            teacher = torch.from_numpy(batch.stored["logits"]).to(logits.device)
            targets = mixed_targets(teacher.float().softmax(-1), batch.mixed)  # [B, C]
            loss_soft = soft_loss(logits, targets)
            loss = phase.alpha * loss_soft + loss
        if loss_feat is not None:
            loss = loss + gamma * loss_feat
        return replace(losses, loss=loss, loss_feat=loss_feat, loss_soft=loss_soft)


def check_targets(schema: store.Schema, settings: Settings, url: str) -> None:
    """Raises UserError for a loss without stored predictions, and for views that phase B would draw
    otherwise."""
    if settings.phase_b.alpha and not schema.extra.get("predicts", True):
        raise UserError(
            f"{url}: the teacher of these maps predicts no classes: set phase_b.alpha=0, and "
            "phase_b.beta to what the labels are to weigh"
        )
    drawn = schema.extra.get("views")
    if drawn is not None and drawn != drawing(settings):
        raise UserError(
            f"{url}: holds maps of views drawn with another augmentation or another seed: "
            "phase B must draw the same; change them back, or export again"
        )


class MapsOfEpoch:
    """The stored entries of one epoch: of each image its entry for one of the views, all arrays or
    those of these ``names``.

    With a ``seed``, a control, every image gets the maps of another one, always the same, with its
    own logits.
    """

    def __init__(
        self,
        maps: store.Store,
        view: int = 0,
        seed: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.maps = maps
        self.view = view
        self.views = maps.schema.views
        self.names = names
        images = len(maps) // self.views
        self.others = None
        if seed is not None:  # one cycle through all images: none keeps its own maps
            order = np.random.default_rng(seed).permutation(images)
            self.others = np.empty_like(order)
            self.others[order] = np.roll(order, 1)

    def prefetch(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """As :meth:`store.Store.prefetch`."""
        stored = self._prefetch(batches)
        if self.others is None:
            yield from stored
            return
        others = self._prefetch([self.others[image_ids] for image_ids in batches])
        for mine, other in zip(stored, others, strict=True):
            yield {**other, "logits": mine["logits"], "labels": mine["labels"]}

    def _prefetch(self, batches: Sequence[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        entries = [image_ids * self.views + self.view for image_ids in batches]
        return self.maps.prefetch(entries, names=self.names)
