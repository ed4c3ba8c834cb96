"""What a folder of images is like: how many images of which classes, and how large they are."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from gaupipe.data.decoding import identify, refusing
from gaupipe.data.folder import LeftOut, find_classes, layout, training_classes

SAMPLE = 200
"""Images whose headers are read."""

GREY_MODES = ("1", "L", "LA", "I", "F")
"""Pillow's modes without colour; those of 16 bits begin with ``I``."""


@dataclass(frozen=True)
class FolderFacts:
    """What :mod:`stages.runs.choices` looks at."""

    counts: dict[str, int]
    """Training images of each class."""
    width: int
    """Median over the sampled training images, in pixels, as ``height``."""
    height: int
    grey: bool = False
    """Whether all sampled images are stored without colour."""
    val: int | None = None
    """Images in a folder of their own for validation; None where validation images are a part of
    the training images."""
    test: int | None = None
    """Images in a folder of their own for the test; None where there is none."""

    @property
    def images(self) -> int:
        """Training images, with those of which validation images are a part."""
        return sum(self.counts.values())

    @property
    def shorter(self) -> int:
        """The median image's shorter side in pixels."""
        return min(self.width, self.height)

    def __str__(self) -> str:
        held_out = [
            f"{count:,} {split} images"
            for split, count in (("validation", self.val), ("test", self.test))
            if count is not None
        ]
        most, least = (pick(self.counts, key=self.counts.__getitem__) for pick in (max, min))
        classes = f"{self.images:,} training images of {len(self.counts)} classes"
        if self.counts[most] > self.counts[least]:
            classes += f" ({self.counts[least]:,} of {least} to {self.counts[most]:,} of {most})"
        pixels = f"{self.width} x {self.height} pixels" + (", grey" if self.grey else "")
        parts = [classes, *(held_out or ["no test images"]), pixels]
        return ", ".join(parts)


def facts_of(root: Path) -> FolderFacts:
    """Looks at a folder. No pixels are read. Raises UserError for a folder that cannot be meant,
    and for a sampled file that is no image."""
    left_out: LeftOut = []  # what is left out is said when the images are read
    places = layout(root)
    classes = training_classes(places.train, left_out)
    names = [name for images in classes.values() for name in images]
    sampled = [names[i * len(names) // SAMPLE] for i in range(SAMPLE)]
    headers = [_header(places.train / name) for name in dict.fromkeys(sampled)]

    def count(folder: Path | None) -> int | None:
        if folder is None:
            return None
        return sum(len(images) for images in find_classes(folder, left_out).values())

    return FolderFacts(
        counts={name: len(images) for name, images in classes.items()},
        width=round(statistics.median(width for (width, _), _ in headers)),
        height=round(statistics.median(height for (_, height), _ in headers)),
        grey=all(mode in GREY_MODES or mode.startswith("I;") for _, mode in headers),
        val=count(places.val),
        test=count(places.test),
    )


def _header(path: Path) -> tuple[tuple[int, int], str]:
    """((width, height), Pillow's mode) of an image file."""
    with refusing(str(path)), open(path, "rb") as file, identify(file, str(path)) as image:
        return image.size, image.mode
