"""Sums over the images of batches, and their means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

OF_LABELS = ("loss_hard", "acc")
"""Are means over the images with a label alone."""


@dataclass
class Sums:
    """What batches had in all: ``images``, of which so many had a label, and the sum of each
    value."""

    images: int = 0
    labelled: float = 0.0
    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, images: int, labelled: float, means: Mapping[str, Tensor]) -> None:
        """Adds a batch of which these are the ``means``."""
        self.images += images
        self.labelled += labelled
        for name, mean in means.items():
            count = labelled if name in OF_LABELS else images
            self.values[name] = self.values.get(name, 0) + mean.detach() * count

    def means(self) -> dict[str, float]:
        """The mean of each value, but for those of labels where no image had one."""
        means = {}
        for name, total in self.values.items():
            count = self.labelled if name in OF_LABELS else self.images
            if count:
                means[name] = (total / count).item()
        return means
