"""Images that are byte for byte in two splits of a data set, or in two classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gaupipe.data.images import are_among
from gaupipe.system.errors import UserError
from gaupipe.system.messages import warn_once

if TYPE_CHECKING:
    from gaupipe.data.splits import Split


def copies_in(split: Split, others: Sequence[Split]) -> np.ndarray:
    """The ids of the images of a split that are byte for byte among those of ``others``."""
    return np.flatnonzero(are_among(split.contents, [other.contents for other in others]))


def say_contradictions(name: str, split: Split) -> None:
    """Says how many images of a split, which are in files, are in several classes."""
    _, which = np.unique(split.contents, axis=0, return_inverse=True)
    pairs = np.unique(np.stack([which.reshape(-1), split.labels]), axis=1)  # [2, image and class]
    count = int((np.bincount(pairs[0]) > 1)[which].sum())
    if count:
        warn_once(
            f"data set {name}: {count} of {len(split)} training images have copies in another "
            "class, so that at most one of their labels is right: leave them in one class"
        )


def say_copies(name: str, what: str, split: Split, train: Split) -> None:
    """Says how many images of a split, which are ``what``, are training images too."""
    count = len(copies_in(split, [train]))
    if count:
        warn_once(
            f"data set {name}: {count} of {len(split)} {what} images are copies of training "
            "images, so that their accuracy says too much: --set data.leave_out_copies=true "
            "leaves these training images out"
        )


def without_held_out(train: Split, held_out: Sequence[Split]) -> np.ndarray:
    """The positions of the training images of which ``held_out`` has no copy. Raises UserError
    where a class has none of them."""
    copies = copies_in(train, held_out)
    kept = np.delete(train.positions, copies)
    lost = sorted({*train.labels.tolist()} - {*train.source.labels[kept].tolist()})
    if lost:
        names = train.source.class_names
        raise UserError(
            "data.leave_out_copies: all training images of the class "
            f"{names[lost[0]] if names else lost[0]} are copies of validation or test images"
        )
    if len(copies):
        warn_once(
            "data.leave_out_copies: left out training images that are copies of validation or "
            f"test images: {len(copies)} of {len(train)}"
        )
    return kept
