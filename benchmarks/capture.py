"""Time of a forward pass with gaupipe.capture, as a ratio to the plain pass.

    python benchmarks/capture.py --model vit_small_patch16_224 --rounds 9

The passes take turns in one process. ``maps`` is the memory of the maps that were kept. Weights are
random; they do not matter here.
"""

from __future__ import annotations

import argparse

import timm
import torch
from timing import record, seconds, spread

import gaupipe

WAYS = {
    "all maps": {},
    "the last block": {"blocks": [-1]},
    "the class token of the last block": {"blocks": [-1], "queries": [0]},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = timm.create_model(arguments.model).eval().to(device)
    images = torch.randn(arguments.batch_size, *model.pretrained_cfg["input_size"], device=device)
    sizes = {}

    def captured(name: str) -> None:
        with gaupipe.capture(model, **WAYS[name]) as maps:
            model(images)
        sizes[name] = sum(one.nbytes for one in maps.values())

    ratios: dict[str, list[float]] = {name: [] for name in WAYS}
    with torch.inference_mode():
        for turn in range(arguments.rounds + 1):
            plain = seconds(lambda: model(images), device)
            for name, way_ratios in ratios.items():
                taken = seconds(lambda name=name: captured(name), device)
                if turn:  # the first warms up
                    way_ratios.append(taken / plain)
    for name, way_ratios in ratios.items():
        record(f"capture, {name}, times plain", way_ratios)
        print(f"{name}: {spread(way_ratios)} times plain, maps {sizes[name] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
