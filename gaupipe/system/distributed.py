"""The processes of one job, as ``torchrun`` starts them, in torch's words: rank and world size.

What follows from settings, seed, epoch and image id is the same on all ranks, so nothing is agreed
on there. Ranks can differ where they read files, open or lock a run, or get a signal: these few
moments exchange something. A rank that fails anywhere ends all ranks (:class:`Watch`), and rank 0
says why. One process on its own is a world of 1, which has no process group, and in which nothing
here does anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gaupipe.system import terminal
from gaupipe.system.errors import UserError, mistake_of

if TYPE_CHECKING:
    from torch import Tensor

K = TypeVar("K")
T = TypeVar("T")

TIMEOUT = 4 * 3600
"""Seconds a rank waits for the others, which may be reading a large data set. A rank that dies is
noticed at once."""

GRACE = 1.0
"""Seconds that rank 0 has to meet the failure of another rank itself: what the ranks have in common
it says in its own words, and it removes what it has begun."""

PATIENCE = 10.0
"""Seconds that a rank which has failed waits for the others to hear of it."""


@dataclass(frozen=True)
class Launch:
    """The numbers that torchrun gives a process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The number of the process on its machine, which is also that of its GPU."""
    local_world_size: int = 1


def launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """The numbers in torchrun's variables; a world of 1 where there are none."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = [environment.get(name, "") for name in names]
    if all(map(str.isdecimal, values)) and int(values[1]) > 1:
        return Launch(*map(int, values))
    return Launch()


def rank() -> int:
    """The number of this process in its world."""
    group = _group()
    return group.get_rank() if group else 0


_alone = False


def world_size() -> int:
    """W, the number of processes in the world."""
    group = None if _alone else _group()
    return group.get_world_size() if group else 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within it the world is this process, so that one rank may do by itself what would wait for
    the others, such as a forward pass with a batch norm that they share."""
    global _alone
    _alone = True
    try:
        yield
    finally:
        _alone = False


def is_main() -> bool:
    """True if this is rank 0, which logs, downloads and writes what there is once."""
    return rank() == 0


@contextlib.contextmanager
def process_group() -> Iterator[Watch | None]:
    """torch's process group of the processes that torchrun started, for as long as it lasts, and
    the watch over its ranks; None in a world of 1."""
    here = launch()
    if here.world_size == 1:
        yield None
        return
    import torch
    import torch.distributed as group
    from torch.distributed.rendezvous import rendezvous

    backend = "gloo"  # for numbers on the CPU: decisions, counts, and models without a GPU
    if torch.cuda.is_available():
        # a rank without a GPU of its own is refused by prepare_device, which says why
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    store, number, count = next(rendezvous("env://"))
    store = group.PrefixStore(name_of_start(store, number, count), store)
    group.init_process_group(
        backend, store=store, rank=number, world_size=count, timeout=timedelta(seconds=TIMEOUT)
    )
    watch = Watch(store, number, count)
    watch.start()
    yield watch
    watch.stop()
    group.destroy_process_group()  # not after an error: other ranks may be gone


class Watch(threading.Thread):
    """Ends this process once any rank has failed; rank 0 says why.

    A rank that fails leaves its reason in torch's ``store``. The others may wait in an exchange
    that never comes, on a GPU for as long as the timeout, so they look there from a thread.
    """

    def __init__(self, store: Any, number: int, count: int) -> None:
        """``number`` is this rank's, of ``count``."""
        super().__init__(daemon=True)
        self.store = store
        self.number = number
        self.count = count
        self._stopped = threading.Event()
        self._ends = threading.Lock()
        """Held by the thread that ends the process."""

    def run(self) -> None:
        try:
            while not self.store.check(["failure"]):
                if self._stopped.wait(0.2):
                    return
            failure = self.store.get("failure")
        except Exception:  # rank 0 has gone, and the store with it: the next exchange says so
            return
        if self.number == 0:
            time.sleep(GRACE)
        self._end(failure)

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def end_all(self, line: str, code: int) -> NoReturn:
        """Ends all ranks with an exit code, because this one has failed. Rank 0 says the ``line``
        of the rank that failed first, or its own if it has failed too."""
        mine = json.dumps([self.number, line, code])
        first = mine
        with contextlib.suppress(Exception):  # rank 0 has gone
            first = self.store.compare_set("failure", "", mine)
        self._end(mine if self.number == 0 else first)

    def _end(self, failure: str | bytes) -> NoReturn:
        self._ends.acquire()  # never released: the other thread has nothing to add
        number, line, code = json.loads(failure)
        if number:
            line = f"rank {number}: {line}"
        with contextlib.suppress(Exception):
            if self.number == 0:
                say(line)
                self.store.set("said", str(code))
                self._wait_until_heard()
            else:
                try:
                    self.store.wait(["said"], timedelta(seconds=PATIENCE))
                    code = int(self.store.get("said"))
                    self.store.add("heard", 1)
                except Exception:  # rank 0 can no longer say it
                    say(line)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # sys.exit ends one thread: the main one may wait in an exchange

    def _wait_until_heard(self) -> None:
        """Rank 0 may hold the store, which the others still read."""
        until = time.monotonic() + PATIENCE
        while self.store.add("heard", 0) < self.count - 1 and time.monotonic() < until:
            time.sleep(0.02)


def say(line: str) -> None:
    """Prints the line about a failure."""
    whole = f"gaupipe: {' '.join(line.split())}"
    print(terminal.wrap(whole, sys.stderr), file=sys.stderr, flush=True)


def name_of_start(store: Any, number: int, count: int) -> str:
    """A name that the ``count`` ranks which meet at torch's ``store`` now have in common, and that
    no earlier ones had; ``number`` is this rank's.

    When torchrun starts all ranks again it keeps the store, where the addresses of the killed ones
    would be taken for those of the living. Its number of the attempt may differ between machines
    (pytorch/pytorch#135712). So rank 0 makes a name, answers every rank that reports until that
    rank confirms the name, and is not misled by the reports of ranks that are gone.
    """
    mine = os.urandom(16).hex()
    if number:
        store.set(f"reported/{number}", mine)
        start: str = store.get(f"answer/{mine}").decode()
        store.set(f"confirmed/{start}/{number}", "")
        return start

    waiting = set(range(1, count))
    while waiting:
        for other in [*waiting]:
            if store.check([f"reported/{other}"]):
                reported = store.get(f"reported/{other}").decode()
                store.set(f"answer/{reported}", mine)
            if store.check([f"confirmed/{mine}/{other}"]):
                waiting.remove(other)
        time.sleep(0.01)
    return mine


def all_gather_object(value: T) -> list[T]:
    """The ``value`` of every rank, in their order, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    _group().all_gather_object(values, value)
    return values


def all_gather_dict(entries: dict[K, T]) -> dict[K, T]:
    """The entries of all ranks, on every rank."""
    return {key: value for part in all_gather_object(entries) for key, value in part.items()}


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum of ``values``, of any shape and one dtype, over all ranks."""
    if world_size() > 1:
        values = values.clone()  # the sum is written in place
        _group().all_reduce(values)
    return values


def from_main(value: T | None) -> T:
    """The ``value`` of rank 0, on every rank: the others wait for it, whatever theirs is."""
    values: list[Any] = [value]
    if world_size() > 1:
        # on the CPU: torch could send the pickled object by way of a GPU
        _group().broadcast_object_list(values, src=0, device="cpu")
    received: T = values[0]
    return received


def wait_for_main() -> None:
    """Waits until rank 0 has come here."""
    from_main(None)


@contextlib.contextmanager
def rank_zero_first() -> Iterator[None]:
    """The block runs on rank 0 and then, where that went well, on all others: the first one may
    download or make what they find. The block must not wait for another rank itself.

    Raises UserError, on every rank, for a mistake that any rank meets, so that rank 0 removes what
    it has begun.
    """
    if world_size() == 1:
        yield
        return
    if not is_main():
        _refuse([from_main(None)])  # which comes when rank 0 is done
    mistake: str | None = None
    try:
        yield
    except Exception as error:
        mistake = mistake_of(error)
        if mistake is None:
            raise
    if is_main():
        _refuse([from_main(mistake)])
    _refuse(all_gather_object(mistake))


def _refuse(mistakes: Sequence[str | None]) -> None:
    """Raises UserError for the first of some ranks that has met a mistake."""
    for number, mistake in enumerate(mistakes):
        if mistake is not None:
            raise UserError(f"rank {number}: {mistake}" if number else mistake)


def is_lost(error: Exception) -> bool:
    """True if an error says that another rank of this world no longer answers."""
    if world_size() == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, _group().DistError) or "gloo" in str(error)


def _group() -> Any:
    """``torch.distributed`` of a process that has a process group; else None."""
    if "torch.distributed" not in sys.modules:  # a command that needs no torch does not import it
        return None
    import torch.distributed as group

    if group.is_available() and group.is_initialized():
        return group
    return None
