"""The teacher: one object that says everything about itself. Outside of this room nobody asks which
teacher it is.

Axis letters: B images, L blocks, H heads, T tokens, C classes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import store
from gaupipe.data.batches import Batch, Batches
from gaupipe.data.splits import ImageData, Split
from gaupipe.maps.views import pool_map
from gaupipe.settings import ExportSettings, PhaseASettings, Settings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.settings.teachers import TeacherKind
from gaupipe.system import distributed
from gaupipe.system.device import prepare_device
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.system.messages import LOG
from gaupipe.system.progress import EpochMetrics
from gaupipe.teachers.notes import StoreNotes
from gaupipe.training.state import Identity, TrainingState
from gaupipe.training.student import untrained_student
from store.kinds import MapSizes

MOST_NUMBERS = 10**8
"""Of the maps of a batch, all blocks together, or of a block's activations; each takes 4 bytes, or
8 with what is stored of it."""


class MapShape(MapSizes):
    """The shape of the maps of a teacher or a store."""

    @classmethod
    def of(cls, model: Any) -> MapShape:
        """Of the maps of a network that knows them, or of a ViT of timm's."""
        if not isinstance(model, VisionTransformer):
            return cls(model.grid, model.layers, model.heads)
        first: Any = model.blocks[0]
        return cls(tuple(model.patch_embed.grid_size), len(model.blocks), first.attn.num_heads)

    @classmethod
    def of_store(cls, schema: store.Schema) -> MapShape | None:
        """Of the maps in a store; None for a store without maps."""
        return cls(*schema.maps) if schema.has_maps else None

    def stored(self, export: ExportSettings) -> MapShape | None:
        """Of the maps that an ``export`` stores of these; None where it stores none."""
        assert export.kind is not None  # choose_store() names it
        if not store.KINDS[export.kind].has_maps:
            return None
        layers = self.layers if export.layers is None else len(export.layers)
        return MapShape(export.grid or self.grid, layers, self.heads)


@dataclass(eq=False)
class ShownMaps:
    """The attention of a batch, as a teacher shows it and the kinds of stores take it. A teacher
    that makes its maps when they are asked for has a class of its own with ``blocks``, ``dropped``
    and ``maps``."""

    blocks: Sequence[Tensor]
    """For each block [B, H, T, T] float32, from patches to patches, row by row of the grid; rows
    sum to 1. With the ``kept_prefix`` of its teacher [B, H, P + T, P + T]."""
    grid: tuple[int, int]
    """(h, w) in patches."""
    dropped: Tensor | None = None
    """[L, H]: the mean share of a patch's attention that class and register tokens had."""

    def maps(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[B, L, H, T, T], rounded to ``dtype``."""
        images, *rest = self.blocks[0].shape
        maps = self.blocks[0].new_empty(images, len(self.blocks), *rest, dtype=dtype)
        for layer, block in enumerate(self.blocks):
            maps[:, layer] = block
        return maps

    def on_grid(self, grid: tuple[int, int]) -> ShownMaps:
        """The same on a coarser ``grid`` (h, w)."""
        blocks = [pool_map(block, self.grid, grid) for block in self.blocks]
        return replace(self, blocks=blocks, grid=grid)


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a teacher for a batch, beside its predictions and features."""

    generator: torch.Generator
    """For draws."""
    layers: Sequence[int] = ()
    """Blocks whose attention is wanted, in this order; empty leaves attention out."""
    image_ids: Tensor | None = None
    """[B] of training images; None for a batch of others."""


@dataclass
class Outputs:
    """What a teacher makes of a batch."""

    logits: Tensor | None
    """[B, C] float32, log-probabilities; None of a teacher that predicts no classes."""
    attention: Any = None
    """:class:`ShownMaps`, or as these; None of a teacher that shows none."""
    features: Tensor | None = None
    """[B, D] float32, pooled, as its head gets them; None of a teacher without such."""


@dataclass
class Teacher:
    """A teacher on the data of a run.

    It begins as an :meth:`outline`, which is checked before anything is allocated;
    :meth:`begin` makes of it what phase A trains, and :meth:`finished` reads what phase A left.
    Raises UserError, naming the setting, for a teacher that cannot be had.
    """

    settings: Settings
    data: ImageData
    device: torch.device
    network: Any = field(default_factory=nn.Module)
    """Its torch module; one without parameters for a teacher that is no network."""

    forms: ClassVar[frozenset[str]] = frozenset()
    """What an export can store of its attention: ``maps``, and of Gaussians ``gaussians``,
    ``embeddings`` and ``prior``. Empty for a teacher that shows no attention."""
    is_exact: ClassVar[bool] = False
    """Whether its stored attention is the same on every machine."""
    fewer_images: ClassVar[str] = "data.train_images"
    """The setting or option by which it sees fewer images."""
    lighter: ClassVar[str] = "lower data.batch_size or data.train_images, take a smaller model"
    """What to do where the memory is too small for an export."""

    # ---- before phase A, and after it

    @classmethod
    def outline(cls, settings: Settings, data: ImageData) -> Teacher:
        """The teacher of the settings before its training. A network that phase A trains lies on
        torch's meta device."""
        return cls(settings, data, prepare_device(settings.device, settings.threads))

    def begin(self, folder: Path) -> Teacher:
        """The teacher that phase A trains into a ``folder``, freshly started. Writes nothing."""
        return self

    @classmethod
    def finished(
        cls, settings: Settings, data: ImageData, folder: Path, with_images: bool = True
    ) -> Teacher | None:
        """The teacher that phase A has left in a ``folder``, in eval mode; None where it is not
        whole. ``with_images`` False leaves the parameters of single images out."""
        return cls.outline(settings, data)

    # ---- phase A

    def training_state(self) -> TrainingState[Any] | None:
        """The optimizer of its network and its schedule, freshly started; None for a teacher that
        is not trained in epochs."""
        return None

    def train(self, state: TrainingState[Any], folder: Path) -> Teacher:
        """Phase A of a teacher that is trained in epochs: goes on from ``state``, leaves
        ``metrics.jsonl`` in the ``folder``, and returns the finished teacher. Collective."""
        raise NotImplementedError

    def prepare(self, folder: Path) -> None:
        """Phase A of any other teacher: leaves a ``metrics.jsonl`` of one line in the ``folder``,
        of epoch 0, and here without accuracies. Collective."""
        following = "" if self.kind.stored else ", and phase B makes its maps"
        LOG.info(f"phase A: {self.settings.phase_a.teacher} needs no training{following}")
        if distributed.is_main():
            folder.mkdir(exist_ok=True)
            write_whole(folder / "metrics.jsonl", json.dumps(metrics_of_no_epoch()) + "\n")

    @property
    def images_for_training(self) -> ImageData:
        """The data set, its images as phase A takes them."""
        return self.data

    def training_forward(self, images: Tensor) -> Tensor:
        """Logits of images [B, channels, height, width] as in phase A, for their cost, of a teacher
        that phase A trains."""
        logits: Tensor = self.network(images)
        return logits

    def given_sha256(self) -> dict[str, str]:
        """As :meth:`named_sha256`, of a teacher that no phase A trains: it is made anew for each
        command, and must then be the same. Empty for a trained one."""
        return {} if self.kind.trained else self.named_sha256()

    def say_before(self) -> None:
        """Says what a user should know of the teacher before it is used."""

    # ---- what a student learns from it

    @property
    def kind(self) -> TeacherKind:
        return self.settings.phase_a.kind

    @property
    def predicts(self) -> bool:
        """Whether it predicts the classes of the data set."""
        return self.kind.predicts

    @property
    def shape(self) -> MapShape:
        """The shape of its maps: the student's, of a teacher without a network."""
        shape = self.student_shape
        assert shape is not None  # only a network sees images without a student
        return shape

    @cached_property
    def student_shape(self) -> MapShape | None:
        """The shape of the maps of the student that the settings describe; None for a model on
        image files, from whose maps nobody learns."""
        return MapShape.of(untrained_student(self.settings, self.data))

    @property
    def shows_rows(self) -> bool:
        """Whether it shows the rows of its maps, and not Gaussians, which are fewer numbers and
        move with their images."""
        return "maps" in self.forms and "gaussians" not in self.forms

    @property
    def tokens(self) -> int:
        """Tokens whose rows it computes, those that it leaves out of its maps included."""
        return math.prod(self.shape.grid)

    def describe(self) -> str:
        """The teacher in words."""
        return self.settings.phase_a.teacher

    def constant_maps(self, student: VisionTransformer) -> Any:
        """The maps that all images share, for a ``student``: a
        :class:`~gaupipe.maps.stored.StoredAttention` with a :class:`MapShape`; None for a teacher
        whose maps are stored."""
        return None

    def check_student(self) -> None:
        """Raises UserError for settings of phase B that this teacher cannot serve."""

    def weights(self) -> dict[str, Tensor]:
        """The weights of its ViT by timm's names, for a student that starts from them. Raises
        UserError for a teacher that is none."""
        raise UserError(
            f"phase_b.warm_start: the teacher {self.settings.phase_a.teacher} is no ViT: take "
            "phase_b.warm_start=none"
        )

    def spread(self) -> Tensor | None:
        """The spread of its residual stream, by which a slice is chosen."""
        return None

    def remarks(self) -> list[str]:
        """Lines about what a student that starts from its weights should know."""
        return []

    # ---- what is stored

    def prepare_export(self) -> None:
        """Makes whatever its predictions need, such as a probe. Collective."""

    def batches(
        self, split: Split, batch_size: int | None = None, with_maps: bool = False
    ) -> Batches:
        """Batches of a split, as the teacher takes its images, by default of the size for
        evaluation, but no more than :meth:`images_at_once`."""
        settings = self.settings.data
        size = self.images_at_once(batch_size or settings.eval_batch_size, with_maps)
        taken, data = self.as_taken(split)
        return Batches(taken, data, self.device, size, settings.workers, settings.num_buckets)

    def as_taken(self, split: Split) -> tuple[Split, ImageData]:
        """A split with its images as the teacher takes them, and the data set with such images."""
        return split, self.data

    def images_at_once(self, batch_size: int, with_maps: bool = True) -> int:
        """So many images, at most ``batch_size`` and at least 1, have no more than
        :data:`MOST_NUMBERS` in what a block makes of them and, ``with_maps``, in their maps."""
        if not self.shows_rows:
            return batch_size
        numbers = self.numbers_of_block
        if with_maps:
            numbers = max(numbers, self.shape.layers * self.shape.heads * self.tokens**2)
        return min(batch_size, max(1, MOST_NUMBERS // max(1, numbers)))

    @property
    def numbers_of_block(self) -> int:
        """What attention and FFN of a block take and give, of an image, about."""
        return 12 * self.tokens * (self.features or 0)

    def outputs(self, batch: Batch, wanted: Wanted) -> Outputs:
        """What an export stores of a batch of :meth:`batches`."""
        raise NotImplementedError

    @cached_property
    def sha256(self) -> str:
        """A digest of everything that a finished teacher has learned; where that is nothing, of its
        name. Collective."""
        return hashlib.sha256(self.settings.phase_a.teacher.encode()).hexdigest()

    def named_sha256(self) -> dict[str, str]:
        """:attr:`sha256` by a name for messages. Collective."""
        return {f"teacher {self.settings.phase_a.teacher}, sha256": self.sha256}

    def notes(self) -> StoreNotes:
        """What a store notes of the teacher and its images."""
        return StoreNotes(
            teacher=self.settings.phase_a.teacher,
            predicts=self.predicts,
            data=self.settings.data.model_dump(mode="json", exclude={"buckets"}),
        )

    @property
    def width(self) -> int:
        """Channels of its network, which decide the precision of an export; 0 for float32."""
        return 0

    @property
    def features(self) -> int | None:
        """The number D of its pooled features; None of a teacher without such."""
        return None

    @property
    def embedding(self) -> int | None:
        """The numbers E of an image's embedding in a block; None of a teacher without such."""
        return None

    @property
    def kept_prefix(self) -> int:
        """Class and register tokens in its maps."""
        return 0

    def timed(self) -> tuple[nn.Module, int]:
        """The network to measure the speed of, and the pixels a side of its images."""
        return self.network, self.data.image_size


def teacher_class(settings: Settings) -> type[Teacher]:
    """The class of the teacher that the settings name, imported at its first use."""
    module, _, name = settings.phase_a.kind.implementation.partition(".")
    loaded: type[Teacher] = getattr(import_module(f"gaupipe.teachers.{module}"), name)
    return loaded


def outline(settings: Settings, data: ImageData) -> Teacher:
    """As :meth:`Teacher.outline`, of the teacher that the settings name."""
    return teacher_class(settings).outline(settings, data)


UPPER_ACCURACY = 0.98
"""Upper bound of the window for the training accuracy (*GauTransformer, section 3.3.1*)."""


def ending(phase: PhaseASettings, metrics: Sequence[EpochMetrics]) -> str:
    """A line about a teacher that is trained: why its training ended, and whether its accuracy on
    the training images lies in the window."""
    rate = "phase_a.optim.lr"
    more = "phase_a.fine_tune_epochs" if phase.fine_tune_epochs else "phase_a.max_epochs"
    if phase.learns_of_images:
        rate = "phase_a.rows.lr"
    accuracy = metrics[-1]["train_acc"]
    epochs = len(metrics)
    assert accuracy is not None  # it was trained
    if accuracy < phase.stop_accuracy == 1:  # nobody expects it
        return f"ended after all {epochs} epochs with a training accuracy of {accuracy:.4f}"
    if accuracy < phase.stop_accuracy:
        return (
            f"{epochs} epochs were not enough for a training accuracy of {phase.stop_accuracy}: "
            f"{accuracy:.4f}; raise {more} or {rate}"
        )
    if accuracy > max(UPPER_ACCURACY, phase.stop_accuracy):
        return (
            f"the training accuracy {accuracy:.4f} is above the window's upper bound "
            f"{UPPER_ACCURACY}: the teacher has begun to memorise; lower {rate}"
        )
    return (
        f"ended after {epochs} of {phase.most_epochs} epochs: the training accuracy {accuracy:.4f} "
        f"has reached phase_a.stop_accuracy={phase.stop_accuracy}"
    )


def metrics_of_no_epoch() -> EpochMetrics:
    """The line of metrics.jsonl for a teacher that phase A does not train."""
    return {"epoch": 0, "train_loss": None, "train_acc": None, "val_acc": None, "seconds": 0.0}


def identity(settings: Settings, data: ImageData) -> Identity:
    """Every setting that phase A reads, and the data set."""
    read_by_phase_a = flatten(settings.without_student(), Scope.ANYTIME)
    return read_by_phase_a | {"the data set": data.sha256}
