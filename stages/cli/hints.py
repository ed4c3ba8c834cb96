"""What commands say beside their results: what begins, and what may follow."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gaupipe.system import distributed
from gaupipe.system.terminal import fitted
from stages.begin import importing


def say(line: str, command: str = "") -> None:
    """A line of rank 0 on stderr; a ``command`` that ends it can be copied from a terminal."""
    if distributed.launch().rank == 0:
        print(fitted(f"gaupipe: {line}", sys.stderr, command), file=sys.stderr)


@contextlib.contextmanager
def begins(what: str) -> Iterator[None]:
    """Says what a command is about to do, and then imports torch, which takes seconds."""
    say(f"{what} ...")
    with importing():
        yield


def starts(
    what: str, settings: Any, folder: Path, attention: str | None = None, model: str = ""
) -> contextlib.AbstractContextManager[None]:
    """:func:`begins`, of a job with these settings."""
    attention, data = attention or settings.model.attention, settings.data
    model = model or f"{settings.model.name}, attention {attention}"
    return begins(f"{what}: {data.root or data.name}, {model}, into {folder}")


def say_next(*commands: list[Any]) -> None:
    """Says what may follow, a line for each command."""
    before = "next:"
    for command in commands:
        say(before, shlex.join(map(str, ["gaupipe", *command])))
        before = "or:"
