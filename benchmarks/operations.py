"""Where the processor's time of a training step goes, operation by operation.

    python benchmarks/operations.py --students standard,belief2,belief_star --tokens 64,196
    python benchmarks/operations.py --students standard --maps local,gaussian,topk    also phase B

Each operation that torch executes is timed by the processor's clock of its thread, which, unlike
torch.profiler's, does not count other programs; steps of all contenders take turns, and the table
has the median over the rounds in milliseconds, by group. "floor" is the ratio of the multiply-adds
alone, which no implementation of the same equations can beat where matrix products set the pace.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import timm
import torch
from phase_b import SIZES, queries, write_store
from timing import record
from timm.models.vision_transformer import VisionTransformer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gaupipe.vit.models  # noqa: F401  (registers the models)
from gaupipe.distillation.kinds import StoredAttentionReader
from gaupipe.distillation.losses import FeatureLoss, TeacherMaps, drawn_queries
from gaupipe.maps.stored import StoredAttention
from gaupipe.settings import PhaseBSettings
from gaupipe.teachers.base import MapShape
from gaupipe.teachers.local import LocalMaps
from gaupipe.training.job import hard_loss

GROUPS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"),
    "fused attention": ("scaled_dot_product",),
    "copies": ("copy_", "clone", "cat", "constant_pad_nd", "_to_copy", "fill_", "slice_backward"),
    "softmax": ("softmax",),
    "optimizer": ("_foreach", "_fused_adam", "addcdiv_", "lerp_", "sqrt"),
}
ELSE = "one by one"


class ProcessorTime(TorchDispatchMode):
    """Adds up the processor's seconds of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        began = time.thread_time()
        result = function(*args, **(kwargs or {}))
        self.seconds[function.__name__.split(".")[0]] += time.thread_time() - began
        return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--students", default="standard,belief_star,belief2")
    parser.add_argument("--tokens", default="64,196", help="of " + ", ".join(map(str, SIZES)))
    parser.add_argument("--maps", default="", help="also phase B: local, or kinds of stores")
    parser.add_argument("--class-token", action="store_true")
    parser.add_argument("--queries", type=queries, default=PhaseBSettings().queries)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--names", action="store_true", help="operations instead of groups")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for tokens in map(int, arguments.tokens.split(",")):
        steps: dict[str, Callable[[], object]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for key in arguments.students.split(","):
                steps |= steps_of(key, tokens, folder, arguments)
            show(tokens, steps, arguments)


def steps_of(
    key: str, tokens: int, folder: str, arguments: argparse.Namespace
) -> dict[str, Callable]:
    """The plain step of a student, and one with L_feat for each kind of ``maps``."""
    torch.manual_seed(0)
    sizes = dict(SIZES[tokens])
    if arguments.class_token:
        sizes |= dict(class_token=True, global_pool="token", fc_norm=False)
    model = timm.create_model("gauvit_atto_patch4_32", attention=key, **sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = arguments.tokens_per_batch // tokens
    images = torch.randn(batch, 3, *model.patch_embed.img_size)
    labels = torch.randint(0, 10, (batch,))
    layers = list(range(len(model.blocks)))
    with_loss = FeatureLoss(model)

    def update(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def distil(attention_of_batch: Callable[[], StoredAttention]) -> None:
        maps = attention_of_batch()
        queries = drawn_queries(arguments.queries, (0, 0, 0), tokens)
        logits, feature = with_loss(images, TeacherMaps(maps, layers, maps.grid, queries=queries))
        update(hard_loss(logits, labels) + feature)

    steps: dict[str, Callable[[], object]] = {key: lambda: update(hard_loss(model(images), labels))}
    for kind in filter(None, arguments.maps.split(",")):
        steps[f"{key}, {kind}"] = partial(
            distil, maps_of(kind, model, tokens, batch, f"{folder}/{key}-{kind}.zarr")
        )
    return steps


def maps_of(
    kind: str, model: VisionTransformer, tokens: int, batch: int, url: str
) -> Callable[[], StoredAttention]:
    """Reads the maps of some images: of the teacher ``local``, or from a store of random ones that
    is written to ``url``."""
    if kind == "local":
        local = LocalMaps(MapShape.of(model), [0.8, 2.0] * 6)
        return lambda: local
    maps = write_store(url, tokens, kind)
    reader = StoredAttentionReader(maps, torch.device("cpu"))
    random_numbers = np.random.default_rng(0)
    return lambda: reader.attention(maps.gather(random_numbers.permutation(len(maps))[:batch]))


def show(tokens: int, steps: dict[str, Callable], arguments: argparse.Namespace) -> None:
    """Prints the table of the steps at one number of tokens."""
    flops = {}
    for name, step in steps.items():
        step()
        with FlopCounterMode(display=False) as counted:
            step()
        flops[name] = counted.get_total_flops()
    taken: dict[str, list[Counter[str]]] = {name: [] for name in steps}
    whole: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name in random.sample([*steps], len(steps)):
            with ProcessorTime() as clock:
                steps[name]()
            taken[name].append(clock.seconds)
            began = time.process_time()
            steps[name]()
            whole[name].append(time.process_time() - began)
    first = next(iter(steps))
    ratios = {
        name: [mine / base for mine, base in zip(times, whole[first], strict=True)]
        for name, times in whole.items()
    }
    print(f"\n| {tokens} tokens | " + " | ".join(steps) + " |")
    print("|---" * (1 + len(steps)) + "|")
    for name, values in ratios.items():
        record(f"{name}, {tokens} tokens over {first}", values)
    medians = [statistics.median(ratios[name]) for name in steps]
    print("| ratio | " + " | ".join(f"{ratio:.2f}" for ratio in medians) + " |")
    floors = [flops[name] / flops[first] for name in steps]
    print("| floor | " + " | ".join(f"{ratio:.2f}" for ratio in floors) + " |")
    rows: dict[str, dict[str, list[float]]] = {}
    for name, rounds in taken.items():
        for one in rounds:
            summed: Counter[str] = Counter()
            for operation, seconds in one.items():
                summed[operation if arguments.names else group(operation)] += seconds
            for row, seconds in summed.items():
                rows.setdefault(row, {}).setdefault(name, []).append(1e3 * seconds)
    table = {
        row: [statistics.median(values[name]) if name in values else 0.0 for name in steps]
        for row, values in rows.items()
    }
    for row, cells in sorted(table.items(), key=lambda item: -max(item[1]))[:25]:
        print(f"| {row}, ms | " + " | ".join(f"{ms:.1f}" for ms in cells) + " |", flush=True)


def group(operation: str) -> str:
    """The group of an operation."""
    for name, members in GROUPS.items():
        if operation in members or any(operation.startswith(f"_{one}") for one in members):
            return name
    return next((name for name, members in GROUPS.items() if operation.startswith(members)), ELSE)


if __name__ == "__main__":
    main()
