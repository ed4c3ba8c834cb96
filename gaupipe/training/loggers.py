"""Loggers of a training beside its metrics.jsonl and steps.jsonl: TensorBoard, Weights & Biases
and trackio, each an extra of the same name.

A logger has ``log(step, values)``, numbers by name after so many batches of the training, and
``close()``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.system.imports import pip_install

MODULES = {"tensorboard": "torch.utils.tensorboard.writer", "wandb": "wandb", "trackio": "trackio"}
"""By the names of ``log.to`` and of the extras."""


class TensorBoard:
    """Event files in a folder, written by torch's ``SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Service:
    """A run of Weights & Biases, whose variables such as WANDB_MODE count, or of trackio, which has
    the same interface."""

    def __init__(self, module: Any, **options: Any) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # a command's results go to stdout
            self.run = module.init(project="gaupipe", resume="allow", **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self.run.finish()


def open_logger(
    logger: str, folder: Path, name: str, config: Mapping[str, Any]
) -> TensorBoard | Service:
    """The logger of the training in ``folder``. A service knows the training by an id, which the
    file ``folder``/log_id keeps for the time when the training is continued."""
    module = importlib.import_module(MODULES[logger])
    if logger == "tensorboard":
        return TensorBoard(module.SummaryWriter(str(folder / "tensorboard")))
    path = folder / "log_id"
    if not path.is_file():
        write_whole(path, uuid.uuid4().hex[:8])
    run = path.read_text()
    if logger == "wandb":
        return Service(module, config=dict(config), dir=str(folder), name=name, id=run)
    # trackio continues a run by its name, of which it makes a file
    return Service(module, config=dict(config), name=f"{name} {run}".replace("/", " "))


def check(names: Sequence[str]) -> None:
    """Raises UserError for a logger whose package cannot be imported."""
    for name in names:
        try:
            importlib.import_module(MODULES[name])
        except ImportError as error:
            raise UserError(
                f"log.to: {name} is not installed ({error}): {pip_install(name)}, or leave it out"
            ) from None
