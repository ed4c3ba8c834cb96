"""Commands in this process, and what their runs leave."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from gaupipe.settings import load as config
from stages import phase_a
from stages.cli import main

SETTINGS = [
    "data.train_images=200",
    "data.batch_size=2",
    "phase_a.max_epochs=1",
    "phase_a.mode=stochastic",
    "model.args={depth: 2, embed_dim: 16, num_heads: 2}",
    "threads=1",
]
SHARD_MB = 0.006  # 11 images: 19 shards, the last of them shorter


def train_teacher(folder: Path, *settings: str) -> Path:
    """A run directory whose phase A has finished."""
    phase_a.run(config.load("digits_expected", [*SETTINGS, *settings]), folder)
    return folder


def end_of(*arguments, cwd=None) -> SystemExit:
    """How a command ends that runs in this process, which saves importing torch: its exit code,
    and as its context the error that it reports."""
    with pytest.MonkeyPatch.context() as patch:
        if cwd is not None:
            patch.chdir(cwd)
        patch.setattr(sys, "argv", ["gaupipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
    return exit_.value


def run_main(*arguments, cwd=None) -> int:
    """The exit code of a command in this process."""
    return end_of(*arguments, cwd=cwd).code or 0


def linked(folder: Path, copy: Path) -> Path:
    """A copy of a folder by hard links, but of the files that gaupipe writes in place. A test
    removes a file before it writes another one of its name."""

    def link_or_copy(source: str, target: str) -> None:
        in_place = source.endswith((".jsonl", "lock"))
        (shutil.copy2 if in_place else os.link)(source, target)

    return Path(shutil.copytree(folder, copy, copy_function=link_or_copy))


def metrics(path: Path) -> list[dict]:
    """A metrics.jsonl without what depends on the machine's speed."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    timed = ("seconds", "_per_s")
    return [{name: row[name] for name in row if not name.endswith(timed)} for row in rows]


def results(run_dir: Path) -> dict[str, list[dict]]:
    """The metrics of every training of a run."""
    paths = sorted(run_dir.glob("**/metrics.jsonl"))
    return {str(path.relative_to(run_dir)): metrics(path) for path in paths}
