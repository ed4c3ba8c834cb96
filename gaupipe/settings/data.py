"""The section ``data``: the data set, and how its images become tensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gaupipe.settings.sections import Keywords, Positive, Scope, Section, Size, validate
from gaupipe.system.files import utf8

FILE_IMAGE_SIZE = 224
"""Pixels of images in files where ``data.image_size`` is null."""

ChannelMean = Annotated[float, Field(ge=-1e3, le=1e3)]
ChannelStd = Annotated[float, Field(ge=1e-6, le=1e3)]
Workers = Annotated[int, Field(ge=0, le=1024)] | Literal["auto"]


class Scaling(BaseModel):
    """The keys of ``data.scaling``: a number for each channel, as shares of 255."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    mean: Annotated[list[ChannelMean], Field(min_length=1)] | None = None
    std: Annotated[list[ChannelStd], Field(min_length=1)] | None = None
    interpolation: Literal["bilinear", "bicubic"] | None = None


class DataSettings(Section):
    """The data set, and how its images become tensors."""

    name: str = "digits"
    """``digits``, ``fashion_mnist``, ``folder``, or, as timm's ``create_dataset`` names them,
    ``torch/NAME`` of torchvision and ``hfds/NAME`` of Hugging Face's datasets."""
    root: Annotated[Path | None, Scope.ANYTIME] = None
    """Folder of the files. With null, ``fashion_mnist`` takes the folder that the environment
    variable GAUPIPE_FASHION_MNIST names, or else the folder of Debian's package."""
    unlabelled: Annotated[str | None, Scope.ANYTIME] = None
    """Images without labels, which a student sees beside the training images: a folder with images
    at any depth, a ``.tar`` or a folder of such files, or ``hfds/NAME``. With null those in a
    folder ``unlabelled`` beside ``train``, where there is one (``name: folder``)."""
    train_images: Positive | None = None
    """Use only this many training images, of each class its share; null takes all."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the training images held out, class by class, for validation; ``digits`` always
    holds out 20 %, and a data set with validation images of its own, such as a folder ``val``,
    nothing."""
    image_size: Size | None = None
    """Height and width of the images that the model gets, in pixels: a multiple of the patch size.
    Null keeps the size of images held in memory. Images in files then get 224 pixels. A ViT that
    is fine-tuned gets the size that its weights expect."""
    scaling: Annotated[Keywords, AfterValidator(partial(validate, model=Scaling))] = {}
    """Scaling of pixels by timm's names: ``{mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5],
    interpolation: bicubic}``. A ViT that is fine-tuned sets what its weights expect. Otherwise
    images are resized ``bilinear``, and mean and standard deviation are those of the training
    images held in memory, or of ImageNet for images in files."""
    batch_size: Annotated[Positive, Field(le=2**20), Scope.STUDENT] = 128
    """Training images in a step. Where nothing is trained, a batch has four times as many, up to
    512."""
    workers: Annotated[Workers, Scope.ANYTIME] = "auto"
    """Processes that decode images, 0 to 1024; with 0 the process that trains decodes. ``auto`` is
    0 for images held in memory or in the cache, and for few images; else it is chosen by the
    processor cores, and is larger with a GPU."""
    cache: Annotated[Literal["auto", "none"], Scope.ANYTIME] = "auto"
    """``auto`` keeps the decoded images of image files in the user's cache (GAUPIPE_CACHE), also
    for later commands, where they take less than 20 GB and less than half of the free disk.
    ``none`` decodes in every epoch."""
    unreadable: Literal["refuse", "leave_out"] = "refuse"
    """Image files that cannot be read to their end: ``refuse`` lists them and stops, ``leave_out``
    lists them and goes on without them."""
    leave_out_copies: bool = False
    """Whether image files that are byte for byte a validation or test image are left out of the
    training images; otherwise a line says how many there are. The settings that ``--data`` chooses
    count them unless the validation images are given too."""
    buckets: Annotated[Positive, Field(le=2**16)] | None = None
    """Groups of training images that several processes share (see docs/scale.md). The number
    of processes must divide it, and may change when a run is continued. Null is the number of
    processes that the run starts with."""

    @property
    def title(self) -> str:
        """What messages and cards call the data set: images in a folder or archive by its name."""
        if self.name == "folder" and self.root is not None:
            return utf8(self.root.name) or self.name
        return self.name

    @property
    def interpolation(self) -> str:
        """How images are resized, by timm's name."""
        return self.scaling.get("interpolation") or "bilinear"

    @property
    def eval_batch_size(self) -> int:
        """Images in a batch where nothing is trained: validation, export, evaluation."""
        return max(self.batch_size, min(4 * self.batch_size, 512))

    @property
    def num_buckets(self) -> int:
        """``buckets`` of a run that has started: null is then a single process."""
        return self.buckets or 1
