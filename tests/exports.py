"""Runs whose teacher is to be exported, and their stores of several shards."""

from pathlib import Path
from typing import Any

from arguments import tiny
from gaupipe.settings.load import load
from stages import export, phase_a
from stages.export.place import Place
from stages.runs.directory import RunDirectory

SETTINGS = [*tiny(200, 2, 1), "phase_a.mode=stochastic"]
SHARD_MB = 0.006  # 11 images: 19 shards, the last of them shorter


def train(folder: Path, *settings: str) -> Path:
    phase_a.run(load("digits_expected", [*SETTINGS, *settings]), folder)
    return folder


def exported(folder: Path) -> Path:
    """A run directory whose phase A has finished, and its complete store."""
    write_store(train(folder), shard_mb=SHARD_MB)
    return folder


def write_store(
    run: Path,
    asked: dict[str, Any] | None = None,
    *,
    out: str | None = None,
    teacher: str | None = None,
    **how: Any,
) -> str | None:
    """Exports the run's teacher, or another one, to the run's own store or to ``out``. ``how`` are
    fields of :class:`Place`."""
    place = Place(str(run / "maps.zarr") if out is None else out, **how)
    directory = RunDirectory(run)
    request = export.ExportRequest(directory, directory.settings(), place, asked or {}, teacher)
    return export.export_run(request)
