"""The machine's means for this process: processor cores, memory, disk."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from pathlib import Path

from gaupipe.system import distributed

CGROUP = Path("/sys/fs/cgroup")

M_ARENA_MAX = -8
"""glibc's number of a setting of mallopt, from its malloc.h."""

jobs = 1
"""Trainings that one command has at work on this machine at the same time, each in a process."""


def processes() -> int:
    """Processes that share the machine's cores and memory, this one included."""
    return jobs * distributed.launch().local_world_size


def share_of_cores() -> int:
    """The cores that are this process's share of :func:`cores`, rounded down: perhaps none."""
    return cores() // processes()


def cores() -> int:
    """Processor cores that this process may use, within the container's limit."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()  # "max" where there is no limit
        return max(1, min(count or 1, int(quota) // int(period)))
    except (OSError, ValueError):
        return count or 1


def free_disk(folder: Path) -> int:
    """Bytes free where ``folder`` is or will be."""
    folder = folder.absolute()
    while not os.path.exists(folder):  # one that may not be searched counts as not there
        folder = folder.parent
    return shutil.disk_usage(folder).free


def share_one_heap() -> None:
    """Has all threads of this process allocate from one heap. glibc would give each its own, which
    keeps what that thread once needed. Does nothing where there is no glibc."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


def available_memory(
    meminfo: Path = Path("/proc/meminfo"),
    group: Path = CGROUP,
    status: Path = Path("/proc/self/status"),
) -> int | None:
    """Bytes that this process, and those beside it in its torchrun world, may use altogether
    without pushing out others: what the kernel's ``meminfo`` has left, within the limit of the
    container's folder of cgroup v2, and what they hold already. None if the kernel does not say."""
    unknown = OSError, KeyError, ValueError
    try:
        left = _kilobytes(meminfo, "MemAvailable")
    except unknown:
        return None
    held = 0
    with contextlib.suppress(*unknown):
        # without the pages of libraries' files, which MemAvailable counts
        held = _kilobytes(status, "RssAnon")
    with contextlib.suppress(*unknown):
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = int(counters["active_file"]) + int(counters["inactive_file"])
        left = min(left, limit - used + files)
    return left + held * distributed.launch().local_world_size


def _kilobytes(file: Path, name: str) -> int:
    """The bytes of a line ``name: 7 kB`` in a file of the kernel's."""
    lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
