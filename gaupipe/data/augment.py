"""Augmentation that says where each view lies in its image, so that stored Gaussians can move
along.

torchvision's transforms would draw from the global generator: a resumed run, another number of
ranks or a teacher on another machine would see other views, and stored maps of views would belong
to no image that a student sees. Nor do they say where a crop came from, which a map needs in order
to move with it. So all random numbers are a function of (seed, epoch, image id): not of the batch
an image is in, its place there, the process, or the device. Whole batches of uint8 images [B, C,
height, width] are augmented at once, on any device: a GPU would wait for the launches of one image
after the other. What is drawn is numpy's, on the CPU, so nothing has to be read back.

Axis letters: B images, C channels, H heads, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from gaupipe.maps.gaussians import Geometry
from gaupipe.settings.augment import AugmentSettings, RandAugmentSettings, ResizedCropSettings

# Each kind of draw has numbers of its own, so that switching one augmentation on leaves the draws
# of the others alone.
RESIZED_CROP, SHIFT, FLIP, RANDAUGMENT, ERASING, PAIRING, MIXING = range(7)

RATIO = (3 / 4, 4 / 3)
"""Smallest and largest ratio of width to height of a resized crop."""

Operation = Callable[[Tensor, float, int], Tensor]

ATTEMPTS = 10
"""Boxes drawn until one lies within the image, as in torchvision."""


def uniforms(
    seed: int, epoch: int | np.ndarray, image_ids: Tensor | np.ndarray, k: int, stream: int = 0
) -> np.ndarray:
    """k random numbers for every image, float64 [B, k] in (0, 1), a function of the arguments and
    of nothing else. ``epoch`` is one for all, or that of each image [B].

    Philox4x32-10 (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*) with the seed as
    its key and (image id, epoch, stream, number of four draws) as its counter. ``stream`` below
    2^16 tells uses apart; at most 2^18 draws each.
    """
    ids = np.asarray(image_ids, dtype=np.uint64)[:, None]
    blocks = np.arange(-(-k // 4), dtype=np.uint64)[None]
    epochs = np.asarray(epoch, dtype=np.uint64).reshape(-1, 1)
    counter = np.broadcast_arrays(
        ids & _WORD, ids >> _HALF, epochs, np.uint64(stream << 16) | blocks
    )
    words = np.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), axis=-1)
    return (words.reshape(len(ids), -1)[:, :k] + 0.5) * 2.0**-32


_WORD = np.uint64(0xFFFFFFFF)  # the lower 32 bits
_HALF = np.uint64(32)  # shifts the upper 32 bits down


def philox(counter: Sequence[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-10 of four equally shaped uint64 arrays, each holding 32 bits; returns four
    such arrays."""
    a, b, c, d = counter
    for number in range(10):
        key_a, key_b = (
            np.uint64(word + number * step & 0xFFFFFFFF)
            for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        )
        from_a = a * np.uint64(0xD2511F53)
        from_c = c * np.uint64(0xCD9E8D57)
        a = from_c >> _HALF ^ b ^ key_a
        b = from_c & _WORD
        c = from_a >> _HALF ^ d ^ key_b
        d = from_a & _WORD
    return [a, b, c, d]


class Augment:
    """The augmentation of one image at a time: everything in the settings but Mixup and CutMix
    (:func:`mix`).

    Shifts and boxes are drawn in the pixels of square images whose side is ``size``, None for that
    of the images that are augmented. Images of another size, such as a teacher's, get the same
    views: what is drawn is scaled, and rounded to pixels.
    """

    def __init__(self, settings: AugmentSettings, seed: int, size: int | None = None) -> None:
        self.settings = settings
        self.seed = seed
        self.size = size

    def __call__(
        self,
        images: Tensor,
        image_ids: Tensor,
        epoch: int | np.ndarray,
        crop_geometry: Tensor | None = None,
    ) -> tuple[Tensor, Geometry | None]:
        """(views, where they lie) of a batch.

        images      uint8 [B, C, height, width], before normalisation, C 1 or 3; not changed
        image_ids   int64 [B]
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
        image_ids: Tensor,
        epoch: int | np.ndarray,
    ) -> Tensor:
        draws = uniforms(self.seed, epoch, image_ids, 2 * settings.ops, RANDAUGMENT)
        names = self.settings.operations
        numbers = np.floor(draws[:, ::2] * len(names)).astype(np.int64)
        signed = np.array([name not in UNSIGNED for name in names])[numbers]
        signs = np.where(signed & (draws[:, 1::2] < 0.5), -1, 1)
        images = images.clone()
        strength = settings.magnitude / 30
        for step in range(settings.ops):
            choices = np.stack([numbers[:, step], signs[:, step]], axis=1)  # [B, 2]
            # images with the same operation and sign go through it together
            for number, sign in np.unique(choices, axis=0).tolist():
                positions = np.flatnonzero((choices == (number, sign)).all(axis=1))
                group = torch.from_numpy(positions).to(images.device)
                images[group] = OPERATIONS[names[number]](images[group], strength, sign)
        return images

    def _erase(self, images: Tensor, image_ids: Tensor, epoch: int | np.ndarray) -> Tensor:
        draws = uniforms(self.seed, epoch, image_ids, 4 + 4 * ATTEMPTS, ERASING)
        size = (images.shape[-2], images.shape[-1])
        if self.size is not None:
            size = (self.size, self.size)
        boxes, fits = _boxes(draws[:, 4:], size, (0.02, 1 / 3), (0.3, 10 / 3))
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
    resized = np.array([size * side // min(height, width) for side in (width, height)])
    start = np.array([round((side - size) / 2) for side in resized.tolist()])
    return start * pixels / resized, size * pixels / resized


def enlarged(images: Tensor, boxes: np.ndarray) -> Tensor:
    """The ``boxes`` [B, 4] (top, left, height, width) of uint8 images [B, C, height, width], each
    enlarged to the size of the images: bilinear, bit by bit torchvision's ``resized_crop`` of each
    image on a CPU, which calculates in whole numbers and rounds after each axis, columns first."""
    count, channels, height, width = images.shape
    top, left, rows, columns = boxes.astype(np.float64).T
    pixels = images.float()  # exact, like the sums: none needs more than 24 binary digits
    first, second, shares = _two_pixels(left, columns, width, images.device)
    first, second = (
        pixels.gather(-1, place[:, None, None].expand(count, channels, height, width))
        for place in (first, second)
    )
    pixels = _weighted(first, second, shares[:, None, None])
    first, second, shares = _two_pixels(top, rows, height, images.device)
    image = torch.arange(count, device=images.device)[:, None, None]
    channel = torch.arange(channels, device=images.device)[:, None]
    first, second = (pixels[image, channel, place[:, None]] for place in (first, second))
    return _weighted(first, second, shares[:, None, :, None]).to(torch.uint8)


def _two_pixels(
    start: np.ndarray, extent: np.ndarray, size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The pixels that lie around each of ``size`` points of an axis, int64 [B, size] each, when a
    box [B] from ``start`` is enlarged to ``size``, and their shares, float32 [B, size, 2]."""
    point = (extent / size)[:, None] * (np.arange(size) + 0.5) - 0.5
    pixels = np.floor(point)[..., None] + [0, 1]  # [B, size, 2]
    shares = np.maximum(1 - np.abs(pixels - point[..., None]), 0)
    last = extent[:, None, None] - 1
    shares[(pixels < 0) | (pixels > last)] = 0
    shares /= shares.sum(-1, keepdims=True)
    # torch rounds shares to as many binary digits as fit into 16 bits
    digits = np.exp2(np.floor(np.log2((2**15 - 0.5) / shares.max((1, 2), keepdims=True))))
    shares = np.floor(shares * digits + 0.5) / digits
    pixels = np.clip(pixels, 0, last) + start[:, None, None]
    first, second = torch.from_numpy(pixels.astype(np.int64)).to(device).unbind(-1)
    return first, second, torch.from_numpy(shares).float().to(device)


def _weighted(first: Tensor, second: Tensor, shares: Tensor) -> Tensor:
    """The sum of pixels with shares [..., 2], rounded, in the place of ``first``."""
    share, other = shares.unbind(-1)
    return first.mul_(share).addcmul_(second, other).add_(0.5).floor_()


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


def _enhanced(adjust: Callable[[Tensor, float], Tensor]) -> Operation:
    return lambda images, strength, sign: adjust(images, 1 + sign * 0.9 * strength)


def _affine(images: Tensor, **changes: Any) -> Tensor:
    unchanged = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    return F.affine(images, **(unchanged | changes))


def _sheared(images: Tensor, x: float, y: float) -> Tensor:
    angles = [math.degrees(math.atan(0.3 * slope)) for slope in (x, y)]
    return _affine(images, shear=angles, center=[0, 0])


def _shifted(images: Tensor, x: float, y: float) -> Tensor:
    height, width = images.shape[-2:]
    pixels = [int(x * 150 / 331 * width), int(y * 150 / 331 * height)]
    return _affine(images, translate=pixels)


UNSIGNED = ("Identity", "Posterize", "Solarize", "AutoContrast", "Equalize")
"""Operations that have no use for a sign."""

OPERATIONS: dict[str, Operation] = {
    "Identity": lambda images, strength, sign: images,
    "Brightness": _enhanced(F.adjust_brightness),
    "Color": _enhanced(F.adjust_saturation),
    "Contrast": _enhanced(F.adjust_contrast),
    "Sharpness": _enhanced(F.adjust_sharpness),
    "Posterize": lambda images, strength, sign: F.posterize(images, round(8 - 4 * strength)),
    "Solarize": lambda images, strength, sign: F.solarize(images, 255 * (1 - strength)),
    "AutoContrast": lambda images, strength, sign: F.autocontrast(images),
    "Equalize": lambda images, strength, sign: F.equalize(images),
    "Rotate": lambda images, strength, sign: F.rotate(images, sign * 30 * strength),
    "ShearX": lambda images, strength, sign: _sheared(images, sign * strength, 0),
    "ShearY": lambda images, strength, sign: _sheared(images, 0, sign * strength),
    "TranslateX": lambda images, strength, sign: _shifted(images, sign * strength, 0),
    "TranslateY": lambda images, strength, sign: _shifted(images, 0, sign * strength),
}
"""Operation of uint8 images [B, C, height, width] with a strength from 0 to 1 and a sign.
Strengths as in torchvision's RandAugment, whose magnitude is 30 times ours."""


@dataclass
class Mix:
    """The images of a batch that were mixed, and the boxes. On the CPU.

    partner   int64 [B]: position in the batch of the image mixed in
    blend     float64 [B]: an image's own share outside the box; 1 for CutMix
    box       float64 [B, 4]: (left, top, right, bottom) of the part taken from the partner
              alone, as fractions of width and height; empty for Mixup
    """

    partner: Tensor
    blend: Tensor
    box: Tensor

    @property
    def weight(self) -> Tensor:
        """An image's own share in its target, float32 [B]: by blend for Mixup, by area for
        CutMix."""
        return self.own_share((1, 1))[:, 0]

    def own_share(self, grid: tuple[int, int]) -> Tensor:
        """An image's own share in each cell of a grid, by area: float32 [B, T], row-major."""
        h, w = grid
        covered_x = self._covered(0, w)
        covered_y = self._covered(1, h)
        covered = covered_y.unsqueeze(-1) * covered_x.unsqueeze(-2)  # [B, h, w]
        return (self.blend[:, None] * (1 - covered.flatten(1))).float()

    def blended(self, values: Tensor, share: Tensor) -> Tensor:
        """share * an image's own values + (1 - share) * its partner's."""
        return torch.lerp(values[self.partner.to(values.device)], values, share.to(values))

    def _covered(self, axis: int, n: int) -> Tensor:
        """Share [B, n] of each of the n cells of an axis that the box covers."""
        first = self.box[:, axis, None] * n
        last = self.box[:, axis + 2, None] * n
        cells = torch.arange(n, dtype=self.box.dtype)
        return (torch.minimum(last, cells + 1) - torch.maximum(first, cells)).clamp(0, 1)


def mix(
    images: Tensor,
    image_ids: Tensor,
    seed: int,
    epoch: int,
    settings: AugmentSettings,
    parts: Sequence[int] = (),
) -> tuple[Tensor, Mix | None]:
    """Mixup and CutMix of a batch: (mixed images, what was mixed), or the images and None when both
    are off.

    images      floating point [B, C, height, width], normalised or not: mixing is linear
    parts       sizes of the parts of the batch that are mixed each among themselves; all are one
                part by default

    The images of a batch are put in an order drawn from (seed, epoch, image id), and each is mixed
    with the next in it: partners depend on which images are in the batch, not on their places, and
    none is its own unless it is alone. Mixup (arXiv 1710.09412) is share * own + (1 - share) *
    partner; CutMix (arXiv 1905.04899) puts a box of the partner over the image, of the drawn area,
    its centre anywhere and the part outside cut off; its share is the area that stays.
    """
    if not (settings.mixup or settings.cutmix):
        return images, None
    pairing = uniforms(seed, epoch, image_ids, 1, PAIRING)[:, 0]
    partner = np.empty(len(image_ids), dtype=np.int64)
    for part in np.split(np.arange(len(image_ids)), np.cumsum(parts)[:-1].astype(np.int64)):
        order = part[np.lexsort((np.asarray(image_ids)[part], pairing[part]))]
        partner[order] = np.roll(order, -1)
    draws = uniforms(seed, epoch, image_ids, 4, MIXING)
    if settings.mixup and settings.cutmix:
        cut = draws[:, 0] < 0.5
    else:
        cut = np.full(len(draws), bool(settings.cutmix))
    share = np.where(cut, _beta(draws[:, 1], settings.cutmix), _beta(draws[:, 1], settings.mixup))
    height, width = images.shape[-2:]
    boxes = _cutmix_boxes(share, draws[:, 2:], (height, width))
    mixed = Mix(
        torch.from_numpy(partner),
        torch.from_numpy(np.where(cut, 1.0, share)),
        torch.from_numpy(np.where(cut[:, None], boxes, 0.0)),
    )
    share_of_pixels = mixed.own_share((height, width)).view(-1, 1, height, width)
    return mixed.blended(images, share_of_pixels), mixed


def _beta(draws: np.ndarray, alpha: float) -> np.ndarray:
    """Uniform draws turned into draws from Beta(alpha, alpha)."""
    from scipy.special import betaincinv

    if not alpha:  # nobody reads them
        return draws
    return betaincinv(alpha, alpha, draws)


def _cutmix_boxes(share: np.ndarray, centres: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(left, top, right, bottom) [B, 4] over about 1 - share of the image, as fractions."""
    pixels = np.array(size[::-1])
    extent = np.floor(pixels * np.sqrt(1 - share)[:, None])
    start = np.floor(centres * pixels) - extent // 2
    corners = np.clip([start, start + extent], 0, pixels) / pixels
    return np.concatenate(list(corners), axis=-1)


def mixed_map(maps: Tensor, mixed: Mix | None, grid: tuple[int, int]) -> Tensor:
    """Attention maps [B, H, T, T] that a mixed batch should show, from those of its images, each
    moved with its own view.

    The attention of a query is the mean of that in its two sources, weighted by the share of the
    query's area that each source has: one share for all queries with Mixup; with CutMix the
    partner's attention inside the box, the image's outside, and the mean of both in tokens that the
    box cuts. Keys are neither weighted nor renormalised: a query keeps looking where its source
    looked, also where the mixed image now shows the other one. So it still sums to 1.
    """
    if mixed is None:
        return maps
    return mixed.blended(maps, mixed.own_share(grid)[:, None, :, None])


def mixed_targets(probabilities: Tensor, mixed: Mix | None) -> Tensor:
    """Probabilities of classes [B, C] for a mixed batch: one-hot labels, or the teacher's
    softmax (never its logits)."""
    if mixed is None:
        return probabilities
    return mixed.blended(probabilities, mixed.weight[:, None])
