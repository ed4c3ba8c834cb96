"""Progress of a job: a bar on a terminal, one plain line per epoch elsewhere, and
metrics.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.files import naming
from gaupipe.system.messages import LOG, shared_console
from gaupipe.system.terminal import aligned

T = TypeVar("T")

SILENCE = 60
"""Seconds after which a job that has said nothing says how far it is."""


class EpochMetrics(TypedDict):
    """A line of metrics.jsonl: an epoch of training, or, with the number 0, a teacher that was
    trained before. A loss that was not computed is None."""

    epoch: int
    """From 1."""
    train_loss: float | None
    train_acc: float | None
    val_acc: float | None
    """None for a teacher that predicts nothing of unseen images."""
    val_loss: NotRequired[float]
    loss_soft: NotRequired[float | None]
    loss_hard: NotRequired[float]
    loss_feat: NotRequired[float | None]
    gamma: NotRequired[float]
    """Weight of loss_feat."""
    alpha: NotRequired[float]
    """Weight of loss_soft. What it is below the settings' is added to that of loss_hard."""
    seconds: float
    """Of training steps, without evaluation and checkpoints; of a teacher that was trained before,
    of its linear probe and its evaluation."""
    processor_seconds: NotRequired[float]
    """As ``seconds``, summed over all ranks, without the processes that read images for them; of a
    teacher that was trained before, of its linear probe alone."""
    images_per_s: NotRequired[float]


EPOCHS_SHOWN = 10
"""Epochs that stay on a terminal when a job ends."""


class Bar(Progress):
    """A bar below the line of the last epoch."""

    last = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.last:
            yield Text(self.last)
        yield from super().get_renderables()


class EpochProgress:
    """Progress of a job. On a terminal it is the line of the last epoch, and a bar with speed and
    time left; at the end a table of at most :data:`EPOCHS_SHOWN` epochs, so that many epochs do not
    push what else was said off the screen. Elsewhere plain lines, one per epoch and one per minute
    of :data:`SILENCE`. Of several ranks the first shows it."""

    def __init__(self, label: str, images_per_epoch: int, epochs: int, done: int = 0) -> None:
        self.label = label
        self.epochs = epochs
        self.total = images_per_epoch * epochs
        self.console = shared_console()
        self.console.quiet = not distributed.is_main()
        self._bar: Bar | None = None
        self._epochs: list[dict[str, str]] = []
        self._task = TaskID(0)
        self._shown = 0.0
        self._started = self._said = time.monotonic()
        self._done = self._first = done * images_per_epoch

    def __enter__(self) -> EpochProgress:
        if self.console.is_terminal:
            self._bar = bar = Bar(
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
            shown = spread(self._epochs, EPOCHS_SHOWN)
            if shown:
                table = [[*shown[0]], *([*row.values()] for row in shown)]
                for line in aligned(table, self.console.file, right=True):
                    self.console.print(line, soft_wrap=True)

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
            done = f"{self._done / self.total:.0%}, {speed:,.2g} images/s"
            self.line(f"{self.label}: {done}, {duration((self.total - self._done) / speed)} left")

    @property
    def is_stale(self) -> bool:
        """True if there is a bar whose text is a second old."""
        return self._bar is not None and time.monotonic() - self._shown >= 1

    def show(self, text: str) -> None:
        """Puts another text before the bar."""
        self._shown = time.monotonic()
        if self._bar:
            self._bar.update(self._task, description=text)

    def epoch(self, number: int, values: Mapping[str, str]) -> None:
        """Shows named ``values`` of an epoch, counted from 1, that has finished."""
        said = ", ".join(f"{name} {value}" for name, value in values.items())
        text = f"{self.label} epoch {number}/{self.epochs}: {said}"
        if self._bar is None:
            self.line(text)
            return
        self._epochs.append({"epoch": str(number), **values})
        self._bar.last = text

    def line(self, text: str) -> None:
        """Says a line, which is printed above the bar."""
        self._said = time.monotonic()
        LOG.info(text)


def duration(seconds: float) -> str:
    """Seconds in the unit that one would say them in."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.0f} s"


def spread(rows: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the rows, in equal steps, the first and the last among them."""
    if len(rows) <= most:
        return [*rows]
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def write_metrics(path: Path, entries: Sequence[EpochMetrics], mode: str = "w") -> None:
    """Writes entries of finished epochs to a metrics.jsonl, or with the ``mode`` "a" appends them:
    one JSON object a line. The checkpoint has them too, and is what counts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open(mode) as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def read_metrics(path: Path) -> list[EpochMetrics]:
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


def epochs_in(metrics: Sequence[EpochMetrics]) -> int:
    """The number of epochs of training that a metrics file has; a teacher that was trained before
    has an entry of epoch 0."""
    return sum(entry["epoch"] > 0 for entry in metrics)


def total_seconds(metrics: Sequence[EpochMetrics]) -> float:
    """Seconds of training steps over all epochs of a metrics file."""
    return sum(entry["seconds"] for entry in metrics)


def processor_seconds(metrics: Sequence[EpochMetrics]) -> float:
    """The same, summed over the processor's cores; of a teacher that was trained before, those of
    its linear probe."""
    return sum(entry.get("processor_seconds", 0.0) for entry in metrics)
