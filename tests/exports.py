"""Runs whose teacher is to be exported, and their stores of several shards."""

from pathlib import Path

from arguments import tiny
from gaupipe.settings.load import load
from stages import export, phase_a

SETTINGS = [*tiny(200, 2, 1), "phase_a.mode=stochastic"]
SHARD_MB = 0.006  # 11 images: 19 shards, the last of them shorter


def train(folder: Path, *settings: str) -> Path:
    phase_a.run(load("digits_expected", [*SETTINGS, *settings]), folder)
    return folder


def exported(folder: Path) -> Path:
    """A run directory whose phase A has finished, and its complete store."""
    export.run(train(folder), shard_mb=SHARD_MB)
    return folder
