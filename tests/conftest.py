"""One thread a test process: the models are tiny, and threads that wait for each other cost more than they bring."""

import sys

import pytest
import torch

from gaupipe.cli import main

torch.set_num_threads(1)


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
