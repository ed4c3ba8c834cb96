"""Checks that the ranks of a world have the same settings and data set, before a stage does
any work. A single process has nothing to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.system import distributed

R = TypeVar("R")


def check_same(settings: Settings, data: ImageData) -> None:
    """Raises ErrorOnAllRanks, on every rank, where ranks have other settings or another data set.
    The digest is the one that was made when the data set was read."""
    same = flatten(settings, Scope.ANYTIME)
    same |= {f"log.{name}": value for name, value in settings.log}  # all ranks log a step together
    distributed.check_same(same, "every process should get the same settings")
    for what, digest in (("training", data.sha256), ("validation", data.val_sha256)):
        distributed.check_same(
            {f"data set {data.name}, sha256 of the {what} images": digest},
            f"every machine should have the same {what} images and labels under data.root",
        )


def resolve(request: Callable[[], R]) -> R:
    """A stage's request, resolved by ``request`` on every rank, with the same ``settings`` and
    ``data``. Raises ErrorOnAllRanks, on every rank, where any refuses it."""
    resolved: Any = distributed.main_first(request)
    check_same(resolved.settings, resolved.data)
    return resolved
