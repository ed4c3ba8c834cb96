"""Augmentation that says where each view lies in its image, so that stored Gaussians can move
along.

torchvision's transforms would draw from the global generator: a resumed run, another number of
ranks or a teacher on another machine would see other views, and stored maps of views would belong
to no image that a student sees. Nor do they say where a crop came from, which a map needs in order
to move with it. So all random numbers are a function of (seed, epoch, image id): not of the batch
an image is in, its place there, the process, or the device. Whole batches of uint8 images [B, C,
height, width] are augmented at once, on any device: a GPU would wait for the launches of one image
after the other. What is drawn is numpy's, on the CPU, so nothing has to be read back.

Axis letters: B images, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import grid_sample
from torchvision.transforms.v2 import functional as F

from gaupipe.data.draws import ERASING, FLIP, RANDAUGMENT, RESIZED_CROP, SHIFT, uniforms
from gaupipe.data.operations import OPERATIONS, UNSIGNED
from gaupipe.maps.gaussians import Geometry
from gaupipe.settings.augment import AugmentSettings, RandAugmentSettings, ResizedCropSettings

RATIO = (3 / 4, 4 / 3)
"""Smallest and largest ratio of width to height of a resized crop."""

ATTEMPTS = 10
"""Boxes drawn until one lies within the image, as in torchvision."""


@dataclass
class Augment:
    """The augmentation of one image at a time: everything in the settings but Mixup and CutMix
    (:func:`gaupipe.data.mixing.mix`).

    Shifts and boxes are drawn in the pixels of square images whose side is ``size``, None for that
    of the images that are augmented. Images of another size, such as a teacher's, get the same
    views: what is drawn is scaled, and rounded to pixels.
    """

    settings: AugmentSettings
    seed: int
    size: int | None = None

    def __call__(
        self,
        images: Tensor,
        image_ids: Tensor | np.ndarray,
        epoch: int | np.ndarray,
        crop_geometry: Tensor | None = None,
    ) -> tuple[Tensor, Geometry | None]:
        """(views, where they lie) of a batch.

        images      uint8 [B, C, height, width], before normalisation, C 1 or 3; not changed
        image_ids   int64 [B], as :meth:`gaupipe.data.splits.Split.drawn_ids` gives them
        epoch       counted from 0; one for all images, or that of each [B]
        crop_geometry
                    where the ``images`` lie, if they are crops of full-size images already, which
                    are then not cropped again: float64 [B, 4], as :meth:`crops` returns it

        The views have the shape, dtype and device of the images. The geometry is None when nothing
        moved, or when the settings ignore geometry; else it is on the images' device. Erasing fills
        in uint8, so before normalisation; it and the colour operations leave attention where it is.
        """
        settings = self.settings
        count = len(images)
        height, width = images.shape[-2:]
        ratio = 1.0
        if self.size is not None:
            ratio = width / self.size
        offset = np.zeros((count, 2))
        scale = np.ones((count, 2))
        if crop_geometry is not None:
            offset, scale = np.split(crop_geometry.numpy(), 2, axis=1)
        elif settings.resized_crop:
            assert ratio == 1  # a crop of a smaller square would be blurred: see crops_of_squares
            draws = uniforms(self.seed, epoch, image_ids, 4 * ATTEMPTS, RESIZED_CROP)
            boxes = crop_boxes(draws, (height, width), settings.resized_crop)
            images = enlarged(images, boxes)
            offset, scale = _lies(boxes, np.zeros(2), np.array([width, height]))
        if settings.crop_padding or settings.flip:
            padding = settings.crop_padding
            steps = uniforms(self.seed, epoch, image_ids, 2, SHIFT) * (2 * padding + 1)
            shifts = np.floor(steps).astype(np.int64) - padding
            flips = settings.flip & (uniforms(self.seed, epoch, image_ids, 1, FLIP)[:, 0] < 0.5)
            if settings.crop_padding:
                images = shifted(images, np.rint(shifts * ratio).astype(np.int64))
            if settings.flip:
                images = mirrored(images, flips)
            # a shift is in pixels of the view, which may be an enlarged part of the image
            offset = offset + scale * (2 * shifts * ratio / np.array([width, height]))
            # a mirrored view runs against the x axis of its image
            scale = scale * np.stack([np.where(flips, -1, 1), np.ones(count)], axis=-1)
        if settings.randaugment:
            images = self._randaugment(settings.randaugment, images, image_ids, epoch)
        if settings.erasing:
            images = self._erase(images, image_ids, epoch)
        moves = settings.resized_crop or settings.crop_padding or settings.flip
        if settings.geometry == "ignore" or not moves:
            return images, None
        return images, Geometry(
            offset=torch.from_numpy(offset).float().to(images.device),
            scale=torch.from_numpy(scale).float().to(images.device),
        )

    def crops(
        self, images: Iterable[Tensor], image_ids: np.ndarray, epochs: np.ndarray, size: int
    ) -> tuple[Tensor, Tensor]:
        """(crops uint8 [B, 3, size, size], their geometry) of full-size images [3, height, width],
        of any height and width: those that a call draws of the images themselves in these
        ``epochs``.

        The geometry says where each crop lies in the square that the image becomes without a crop:
        (offset x, offset y, scale x, scale y) in border coordinates, float64 [B, 4]. A crop may lie
        outside the square, which is the middle of the image.
        """
        assert self.settings.resized_crop
        draws = uniforms(self.seed, epochs, image_ids, 4 * ATTEMPTS, RESIZED_CROP)
        crops = []
        geometry = []
        for image, numbers in zip(images, draws, strict=True):
            height, width = image.shape[-2:]
            box = crop_boxes(numbers[None], (height, width), self.settings.resized_crop)
            crops.append(F.resized_crop(image, *box[0].tolist(), [size, size], antialias=True))
            start, extent = middle_square(height, width, size)
            geometry.append(np.concatenate(_lies(box, start, extent), axis=1))
        return torch.stack(crops).contiguous(), torch.from_numpy(np.concatenate(geometry))

    def crops_of_squares(
        self,
        images: Iterable[Tensor],
        image_ids: np.ndarray,
        epochs: np.ndarray,
        size: int,
        interpolation: str,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`crops`, of the crops that a call draws of the squares that these images become:
        each is cut from the image itself [C, height, width], C 1 or 3, and so has its detail."""
        assert self.settings.resized_crop
        assert self.size is not None
        draws = uniforms(self.seed, epochs, image_ids, 4 * ATTEMPTS, RESIZED_CROP)
        square = (self.size, self.size)
        boxes = crop_boxes(draws, square, self.settings.resized_crop)
        crops = []
        for image, (top, left, height, width) in zip(images, boxes.tolist(), strict=True):
            start, extent = middle_square(image.shape[1], image.shape[2], self.size)
            corners = np.array([[left, top], [left + width, top + height]])
            corners = start + corners * extent / self.size
            crops.append(cut(image, corners, size, interpolation))
        places = _lies(boxes, np.zeros(2), np.array(square))
        return torch.stack(crops), torch.from_numpy(np.concatenate(places, axis=1))

    def _randaugment(
        self,
        settings: RandAugmentSettings,
        images: Tensor,
        image_ids: Tensor | np.ndarray,
        epoch: int | np.ndarray,
    ) -> Tensor:
        draws = uniforms(self.seed, epoch, image_ids, 2 * settings.ops, RANDAUGMENT)
        names = self.settings.operations
        numbers = np.floor(draws[:, ::2] * len(names)).astype(np.int64)
        signed = np.array([name not in UNSIGNED for name in names])[numbers]
        signs = np.where(signed & (draws[:, 1::2] < 0.5), -1, 1)
        images = images.clone()  # groups of images are replaced below, and the caller keeps its own
        strength = settings.magnitude / 30
        for step in range(settings.ops):
            choices = np.stack([numbers[:, step], signs[:, step]], axis=1)  # [B, 2]
            # images with the same operation and sign go through it together
            for number, sign in np.unique(choices, axis=0).tolist():
                positions = np.flatnonzero((choices == (number, sign)).all(axis=1))
                group = torch.from_numpy(positions).to(images.device)
                images[group] = OPERATIONS[names[number]](images[group], strength, sign)
        return images

    def _erase(
        self, images: Tensor, image_ids: Tensor | np.ndarray, epoch: int | np.ndarray
    ) -> Tensor:
        draws = uniforms(self.seed, epoch, image_ids, 4 + 4 * ATTEMPTS, ERASING)
        size = (images.shape[-2], images.shape[-1])
        if self.size is not None:
            size = (self.size, self.size)
        boxes, fits = _boxes(draws[:, 4:], size, (0.02, 1 / 3), (0.3, 10 / 3))
        # a box without extent erases nothing, so that the whole batch takes one path
        boxes[~(fits & (draws[:, 0] < self.settings.erasing))] = 0
        boxes = np.rint(boxes * (images.shape[-1] / size[1])).astype(np.int64)
        colours = np.floor(draws[:, 1 : 1 + images.shape[1]] * 256).astype(np.uint8)
        rows = _within(boxes[:, 0], boxes[:, 2], images.shape[-2])  # [B, height]
        columns = _within(boxes[:, 1], boxes[:, 3], images.shape[-1])  # [B, width]
        erased = (rows[:, None, :, None] * columns[:, None, None, :]).to(images.device)
        fill = torch.from_numpy(colours).to(images.device)[:, :, None, None]
        return images * (1 - erased) + fill * erased  # 12 times as fast as torch.where on a CPU


def crop_boxes(
    draws: np.ndarray, size: tuple[int, int], settings: ResizedCropSettings
) -> np.ndarray:
    """Parts (top, left, height, width) of images of this size in pixels, int64 [B, 4], drawn as
    torchvision's RandomResizedCrop draws them, from uniform numbers [B, 4 * ATTEMPTS]."""
    height, width = size
    boxes, fits = _boxes(draws, size, settings.scale, RATIO)
    # the largest box in the middle, when no attempt fits
    low, high = RATIO
    h = height
    w = width
    if width / height < low:
        h = round(width / low)
    elif width / height > high:
        w = round(height * high)
    boxes[~fits] = (height - h) // 2, (width - w) // 2, h, w
    return boxes


def _lies(
    boxes: np.ndarray, start: np.ndarray, extent: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(offset, scale) [B, 2] of boxes [B, 4] in the border coordinates of the part of an image that
    begins at ``start`` (x, y) and has this ``extent``, all in pixels."""
    corners = boxes[:, [1, 0]]  # (left, top)
    sizes = boxes[:, [3, 2]]  # (width, height)
    offset = (2 * (corners - start) + sizes) / extent - 1  # of the box's middle
    return offset, sizes / extent


def cut(image: Tensor, corners: np.ndarray, size: int, interpolation: str) -> Tensor:
    """A part of an image uint8 [C, height, width], C 1 or 3, as a square of ``size`` pixels a side.
    Its ``corners`` [[left, top], [right, bottom]] are pixels, but need not be whole: Pillow, unlike
    torchvision, resizes such a part, with antialiasing."""
    channels, height, width = image.shape
    corners = np.clip(corners, 0, [width, height])  # they were rounded
    pixels = image.permute(1, 2, 0).numpy()
    if channels == 1:
        pixels = pixels[..., 0]
    filter = Image.Resampling[interpolation.upper()]
    resized = Image.fromarray(pixels).resize((size, size), filter, tuple(corners.flatten()))
    return torch.from_numpy(np.array(resized).reshape(size, size, channels)).permute(2, 0, 1)


def middle_square(height: int, width: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of an image that becomes a square of ``size`` pixels, when its shorter side is
    resized to ``size`` and the middle of the longer side is kept: (left, top) and (width, height)
    in pixels of the image, float64 [2] each."""
    pixels = np.array([width, height], dtype=np.float64)
    # torchvision cuts the longer side off to whole pixels, and rounds the margin
    resized = np.array([size * side // min(height, width) for side in (width, height)])
    start = np.array([round((side - size) / 2) for side in resized.tolist()])
    return start * pixels / resized, size * pixels / resized


def enlarged(images: Tensor, boxes: np.ndarray) -> Tensor:
    """The ``boxes`` [B, 4] (top, left, height, width) of uint8 images [B, C, height, width], each
    enlarged to the size of the images: bilinear, and without what lies around the box, as
    torchvision's ``resized_crop`` of each image."""
    height, width = images.shape[-2:]
    top, left, rows, columns = torch.from_numpy(boxes).to(images.device).float().unbind(1)
    y = _places(top, rows, height)[:, :, None]
    x = _places(left, columns, width)[:, None]
    grid = torch.stack(torch.broadcast_tensors(x, y), dim=-1)  # [B, height, width, 2]
    return grid_sample(images.float(), grid, align_corners=False).round_().to(torch.uint8)


def _places(start: Tensor, extent: Tensor, size: int) -> Tensor:
    """Where ``size`` pixels lie, [B, size] in border coordinates of an axis, when a box [B] from
    ``start`` is enlarged to ``size``: at its ends on its outer pixels, as nothing lies beyond."""
    steps = (torch.arange(size, device=start.device) + 0.5) / size
    inside = extent[:, None] * steps - 0.5
    inside = torch.minimum(inside.clamp_min(0), extent[:, None] - 1)
    return (2 * (start[:, None] + inside) + 1) / size - 1


def _within(start: np.ndarray, extent: np.ndarray, size: int) -> Tensor:
    """1 for the pixels of an axis that lie in a box, else 0: uint8 [B, size]."""
    pixels = np.arange(size) - start[:, None]
    return torch.from_numpy(((pixels >= 0) & (pixels < extent[:, None])).astype(np.uint8))


def shifted(images: Tensor, shifts: np.ndarray) -> Tensor:
    """Views of the same size that start at pixel ``shifts`` [B, 2] (x, y) of their image, 0
    outside it."""
    height, width = images.shape[-2:]
    margin = int(np.abs(shifts).max(initial=0))
    x, y = torch.from_numpy(shifts + margin).to(images.device).unbind(-1)
    # every part of a padded image that is as large as the image, without a copy
    parts = F.pad(images, [margin]).unfold(2, height, 1).unfold(3, width, 1)
    return parts[torch.arange(len(images), device=images.device), :, y, x]


def mirrored(images: Tensor, flips: np.ndarray) -> Tensor:
    """The images, from right to left where ``flips`` [B] says so."""
    pixels = np.arange(images.shape[-1])
    columns = torch.from_numpy(np.where(flips[:, None], pixels[::-1], pixels)).to(images.device)
    return images.gather(-1, columns[:, None, None].expand(images.shape))


def _boxes(
    draws: np.ndarray, size: tuple[int, int], area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The first box of each image that fits: (top, left, height, width) int64 [B, 4], and whether
    there is one, bool [B]; ``draws`` [B, 4 * attempts] are uniform."""
    height, width = size
    draws = draws.reshape(len(draws), -1, 4)
    areas = height * width * (area[0] + draws[..., 0] * (area[1] - area[0]))
    # by the logarithm, so that boxes twice as wide are as frequent as boxes twice as high
    ratios = np.exp(math.log(ratio[0]) + draws[..., 1] * math.log(ratio[1] / ratio[0]))
    w = np.rint(np.sqrt(areas * ratios))
    h = np.rint(np.sqrt(areas / ratios))
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    top = np.floor(draws[..., 2] * (height - h + 1))
    left = np.floor(draws[..., 3] * (width - w + 1))
    first = fits.argmax(axis=1)
    image = np.arange(len(draws))
    boxes = np.stack([top, left, h, w], axis=-1)[image, first]
    return boxes.astype(np.int64), fits[image, first]
