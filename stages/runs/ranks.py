"""Checks that the ranks of a world have the same settings and data set, before a stage does
any work. A single process has nothing to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.system import distributed


class Job(Protocol):
    """A training, or a teacher, with the settings and the data that all ranks should share."""

    @property
    def settings(self) -> Settings: ...

    @property
    def data(self) -> ImageData: ...


R = TypeVar("R", bound=Job)


def resolve(request: Callable[[], R], place: object) -> R:
    """A stage's request, which ``request`` resolves on every rank, with the same ``settings`` and
    ``data``; the stage writes into its ``place``, a folder. Raises UserError, on every rank, where
    any refuses it."""
    resolved = distributed.main_first(request)
    check_same(resolved.settings, resolved.data, {"run": place})
    return resolved


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
