"""When a training writes a checkpoint in the middle of an epoch, and how it ends there: Ctrl-C
(SIGINT), and SIGTERM, which SLURM sends some time before it kills.

A signal requests a checkpoint, and so does the clock when the last checkpoint is old. Only between
two steps of the optimizer is there anything to save, and all ranks must save at the same one. So a
request waits, and the ranks add up their requests every some batches
(:class:`gaupipe.training.update.Update`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import active_children, parent_process, resource_tracker, util
from types import FrameType
from typing import Any

import torch

from gaupipe.system import distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_ENTERED: list[Pauses] = []
"""Those that hold signals back."""


def let_through() -> None:
    """Lets a signal that is held back end this process as usual. For long work of which no
    checkpoint could save anything."""
    for pauses in _ENTERED:
        if pauses.received and threading.current_thread() is threading.main_thread():
            pauses.let_go()
            os.kill(os.getpid(), pauses.received)


class Pauses:
    """Requests for a checkpoint within an epoch: of this process, and of all ranks.

    While it is entered, the first SIGINT or SIGTERM is a request, a second SIGINT raises
    KeyboardInterrupt at once. Signals that the process ignores stay ignored.
    """

    def __init__(self, minutes: float | None = None) -> None:
        """A checkpoint is due so many ``minutes`` after the last, by the clock of rank 0; None is
        never."""
        self.seconds: float | None = None
        if minutes is not None:
            self.seconds = 60 * minutes
        self.received: int | None = None
        """The signal that this process has received."""
        self.signal: int | None = None
        """The signal that some rank has received; all ranks know it."""
        self.late = False
        """True if the last checkpoint is old by the clock of rank 0; all ranks know it."""
        self._handlers: dict[int, Any] = {}
        self.saved()

    def __enter__(self) -> Pauses:
        self.saved()
        if threading.current_thread() is threading.main_thread():  # no other may set a handler
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._receive)
        _ENTERED.append(self)
        return self

    def __exit__(self, exception: Any, *_details: Any) -> None:
        _ENTERED.remove(self)
        self.let_go()
        if exception is None and self.received and not self.signal:
            # it came after the last exchange of requests: nobody has answered it
            os.kill(os.getpid(), self.received)

    def let_go(self) -> None:
        """From now on signals do what they did before this was entered."""
        while self._handlers:
            number, handler = self._handlers.popitem()
            if handler is None:  # it was not set from Python, and Python cannot set it again
                handler = signal.SIG_DFL
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            self.let_go()
            raise KeyboardInterrupt
        if self.received is None and distributed.is_main():
            name = signal.Signals(number).name
            message = f"\ngaupipe: {name}: stops when this step is saved; Ctrl-C ends it at once\n"
            os.write(2, message.encode())  # print is not safe in a signal handler
        self.received = self.received or number

    def requests(self) -> list[float]:
        """The requests of this process, as numbers to be added up over ranks: [a checkpoint because
        of the clock, an end because of SIGINT, an end because of SIGTERM]."""
        late = False
        if self.seconds is not None and distributed.is_main():  # clocks of ranks differ
            late = time.monotonic() - self.since >= self.seconds
        return [float(late), *(float(self.received == number) for number in SIGNALS)]

    def take_sum(self, requests: Sequence[float]) -> None:
        """Takes the sum of the requests of all ranks."""
        late, *ended = requests
        self.late |= late > 0
        for number, ranks in zip(SIGNALS, ended, strict=True):
            if ranks and self.signal is None:  # ranks with different signals end by the same one
                self.signal = number

    def all_reduce(self) -> None:
        """Adds up the requests of all ranks, on the CPU: no GPU is waited for. Collective."""
        requests = self.requests()
        if distributed.world_size() > 1:
            requests = distributed.all_reduce_sum(torch.tensor(requests)).tolist()
        self.take_sum(requests)

    @property
    def due(self) -> bool:
        """True if there should be a checkpoint after this step of the optimizer."""
        return self.late or self.signal is not None

    def saved(self) -> None:
        """Starts the clock again: there is a checkpoint."""
        self.since = time.monotonic()
        self.late = False


@contextlib.contextmanager
def spared() -> Iterator[None]:
    """Processes that are started here do not get SIGTERM until they unblock it: SLURM sends it to
    all processes, and a training needs those that read its images for one more step."""
    resource_tracker.ensure_running()  # it ignores SIGTERM itself; its start would unblock it here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_readers_at_exit() -> None:
    """Before this process ends, it kills what is left of the processes that read its images.

    multiprocessing would ask them with SIGTERM and wait. But they spare the first SIGTERM, and two
    that come while it is blocked count as one: this process would wait for ever. torch has asked
    them to end before.
    """
    util.Finalize(None, _kill_children, exitpriority=0)


def _kill_children() -> None:
    for process in active_children():
        if process.daemon:
            process.kill()


def spare_worker(_number: int) -> None:
    """Called first in a process that reads images. It leaves Ctrl-C and the first SIGTERM to the
    process that trains, and ends with it. torch's own watch is on the fork server, which lives as
    long as its children."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    # only now: one that came while torch was imported is the first, and not the end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def end_with_parent() -> None:
    """For a thread: ends this process when the one that started it by multiprocessing is gone."""
    parent = parent_process()
    if parent:
        parent.join()
        os._exit(1)  # sys.exit would end this thread alone
