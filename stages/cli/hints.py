"""What commands say beside their results: what begins, and what may follow."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gaupipe.system import distributed, terminal
from gaupipe.system.progress import EpochMetrics
from stages.begin import importing


def say(line: str, command: Sequence[Any] = ()) -> None:
    """A line of rank 0 on stderr; a ``command`` that ends it can be copied from a terminal."""
    if distributed.launch().rank == 0:
        words = [str(word) for word in command]
        terminal.say(f"gaupipe: {line}", words)


@contextlib.contextmanager
def begins(what: str) -> Iterator[None]:
    """Says what a command is about to do, and then imports torch, which takes seconds."""
    say(f"{what} ...")
    with importing():
        yield


def starts(
    what: str, settings: Any, folder: Path, attention: str | None = None, model: str = ""
) -> contextlib.AbstractContextManager[None]:
    """:func:`begins`, of a job with these settings."""
    attention = attention or settings.model.attention
    data = settings.data
    model = model or f"{settings.model.name}, attention {attention}"
    return begins(f"{what}: {data.root or data.name}, {model}, into {folder}")


def say_other_epoch(run_dir: Path, name: str, distilled: bool) -> None:
    """Says how the better epoch of a student becomes the one that is kept, where another is."""
    from stages.runs import kept_epochs
    from stages.runs.directory import RunDirectory

    if not distributed.is_main():
        return
    kept = kept_epochs.entry(RunDirectory(run_dir).student(name, distilled))
    if kept["epoch"] == kept["best"]:
        return
    command = ["gaupipe", *sys.argv[1:]]
    if "--resume" not in command:
        command.append("--resume")
    command += ["--set", "train.keep=best"]
    say(f"to keep epoch {kept['best']}, the best on the validation images:", command)


FAR_APART = 0.15
"""Training accuracy above validation accuracy from which a training is said to have overfitted. The
first is measured on augmented images, so that the two agree in a training that has not."""


def say_if_overfitted(metrics: Sequence[EpochMetrics], settings: Any) -> None:
    """Says what it means where a training ends with accuracies far apart, and what to type."""
    train = metrics[-1]["train_acc"]
    val = metrics[-1]["val_acc"]
    if train is None or val is None or train - val < FAR_APART:
        return
    line = (
        f"train {100 * train:.1f} % and val {100 * val:.1f} % lie far apart: the ViT knows its "
        "training images better than what images of a class have in common"
    )
    from stages.runs.choices import fine_tuning  # with numpy and Pillow

    if settings.data.name == "folder" and settings.model.name.startswith("gauvit_"):
        line += "; more images help, or a ViT that was trained on many others:"
        say(line, fine_tuning(settings.data.root))
    else:
        say(f"{line}; more images help, or more augmentation:", ["gaupipe", "settings", "augment"])


def say_next(*commands: list[Any]) -> None:
    """Says what may follow, a line for each command."""
    before = "next:"
    for command in commands:
        say(before, ["gaupipe", *command])
        before = "or:"
