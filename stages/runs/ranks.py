"""Checks that the ranks of a world have the same settings and data set, before a stage does
any work. A single process has nothing to compare."""

from __future__ import annotations

from collections.abc import Mapping

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.system import distributed


def check_same(settings: Settings, data: ImageData, files: Mapping[str, object]) -> None:
    """Raises UserError, on every rank, where ranks have other settings, another data set or other
    ``files``, which are named folders or digests. The digest of the data set is the one that was
    made when it was read."""
    same = dict(files)
    right = dict.fromkeys(files, "every process should get the same files")
    same |= flatten(settings, Scope.ANYTIME)
    same |= {f"log.{name}": value for name, value in settings.log}  # all ranks log a step together
    digests = {
        "training": data.sha256,
        "validation": data.val_sha256,
        "unlabelled": data.unlabelled_sha256,
    }
    for what, digest in digests.items():
        name = f"data set {data.name}, sha256 of the {what} images"
        same[name] = digest
        right[name] = f"every machine should have the same {what} images and labels under data.root"
    distributed.check_same(same, right, "every process should get the same settings")
