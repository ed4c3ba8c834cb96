"""Runs whose teacher is to be exported, and their stores of several shards."""

from pathlib import Path

from gaupipe.settings import load as config
from stages import export, phase_a

SETTINGS = [
    "data.train_images=200",
    "data.batch_size=2",
    "phase_a.max_epochs=1",
    "phase_a.mode=stochastic",
    "model.args={depth: 2, embed_dim: 16, num_heads: 2}",
    "threads=1",
]
SHARD_MB = 0.006  # 11 images: 19 shards, the last of them shorter


def train(folder: Path, *settings: str) -> Path:
    phase_a.run(config.load("digits_expected", [*SETTINGS, *settings]), folder)
    return folder


def exported(folder: Path) -> Path:
    """A run directory whose phase A has finished, and its complete store."""
    export.run(train(folder), shard_mb=SHARD_MB)
    return folder
