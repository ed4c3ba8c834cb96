"""Processes of their own for tests: forked from one that has imported torch, and killed at a moment
that is counted in file operations, not in seconds, so that a fast machine and a slow one meet the
same kills."""

import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from store.files import Files

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "stages.run",
        "stages.evaluate",
        "sklearn.datasets",
        "sklearn.model_selection",
        "torch.nn.parallel",
        "torch._dynamo",
    ]
)

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")


def exit_code(work, *arguments) -> int:
    """Of a process that calls ``work``, a function of a module; minus its signal if it is
    killed."""
    process = FORKS.Process(target=work, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def kill_this_process(folder: Path, operations: int, pause: float) -> None:
    """Before the given number of opened, renamed, removed or made files in ``folder``, or up to
    ``pause`` seconds after it. For a process that is started for this purpose."""
    count = itertools.count(1)
    kill = threading.Timer(pause, os.kill, (os.getpid(), signal.SIGKILL))

    def hook(event: str, arguments: tuple) -> None:
        inside = event in EVENTS and str(arguments[0]).startswith(str(folder))
        if inside and next(count) == operations:
            kill.start() if pause else kill.function(*kill.args)

    sys.addaudithook(hook)


def kill_in_write(number: int) -> None:
    """Kills this process in the midst of that write to a store, 0 being the first."""
    write_all, begun = Files.write_all, itertools.count()

    def write_or_die(files: Files, contents: dict[str, bytes]) -> None:
        if next(begun) == number:
            _under_way = [files._kvstore.write(key, data) for key, data in contents.items()]
            os.kill(os.getpid(), signal.SIGKILL)
        write_all(files, contents)

    Files.write_all = write_or_die


def moment(generator: random.Random, kills: int) -> tuple[int, float]:
    """When to kill a run that was killed ``kills`` times before: later and later, so that it gets
    somewhere; in every second case not at the operation itself but a little after."""
    return generator.randint(1, 20 + 20 * kills), generator.choice([0.0, generator.uniform(0, 0.1)])


def signal_at_call(owner: Any, name: str, calls: Sequence[int], number: int) -> None:
    """This process gets a signal at the beginning of the given calls, counted from 1, of the
    function ``owner.name``. For a process that is started for this purpose."""
    function, count = getattr(owner, name), itertools.count(1)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        if next(count) in calls:
            os.kill(os.getpid(), number)
        return function(*arguments, **keywords)

    setattr(owner, name, counted)
