"""Which channels of a trained ViT's residual stream a smaller one should begin with.

    python benchmarks/slice_rules.py --data photos --teacher local-dir:FOLDER [--images 1000]

A ViT of four blocks (width 64, 64 pixels, patches of 8) starts with a slice of the teacher by each
rule, or from scratch, and learns the labels for a few epochs with Muon, flips and crops. The rules:
every n-th channel, the first channels, and the principal components of the residual stream, each
with what is kept of a sum made as large as the whole; and once without that. Prints each training
in the form of docs/results/data, as JSON, with the validation accuracies after all epochs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from unittest.mock import patch

import timm
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData
from gaupipe.settings import DataSettings, OptimSettings
from gaupipe.settings.augment import AugmentSettings
from gaupipe.teachers.readable_vit import ReadableViT
from gaupipe.teachers.vit import load_network
from gaupipe.training.optimizer import build_optimizer
from gaupipe.training.scores import score_model
from gaupipe.vit.inputs import spread_of
from gaupipe.vit.slicing import slice_weights

CPU = torch.device("cpu")
RULES = (
    "scratch",
    "every n-th channel",
    "first channels",
    "principal components",
    "components, sums as cut",
)
AUGMENT = AugmentSettings(flip=True, resized_crop={"scale": (0.4, 1.0)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--teacher", required=True, metavar="NAME")
    parser.add_argument("--images", type=int)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    images = arguments.images
    data = load_data(
        DataSettings(name="folder", root=arguments.data, image_size=64, train_images=images)
    )
    teacher = load_network(arguments.teacher, data, {})
    spread = spread_of(teacher.model, data, teacher.takes)
    optim = OptimSettings(lr=arguments.lr)
    for rule in RULES:
        for seed in range(arguments.seeds):
            started = time.process_time()
            torch.manual_seed(seed)
            student = timm.create_model(
                "gauvit_pico_patch2_8",
                attention="standard",
                num_classes=data.num_classes,
                img_size=64,
                patch_size=8,
                in_chans=3,
                embed_dim=64,
                depth=4,
                num_heads=2,
                mlp_ratio=4,
            )
            if rule != "scratch":
                student.load_state_dict(start(rule, teacher, student, spread), strict=False)
            accuracies = train(student, data, optim, arguments.epochs, seed)
            row = {
                "name": rule,
                "command": shlex.join(["python", "benchmarks/slice_rules.py", *sys.argv[1:]]),
                "data": arguments.data.name,
                "images": len(data.train),
                "epochs": arguments.epochs,
                "seed": seed,
                "val": round(accuracies[-1], 4),
                "core_seconds": round(time.process_time() - started),
                "curve": [round(accuracy, 4) for accuracy in accuracies],
            }
            print(json.dumps(row), flush=True)


def start(rule: str, teacher: ReadableViT, student: timm.models.VisionTransformer, spread: Tensor):
    """The slice of the teacher's weights by a rule."""
    asked = teacher.weights(), teacher.heads, teacher.grid, student, "slice"
    if rule == "principal components":
        return slice_weights(*asked, spread)
    if rule == "components, sums as cut":
        with patch("gaupipe.vit.slicing.rescaled", lambda weights, *_: weights):
            return slice_weights(*asked, spread)
    if rule == "every n-th channel":
        return slice_weights(*asked)
    with patch("gaupipe.vit.slicing.every_nth", lambda count, _available: torch.arange(count)):
        return slice_weights(*asked)


def train(
    student: torch.nn.Module, data: ImageData, optim: OptimSettings, epochs: int, seed: int
) -> list[float]:
    """Validation accuracies after each epoch."""
    batches, validation = Batches(data.train, data, CPU, 64), Batches(data.val, data, CPU, 256)
    optimizer, schedule = build_optimizer(student, optim, epochs, batches.steps)
    step, accuracies = 0, []
    for epoch in range(epochs):
        student.train()
        for batch in batches.epoch(epoch, Augment(AUGMENT, seed)):
            schedule.step_update(step)
            optimizer.zero_grad()
            cross_entropy(student(batch.images), batch.labels).backward()
            clip_grad_norm_(student.parameters(), optim.clip_grad)
            optimizer.step()
            step += 1
        accuracies.append(score_model(student, validation).acc)
    return accuracies


if __name__ == "__main__":
    main()
