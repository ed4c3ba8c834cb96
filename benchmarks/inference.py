"""What a student costs where it is used, beside its teacher.

    python benchmarks/inference.py

The ViTs of the configurations of docs/results/distillation.md and judge.md, with random weights:
parameters, images per second (one thread, the processor's seconds, the median of rounds in which
the ViTs take turns) and the size as ONNX. Prints the entries of docs/results/data/inference.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import timm
import torch
from timing import record, seconds
from timm.models.vision_transformer import VisionTransformer

from gaupipe.settings.load import load
from gaupipe.vit.build import build_vit
from stages.publish.export_student import to_onnx

CONFIGS = Path(__file__).resolve().parents[1] / "docs" / "results" / "data"
TEACHER = "deit_tiny_patch16_224"
CLASSES = {"given_cifar10": 10, "judge": 43}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=64, help="in a batch")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.process_time()
    residual = ["model.stem=residual", "model.args.depth=2"]
    vits = {
        "student, 32 pixels, patches": student("given_cifar10"),
        "student, 32 pixels, conv stem": student("given_cifar10", ["model.stem=conv"]),
        "student, 32 pixels, residual stem, 2 blocks": student("given_cifar10", residual),
        "student, 64 pixels, patches": student("judge"),
        "student, 64 pixels, conv stem": student("judge", ["model.stem=conv"]),
        "student, 64 pixels, residual stem, 2 blocks": student("judge", residual),
        "DeiT-Ti, the teacher, 224 pixels": timm.create_model(TEACHER),
    }
    rates: dict[str, list[float]] = {name: [] for name in vits}
    forwards = {}
    for name, vit in vits.items():
        images = torch.randn(arguments.images, 3, *vit.patch_embed.img_size)
        forwards[name] = partial(vit.eval(), images)
    with torch.inference_mode():
        for number in range(arguments.rounds + 2):
            for name, forward in forwards.items():
                taken = seconds(forward, torch.device("cpu"))
                if number >= 2:  # the first two warm up
                    rates[name].append(arguments.images / taken)
    entries = []
    for name, vit in vits.items():
        record(f"inference, {name}", rates[name])
        content, _ = to_onnx(vit, torch.randn(2, 3, *vit.patch_embed.img_size))
        entries.append(
            {
                "title": name,
                "parameters": sum(parameter.numel() for parameter in vit.parameters()),
                "images_per_second": round(statistics.median(rates[name]), 1),
                "onnx_kb": round(len(content) / 1000),
            }
        )
    facts = {
        "command": shlex.join(["python", "benchmarks/inference.py", *sys.argv[1:]]),
        "data": "random",
        "images": arguments.images,
        "epochs": None,
        "seed": None,
        "val": None,
        "core_seconds": round(time.process_time() - started),
    }
    print(json.dumps([entry | facts for entry in entries], indent=1))


def student(config: str, changes: Sequence[str] = ()) -> VisionTransformer:
    """The student of a configuration of docs/results/data, with ``changes`` as --set takes them."""
    settings = load(CONFIGS / f"{config}.yaml", list(changes))
    images = dict(image_size=settings.data.image_size, channels=3, num_classes=CLASSES[config])
    return build_vit(settings.model, SimpleNamespace(**images))


if __name__ == "__main__":
    main()
