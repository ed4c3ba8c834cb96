"""Settings of the augmentation, free of torch so that the command line can read them at once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gaupipe.settings.sections import Count, Fraction, Positive, Rate, Section, Weight

COLOUR_OPERATIONS = (
    "Identity",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)
"""RandAugment's operations that leave every pixel where it is."""
GEOMETRIC_OPERATIONS = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
"""RandAugment's operations that stored maps cannot follow."""

Range = tuple[Rate, Rate]


class ResizedCropSettings(Section):
    """A random part of the image, enlarged to the image's size (bilinear with antialiasing)."""

    scale: Range = (0.08, 1.0)
    """Smallest and largest share of the image's area that the part has."""
    ratio: Range = (3 / 4, 4 / 3)
    """Smallest and largest ratio of width to height, before the part is enlarged."""
    full_size: bool = False
    """Take the part from the image file at its full size, as is usual for ImageNet, and not from
    the square of ``data.image_size`` pixels. Images held in memory have only the square."""

    @model_validator(mode="after")
    def _consistent(self) -> ResizedCropSettings:
        if not self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(
                "scale should be two shares of the area, the smaller first, none above 1"
            )
        if self.ratio[0] > self.ratio[1]:
            raise ValueError("ratio should be two numbers, the smaller first")
        return self


class RandAugmentSettings(Section):
    """Operations drawn at random for every image, all of the same strength (arXiv 1909.13719)."""

    ops: Positive = 2
    """Number of operations applied to each image."""
    magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0
    """Strength on torchvision's scale from 0 to 30. timm's scale goes from 0 to 10: its ``m9`` is
    27 here."""
    operations: tuple[str, ...] = COLOUR_OPERATIONS
    """Names of the operations to draw from, as torchvision's RandAugment has them."""

    @model_validator(mode="after")
    def _known(self) -> RandAugmentSettings:
        unknown = [
            name
            for name in self.operations
            if name not in (*COLOUR_OPERATIONS, *GEOMETRIC_OPERATIONS)
        ]
        if unknown or not self.operations:
            raise ValueError(
                f"unknown operation {unknown[0]!r}; known: "
                f"{', '.join((*COLOUR_OPERATIONS, *GEOMETRIC_OPERATIONS))}"
                if unknown
                else "operations is empty; null switches RandAugment off"
            )
        return self


class AugmentSettings(Section):
    """Augmentation of the training images, in the order of the settings in this section. The
    default does nothing."""

    resized_crop: ResizedCropSettings | None = None
    crop_padding: Count = 0
    """Shift the image by up to this many pixels along each axis; pixels from outside the image are
    0."""
    flip: bool = False
    """Mirror half of the images, drawn at random, from left to right."""
    randaugment: RandAugmentSettings | None = None
    erasing: Fraction = 0.0
    """Share of images that get one rectangle of a random colour over 2 to 33 % of their area."""
    mixup: Weight = 0.0
    """Mixup with shares from Beta(mixup, mixup); 0 is off. With cutmix on as well, every image
    draws one of the two. Phase A refuses it with ``phase_a.teacher: gaussian``."""
    cutmix: Weight = 0.0
    """CutMix with shares from Beta(cutmix, cutmix); 0 is off. Phase A refuses it with
    ``phase_a.teacher: gaussian``."""
    geometry: Literal["follow", "ignore"] = "follow"
    """``follow`` moves attention maps with the image: in phase A those of a teacher with Gaussian
    attention, in phase B those of the store. ``ignore`` leaves the maps where they are, as in the
    GauTransformer paper. ``ignore`` also allows RandAugment's geometric operations, which maps
    cannot follow."""

    @property
    def draws_views(self) -> bool:
        """Whether a view, before Mixup and CutMix, can be other than the image."""
        views = (self.resized_crop, self.crop_padding, self.flip, self.randaugment, self.erasing)
        return any(views)

    @model_validator(mode="after")
    def _can_be_followed(self) -> AugmentSettings:
        named = (
            [name for name in self.randaugment.operations if name in GEOMETRIC_OPERATIONS]
            if self.randaugment
            else []
        )
        if named and self.geometry == "follow":
            raise ValueError(
                f"Gaussians cannot follow RandAugment's {', '.join(named)}: take "
                f"{'it' if len(named) == 1 else 'them'} out of randaugment.operations, or set "
                "geometry to ignore to use stored maps that do not match the image"
            )
        return self
