"""Worlds of processes (gloo, on the CPU), and whether two trainings are the same."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

from gaupipe.system.messages import show_messages
from killing import FORKS


def rank_of(rank: int, size: int, port: int, folder: Path, work, arguments) -> None:
    """What one rank does: ``work`` in its world, its words in a file. The exit code is that of the
    command line."""
    # the fork server blocks SIGTERM if the first to start it was a training with readers of images
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with (folder / f"rank{rank}.txt").open("w") as words:
        os.dup2(words.fileno(), 1)
        os.dup2(words.fileno(), 2)
        torch.set_num_threads(1)
        show_messages()
        work(*arguments)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(size: int, folder: Path, work, *arguments) -> list:
    """The processes of a world."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    ranks = [
        FORKS.Process(target=rank_of, args=(rank, size, port, folder, work, arguments))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    return ranks


def in_world(size: int, folder: Path, work, *arguments) -> list[int]:
    """The exit codes of a world that was left alone."""
    ranks = start(size, folder, work, *arguments)
    for process in ranks:
        process.join(120)
    return [process.exitcode for process in ranks]


def assert_close(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for path, entries in expected.items():
        assert len(found[path]) == len(entries) == 3
        for number, entry in enumerate(entries):
            for name, value in entry.items():
                # one image of 301 may fall on the other side
                slack = 0.004 if name.endswith("acc") else tolerance * 10**number
                close = value if value is None else pytest.approx(value, rel=slack, abs=slack)
                assert found[path][number][name] == close, (path, number, name)


def command(*arguments: str) -> None:
    from stages.cli import main

    sys.argv = ["gaupipe", *arguments]
    main()
