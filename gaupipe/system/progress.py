"""Progress of a job: a bar on a terminal, one plain line per epoch elsewhere, and
metrics.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import naming

SILENCE = 60
"""Seconds after which a job that has said nothing says how far it is."""


class EpochProgress:
    """Progress of a job: a bar with speed and time left on a terminal; elsewhere plain lines, one
    per epoch and one per minute of :data:`SILENCE`. Of several ranks the first shows it."""

    def __init__(self, label: str, images_per_epoch: int, epochs: int, done: int = 0) -> None:
        self.label, self.epochs, self.total = label, epochs, images_per_epoch * epochs
        self.console = Console(stderr=True, highlight=False, quiet=not distributed.is_main())
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._shown = 0.0
        self._started = self._said = time.monotonic()
        self._done = self._first = done * images_per_epoch

    def __enter__(self) -> EpochProgress:
        if self.console.is_terminal:
            self._bar = bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=10),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._task = bar.add_task(self.label, total=self.total, completed=self._done, speed="")
            bar.start()
        self._started = self._said = time.monotonic()
        return self

    def __exit__(self, *_exception: Any) -> None:
        if self._bar:
            self._bar.stop()

    def skip(self, images: int) -> None:
        """Counts images that an earlier process has done."""
        self._done += images
        self._first = self._done

    def advance(self, images: int) -> None:
        """Counts images that are done."""
        self._done += images
        now = time.monotonic()
        speed = (self._done - self._first) / max(now - self._started, 1e-6)
        if self._bar:
            self._bar.update(self._task, completed=self._done, speed=f"{speed:,.0f} images/s")
        elif now - self._said >= SILENCE:
            self.line(f"{self.label}: {self._done / self.total:.0%}, {speed:,.2g} images/s")

    @property
    def is_stale(self) -> bool:
        """True if there is a bar whose text is a second old."""
        return self._bar is not None and time.monotonic() - self._shown >= 1

    def show(self, text: str) -> None:
        """Puts another text before the bar."""
        self._shown = time.monotonic()
        if self._bar:
            self._bar.update(self._task, description=text)

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        self._said = time.monotonic()
        (self._bar.console if self._bar else self.console).print(text, soft_wrap=True)


def write_metrics(path: Path, entries: Sequence[dict[str, Any]], mode: str = "w") -> None:
    """Writes entries of finished epochs to a metrics.jsonl, or with the ``mode`` "a" appends them:
    one JSON object a line. The checkpoint has them too, and is what counts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open(mode) as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl. Raises UserError for a damaged file."""
    try:
        entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    except (ValueError, RecursionError):
        entries = [None]
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(
            f"{path} is damaged: each of its lines should be a JSON object; --resume of the "
            "training writes it again"
        )
    return entries


def epochs_in(metrics: Sequence[dict[str, Any]]) -> int:
    """The number of epochs of training that a metrics file has; a teacher that was trained before
    has an entry of epoch 0."""
    return sum(entry["epoch"] > 0 for entry in metrics)


def total_seconds(metrics: Sequence[dict[str, Any]]) -> float:
    """Seconds of training steps over all epochs of a metrics file."""
    return sum(entry["seconds"] for entry in metrics)
