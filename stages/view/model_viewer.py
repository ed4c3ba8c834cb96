"""A model's attention on image files, computed when an image is opened; nothing is stored.

Axis letters: L blocks, H heads, N tokens: class and register tokens, then patches.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import resolve_model_data_config
from torchvision.transforms import Normalize

from gaupipe.system.errors import UserError
from gaupipe.vit.capture import capture, use_fused_attention
from stages.predict import class_names, image_files, load_model, reader
from stages.view.gallery import PAGE
from stages.view.viewer import prediction
from stages.view.wire import pack

MOST_PATCHES = 20
"""Patches a side of the largest maps that are shown unasked: a page gets the maps of all blocks and
heads at once."""
LARGE = 16_000_000
"""Weights of an image above which they are sent as float16."""


def open_model(
    source: str, paths: Sequence[Path], download: bool = False, image_size: int | None = None
) -> ModelViewer:
    """A model and the image files of ``paths`` for the page.

    source    a student's folder, ``local-dir:FOLDER``, ``hf-hub:NAME`` or a timm name
    download  fetch weights that are not on this machine. Without them a timm name is shown with
              random weights, and the page says so
    image_size
              pixels of the images that the model gets; None is the model's own, or less where
              that gives more than :data:`MOST_PATCHES` patches a side, and the page says so

    Raises UserError for a model whose attention cannot be seen, and where there are no images.
    """
    images = list(image_files(paths))
    note = ""
    try:
        model = load_model(source, download)
    except UserError as error:
        if download or not timm.is_model(source.split(".")[0]) or Path(source).is_dir():
            raise
        note = f"Random weights: {error}."
        torch.manual_seed(0)
        model = timm.create_model(source.split(".")[0]).eval()
    image_size, reduced = fitted(source, model, image_size)
    notes = " ".join(text for text in (note, reduced) if text)
    viewer = ModelViewer(source, model, images, notes, image_size)
    viewer.image(0)  # refuses a model that cannot be looked at before the page opens
    return viewer


def fitted(source: str, model: Any, image_size: int | None) -> tuple[int | None, str]:
    """The pixels of the images that a model is set to take, None for its own, and a note where
    they are fewer than its own."""
    patches = getattr(model, "patch_embed", None)
    grid, patch = getattr(patches, "grid_size", None), getattr(patches, "patch_size", (1,))[0]
    note = ""
    if (
        image_size is None
        and grid
        and max(grid) > MOST_PATCHES
        and hasattr(model, "set_input_size")
    ):
        image_size = MOST_PATCHES * patch
        own = max(grid) * patch
        note = f"Shown at {image_size} pixels, of the model's {own}: --image-size {own} shows all."
    if image_size is None:
        return None, ""
    try:
        if image_size % patch:
            raise ValueError("not a multiple of a patch")
        model.set_input_size(img_size=image_size)
    except (AttributeError, AssertionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--image-size {image_size}: {source} cannot take it ({str(error).splitlines()[0]}); "
            f"its patches have {patch} pixels"
        ) from None
    return image_size, note


class ModelViewer:
    """A model opened for looking: the answers of :class:`stages.view.viewer.Viewer`."""

    students: tuple[str, ...] = ()
    snapshots: dict[str, Any] = {}
    views = 1

    def __init__(
        self,
        name: str,
        model: Any,
        images: list[Path],
        note: str = "",
        image_size: int | None = None,
    ) -> None:
        self.name, self.model, self.images, self.note = name, model, images, note
        self.gallery = FileGallery(images)
        use_fused_attention(model)
        self._read = reader(model, image_size)
        config = resolve_model_data_config(model)
        mean, std = torch.tensor(config["mean"]), torch.tensor(config["std"])
        self._to_pixels = Normalize((-mean / std).tolist(), (1 / std).tolist())
        self._one_at_a_time = threading.Lock()
        self._names = class_names(model, getattr(model, "num_classes", 0) or 0)
        self._shape: dict[str, Any] = {}
        self._latest = lru_cache(maxsize=1)(self._message)

    def start(self) -> None:
        """Does nothing: everything is computed when it is asked for."""

    load_images = start

    def about(self) -> dict[str, Any]:
        """All that does not change while the page is open."""
        names = "\n".join(map(str, self.images))
        return {
            "store": self.name,
            "token": hashlib.sha256(f"{self.name}\n{names}".encode()).hexdigest()[:12],
            "kind": "computed now",
            "images": len(self.images),
            "views": self.views,
            "classes": 0,
            "students": [],
            "snapshots": {},
            "note": self.note,
            **self._shape,
        }

    def status(self) -> dict[str, Any]:
        """There is nothing to wait for."""
        count = len(self.images)
        return {
            "labels": {"done": count, "total": count, "ready": True, "error": ""},
            "pixels": {"ready": True, "error": ""},
            "class_names": list(self._names),
        }

    def image(self, image: int, view: int = 0) -> bytes:
        """The maps [L, H, N, N] float32 of an image, and the model's prediction."""
        return self._latest(image)

    def _message(self, image: int) -> bytes:
        inputs = self._input(image)[None]  # [1, channels, height, width]
        with self._one_at_a_time, torch.inference_mode():
            try:
                with capture(self.model) as maps:
                    output = self.model(inputs)
            except (ValueError, RuntimeError) as error:
                raise UserError(f"{self.name}: {' '.join(str(error).split())}") from None
        grid = getattr(getattr(self.model, "patch_embed", None), "grid_size", None)
        extra = getattr(self.model, "num_prefix_tokens", 0)
        tokens = extra + (0 if grid is None else grid[0] * grid[1])
        square = [one[0] for one in maps.values() if one.shape[-2:] == (tokens, tokens)]
        if grid is None or not square or len({one.shape for one in square}) != 1:
            raise UserError(
                f"{self.name} ({type(self.model).__name__}) does not attend over all patches in "
                "every block: take a ViT, such as vit_small_patch14_dinov2.lvd142m"
            )
        self._shape = {"layers": len(square), "heads": len(square[0]), "grid": list(grid)}
        header = {
            "image": image,
            "view": 0,
            "rows": "maps",
            "name": self.name,
            "title": self.images[image].name,
            "extra": token_names(extra),
            **self._shape,
        }
        if self._names:
            header |= prediction(output[0])
        stacked = torch.stack(square)  # [L, H, N, N]
        if stacked.numel() > LARGE:
            stacked = stacked.half()
        return pack(header, {"maps": stacked.numpy()})

    def pixels(self, image: int, view: int = 0) -> bytes:
        """The image as PNG, as the model sees it: resized and cropped."""
        values = self._to_pixels(self._input(image)).clamp(0, 1)  # [channels, height, width]
        array = (values * 255).round().byte().permute(1, 2, 0).numpy()
        file = io.BytesIO()
        Image.fromarray(array.squeeze(-1) if array.shape[-1] == 1 else array).save(file, "PNG")
        return file.getvalue()

    def student(self, name: str, image: int, view: int = 0) -> bytes:
        """Refused: beside a model there are no students."""
        raise UserError(f"student {name!r}: there are none beside a model")

    def epochs(self, who: str, image: int) -> bytes:
        """Refused: a model's training is not known."""
        raise UserError(f"no snapshots were kept for {who}")

    def check(self, image: int, view: int = 0) -> None:
        """Raises UserError for an image that there is not."""
        if not 0 <= image < len(self.images):
            raise UserError(f"image {image}: there are 0 to {len(self.images) - 1}")
        if view:
            raise UserError(f"view {view}: images are shown as they are")

    def _input(self, image: int) -> torch.Tensor:
        """An image as the model takes it: [channels, height, width], normalised."""
        self.check(image)
        return self._read(self.images[image])


def token_names(count: int) -> list[str]:
    """Names of the tokens that are no patches: the class token first, where there are any."""
    return ["class", *(f"register {number}" for number in range(1, count))][:count]


class FileGallery:
    """Image files as the gallery shows them, by their number."""

    def __init__(self, images: list[Path]) -> None:
        self.images = images

    def page(self, order: str = "id", label: int | None = None, number: int = 0) -> dict[str, Any]:
        """One page of images, as :meth:`stages.view.gallery.Gallery.page` gives it."""
        first = number * PAGE
        items = [
            {"id": first + place, "title": path.name}
            for place, path in enumerate(self.images[first : first + PAGE])
        ]
        return {"items": items, "total": len(self.images), "page": number, "size": PAGE}
