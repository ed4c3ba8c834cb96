"""Checks that the ranks of a world have the same folder, settings and data set, before a stage does
any work. A single process has nothing to compare."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Scope
from gaupipe.system import distributed
from stages.runs.directory import TOKEN

R = TypeVar("R")

VISIBLE_WITHIN = 60.0
"""Seconds after which a file is on no disk that this machine sees. A network file system may go on
for as long with what it knows of a folder (NFS: ``acdirmax``)."""


def check_same(settings: Settings, data: ImageData) -> None:
    """Raises ErrorOnAllRanks, on every rank, where ranks have other settings or another data set.
    The digest is the one that was made when the data set was read."""
    same = flatten(settings, Scope.MACHINE)
    distributed.check_same(same, "every process should get the same settings")
    for what, digest in (("training", data.sha256), ("validation", data.val_sha256)):
        distributed.check_same(
            {f"data set {data.name}, sha256 of the {what} images": digest},
            f"every machine should have the same {what} images and labels under data.root",
        )


def check_shared(folder: Path) -> None:
    """Raises ErrorOnAllRanks, on every rank, where ranks do not see the same ``folder``, which need
    not be there yet. Leaves nothing behind."""
    if distributed.world_size() == 1:
        return
    with contextlib.ExitStack() as held:
        made = distributed.on_main(lambda: held.enter_context(token_near(folder)))
        token = distributed.broadcast(made)
        everyone = distributed.all_gather_object((socket.gethostname(), sees(folder, token)))
    machine = everyone[0][0]
    for number, (elsewhere, seen) in enumerate(everyone):
        if not seen:
            raise distributed.ErrorOnAllRanks(
                f"{folder}: rank {number} (on {elsewhere}) does not see what rank 0 (on {machine}) "
                "writes there: name a folder on a disk that all processes share"
            )


def resolve(folder: Path, request: Callable[[], R]) -> R:
    """A stage's request, resolved by ``request`` on every rank: with the same ``settings`` and
    ``data``, and a ``folder`` that all ranks see. Raises ErrorOnAllRanks, on every rank, where any
    refuses it."""
    check_shared(folder)
    resolved: Any = distributed.main_first(request)
    check_same(resolved.settings, resolved.data)
    return resolved


Token = tuple[str, tuple[str, ...]]
"""The name of a file, and the path from its folder to the folder in question."""


@contextlib.contextmanager
def token_near(folder: Path) -> Iterator[Token]:
    """Makes an empty file in ``folder`` or, where that is not there yet, in the nearest folder
    above it that is, and removes it in the end."""
    parent = folder.absolute()
    while not parent.is_dir():
        parent = parent.parent
    descriptor, path = tempfile.mkstemp(prefix=TOKEN, dir=parent)
    os.close(descriptor)
    try:
        yield os.path.basename(path), folder.absolute().relative_to(parent).parts
    finally:
        os.unlink(path)


def sees(folder: Path, token: Token) -> bool:
    """True if this process finds the file of :func:`token_near`."""
    name, below = token
    path = folder.absolute()
    above = len(path.parts) - len(below)
    if path.parts[above:] != below:
        return False
    file, deadline = Path(*path.parts[:above], name), time.monotonic() + VISIBLE_WITHIN
    while not os.path.exists(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
