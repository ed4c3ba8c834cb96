"""The section ``phase_a``: the teacher, whose attention maps the student learns from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gaupipe.settings.model import usable_model_args
from gaupipe.settings.sections import (
    Count,
    Fraction,
    Keywords,
    ModelName,
    Positive,
    Rate,
    Section,
    Weight,
)
from gaupipe.settings.teachers import TEACHERS, TeacherKind, teacher_kind
from gaupipe.settings.train import OptimSettings


class RowSettings(Section):
    """The per-image parameters (raw numbers of the Gaussians, or embeddings), and the Adam
    optimizer that updates them image by image."""

    lr: Rate = 0.1
    """Learning rate of Adam for the per-image parameters, which are updated once an epoch."""
    initial_std: Weight = 0.0
    """Standard deviation of the initialisation of the per-image parameters; with 0 all images start
    alike."""


class CompressionSettings(Section):
    """The compression network of ``phase_a.per_image: embedding``: an embedding for each image and
    block, from which a decoder computes the raw numbers of the image's Gaussians."""

    embedding: Annotated[int, Field(gt=0, le=65536)] = 256
    """Numbers in an embedding."""
    hidden: Annotated[int, Field(gt=0, le=65536)] = 768
    """Width of the decoder's hidden layer."""


Std = Annotated[float, Field(gt=0, allow_inf_nan=True)]


class LocalSettings(Section):
    """The maps of ``phase_a.teacher: local``: a Gaussian round each token, the same for all images
    and in all blocks of the student."""

    std: Annotated[list[Std], Field(min_length=1)] = [0.7, 1.5, 3.0]
    """Standard deviations in tokens, at most one for each head: head i takes number i modulo their
    count. ``.inf`` makes uniform maps, a control."""
    permuted: bool = False
    """A control: each query gets the Gaussian of another place, always the same one, drawn from
    ``seed``. The maps are as sharp as before, but at wrong places."""


class PhaseASettings(Section):
    """Phase A: the teacher, whose attention maps the student learns from. Not every teacher reads
    all settings: ``vit`` and ``resnet`` read ``teacher_args``, ``max_epochs``,
    ``stop_accuracy``, ``augment`` and ``optim``, a model that was trained before
    ``teacher_args``, ``augment`` and ``fine_tune_epochs``, with which it reads ``stop_accuracy``
    and ``optim`` too, and ``local`` its section ``local``."""

    teacher: ModelName = "gaussian"
    """``gaussian`` trains a ViT with Gaussian attention, ``vit`` an ordinary ViT, ``resnet`` a
    ResNet, which gives predictions alone. ``local-dir:FOLDER`` takes a trained model from a folder
    that timm reads, a timm name such as ``deit_tiny_patch16_224.fb_in1k`` one with published
    weights: for its maps, if its attention can be read, and for its predictions. ``local`` is
    no network, but fixed Gaussians round the tokens, which phase B makes itself."""
    local: LocalSettings = LocalSettings()
    teacher_args: Keywords = {}
    """Keywords for a teacher that is a trained ViT. With ``vit`` they change ``model.args``. For
    any other teacher they go to ``timm.create_model``, e.g. ``{img_size: 32}``."""
    mode: Literal["stochastic", "expected"] = "expected"
    """``stochastic`` samples one point for each query, as the GauTransformer paper does; its
    predictions are then the mean over eight forward passes. ``expected`` uses the exact mean over
    the query's Gaussian."""
    parametrisation: Literal["loc_scale", "paper"] = "loc_scale"
    """``loc_scale`` learns means and logarithms of the standard deviations of a Gaussian; ``paper``
    learns the eight numbers of *GauTransformer, eq. 5*."""
    prior: bool = True
    """Learn a shared prior: one Gaussian for each block, head and query, which all images share."""
    per_image: Literal["table", "embedding", "none"] = "none"
    """What makes the Gaussians of an image differ from the shared prior. ``table`` learns raw
    numbers for each training image, as in the GauTransformer paper. ``embedding`` learns an
    embedding for each training image and block, and a decoder that turns it into raw numbers. With
    ``none`` all images have the Gaussians of the shared prior."""
    compression: CompressionSettings = CompressionSettings()
    max_epochs: Positive = 12
    """Largest number of epochs of phase A."""
    fine_tune_epochs: Count = 0
    """Epochs for which a model that was trained before is fine-tuned on the labels, in place of
    ``max_epochs``; 0 takes it as it is. Its predictions of the training images are then of images
    that it has learned, those of images without labels are not."""
    stop_accuracy: Fraction = 0.92
    """Phase A stops after the first epoch with a training accuracy of at least this."""
    augment: bool = False
    """Whether phase A augments the training images too, as the section ``augment`` says."""
    optim: OptimSettings = OptimSettings()
    rows: RowSettings = RowSettings()

    @model_validator(mode="after")
    def _consistent(self) -> PhaseASettings:
        if self.fine_tune_epochs and self.teacher in TEACHERS:
            raise ValueError(
                f"fine_tune_epochs is for a model that was trained before: {self.teacher} is none"
            )
        if self.teacher_args and not self.kind.takes_args:
            raise ValueError(f"teacher_args: the teacher {self.teacher} takes none: leave it out")
        if self.shares_gaussians and not self.prior:
            raise ValueError(
                "prior is false and per_image none: nothing is left to learn where to look"
            )
        if self.teacher in TEACHERS:
            usable_model_args(self.teacher_args)
        elif "pretrained" in self.teacher_args:
            raise ValueError("teacher_args: a teacher always has its trained weights")
        elif "patch_drop_rate" in self.teacher_args:
            raise ValueError("teacher_args: a teacher drops no patches: leave patch_drop_rate out")
        return self

    @property
    def kind(self) -> TeacherKind:
        """What is known of the teacher by its name."""
        return teacher_kind(self.teacher, self.fine_tune_epochs > 0)

    @property
    def most_epochs(self) -> int:
        """Epochs of phase A at most; 0 for a teacher that was trained before."""
        if not self.kind.trained:
            return 0
        return self.fine_tune_epochs or self.max_epochs

    @property
    def learns_of_images(self) -> bool:
        """True if the teacher has parameters of single images."""
        return self.kind.learns_images and self.per_image != "none"

    @property
    def shares_gaussians(self) -> bool:
        """True if all images have the same Gaussians, and so the same maps."""
        return self.kind.learns_images and self.per_image == "none"
