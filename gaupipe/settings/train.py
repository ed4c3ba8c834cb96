"""The section ``train`` and the optimizer: what a ViT is trained with."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gaupipe.settings.sections import Count, Keywords, Positive, Rate, Section, Weight, validate


class OptimSettings(Section):
    """The optimizer of the network's weights and the schedule of its learning rate, by timm's names
    (``create_optimizer_v2``, ``create_scheduler_v2``)."""

    name: str = "muon"
    """Name of the optimizer in timm, such as ``muon``, ``adamw`` or ``sgd``. Muon updates
    matrices, and leaves [the other weights](your-own-images.md#from-random-weights) to AdamW."""
    lr: Rate = 4e-3
    """Learning rate after the warm-up."""
    args: Keywords = {}
    """Further keywords of ``create_optimizer_v2``, e.g. ``{betas: [0.9, 0.95]}`` in place of 0.9
    and 0.999. With ``{layer_decay: 0.75}`` each block of a ViT has 0.75 times the learning rate of
    the next one, as is usual in fine-tuning."""
    weight_decay: Weight = 0.03
    """Weight decay of the network's weights; biases, norms and the position embedding have none."""
    schedule: str = "cosine"
    """The schedule after the warm-up: ``cosine``, ``constant``, ``poly``, ``step``, ``multistep``,
    ``tanh``, ``wsd`` or ``rsqrt``."""
    schedule_args: Keywords = {}
    """Further keywords of ``create_scheduler_v2``, with times in epochs, e.g. ``{decay_epochs: 30,
    decay_rate: 0.1}``. ``num_epochs`` is the length of one cycle. By default one cycle takes all
    epochs after the warm-up. ``{num_epochs: 3, cycle_limit: 2, cycle_mul: 2}`` restarts the
    schedule after 3 epochs."""
    warmup_epochs: Count = 1
    """Epochs of linear warm-up; they count among the epochs of the phase."""
    min_lr: Weight = 1e-5
    """Learning rate at the start of the warm-up and at the end of the schedule, at most ``lr``."""
    clip_grad: Rate | None = 1.0
    """Largest norm of the gradient, to which larger gradients are clipped; null does not clip."""
    accumulate: Positive = 1
    """Batches whose gradients are added up before a step."""
    ema: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Largest decay of an exponential moving average of the weights. If set, the averaged weights
    are evaluated and saved. In step n the decay is at most 1 - n^(-2/3), as in timm's warm-up, so
    that an average over few steps forgets the untrained weights: 0.99 is reached after 1,000,
    0.9999 after a million steps. Null makes no average."""


class TrainSettings(Section):
    """What a ViT is trained with on the labels alone: the baseline, and the ViT of ``gaupipe
    train``. A student of phase B takes a field of the same name from ``phase_b`` instead, where
    that is set. A setting of ``train`` on the command line counts for both, although the file may
    have another one for the student."""

    epochs: Positive = 12
    """Number of epochs."""
    optim: OptimSettings = OptimSettings()
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Smoothing of the labels in the cross-entropy with the labels."""
    patch_drop_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the patches that each image loses in the first half of the epochs, except while maps
    are compared (PatchDropout, arXiv 2208.07220)."""
    keep: Literal["last", "best"] = "last"
    """Which epoch the folder ``student`` is of: the last, or the one with the best accuracy on the
    validation images. The other one lies beside it. May be changed when a student is continued,
    also a finished one."""
    patience: Positive | None = None
    """Early stopping: training ends when this many epochs in a row had no better accuracy on the
    validation images than the best before them. Null trains all epochs."""


class TrainChanges(Section):
    """Fields of :class:`TrainSettings` in which a student is trained otherwise."""

    epochs: Positive | None = None
    """Null is ``train.epochs``."""
    optim: Annotated[Keywords, AfterValidator(partial(validate, model=OptimSettings))] = {}
    """Settings of ``train.optim`` that are others here, e.g. ``{lr: 0.002}``."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Null is ``train.label_smoothing``."""
    patch_drop_rate: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Null is ``train.patch_drop_rate``."""
    keep: Literal["last", "best"] | None = None
    """Null is ``train.keep``."""
    patience: Positive | None = None
    """Null is ``train.patience``; as many epochs as there are end no training early."""
