"""One thread a test process: the models are tiny, and threads that wait for each other cost more
than they bring."""

import functools
import gzip
import importlib
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

from gaupipe.cli import main

torch.set_num_threads(1)

# Processes inherit from what starts the tests that a signal is ignored or blocked (a shell's
# background jobs ignore SIGINT), and gaupipe leaves ignored signals ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def write_idx(path: Path, array: np.ndarray) -> None:
    """A gzipped IDX file of bytes, the format of Fashion-MNIST's files."""
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">i4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture(scope="session", autouse=True)
def machine(tmp_path_factory):
    """Stands in for what commands would find on the machine: a folder with 'cache' and
    'fashion-mnist', 300 images of 8 x 8 pixels and 50 to test."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "fashion-mnist").mkdir()
    draw = np.random.default_rng(0)
    for prefix, count in (("train", 300), ("t10k", 50)):
        images = draw.integers(256, size=(count, 8, 8), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        write_idx(folder / "fashion-mnist" / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(folder / "fashion-mnist" / f"{prefix}-labels-idx1-ubyte.gz", labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAUPIPE_FASHION_MNIST", str(folder / "fashion-mnist"))
        patch.setenv("GAUPIPE_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def parsers():
    """Makes the command line's parsers once: a process needs them once, and they hold no state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def in_process(capfd, monkeypatch):
    """Runs a command in this process, which saves importing torch: (exit code, stdout, stderr)."""

    def call(*arguments, cwd=None) -> tuple[int, str, str]:
        capfd.readouterr()
        if cwd is not None:
            monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["gaupipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        return (exit_.value.code or 0, *capfd.readouterr())

    return call


@pytest.fixture
def example(monkeypatch):
    """Imports a script of examples/ by name; its ``main`` then runs with given arguments."""

    def load(name):
        monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
        module = importlib.import_module(name)

        def run(*arguments):
            monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
            module.main()

        return module, run

    return load
