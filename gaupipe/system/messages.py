"""What the library says: messages of the logger ``gaupipe``. The command line shows them; a program
that imports gaupipe sees warnings alone, until it configures :mod:`logging`."""

from __future__ import annotations

import functools
import logging
import multiprocessing

from rich.console import Console

from gaupipe.system import distributed
from gaupipe.system.terminal import wrap

LOG = logging.getLogger("gaupipe")

WRAP_OPTIONS = ("command", "indent")
"""Keys of ``extra`` in a message: what :func:`~gaupipe.system.terminal.wrap` takes beside it."""


@functools.cache
def shared_console() -> Console:
    """One for all messages and bars: a bar that begins inside another one is drawn below it, not
    over it, and messages above both."""
    return Console(stderr=True, highlight=False, markup=False)  # a path may have brackets


class ShowOnConsole(logging.Handler):
    """Prints messages of rank 0 on stderr, above a bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        if distributed.launch().rank == 0:
            console = shared_console()
            how = {name: value for name, value in vars(record).items() if name in WRAP_OPTIONS}
            line = wrap(record.getMessage(), console.file, **how)
            console.print(line, soft_wrap=True)


def show_messages(level: int = logging.INFO) -> None:
    """Shows the messages of this process that are of this ``level`` or above."""
    LOG.setLevel(level)
    LOG.propagate = False
    if not any(isinstance(handler, ShowOnConsole) for handler in LOG.handlers):
        LOG.addHandler(ShowOnConsole())


@functools.cache
def warn_once(line: str) -> None:
    """Warns once in a process, and not in those that read images for it."""
    if multiprocessing.parent_process() is None:
        LOG.warning(line)
