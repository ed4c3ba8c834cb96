"""One image and its attention, and the stored attention of the images of a store.

Axis letters: L blocks, H heads, T patches, P class and register tokens, which come before the
patches, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

import store
from gaupipe.data.images import FileImages
from gaupipe.data.load import load_data
from gaupipe.data.loader import view_of
from gaupipe.data.splits import ImageData
from gaupipe.distillation.kinds import StoredAttentionReader
from gaupipe.maps.stored import StoredGaussians
from gaupipe.settings import DataSettings
from gaupipe.system.errors import UserError
from gaupipe.teachers import files
from gaupipe.teachers.notes import Drawing, StoreNotes
from gaupipe.vit.heads import probabilities

CPU = torch.device("cpu")
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
    file        the name of its file; None where there is none
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
    file: str | None = None

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
        if "names" in stored:
            seen.file = store.unpack_names(stored["names"])[0]
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
