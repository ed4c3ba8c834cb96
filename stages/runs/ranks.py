"""Checks that the ranks of a world have the same settings and data set, before a stage does
any work. A single process has nothing to compare."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.system import distributed
from gaupipe.system.errors import UserError


def check_same(settings: Settings, data: ImageData, files: Mapping[str, object]) -> None:
    """Raises UserError, on every rank, where ranks have other settings, another data set or other
    ``files``, which are named folders or digests. The digest of the data set is the one that was
    made when it was read."""
    if distributed.world_size() == 1:
        return
    mine = {**files, **flatten(settings, Scope.ANYTIME)}
    mine |= {f"log.{name}": value for name, value in settings.log}  # all ranks log a step together
    right = dict.fromkeys(files, "every process should get the same files")
    digests = {
        "training": data.sha256,
        "validation": data.val_sha256,
        "unlabelled": data.unlabelled_sha256,
    }
    for what, digest in digests.items():
        name = f"data set {data.name}, sha256 of the {what} images"
        mine[name] = digest
        right[name] = f"every machine should have the same {what} images and labels under data.root"
    (machine, expected), *others = distributed.all_gather_object((os.uname().nodename, mine))
    for number, (elsewhere, theirs) in enumerate(others, start=1):
        for name in expected | theirs:
            if theirs.get(name) != expected.get(name):
                remedy = right.get(name, "every process should get the same settings")
                raise UserError(
                    f"{name}: {theirs.get(name)!s:.40} in rank {number} (on {elsewhere}), "
                    f"{expected.get(name)!s:.40} in rank 0 (on {machine}): {remedy}"
                )
