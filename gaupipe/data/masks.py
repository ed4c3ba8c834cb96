"""Images that are none of their own: a mask beside each image of a data set for segmentation."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from gaupipe.system.errors import UserError

MASK = re.compile(
    r"(.+)[._-](masks?|seg|segmentation|gt|labels?|annotations?|depth|trimap)([._-]?\d+)?",
    re.IGNORECASE,
)
"""A name without its suffix, in which the image that it belongs to comes first."""


def check_no_masks(place: object, names: Sequence[str]) -> None:
    """Raises UserError where some of the ``names`` of images are those of masks of others."""
    stems = {os.path.splitext(name)[0] for name in names}
    masks = []
    for name in names:
        match = MASK.fullmatch(os.path.splitext(name)[0])
        if match and match[1] in stems:
            masks.append(name)
    if masks:
        raise UserError(
            f"{place}: {masks[0]} looks like a mask of the image of that name, as {len(masks)} of "
            f"{len(names)} images do: take the masks out"
        )
