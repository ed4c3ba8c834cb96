"""Loggers of a training beside its metrics.jsonl and steps.jsonl: TensorBoard, Weights & Biases
and trackio, each an extra of the same name.

A logger has ``log(step, values)``, numbers by name after so many batches of the training, and
``close()``. It never gets a step twice, also of a training that goes on from a checkpoint
(:mod:`gaupipe.training.step_log`).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaupipe.system.errors import UserError


class TensorBoard:
    """Event files in ``folder``/tensorboard."""

    needs = "torch.utils.tensorboard.writer"

    def __init__(self, folder: Path, name: str, run: str, config: Mapping[str, Any]) -> None:
        module = importlib.import_module(self.needs)
        self.writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases, continued under its id; variables such as WANDB_MODE count."""

    needs = "wandb"

    def __init__(self, folder: Path, name: str, run: str, config: Mapping[str, Any]) -> None:
        self.module = importlib.import_module(self.needs)
        options = {"project": "gaupipe", "config": dict(config), "resume": "allow"}
        with contextlib.redirect_stdout(sys.stderr):  # a command's results go to stdout
            self.run = self.module.init(**options, **self._identity(folder, name, run))

    def _identity(self, folder: Path, name: str, run: str) -> dict[str, Any]:
        return {"dir": str(folder), "name": name, "id": run}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self.run.finish()


class Trackio(WandB):
    """A run of trackio, which has the interface of Weights & Biases. It is continued under its
    name, which therefore ends in the run's id."""

    needs = "trackio"

    def _identity(self, folder: Path, name: str, run: str) -> dict[str, Any]:
        return {"name": f"{name} {run}".replace("/", " ")}  # it is a folder's name


LOGGERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
"""By the names of ``log.to`` and of the extras."""


def check(names: Sequence[str]) -> None:
    """Raises UserError for a logger whose package cannot be imported."""
    for name in names:
        try:
            importlib.import_module(LOGGERS[name].needs)
        except ImportError as error:
            raise UserError(
                f"log.to: {name} is not installed ({error}): pip install 'gaupipe[{name}]', or "
                "leave it out"
            ) from None
