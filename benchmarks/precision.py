"""bfloat16 against float32: a step of a training, and a forward pass of a trained ViT.

    python benchmarks/precision.py

Both take turns in one process with one thread; the time is the processor's, the figure bfloat16's
median share of float32's. Below 1 bfloat16 is faster: `precision: auto` takes it from width 192 on.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import timm
import torch
from timing import record, seconds
from torch import Tensor, nn

import gaupipe.vit.models  # noqa: F401  (timm learns the names)

SHAPES = {
    "width 64, 64 tokens": ("gauvit_atto_patch4_32", dict(embed_dim=64, depth=4, num_heads=2), 32),
    "width 128, 64 tokens": ("gauvit_atto_patch4_32", dict(embed_dim=128, num_heads=4), 32),
    "width 192, 64 tokens": ("deit_tiny_patch16_224", dict(img_size=128), 128),
    "width 192, 196 tokens": ("deit_tiny_patch16_224", {}, 224),
    "width 384, 64 tokens": ("gauvit_atto_patch4_32", {}, 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens in a batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for shape, (name, sizes, side) in SHAPES.items():
        model = timm.create_model(name, num_classes=10, **sizes).to(arguments.device)
        batch = max(1, arguments.tokens // model.patch_embed.num_patches)
        images = torch.randn(batch, 3, side, side, device=arguments.device)
        for what, work in (("step", step), ("forward", forward)):
            ways: dict[str, Callable[[], object]] = {
                "float32": partial(work, model, images, torch.float32),
                "bfloat16": partial(work, model, images, torch.bfloat16),
            }
            ratios = in_turns(ways, arguments.rounds, torch.device(arguments.device))
            record(f"precision, {shape}, {what}", ratios)
            print(f"{shape}, {what}: {statistics.median(ratios):.2f}", flush=True)


def in_turns(
    ways: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> list[float]:
    """bfloat16's share of float32's time, round by round; the first two warm up."""
    ratios = []
    for _ in range(rounds + 2):
        times = {name: seconds(way, device) for name, way in ways.items()}
        ratios.append(times["bfloat16"] / times["float32"])
    return ratios[2:]


def step(model: nn.Module, images: Tensor, dtype: torch.dtype) -> None:
    """Forward and backward pass; the optimizer's own arithmetic is the same."""
    model.zero_grad()
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(images)
    logits.float().logsumexp(-1).mean().backward()


@torch.inference_mode()
def forward(model: nn.Module, images: Tensor, dtype: torch.dtype) -> None:
    with torch.autocast(images.device.type, dtype, enabled=dtype != torch.float32):
        model(images)


if __name__ == "__main__":
    main()
