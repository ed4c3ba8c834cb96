"""Sums over the images of batches, and their means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gaupipe.data.batches import Batch

OF_LABELS = ("loss_hard", "acc")
"""Are means over the images with a label alone."""


@dataclass
class Sums:
    """What batches had in all: ``images``, of which so many had a label, and the sum of each
    value."""

    images: int = 0
    labelled: int = 0
    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, batch: Batch, means: Mapping[str, Tensor]) -> None:
        """Adds a batch of which these are the ``means``, those of labels over as many images as
        :attr:`Batch.labelled` says."""
        self.images += len(batch)
        self.labelled += len(batch) if batch.labelled_here is None else batch.labelled_here
        for name, mean in means.items():
            count = batch.labelled if name in OF_LABELS else len(batch)
            self.values[name] = self.values.get(name, 0) + mean.detach() * count

    def means(self) -> dict[str, float]:
        """The mean of each value, but for those of labels where no image had one."""
        means = {}
        for name, total in self.values.items():
            count = self.labelled if name in OF_LABELS else self.images
            if count:
                means[name] = (total / count).item()
        return means
