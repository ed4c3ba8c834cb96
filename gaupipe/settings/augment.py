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


class ResizedCropSettings(Section):
    """A random part of the image, enlarged to the image's size (bilinear with antialiasing). The
    part is 3/4 to 4/3 times as wide as high."""

    scale: tuple[Rate, Rate] = (0.08, 1.0)
    """Smallest and largest share of the image's area that the part has."""
    full_size: bool = False
    """Take the part from the image file at its full size, as is usual for ImageNet, and not from
    the square of ``data.image_size`` pixels. Images held in memory have only the square."""

    @model_validator(mode="after")
    def _ascending(self) -> ResizedCropSettings:
        if not self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(
                "scale should be two shares of the area, the smaller first, none above 1"
            )
        return self


class RandAugmentSettings(Section):
    """Operations drawn at random for every image, all of the same strength (arXiv 1909.13719):
    those of torchvision's RandAugment. With ``geometry: follow`` the operations that move pixels
    are not among them."""

    ops: Annotated[Positive, Field(le=100)] = 2
    """Number of operations applied to each image."""
    magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0
    """Strength on torchvision's scale from 0 to 30. timm's scale goes from 0 to 10: its ``m9`` is
    27 here."""


class AugmentSettings(Section):
    """Augmentation of the training images, in the order of the settings in this section. The
    default does nothing. Phase B augments, and so does plain training; phase A does if
    ``phase_a.augment`` is true."""

    resized_crop: ResizedCropSettings | None = None
    crop_padding: Annotated[Count, Field(le=1024)] = 0
    """Shift the image by up to this many pixels along each axis, and larger images, a teacher's, by
    as much of them; pixels from outside the image are 0."""
    flip: bool = False
    """Mirror half of the images, drawn at random, from left to right."""
    randaugment: RandAugmentSettings | None = None
    erasing: Fraction = 0.0
    """Share of images that get one rectangle of a random colour over 2 to 33 % of their area."""
    mixup: Weight = 0.0
    """Mixup with shares from Beta(mixup, mixup); 0 is off. With cutmix on as well, every image
    draws one of the two. Phase A with ``phase_a.teacher: gaussian`` mixes no images."""
    cutmix: Weight = 0.0
    """CutMix with shares from Beta(cutmix, cutmix); 0 is off. Phase A with ``phase_a.teacher:
    gaussian`` mixes no images."""
    geometry: Literal["follow", "ignore"] = "follow"
    """``follow`` moves attention maps with the image: in phase A those of a teacher with Gaussian
    attention, in phase B those of the store. ``ignore`` leaves the maps where they are, as we read
    the GauTransformer paper, which flips and crops and names no motion of maps. With ``ignore``
    RandAugment also rotates, shears and translates, which maps cannot follow."""

    @property
    def draws_views(self) -> bool:
        """True where a view, before Mixup and CutMix, can be other than the image."""
        views = (self.resized_crop, self.crop_padding, self.flip, self.randaugment, self.erasing)
        return any(views)

    @property
    def full_size(self) -> bool:
        """True where crops are parts of image files at their full size."""
        return self.resized_crop is not None and self.resized_crop.full_size

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the operations that RandAugment draws from."""
        moving = GEOMETRIC_OPERATIONS if self.geometry == "ignore" else ()
        return (*COLOUR_OPERATIONS, *moving)
