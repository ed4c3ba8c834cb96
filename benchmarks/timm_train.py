"""``gaupipe train`` against timm's own train script: images a second and accuracy.

    git clone --depth 1 https://github.com/huggingface/pytorch-image-models
    python benchmarks/timm_train.py pytorch-image-models/train.py photos

``photos`` holds train/CLASS/* and val/CLASS/*, of square images of ``--size`` pixels, so that both
programs cut the same pixels. Both fine-tune the same weights (random ones, made here) in one
process with one thread: the same batch size, random resized crop, flip, AdamW, schedule and
clipping. The programs take turns. Images a second are those of the training steps, reading
included, without the first epoch, in which gaupipe decodes what it keeps; the table has the median
over epochs with the quartiles in brackets, and the accuracy on the validation images after the last
epoch.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import timm
import torch
from timing import spread

from gaupipe.vit.saving import save_student

LR, DECAY, MIN_LR, SCALE = 1e-3, 0.03, 1e-5, (0.5, 1.0)
RATE = re.compile(r"Train: (\d+) \[ *(\d+)/.*?, *([\d.]+)/s\)")
"""Epoch, batch and the mean images a second of the epoch so far in a line of timm's script."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", type=Path, help="timm's train.py")
    parser.add_argument("data", type=Path)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    programs = {"gaupipe": gaupipe, "timm": timm_script}
    rates, accuracies = ({name: [] for name in programs} for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"
        save_weights(weights, arguments.size)
        for number in range(arguments.rounds):
            for name, program in programs.items():
                out = Path(folder) / f"{name}-{number}"
                of_epochs, accuracy = program(arguments, weights, out, seed=number)
                rates[name] += of_epochs[1:]
                accuracies[name].append(accuracy)
    for name in programs:
        reached = ", ".join(f"{accuracy:.1%}" for accuracy in accuracies[name])
        print(f"{name:<8} {spread(rates[name], '.0f')} images/s, validation {reached}")


def save_weights(folder: Path, size: int) -> None:
    torch.manual_seed(0)
    sizes = dict(patch_size=4, embed_dim=64, depth=4, num_heads=2, num_classes=2)
    save_student(timm.create_model("vit_tiny_patch16_224", img_size=size, **sizes), folder)


def gaupipe(
    arguments: argparse.Namespace, weights: Path, out: Path, seed: int
) -> tuple[list[float], float]:
    """Images a second of each epoch, and the last validation accuracy."""
    settings = {
        "data.name": "folder",
        "data.root": arguments.data.resolve(),
        "data.batch_size": arguments.batch,
        "data.workers": 0,
        "augment.flip": "true",
        "augment.resized_crop.scale": list(SCALE),
        "phase_b.epochs": arguments.epochs,
        "phase_b.optim": f"{{lr: {LR}, weight_decay: {DECAY}, min_lr: {MIN_LR}}}",
        "baseline": "{}",
        "seed": seed,
        "threads": 1,
    }
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    run(
        [
            sys.executable,
            "-m",
            "gaupipe",
            "train",
            "--model",
            f"local-dir:{weights}",
            *sets,
            "--run-dir",
            out,
        ]
    )
    lines = (out / "plain" / "standard" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    return [epoch["images_per_s"] for epoch in metrics], metrics[-1]["val_acc"]


def timm_script(
    arguments: argparse.Namespace, weights: Path, out: Path, seed: int
) -> tuple[list[float], float]:
    """As :func:`gaupipe`. The script adds the epoch of the warm-up."""
    classes = sum(path.is_dir() for path in (arguments.data / "train").iterdir())
    options = f"""
        --data-dir {arguments.data} --train-split train --val-split val --num-classes {classes}
        --model local-dir:{weights} --pretrained --device cpu --workers 0 --no-prefetcher
        --batch-size {arguments.batch} --validation-batch-size 256 --epochs {arguments.epochs - 1}
        --scale {SCALE[0]} {SCALE[1]} --hflip 0.5 --color-jitter 0 --smoothing 0
        --train-interpolation bilinear --interpolation bilinear --crop-pct 1.0
        --opt adamw --lr {LR} --weight-decay {DECAY} --clip-grad 1.0 --sched cosine
        --sched-on-updates --min-lr {MIN_LR} --warmup-lr {MIN_LR} --warmup-epochs 1 --warmup-prefix
        --log-interval 1 --checkpoint-hist 1 --output {out} --experiment run --seed {seed}
    """.split()
    said = run([sys.executable, arguments.script, *options])
    rates = {int(epoch): float(rate) for epoch, _, rate in RATE.findall(said)}
    with (out / "run" / "summary.csv").open() as file:
        accuracy = float([*csv.DictReader(file)][-1]["eval_top1"]) / 100
    return [*rates.values()], accuracy


def run(command: list) -> str:
    done = subprocess.run([*map(str, command)], text=True, capture_output=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
