"""The processes of one job, as ``torchrun`` starts them, in torch's words: rank and world size.

:func:`on_main` and :func:`main_first` let a mistake that one rank meets end every rank. One process
on its own is a world of 1, which has no process group, and in which nothing here does anything.

The function that :func:`on_main` or :func:`main_first` gets must not wait for another rank itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gaupipe.system.errors import UserError, mistake_of

if TYPE_CHECKING:
    from torch import Tensor, nn

K = TypeVar("K")
T = TypeVar("T")

TIMEOUT = 4 * 3600
"""Seconds a rank waits for the others, which may be reading a large data set. A rank that dies is
noticed at once."""


class ErrorOnAllRanks(UserError):
    """A mistake that every rank of the world has been told of: rank 0 says it for all."""


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
    return _group().get_rank() if _is_initialized() else 0


def world_size() -> int:
    """W, the number of processes in the world."""
    return _group().get_world_size() if _is_initialized() else 1


def is_main() -> bool:
    """True if this is rank 0, which logs, downloads and writes what there is once."""
    return rank() == 0


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """torch's process group of the processes that torchrun started, for as long as it lasts."""
    here = launch()
    if here.world_size == 1:
        yield
        return
    from datetime import timedelta

    import torch
    import torch.distributed as group
    from torch.distributed.rendezvous import rendezvous

    backend = "gloo"  # for numbers on the CPU: decisions, counts, and models without a GPU
    if torch.cuda.is_available():
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    store, number, count = next(rendezvous("env://"))
    store = group.PrefixStore(name_of_start(store, number, count), store)
    group.init_process_group(
        backend, store=store, rank=number, world_size=count, timeout=timedelta(seconds=TIMEOUT)
    )
    yield
    group.destroy_process_group()  # not after an error: other ranks may be gone


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
        start = store.get(f"answer/{mine}").decode()
        store.set(f"confirmed/{start}/{number}", "")
        return start
    waiting = set(range(1, count))
    while waiting:
        for other in [*waiting]:
            if store.check([f"reported/{other}"]):
                store.set(f"answer/{store.get(f'reported/{other}').decode()}", mine)
            if store.check([f"confirmed/{mine}/{other}"]):
                waiting.remove(other)
        time.sleep(0.01)
    return mine


def broadcast(value: T) -> T:
    """Rank 0's ``value``, on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    _group().broadcast_object_list(values, src=0, device="cpu")
    return values[0]


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
        values = values.clone()
        _group().all_reduce(values)
    return values


def on_main(work: Callable[[], T]) -> T:
    """Calls ``work`` on rank 0, while the others wait, and returns what it returned; None
    elsewhere.

    Raises ErrorOnAllRanks, on every rank, for a mistake that rank 0 meets.
    """
    if world_size() == 1:
        return work()
    return _together(lambda: work() if is_main() else None)  # type: ignore[return-value]


def main_first(work: Callable[[], T]) -> T:
    """Calls ``work`` on rank 0 and then, where that went well, on all others.

    Raises ErrorOnAllRanks, on every rank, for a mistake that any rank meets.
    """
    if world_size() == 1:
        return work()
    made = on_main(work)
    return _together(lambda: made if is_main() else work())


def check_same(values: Mapping[str, object], right: str) -> None:
    """Raises ErrorOnAllRanks, on every rank, for the first of some named values that is another one
    on some rank than on rank 0. ``right`` says what would be right."""
    if world_size() == 1:
        return
    (machine, expected), *others = all_gather_object((os.uname().nodename, dict(values)))
    for number, (elsewhere, mine) in enumerate(others, start=1):
        for name in expected | mine:
            if mine.get(name) != expected.get(name):
                raise ErrorOnAllRanks(
                    f"{name}: {mine.get(name)!s:.40} in rank {number} (on {elsewhere}), "
                    f"{expected.get(name)!s:.40} in rank 0 (on {machine}): {right}"
                )


def is_lost(error: Exception) -> bool:
    """True if an error says that another rank of this world no longer answers."""
    if world_size() == 1 or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, _group().DistError) or "gloo" in str(error)


def _together(work: Callable[[], T]) -> T:
    """Calls ``work`` on every rank. Raises ErrorOnAllRanks on all of them for a mistake of any."""
    made, mistake = None, None
    try:
        made = work()
    except ErrorOnAllRanks:
        raise
    except Exception as error:
        mistake = mistake_of(error)
        if mistake is None:
            raise
        if not is_main():
            mistake = f"rank {rank()}: {mistake}"
    mistakes = [said for said in all_gather_object(mistake) if said is not None]
    if mistakes:
        raise ErrorOnAllRanks(mistakes[0])
    return made  # type: ignore[return-value]


def data_parallel(losses: nn.Module) -> nn.Module:
    """A module whose forward returns losses, such that the gradients of its parameters become the
    mean over all ranks. All ranks go on with the parameters of rank 0."""
    if world_size() == 1:
        return losses
    from torch.nn.parallel import DistributedDataParallel

    device = next(losses.parameters()).device
    devices = None if device.type == "cpu" else [device]
    return DistributedDataParallel(losses, device_ids=devices)


def _is_initialized() -> bool:
    if "torch.distributed" not in sys.modules:  # a command that needs no torch does not import it
        return False
    return _group().is_available() and _group().is_initialized()


def _group() -> Any:
    import torch.distributed as group

    return group
