"""Ends a process at a moment that is counted in events, not in seconds, so that a fast machine and
a slow one meet the same ends."""

import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")


def kill_this_process(folder: Path, operations: int, pause: float) -> None:
    """SIGKILL before the given number of opened, renamed, removed or made files in ``folder``, or
    up to ``pause`` seconds after it. For a process that is started for this purpose."""
    count = itertools.count(1)
    kill = threading.Timer(pause, os.kill, (os.getpid(), signal.SIGKILL))

    def hook(event: str, arguments: tuple) -> None:
        inside = event in EVENTS and str(arguments[0]).startswith(str(folder))
        if inside and next(count) == operations:
            kill.start() if pause else kill.function(*kill.args)

    sys.addaudithook(hook)


def moment(generator: random.Random, kills: int) -> tuple[int, float]:
    """When to kill a run that was killed ``kills`` times before: later and later, so that it gets
    somewhere; in every second case not at the operation itself but a little after."""
    return generator.randint(1, 20 + 10 * kills), generator.choice([0.0, generator.uniform(0, 0.1)])


def signal_at_call(owner: Any, name: str, calls: Sequence[int], number: int) -> None:
    """This process gets a signal at the beginning of the given calls, counted from 1, of the
    function ``owner.name``. For a process that is started for this purpose."""
    function, count = getattr(owner, name), itertools.count(1)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        if next(count) in calls:
            os.kill(os.getpid(), number)
        return function(*arguments, **keywords)

    setattr(owner, name, counted)
