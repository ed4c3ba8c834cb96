"""steps.jsonl: the progress of a training every so many batches, which the loggers
(:mod:`gaupipe.training.loggers`) get too."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaupipe.data.batches import Batches
from gaupipe.settings import Settings
from gaupipe.settings.load import flatten
from gaupipe.system import distributed
from gaupipe.system.errors import UserError, one_line
from gaupipe.system.files import naming, write_whole
from gaupipe.training.loggers import open_logger
from gaupipe.training.sums import Sums
from gaupipe.training.update import Update


class StepLog:
    """Writes ``folder``/steps.jsonl, and tells the loggers of the settings. Only rank 0 does, of
    its own images; ``images_per_s`` are those of all.

    A line is about the batches since the line before, within one epoch:

        epoch, step     the epoch's number, and batches of the training so far, both from 1
        loss, ...       the means of the losses over the images; loss_hard and acc, where images
                        with labels were among them, over these
        lr, grad_norm   learning rate, and norm of the gradient before it is clipped, in the last
                        step of the optimizer
        images_per_s    images a second
        waits_data      share of the time that the training waited for images
        waits_maps      share of the time that the training waited for stored maps

    A training that goes on from a checkpoint removes the lines after it, and begins a line. It
    tells the loggers again what comes after the checkpoint.
    """

    def __init__(self, settings: Settings, folder: Path, update: Update, batches: Batches) -> None:
        """Raises UserError for a logger that cannot be opened."""
        self.folder = folder
        self.update = update
        self.batches = batches
        self.every = settings.log.every
        self._loggers: list[Any] = []
        folder.mkdir(parents=True, exist_ok=True)
        update.log_norm = bool(self.every)
        if not distributed.is_main():
            return
        if self.every:
            remove_later(folder / "steps.jsonl", update.batch)
        parts = 2 if folder.name == "phase_a" else 3  # from the run directory on
        name = "/".join(folder.resolve().parts[-parts:])
        for logger in settings.log.to:
            try:
                opened = open_logger(logger, folder, name, flatten(settings))
            except Exception as error:  # packages of others raise their own
                reason = one_line(error)
                raise UserError(f"log.to: {logger} cannot be opened ({reason})") from None
            self._loggers.append(opened)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()
        self._loggers = []

    def begin_line(self) -> None:
        """The next batch is the first of a line."""
        self.sums = Sums()
        """Of the line so far."""
        self._since = time.monotonic()
        self._waited = dict(self.batches.waited)

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        """Tells the loggers the metrics of an epoch."""
        numbers = {
            f"epoch/{name}": value
            for name, value in metrics.items()
            if isinstance(value, int | float) and name != "epoch"
        }
        self._tell(numbers)

    def write(self, epoch: int) -> None:
        """Writes a line, and begins the next."""
        if not distributed.is_main():
            return

        seconds = max(time.monotonic() - self._since, 1e-9)
        waited = {name: now - self._waited[name] for name, now in self.batches.waited.items()}
        values = self.sums.means()
        values["lr"] = self.update.state.lr
        if self.update.grad_norm is not None:
            values["grad_norm"] = float(self.update.grad_norm)
        values["images_per_s"] = round(self.sums.images * distributed.world_size() / seconds, 1)
        for name, spent in waited.items():
            values[f"waits_{name}"] = round(spent / seconds, 4)

        step = self.update.batch
        finite = {  # JSON has no infinity, which a first step in float16 may bring
            name: value if math.isfinite(value) else None for name, value in values.items()
        }
        path = self.folder / "steps.jsonl"
        with naming(path), path.open("a") as file:
            file.write(json.dumps({"epoch": epoch + 1, "step": step, **finite}) + "\n")
        self._tell({f"step/{name}": value for name, value in values.items()})
        self.begin_line()

    def _tell(self, values: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.log(self.update.batch, values)


def remove_later(path: Path, step: int) -> None:
    """Removes the lines of a steps.jsonl after ``step``, and a half-written one."""
    written = ""
    if path.is_file():
        written = path.read_text(errors="replace")
    lines = []
    for line in written.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                lines.append(line + "\n")
    write_whole(path, "".join(lines))
