"""RandAugment's operations on batches of images."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchvision.transforms.v2 import functional as F

Operation = Callable[[Tensor, float, int], Tensor]


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
