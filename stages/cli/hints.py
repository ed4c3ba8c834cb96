"""What commands say beside their results: what may follow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gaupipe.system import distributed
from gaupipe.system.progress import EpochMetrics
from stages.begin import say


def say_other_epoch(student: Path, metrics: Sequence[EpochMetrics]) -> None:
    """Says how the best epoch of the student in a folder becomes the one that is kept, where one
    that is less good is; ``metrics`` are those of its training."""
    from stages.runs import kept_epochs

    if not distributed.is_main():
        return
    kept = kept_epochs.entry(student)
    if metrics[kept["epoch"] - 1]["val_acc"] == metrics[kept["best"] - 1]["val_acc"]:
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
