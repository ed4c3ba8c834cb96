"""How long the student attentions take, as ratios to timm's standard attention.

    python benchmarks/attention.py layer    one attention layer, forward and forward + backward
    python benchmarks/attention.py model    whole models, forward + backward
    python benchmarks/attention.py layer --compile --only belief,xsa --shapes atto --rounds 50

Everything is timed in one process. A round runs every contender once, in random order; a ratio is
taken within a round, and the table shows the median over the rounds, the quartiles in brackets and
the ratio of the best times, so that a machine that slows down for a while slows both sides of a
ratio. On a GPU the precision is bfloat16 autocast; on a CPU it is float32, one thread, and the time
is the processor's, not the wall clock's, so that what else runs on the machine counts less.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

import timm
import torch
from timing import record, seconds
from timm.layers import Attention
from torch import nn

import gaupipe.vit.models  # noqa: F401  (registers the models)
from gaupipe.attention import ATTENTION

BASELINE = "timm"
ON_A_GRID = ("gaussian", "prior")  # only in models without class tokens, and when named by --only
STUDENTS = {  # name in the table: (key, options)
    "standard": ("standard", {}),
    "gaussian": ("gaussian", {}),
    "prior": ("standard", {"prior": True}),
    "belief": ("belief", {}),
    "xsa": ("xsa", {}),
    "attentionx": ("attentionx", {}),
    "belief_star": ("belief_star", {}),
    "belief2": ("belief2", {}),
    "belief2 zz=False": ("belief2", {"zz": False}),
}
LAYERS = {  # name: (width, heads); a layer is timed at every number of tokens asked for
    "atto": (384, 12),
    "tiny": (768, 12),
    "deit_s": (384, 6),
}
MODELS = {  # name: (entrypoint, arguments, image size)
    "atto": ("gauvit_atto_patch4_32", {}, 32),
    "tiny": ("gauvit_tiny_patch16_224", {}, 224),
    "deit_s": (
        "gauvit_tiny_patch16_224",
        dict(
            embed_dim=384,
            depth=12,
            num_heads=6,
            mlp_ratio=4,
            class_token=True,
            global_pool="token",
            fc_norm=False,
        ),
        224,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["layer", "model"])
    parser.add_argument("--shapes", default="atto,tiny,deit_s", help="of " + ", ".join(LAYERS))
    parser.add_argument("--only", default="", help="contenders, of " + ", ".join(STUDENTS))
    parser.add_argument(
        "--match-params",
        action="store_true",
        help="models only: the FFN shrinks to equal parameters",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch")
    parser.add_argument("--lengths", default="64,196,197", help="layers only: tokens in an image")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compile", action="store_true", help="torch.compile every contender")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = (
        100  # the contenders share their forward method, and with it one cache
    )
    torch.set_float32_matmul_precision("high")
    names = arguments.only.split(",") if arguments.only else []
    names = names or [name for name in STUDENTS if name not in ON_A_GRID]
    measure = layer_ratios if arguments.what == "layer" else model_ratios
    print_header(names)
    for shape in arguments.shapes.split(","):
        for row, ratios in measure(shape, names, arguments):
            print_row(row, ratios, names)


def layer_ratios(shape: str, names: list[str], arguments: argparse.Namespace):
    """Yields (row, ratios) of one layer for every number of tokens, forward and forward +
    backward."""
    width, heads = LAYERS[shape]
    layers = {BASELINE: Attention(width, heads, qkv_bias=True)}
    for name in names:
        key, options = STUDENTS[name]
        layers[name] = ATTENTION[key](width, heads, qkv_bias=True, **options)
    for tokens in map(int, arguments.lengths.split(",")):
        x = torch.randn(max(1, arguments.tokens // tokens), tokens, width, device=arguments.device)
        steps = {name: steps_of(layer, x, arguments) for name, layer in layers.items()}
        for i, kind in enumerate(("forward", "forward + backward")):
            row = f"{shape}, T={tokens}, {kind}"
            kind_steps = {name: pair[i] for name, pair in steps.items()}
            yield row, interleaved(row, kind_steps, arguments.rounds, arguments.device)


def model_ratios(shape: str, names: list[str], arguments: argparse.Namespace):
    """Yields (row, ratios) of a whole model, forward + backward."""
    entrypoint, sizes, image_size = MODELS[shape]
    models = {BASELINE: timm.create_model(entrypoint, **sizes)}
    for name in names:
        key, options = STUDENTS[name]
        models[name] = timm.create_model(
            entrypoint,
            attention=key,
            attention_options=options,
            match_params=arguments.match_params,
            **sizes,
        )
    tokens = models[BASELINE].patch_embed.num_patches
    x = torch.randn(
        max(1, arguments.tokens // tokens), 3, image_size, image_size, device=arguments.device
    )
    steps = {name: steps_of(model, x, arguments)[1] for name, model in models.items()}
    row = f"{shape}, T={models[BASELINE].pos_embed.shape[1]}"
    yield row, interleaved(row, steps, arguments.rounds, arguments.device)


def steps_of(
    module: nn.Module, x: torch.Tensor, arguments: argparse.Namespace
) -> tuple[Callable, Callable]:
    """(forward, forward + backward) of a module as functions that take no argument."""
    module = module.to(x.device)
    run = torch.compile(module, dynamic=False) if arguments.compile else module
    half = torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda")
    needs_grad = x.clone().requires_grad_(
        x.ndim == 3
    )  # a layer hands a gradient on, a model does not
    gradient = None

    def forward() -> None:
        with torch.no_grad(), half:
            run(x)

    def forward_backward() -> None:
        nonlocal gradient
        with half:
            out = run(needs_grad)
        if gradient is None:
            gradient = torch.randn_like(out)
        out.backward(gradient)
        for tensor in (needs_grad, *module.parameters()):
            tensor.grad = None

    return forward, forward_backward


def interleaved(
    row: str, steps: dict[str, Callable], rounds: int, device: str
) -> dict[str, dict[str, float]]:
    """For each contender the ratio of its time to the baseline's: median and quartiles over the
    rounds, the ratio of their best times, and its median time in milliseconds."""
    order = list(steps)
    for name in order:
        for _ in range(3):
            seconds(steps[name], torch.device(device))
    times = {name: [] for name in order}
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            times[name].append(seconds(steps[name], torch.device(device)))
    summary = {}
    for name in steps:
        ratios = [mine / base for mine, base in zip(times[name], times[BASELINE], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        record(f"{row}, {name}", ratios)
        summary[name] = dict(
            median=median,
            low=low,
            high=high,
            best=min(times[name]) / min(times[BASELINE]),
            ms=1e3 * statistics.median(times[name]),
        )
    return summary


def print_header(names: list[str]) -> None:
    print("| | timm, ms | " + " | ".join(names) + " |")
    print("|---" * (2 + len(names)) + "|")


def print_row(row: str, ratios: dict, names: list[str]) -> None:
    cells = []
    for name in names:
        r = ratios[name]
        cells.append(f"{r['median']:.2f} ({r['low']:.2f}-{r['high']:.2f}) {r['best']:.2f}")
    print(f"| {row} | {ratios[BASELINE]['ms']:.1f} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
