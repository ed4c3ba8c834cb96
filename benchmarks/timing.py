"""What the benchmarks share: how long a step takes, and what is printed and recorded of repeats."""

from __future__ import annotations

import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def seconds(
    step: Callable[[], object],
    device: torch.device,
    cpu_clock: Callable[[], float] = time.process_time,
) -> float:
    """Seconds of one call: the GPU's work included on a GPU, by ``cpu_clock`` on a CPU (there
    time.process_time leaves out what else runs on the machine, and time.perf_counter counts
    waiting)."""
    if device.type != "cuda":
        started = cpu_clock()
        step()
        return cpu_clock() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def core_seconds(command: Sequence[str], **how: Any) -> float:
    """Runs a command to its end, and returns the seconds of the processor's cores that it took.
    ``how`` is as in subprocess.run. Raises CalledProcessError for one that fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, **how)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def resident(name: str, process: int | str = "self") -> int:
    """Memory of a process in kB, as the kernel counts: VmRSS is what it has now, RssAnon without
    files, VmHWM the most that it had."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0])


def record(name: str, values: Sequence[float]) -> None:
    """Adds a line of JSON to the file that $BENCHMARKS names, if it names one: the command, the
    date, torch, and median and quartiles of two values or more."""
    if (path := os.environ.get("BENCHMARKS")) and len(values) > 1:
        low, median, high = statistics.quantiles(values, n=4)
        script = f"benchmarks/{Path(sys.argv[0]).name}"
        command = shlex.join(["python", script, *sys.argv[1:]])
        made = {"command": command, "date": time.strftime("%Y-%m-%d")}
        made |= {"torch": torch.__version__, "name": name}
        with open(path, "a") as file:
            print(json.dumps(made | {"median": median, "low": low, "high": high}), file=file)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median and quartiles, ``1.02 [0.99, 1.05]``; a dash for fewer than two values."""
    if len(values) < 2:
        return "-"
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:{form}} [{low:{form}}, {high:{form}}]"
