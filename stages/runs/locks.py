"""Locks by which one process, or one world of processes, at a time works in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from gaupipe.system import distributed
from gaupipe.system.errors import UserError


@contextlib.contextmanager
def locked(folder: Path, what: str, shared: bool = False) -> Iterator[None]:
    """:func:`lock_of_process` of rank 0, for all ranks: none goes on before rank 0 has the lock, or
    leaves before rank 0 does."""
    with contextlib.ExitStack() as held:
        if distributed.is_main():
            held.enter_context(lock_of_process(folder, what, shared))
        distributed.wait_for_main()
        yield
        distributed.wait_for_main()


@contextlib.contextmanager
def lock_of_process(folder: Path, what: str, shared: bool = False) -> Iterator[None]:
    """Holds the file ``folder``/lock, which is made with the folder where it is missing; the
    operating system lets go of it when the process ends, however it ends. The file's time is when
    the folder was last worked on.

    Raises UserError while another process holds it, unless both are ``shared``. ``what`` is the
    folder's role in the message.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            process = "another process"
            pid = file.read().strip()
            if pid:
                process += f" (pid {pid})"
            raise UserError(
                f"{folder}: {process} is using this {what}: wait for it to end, or choose another "
                f"{what}"
            ) from None
        before = os.fstat(file.fileno())
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        except ValueError:  # a mistake was refused: nothing was worked on
            os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
            raise
