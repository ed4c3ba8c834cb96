"""How long a step with GauAttention takes, as a share of the same ViT's step with fused standard
attention.

    python benchmarks/gauattention.py    Atto at 64 and 196 tokens
    python benchmarks/gauattention.py --tokens 64 --rounds 30

A step is forward and backward of the whole model, the gradient of the Gaussians' parameters
included. One process; a round runs every contender once in random order, a ratio is taken within a
round, and the table shows the median with the quartiles in brackets. On a CPU the time is the
processor's, on one thread, so that what else runs counts less.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from timing import record, seconds, spread
from torch import Tensor

import gaupipe.vit.models  # noqa: F401  (registers the models)
from gaupipe.maps.gaussians import expected_axes, from_raw, outer, point_axes, sample
from gaupipe.models import run_blocks

SIZES = {64: dict(img_size=32, patch_size=4), 196: dict(img_size=56, patch_size=4)}
Read = Callable[[Tensor, Tensor, tuple[int, int]], Tensor]


def by_map(axes: Callable) -> Read:
    """W V with the map W in memory."""
    return lambda v, where, grid: outer(*axes(where, grid)) @ v


def by_grid_sample(v: Tensor, points: Tensor, grid: tuple[int, int]) -> Tensor:
    B, H, T, d = v.shape
    planes = v.transpose(2, 3).reshape(B * H, d, *grid)
    read = F.grid_sample(
        planes,
        points.view(B * H, T, 1, 2),
        mode="bilinear",
        padding_mode="border",
        align_corners=True,
    )
    return read.view(B, H, d, T).transpose(2, 3)


READERS: dict[str, tuple[str, Read]] = {
    "stochastic, map": ("stochastic", by_map(point_axes)),
    "stochastic, grid_sample": ("stochastic", by_grid_sample),
    "expected, map": ("expected", by_map(expected_axes)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="64,196")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    for tokens in map(int, arguments.tokens.split(",")):
        steps = contenders(tokens, arguments.tokens_per_batch // tokens, device)
        agree(tokens, device)
        times = {name: [] for name in steps}
        for number in range(arguments.rounds + 1):
            for name in random.sample(list(steps), len(steps)):
                took = seconds(steps[name], device)
                if number:  # the first round warms up
                    times[name].append(took)
        for name in READERS:
            ratios = [
                ours / base for ours, base in zip(times[name], times["standard"], strict=True)
            ]
            record(f"{name}, {tokens} tokens", ratios)
            print(f"T={tokens:<4} {name:<24} {spread(ratios)}", flush=True)


def contenders(tokens: int, batch: int, device: torch.device) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    student = timm.create_model("gauvit_atto_patch4_32", **SIZES[tokens]).to(device)
    teacher = timm.create_model("gauvit_atto_patch4_32", attention="gaussian", **SIZES[tokens]).to(
        device
    )
    images = torch.randn(batch, 3, *student.patch_embed.img_size, device=device)
    labels = torch.randint(0, 10, (batch,), device=device)
    raw = (torch.randn(batch, 7, 12, tokens, 4, device=device) * 0.5).requires_grad_()
    grid = teacher.patch_embed.grid_size

    def standard() -> None:
        F.cross_entropy(student(images), labels).backward()

    def gaussian(mode: str, read: Read) -> Callable[[], None]:
        def attend(layer, attention, x):
            where = from_raw(raw[:, layer], "loc_scale")
            if mode == "stochastic":
                where = sample(where, torch.randn(*where.shape[:-1], 2, device=device))
            v = attention.v(x).unflatten(-1, (12, -1)).transpose(1, 2)
            return attention.proj(read(v, where, grid).transpose(1, 2).flatten(2))

        return lambda: F.cross_entropy(run_blocks(teacher, images, attend), labels).backward()

    return {"standard": standard} | {name: gaussian(*reader) for name, reader in READERS.items()}


def agree(tokens: int, device: torch.device) -> None:
    """Both ways to read at points give the same numbers."""
    side = int(tokens**0.5)
    v = torch.randn(2, 3, tokens, 8, device=device)
    points = torch.randn(2, 3, tokens, 2, device=device)
    by_axes = by_map(point_axes)(v, points, (side, side))
    by_sampling = by_grid_sample(v, points, (side, side))
    torch.testing.assert_close(by_sampling, by_axes, atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    main()
