"""Any ViT on image files, without a run: for ``view --model`` and ``export-maps --model``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import timm
import torch
from timm.data import resolve_model_data_config

from gaupipe.data.prepared import PreparedImages, image_files
from gaupipe.data.splits import ImageData, Split
from gaupipe.settings import Settings
from gaupipe.settings.sections import LOCAL, with_whole_path
from gaupipe.system.device import prepare_device
from gaupipe.system.errors import UserError
from gaupipe.teachers.notes import StoreNotes
from gaupipe.teachers.readable_vit import ReadableViT
from gaupipe.teachers.vit import VitTeacher
from gaupipe.vit.heads import names_of_tokens
from gaupipe.vit.inputs import SETTING
from gaupipe.vit.pretrained import load_model
from gaupipe.vit.saving import class_names

MOST_PATCHES = 20
"""Patches a side of the largest maps that a page shows unasked: it gets the maps of all blocks and
heads at once."""
BATCH = 1
"""``data.batch_size``: large images have large maps."""


@dataclass
class FilesTeacher(VitTeacher):
    """A ViT on image files, as an export takes a teacher on the data of a run.

    images  notes on the images: ``files``, ``transform`` and ``class_names``
    """

    images: StoreNotes = field(default_factory=StoreNotes)

    fewer_images: ClassVar[str] = "--images"
    lighter: ClassVar[str] = "take a smaller --image-size or --model"

    @cached_property
    def student_shape(self) -> None:
        """There is no student."""

    def say_before(self) -> None:
        """Nothing: there is no student."""

    def prepare_export(self) -> None:
        """Nothing: the images have no labels for a probe."""

    def notes(self) -> StoreNotes:
        tokens = names_of_tokens(self.network.model)
        return replace(
            self.images, teacher=self.network.name, predicts=self.predicts, tokens=tokens
        )


def images_of(
    notes: StoreNotes,
    num_classes: int,
    with_digest: bool = False,
    files: Sequence[Path] | None = None,
) -> ImageData:
    """The images of :meth:`FilesTeacher.notes`, whose ``files`` may have been listed already.
    Raises UserError where they are no longer there."""
    paths = [Path(path) for path in notes.files or ()]
    files = files or list(image_files(paths))
    transform = notes.transform
    assert transform is not None  # of image files
    source = PreparedImages(files, transform)
    source.class_names = tuple(notes.class_names or ())
    split = Split.of_all(source)
    channels, _, size = transform["input_size"]
    return ImageData(
        paths[0].name,
        split,
        split,
        num_classes,
        channels,
        size,
        tuple(transform["mean"]),
        tuple(transform["std"]),
        hashlib.sha256(source.fingerprint()).hexdigest() if with_digest else "",
    )


def open_model(
    source: str,
    paths: Sequence[Path],
    download: bool = False,
    image_size: int | None = None,
    to_look: bool = False,
    random_weights: bool = False,
) -> tuple[FilesTeacher, str]:
    """A model and the image files of ``paths``, and a note for who looks at it.

    source      a student's folder, ``local-dir:FOLDER``, ``hf-hub:NAME`` or a timm name
    download    fetch weights that are not on this machine
    image_size  pixels of the images that the model gets; None is the model's own
    to_look     a model with more than :data:`MOST_PATCHES` patches a side gets smaller images; the
                note says so
    random_weights
                initialise the model of a timm name, always in the same way; the note says so

    Raises UserError for a model whose attention cannot be seen, for weights that are not here, and
    where there are no images.
    """
    if Path(os.path.expanduser(source)).is_dir():
        source = f"{LOCAL}{source}"
    source = with_whole_path(source)
    files = list(image_files(paths))  # refuses what is not there before a model is loaded
    note = ""
    fewer = ""
    model: Any
    if random_weights:
        model = initialise(source, download)
        note = f"Random weights: {source} is untrained here, and its maps show the initialisation."
    else:
        model = load_given(source, download, to_look)
    if to_look and image_size is None:
        image_size, fewer = reduce_size(model)
    named = not random_weights
    teacher = teacher_of_files(
        model, source, paths, files, image_size, to_look=to_look, named=named
    )
    return teacher, " ".join(text for text in (note, fewer) if text)


def teacher_of_files(
    model: Any,
    source: str,
    paths: Sequence[Path],
    files: Sequence[Path],
    image_size: int | None = None,
    *,
    to_look: bool = True,
    named: bool = True,
) -> FilesTeacher:
    """A model, called ``source``, and the image ``files`` that lie at ``paths``. Its classes are
    ``named`` where their names are known. Raises UserError for a model whose attention cannot be
    seen."""
    if not hasattr(model, "pretrained_cfg"):
        raise UserError(f"{source}: is not a model that timm.create_model built")
    transform = resolve_model_data_config(model)
    own_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if own_size:  # which may not be the size that its configuration is for
        transform["input_size"] = (transform["input_size"][0], *own_size)
    if image_size not in (None, transform["input_size"][-1]):
        set_size(model, image_size, source)
        transform["input_size"] = (transform["input_size"][0], image_size, image_size)
    num_classes = getattr(model, "num_classes", 1)
    names: Sequence[str] = ()
    if num_classes and named:
        names = class_names(model, num_classes)
        if names == tuple(map(str, range(num_classes))):  # the numbers of classes without names
            names = ()
    images = StoreNotes(
        files=[str(path.absolute()) for path in paths],
        transform=json.loads(json.dumps(transform)),  # of lists in place of tuples
        class_names=names,
    )
    data = images_of(images, max(num_classes, 1), not to_look, files)
    try:
        network = ReadableViT(model, data, source)
    except UserError as error:
        raise UserError(str(error).removeprefix(f"{SETTING}: ")) from None
    network.kept_prefix = network.prefix
    settings = Settings().with_section("phase_a", teacher=source)
    settings = settings.with_section("data", batch_size=BATCH)
    device = prepare_device("cpu" if to_look else "auto")
    return FilesTeacher(settings, data, device, network.to(device), images=images)


def load_given(source: str, download: bool, to_look: bool) -> Any:
    """A model with its weights, in eval mode. Raises UserError, which tells who wants ``to_look``
    what can be done without them."""
    try:
        return load_model(source, download)
    except UserError as error:
        if to_look and not download and timm.is_model(source.split(".")[0]):
            remedy = "--random-weights (in Python timm.create_model) shows the untrained model"
            raise UserError(f"{error}; {remedy}") from None
        raise


def initialise(name: str, download: bool) -> Any:
    """The model of a timm name with random weights, in eval mode. Raises UserError for weights that
    were asked for, and for another name."""
    if download or name.startswith(LOCAL):
        other = "--download" if download else name
        raise UserError(f"--random-weights: is for a timm name without weights, not with {other}")
    architecture = name.split(".")[0]
    if not timm.is_model(architecture):
        raise UserError(f"timm has no model {architecture!r}")
    torch.manual_seed(0)
    return timm.create_model(architecture).eval()


def reduce_size(model: Any) -> tuple[int | None, str]:
    """The pixels at which a model with many patches is looked at, and a note; (None, "") where it
    is looked at as it is."""
    patches = getattr(model, "patch_embed", None)
    grid = getattr(patches, "grid_size", None)
    patch = getattr(patches, "patch_size", (1,))[0]
    if not grid or max(grid) <= MOST_PATCHES or not hasattr(model, "set_input_size"):
        return None, ""
    size = MOST_PATCHES * patch
    pixels = max(grid) * patch
    return size, (
        f"Shown at {size} pixels, of the model's {pixels}: image_size={pixels} (--image-size) "
        "shows all."
    )


def set_size(model: Any, image_size: int, source: str) -> None:
    """Makes a model take images of so many pixels. Raises UserError where it cannot."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", (1,))[0]
    try:
        if image_size % patch:
            raise ValueError("not a multiple of a patch")
        model.set_input_size(img_size=image_size)
    except (AttributeError, AssertionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"image_size={image_size} (--image-size): {source} cannot take it "
            f"({str(error).splitlines()[0]}); its patches have {patch} pixels"
        ) from None
