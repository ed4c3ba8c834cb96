"""Processes that are killed at a moment which is counted, not timed: before an operation on files,
at a byte of a file, in a write of a store, or at a call of a function. So a fast machine and a slow
one meet the same deaths, and no death comes after the last byte.

A test that kills names a moment, starts its work with ``exit_code`` or ``forked`` and looks at what
is left; ``until_it_ends`` does so again and again at drawn moments, ``each_operation`` at all of
them in turn.
"""

import itertools
import multiprocessing
import os
import pkgutil
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store.files import Files

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "stages.run",
        "stages.evaluate",
        "sklearn.datasets",
        "torch.nn.parallel",
        "torch._dynamo",
    ]
)

KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")


@dataclass(frozen=True)
class AtFile:
    """Before an operation, counted from 1, that opens, renames, removes or makes something in a
    folder. With ``byte`` at that byte of the first file that is longer, from that operation on."""

    folder: Path
    operation: int = 1
    byte: int | None = None

    def arm(self) -> None:
        count = itertools.count(1)

        def hook(event: str, arguments: tuple) -> None:
            inside = event in EVENTS and str(arguments[0]).startswith(str(self.folder))
            if inside and next(count) == self.operation:
                self.die()

        sys.addaudithook(hook)

    def die(self) -> None:
        if self.byte is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:  # the kernel writes up to the byte and then ends the process, which Python ignores
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.byte, self.byte))


@dataclass(frozen=True)
class InWrite:
    """In the midst of a write to a store, 0 being the first."""

    number: int

    def arm(self) -> None:
        write_all, begun = Files.write_all, itertools.count()

        def write_or_die(files: Files, contents: dict[str, bytes], *seen: Any) -> bool:
            if next(begun) == self.number:
                _under_way = [files._kvstore.write(key, data) for key, data in contents.items()]
                os.kill(os.getpid(), signal.SIGKILL)
            return write_all(files, contents, *seen)

        Files.write_all = write_or_die


@dataclass(frozen=True)
class AtCall:
    """At the beginning of the given calls, counted from 1, of a function such as "os:pwrite"; by a
    signal that need not kill."""

    function: str
    calls: tuple[int, ...]
    number: int = signal.SIGKILL

    def arm(self) -> None:
        module, _, path = self.function.partition(":")
        owner, _, name = path.rpartition(".")
        holder = pkgutil.resolve_name(f"{module}:{owner}")
        function, count = getattr(holder, name), itertools.count(1)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            if next(count) in self.calls:
                os.kill(os.getpid(), self.number)
            return function(*arguments, **keywords)

        setattr(holder, name, counted)


Moment = AtFile | InWrite | AtCall


def _work(work: Callable, arguments: tuple, kill: Moment | None) -> None:
    # the fork server blocks SIGTERM if the first to start it was a training with readers of images
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if kill:
        kill.arm()
    work(*arguments)


def exit_code(work: Callable, *arguments: Any, kill: Moment | None = None) -> int:
    """Of a process of its own that calls ``work``, a function of a module; minus its signal if it
    is killed."""
    process = FORKS.Process(target=_work, args=(work, arguments, kill))
    process.start()
    process.join()
    return process.exitcode


def forked(work: Callable[[], Any], kill: Moment) -> int:
    """As :func:`exit_code` for work that trains nothing, any function: a fork of this process."""
    child = os.fork()
    if child == 0:
        try:
            _work(work, (), kill)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, *KILLED), f"ended with {code}, neither whole nor killed"
    return code


def each_operation(folder: Path, *byte: int, most: int = 100) -> Iterator[AtFile]:
    """At given bytes of the first file that is longer, then before the first operation in a folder,
    the second, ...: the loop ends with the first work that is not killed any more."""
    for at in byte:
        yield AtFile(folder, byte=at)
    for operation in range(1, most + 1):
        yield AtFile(folder, operation)
    raise AssertionError(f"killed {most} times, and no end")


def until_it_ends(attempt: Callable[[AtFile], int], folder: Path, seed: Any) -> None:
    """Calls ``attempt``, which gives an exit code, until it is no longer killed: later and later,
    so that it gets somewhere, in every second case in the bytes that follow the operation."""
    draw = random.Random(seed)
    for kills in itertools.count():
        byte = draw.choice([None, draw.randrange(20_000)])
        code = attempt(AtFile(folder, draw.randint(1, 20 + 20 * kills), byte))
        if code == 0:
            break
        assert code in KILLED, f"ended with {code} after {kills} kills"
        assert kills < 40, "no progress between kills"
    assert kills >= 4, f"killed {kills} times only"
