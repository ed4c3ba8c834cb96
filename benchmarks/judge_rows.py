"""The trainings of the judge set for images without labels (docs/results/judge.md), by gaupipe's
own commands.

    python benchmarks/judge_rows.py --names
    python benchmarks/judge_rows.py predictions --seed 0

Run it where docs/results/judge_unlabelled.py wrote its folders, with the teacher's folder
``deit_tiny_in1k`` beside them. Prints one training in the form of docs/results/data, as JSON. Core
seconds are the processor's, of the student's command and of its teacher's, which run once and are
counted for each of its students. The rows "narrow ResNet, labels", "DeiT-Ti and a probe" and
"fine-tuned DeiT-Ti" are teachers themselves.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from timing import core_seconds
from torch import Tensor

from gaupipe.data.batches import Batch
from gaupipe.teachers.base import Wanted
from gaupipe.training.scores import packed, predictions_of
from stages.runs.directory import RunDirectory
from stages.runs.trained import load_teacher

VIT = [
    *("--set", "threads=1", "--set", "data.image_size=64", "--set", "data.batch_size=64"),
    *("--set", "model.name=gauvit_pico_patch2_8", "--set", "model.args.patch_size=8"),
    *("--set", "model.stem=residual", "--set", "model.args.depth=2"),
    *("--set", "model.args.embed_dim=64", "--set", "model.args.num_heads=2"),
    *("--set", "model.args.mlp_ratio=2"),
]
"""What ``--data`` chose for these images, said so that all rows have the same."""
DEIT = ("--teacher", "local-dir:deit_tiny_in1k")
FINE_TUNED = (*DEIT, "--set", "phase_a.fine_tune_epochs=10")
LABELLED_ALONE = [
    *("--set", "export.kind=predictions", "--set", "phase_b.gamma=0", "--set", "phase_b.alpha=0.7"),
    *("--set", "phase_b.beta=0.3", "--set", "phase_b.warm_start=none"),
]
MAPS = [
    *("--set", "export.kind=topk", "--set", "phase_b.gamma=1", "--set", "phase_b.head_map=mean"),
    *("--set", "phase_b.gamma_schedule=stop_after", "--set", "phase_b.gamma_epochs=4"),
]


@dataclass(frozen=True)
class Row:
    data: str
    """The folder."""
    teacher: str | None = None
    """The folder of its run; None for a training on the labels alone. {seed} is the student's."""
    arguments: tuple[str, ...] = ()
    """Of ``phase-a``, or of ``train``."""
    student: tuple[str, ...] = ()
    """Of ``phase-b``."""
    epochs: int = 11
    """Of a student that sees images without labels."""
    itself: bool = False
    """The teacher is scored, and has no student."""


def rows(equal_epochs: int) -> dict[str, Row]:
    """All rows; ``equal_epochs`` are those in which labels alone take the core seconds of
    ``predictions``."""
    few, many = "waste-labelled", "waste"
    longer = ("--epochs", str(equal_epochs))
    return {
        "labels": Row(few),
        "labels, as many core seconds": Row(few, arguments=longer),
        "predictions of the labelled images": Row(few, "few", (*DEIT, *LABELLED_ALONE)),
        "DeiT-Ti and a probe": Row(many, "deit", DEIT, itself=True),
        "predictions": Row(many, "deit", DEIT),
        "predictions and maps": Row(many, "maps", (*DEIT, *MAPS)),
        "predictions and other images' maps": Row(
            many, "maps", (*DEIT, *MAPS), ("--set", "phase_b.shuffle_maps=true")
        ),
        "predictions, 33 epochs": Row(many, "deit", DEIT, epochs=33),
        "narrow ResNet's predictions": Row(many, "resnet-{seed}"),
        "narrow ResNet, labels": Row(many, "resnet-{seed}", itself=True),
        "the ViT's own predictions": Row(many, "vit-{seed}", ("--teacher", "vit")),
        "fine-tuned DeiT-Ti": Row(many, "tuned", FINE_TUNED, itself=True),
        "fine-tuned DeiT-Ti's predictions": Row(many, "tuned", FINE_TUNED),
        "all labels": Row("waste-all"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("row", nargs="?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--equal-epochs", type=int, default=0)
    parser.add_argument("--names", action="store_true", help="print the rows' names")
    arguments = parser.parse_args()
    every = rows(arguments.equal_epochs)
    if arguments.names:
        print("\n".join(every))
    elif arguments.row not in every:
        parser.error(f"{arguments.row}: is none of the rows, which --names prints")
    else:
        print(json.dumps(measure(arguments.row, every[arguments.row], arguments.seed)))


def measure(name: str, row: Row, seed: int) -> dict[str, object]:
    """Runs the commands of a row, and scores its student or teacher once."""
    seeded = ["--seed", str(seed)]
    teacher_seconds = 0.0
    student_seconds = 0.0
    if row.teacher is None:
        run = Path("runs") / f"{name.replace(' ', '-')}-{seed}"
        data = ["--data", row.data, "--run-dir", str(run)]
        student_seconds = gaupipe("train", *data, *seeded, *VIT, *row.arguments)
        right = right_of_student(run, [])
        folder = run / "plain" / "standard"
    elif row.itself:
        run = Path("runs") / row.teacher.format(seed=seed)
        teacher_seconds = taught(row, run, seed)["phase-a"]
        right = right_of_teacher(run)
        folder = run / "phase_a"
    else:
        run = Path("runs") / row.teacher.format(seed=seed)
        teacher_seconds = sum(taught(row, run, seed).values())
        maps = "other" if row.student else "own"
        student = f"{maps}-{row.epochs}-{seed}"
        place = ["--run-dir", str(run), "--name", student]
        epochs = []
        if row.data == "waste":
            epochs = ["--set", f"phase_b.epochs={row.epochs}"]
        student_seconds = gaupipe("phase-b", *place, *seeded, *epochs, *row.student)
        right = right_of_student(run, ["--student", student])
        folder = run / "phase_b" / student
    *_, line = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(line)
    return {
        "name": name,
        "command": shlex.join(["python", "benchmarks/judge_rows.py", *sys.argv[1:]]),
        "data": "waste",
        "epochs": last["epoch"],
        "seed": seed,
        "val": round(last["val_acc"], 4),
        "test": round(float(right.mean()), 4),
        "core_seconds": round(student_seconds + teacher_seconds),
        "teacher_seconds": round(teacher_seconds),
        "right": packed(right),
    }


def taught(row: Row, run: Path, seed: int) -> dict[str, float]:
    """Trains and exports a teacher, unless it was done before. Returns the core seconds of both
    commands."""
    kept = run / "core_seconds.json"
    if not kept.exists():
        seeded = ["--seed", str(seed)] if "{seed}" in str(row.teacher) else []
        place = ["--run-dir", str(run)]
        seconds = {
            "phase-a": gaupipe(
                "phase-a", "--data", row.data, *place, *seeded, *VIT, *row.arguments
            ),
            "export-maps": gaupipe("export-maps", *place),
        }
        kept.write_text(json.dumps(seconds))
    return json.loads(kept.read_text())


def right_of_student(run: Path, student: list[str]) -> np.ndarray:
    """Which test images [N] the command ``evaluate`` has in their class."""
    scored = run / f"test-{'-'.join(student[1:])}.csv"
    gaupipe("evaluate", "--run-dir", str(run), *student, "--test", "--alone", "--out", str(scored))
    with scored.open(newline="") as lines:
        return np.array([line["label"] == line["class"] for line in csv.DictReader(lines)])


@torch.inference_mode()
def right_of_teacher(run: Path) -> np.ndarray:
    """Which test images [N] the teacher has in their class."""
    directory = RunDirectory(run)
    data = directory.load_data(directory.settings(), test=True)
    teacher = load_teacher(directory, data)
    assert data.test is not None
    draws = torch.Generator()

    def predict(batch: Batch) -> Tensor:
        logits = teacher.outputs(batch, Wanted(draws)).logits
        assert logits is not None
        return logits

    logits, labels = predictions_of(predict, teacher.batches(data.test))
    return (logits.argmax(-1) == labels).numpy()


def gaupipe(*words: str) -> float:
    """Runs a command, and returns its core seconds."""
    print(shlex.join(["gaupipe", *words]), file=sys.stderr, flush=True)
    return core_seconds([sys.executable, "-m", "gaupipe", *words], stdout=sys.stderr)


if __name__ == "__main__":
    main()
