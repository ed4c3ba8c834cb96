"""Attention maps in a notebook."""

from __future__ import annotations

import copy
import html
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import nn

from gaupipe.system.errors import UserError

HEIGHT = 900


@dataclass(frozen=True)
class Shown:
    """A page that needs no server, which a notebook displays."""

    page: str
    """HTML."""
    height: int = HEIGHT

    def _repr_html_(self) -> str:
        frame = f'width="100%" height="{self.height}" style="border: 0"'
        return f'<iframe srcdoc="{html.escape(self.page)}" {frame}></iframe>'

    def save(self, path: str | Path) -> None:
        """Writes the page to a file."""
        from gaupipe.system.files import write_whole

        write_whole(Path(path), self.page)


def show(
    model: nn.Module | str,
    images: Any,
    *,
    download: bool = False,
    image_size: int | None = None,
    height: int = HEIGHT,
) -> Shown:
    """The attention of a vision transformer to some images, as the last line of a notebook's cell.

    .. code-block:: python

        gaupipe.show("vit_small_patch16_224.dino", ["cat.jpg", "dog.jpg"], download=True)
        gaupipe.show(model, Image.open("cat.jpg"))

    model       a ViT of timm, of which a copy is taken, or its name; ``local-dir:FOLDER`` or the
                folder of a student
    images      one or a sequence of: paths of files or folders, Pillow's images, and uint8 arrays
                [height, width, 3] or [height, width]
    download    fetch weights that are not on this machine
    image_size  pixels of the images that the model gets; None is the model's own
    height      of the page in the notebook, in pixels

    A page of four photos and a ViT of 12 blocks, 3 heads and 197 tokens has 7 MB, which the
    notebook saves with its cell. Raises UserError for what is no image, and for a model whose
    attention cannot be seen.
    """
    from gaupipe.data.prepared import image_files
    from gaupipe.teachers.files import open_model, teacher_of_files
    from stages.view.page import page_text
    from stages.view.serve import model_viewer

    with tempfile.TemporaryDirectory(prefix="gaupipe-show-") as folder:
        paths = as_files(images, Path(folder))
        note = ""
        if isinstance(model, str):
            teacher, note = open_model(model, paths, download, image_size, to_look=True)
        else:
            name = type(model).__name__
            files = list(image_files(paths))
            teacher = teacher_of_files(copy.deepcopy(model).cpu(), name, paths, files, image_size)
        viewer = model_viewer(teacher, note)
        page = page_text(viewer, list(range(len(teacher.data.train))), "train", {})
    return Shown(page, height)


def as_files(images: Any, folder: Path) -> list[Path]:
    """The paths of images; those that are no paths are written to ``folder``. Raises UserError for
    what is no image, and without any."""
    if isinstance(images, str) or not isinstance(images, Sequence):
        images = [images]
    if not images:
        raise UserError("show: there are no images")
    paths: list[Path] = []
    for number, image in enumerate(images):
        if isinstance(image, (str, Path)):
            paths.append(Path(image))
            continue
        if is_picture(image):
            image = Image.fromarray(image)
        if not isinstance(image, Image.Image):
            raise UserError(
                f"show: image {number} is a {type(image).__name__}: should be a path, Pillow's "
                "image or an array of uint8 [height, width, 3] or [height, width]"
            )
        paths.append(folder / f"image {number}.tiff")
        ImageOps.exif_transpose(image).save(paths[-1])
    return paths


def is_picture(image: Any) -> bool:
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or not image.size:
        return False
    return image.ndim == 2 or image.shape[2:] == (3,)
