"""``gaupipe train`` against timm's own train script: images a second and accuracy.

    git clone --depth 1 https://github.com/huggingface/pytorch-image-models
    python benchmarks/timm_train.py pytorch-image-models/train.py photos

``photos`` holds train/CLASS/* and val/CLASS/*, of square images of ``--size`` pixels, so that both
programs cut the same pixels. Both fine-tune the same weights (random ones, made here) in one
process with one thread: the same batch size, random resized crop, flip, AdamW, schedule and
clipping. The programs take turns. Images a second are those of the processor's time for the epochs
after the second: the time of a training of ``--epochs`` less that of one of two epochs, so that the
start of Python does not count, but reading, evaluation and checkpoints do. The accuracy on the
validation images is that after the last epoch.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import timm
import torch
from timing import record

from gaupipe.vit.saving import save_student

LR, DECAY, MIN_LR, SCALE = 1e-3, 0.03, 1e-5, (0.5, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", type=Path, help="timm's train.py")
    parser.add_argument("data", type=Path)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    images = sum(path.is_file() for path in (arguments.data / "train").glob("*/*"))
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"
        save_weights(weights, arguments.size)
        rates: dict[Any, list[float]] = {gaupipe: [], timm_script: []}
        for seed in range(arguments.rounds):
            for program in rates:
                short, long = (
                    measure(program, arguments, weights, Path(folder) / f"{seed}", seed, epochs)
                    for epochs in (2, arguments.epochs)
                )
                rate = images * (arguments.epochs - 2) / (long[0] - short[0])
                rates[program].append(rate)
                print(f"{program.__name__:<12} {rate:,.0f} images/s, validation {long[1]:.1%}")
        ratios = [mine / timms for mine, timms in zip(*rates.values(), strict=True)]
        record("gaupipe train, images a second, times timm's script", ratios)


def measure(
    program: Any, arguments: argparse.Namespace, weights: Path, out: Path, seed: int, epochs: int
) -> tuple[float, float]:
    """Seconds of the processor, and the last validation accuracy."""
    before = os.times()
    accuracy = program(arguments, weights, out / f"{program.__name__}-{epochs}", seed, epochs)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4]), accuracy


def save_weights(folder: Path, size: int) -> None:
    torch.manual_seed(0)
    sizes = dict(patch_size=4, embed_dim=64, depth=4, num_heads=2, num_classes=2)
    save_student(timm.create_model("vit_tiny_patch16_224", img_size=size, **sizes), folder)


def gaupipe(
    arguments: argparse.Namespace, weights: Path, out: Path, seed: int, epochs: int
) -> float:
    """The last validation accuracy."""
    settings = {
        "data.name": "folder",
        "data.root": arguments.data.resolve(),
        "data.batch_size": arguments.batch,
        "data.workers": 0,
        "augment.flip": "true",
        "augment.resized_crop.scale": list(SCALE),
        "train.epochs": epochs,
        "train.optim": f"{{name: adamw, lr: {LR}, weight_decay: {DECAY}, min_lr: {MIN_LR}}}",
        "seed": seed,
        "threads": 1,
    }
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    model = f"local-dir:{weights}"
    run([sys.executable, "-m", "gaupipe", "train", "--model", model, *sets, "--run-dir", out])
    lines = (out / "plain" / "standard" / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["val_acc"]


def timm_script(
    arguments: argparse.Namespace, weights: Path, out: Path, seed: int, epochs: int
) -> float:
    """As :func:`gaupipe`. The script adds the epoch of the warm-up."""
    classes = sum(path.is_dir() for path in (arguments.data / "train").iterdir())
    options = f"""
        --data-dir {arguments.data} --train-split train --val-split val --num-classes {classes}
        --model local-dir:{weights} --pretrained --device cpu --workers 0 --no-prefetcher
        --batch-size {arguments.batch} --validation-batch-size 256 --epochs {epochs - 1}
        --scale {SCALE[0]} {SCALE[1]} --hflip 0.5 --color-jitter 0 --smoothing 0
        --train-interpolation bilinear --interpolation bilinear --crop-pct 1.0
        --opt adamw --lr {LR} --weight-decay {DECAY} --clip-grad 1.0 --sched cosine
        --sched-on-updates --min-lr {MIN_LR} --warmup-lr {MIN_LR} --warmup-epochs 1 --warmup-prefix
        --checkpoint-hist 1 --output {out} --experiment run --seed {seed}
    """.split()
    run([sys.executable, arguments.script, *options])
    with (out / "run" / "summary.csv").open() as file:
        return float([*csv.DictReader(file)][-1]["eval_top1"]) / 100


def run(command: list) -> None:
    done = subprocess.run([*map(str, command)], text=True, capture_output=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
