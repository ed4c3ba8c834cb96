"""What distillation costs over plain training of the same student: step time, memory, and the wait
for maps.

    python benchmarks/phase_b.py    Atto, every attention, 64 and 196 tokens
    python benchmarks/phase_b.py --students standard,belief2 --tokens 64 --rounds 30
    python benchmarks/phase_b.py --students standard --kinds topk,dense    other kinds of stores
    python benchmarks/phase_b.py --students standard --class-token --queries all
    python benchmarks/phase_b.py --students standard --kinds predictions    without maps, from a
                                                    store and from a table in memory
    python benchmarks/phase_b.py --checkpointing    and both steps with gradient checkpointing
    python benchmarks/phase_b.py --students standard --tokens 64 --kinds topk,dense --teachers 1,4
                                                    and a teacher in every step, and its export

One process; a round runs one plain and one distilled training step (forward, backward, AdamW) of
the same model on the same images in random order, and the ratio to the plain step is taken within
the round; the table shows the median with the quartiles in brackets.
The maps come from a real store, by default of Gaussians, on disk through the reader's prefetch, in
shuffled order; "wait" is the share of the distilled step in which it is waited for. On a CPU the
time is the processor's, reading included, so that what else runs on the machine counts less. Memory
is what the step needs beyond the model and the optimizer's state: on a GPU its peak allocation, on
a CPU the peak of resident memory.

An online step has the teacher's forward pass in place of the store: a ViT like the student, of as
many times its cost as ``--teachers`` says, without gradients. Its export is that forward pass and
the writing of the store, as a multiple of a plain step for as many images.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import timm
import torch
from timing import record, resident, seconds, spread
from torch import nn

import gaupipe.vit.models  # noqa: F401  (registers the models)
import store
from gaupipe import capture
from gaupipe.attention import STUDENTS
from gaupipe.distillation.kinds import StoredAttentionReader
from gaupipe.distillation.losses import FeatureLoss, TeacherMaps, drawn_queries, soft_loss
from gaupipe.maps.gaussians import expected_map
from gaupipe.maps.stored import StoredAttention, StoredRows, select_queries
from gaupipe.maps.views import top_k
from gaupipe.settings import PhaseBSettings
from gaupipe.training.job import hard_loss

IMAGES = 512
STORES = {"gaussian": {}, "topk": dict(k=8, encoding="uint8"), "dense": {}, "predictions": {}}
LARGEST = 2**29
"""Bytes of a store: where images are large there are fewer."""
SIZES = {side**2: dict(img_size=4 * side, patch_size=4) for side in (8, 14, 32)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--students", default=",".join(STUDENTS))
    parser.add_argument("--kinds", default="gaussian", help="of " + ", ".join(STORES))
    parser.add_argument("--tokens", default="64,196", help="of " + ", ".join(map(str, SIZES)))
    parser.add_argument("--class-token", action="store_true")
    parser.add_argument("--queries", type=queries, default=PhaseBSettings().queries)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="both steps")
    parser.add_argument("--checkpointing", action="store_true", help="also with grad_checkpointing")
    parser.add_argument("--teachers", default="", help="costs of online teachers, 1 a student's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kinds = arguments.kinds.split(",")
    device = torch.device(arguments.device)
    steps = ["distilled", *["plain, ckpt", "distilled, ckpt"] * arguments.checkpointing]
    for cost in filter(None, arguments.teachers.split(",")):
        steps += [f"online, {cost}", f"export, {cost}"]
    print(f"{'attention':<12} {'store':<8} tokens  {'step':<15}  {'time':<18} {'memory':<7} wait")
    sizes = [(int(tokens), kind) for tokens in arguments.tokens.split(",") for kind in kinds]
    for tokens, kind in sizes:
        with tempfile.TemporaryDirectory() as folder:
            maps = write_store(f"{folder}/maps.zarr", tokens, kind)
            for key in arguments.students.split(","):
                batch = arguments.tokens_per_batch // tokens
                names = ["distilled", "table"] if kind == "predictions" else steps
                measured = measure(key, tokens, maps, batch, arguments, device, names)
                for step, (ratios, memory, wait) in measured.items():
                    what = f"{step}, {key}, {kind}, {tokens} tokens"
                    record(f"{what}: time", ratios)
                    record(f"{what}: memory", [memory, memory])
                    times = f"{step:<15}  {spread(ratios)}  {memory:<7.2f} {wait:.1%}"
                    print(f"{key:<12} {kind:<8} {tokens:>6}  {times}", flush=True)


def queries(text: str) -> int | None:
    """As phase_b.queries: a number, or all."""
    return None if text == "all" else int(text)


def measure(
    key: str,
    tokens: int,
    maps: store.Store,
    batch: int,
    arguments: argparse.Namespace,
    device: torch.device,
    names: list[str],
) -> dict[str, tuple[list[float], float, float]]:
    """Of each step: ratios of its time to the plain step's, ratio of memory, and the share of its
    time spent waiting for maps."""
    torch.manual_seed(0)
    rounds = arguments.rounds
    sizes = dict(SIZES[tokens])
    if arguments.class_token:
        sizes |= dict(class_token=True, global_pool="token", fc_norm=False)
    model = timm.create_model("gauvit_atto_patch4_32", attention=key, **sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(batch, 3, *model.patch_embed.img_size, device=device)
    labels = torch.randint(0, 10, (batch,), device=device)
    rng = np.random.default_rng()
    targets = maps.prefetch([rng.permutation(len(maps))[:batch] for _ in range(2 * rounds + 10)])
    forward, with_loss = model, FeatureLoss(model)
    if arguments.compile:
        forward, with_loss = torch.compile(model), torch.compile(with_loss)
    reader = None
    if maps.schema.has_maps:
        reader = StoredAttentionReader(maps, device)
    table = np.random.default_rng(0).normal(size=(len(maps), 10)).astype(np.float32)
    waited = 0.0
    drawn = 0

    def plain() -> None:
        nonlocal waited
        waited = 0.0
        update(hard_loss(forward(images), labels))

    def distilled() -> None:
        nonlocal waited
        started = time.perf_counter()
        stored = next(targets)
        waited = time.perf_counter() - started
        logits = torch.from_numpy(stored["logits"]).to(device)
        if reader is None:
            learn_predictions(logits)
        else:
            distil(reader.attention(stored), logits)

    def from_table() -> None:
        nonlocal waited
        waited = 0.0
        learn_predictions(torch.from_numpy(table[rng.permutation(len(table))[:batch]]).to(device))

    def learn_predictions(teacher_logits: torch.Tensor) -> None:
        logits = forward(images)
        soft = soft_loss(logits, teacher_logits.float().softmax(-1))
        update(0.5 * soft + 0.5 * hard_loss(logits, labels))

    def distil(attention: StoredAttention, teacher_logits: torch.Tensor) -> None:
        nonlocal drawn
        drawn += 1
        teacher = TeacherMaps(attention, list(range(maps.schema.layers)), maps.schema.grid)
        teacher.queries = drawn_queries(arguments.queries, (0, 0, drawn), tokens)
        logits, feature = with_loss(images, teacher)
        soft = soft_loss(logits, teacher_logits.float().softmax(-1))
        update(0.2 * soft + 0.1 * hard_loss(logits, labels) + 0.7 * feature)

    def online(teacher: nn.Module) -> None:
        nonlocal waited
        waited = 0.0
        shown, logits = look(teacher, images)
        distil(StoredRows(rows_of(shown), maps.schema.grid), logits)

    def update(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    costs = {name.partition(", ")[2] for name in names if name.startswith("online")}
    teachers = {cost: teacher_of(float(cost), tokens).to(device) for cost in costs}

    def step_of(name: str) -> Callable[[], None]:
        kind, _, more = name.partition(", ")
        model.set_grad_checkpointing(more == "ckpt")
        if kind == "online":
            return lambda: online(teachers[more])
        if kind == "export":
            return lambda: export(teachers[more], images, maps.schema)
        return {"plain": plain, "table": from_table}.get(kind, distilled)

    memory = {}
    for name in ("plain", *names):
        step_of(name)()
        memory[name] = peak_memory(step_of(name), device)
        if name.startswith("online"):
            weights = teachers[name.partition(", ")[2]].parameters()
            memory[name] += sum(weight.nbytes for weight in weights)
    took: dict[str, list[float]] = {name: [] for name in memory}
    waits: dict[str, list[float]] = {name: [] for name in memory}
    for _ in range(rounds):
        for name in random.sample([*memory], len(memory)):
            started = time.perf_counter()
            took[name].append(seconds(step_of(name), device))
            waits[name].append(waited / (time.perf_counter() - started))
    return {
        name: (
            [mine / plain for mine, plain in zip(took[name], took["plain"], strict=True)],
            memory[name] / memory["plain"],
            statistics.median(waits[name]),
        )
        for name in names
    }


def teacher_of(cost: float, tokens: int) -> nn.Module:
    """A ViT like the student, of ``cost`` times its multiply-adds."""
    width = round(384 * cost**0.5 / 12) * 12
    teacher = timm.create_model("gauvit_atto_patch4_32", embed_dim=width, **SIZES[tokens])
    return teacher.eval().requires_grad_(False)


def rows_of(maps: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What StoredRows reads of the maps of some blocks."""
    return lambda layer, queries: select_queries(maps[layer], queries)


def look(teacher: nn.Module, images: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The maps of a teacher's blocks [B, H, T, T], and its logits."""
    with torch.no_grad(), capture(teacher) as shown:
        logits = teacher(images)
    return list(shown.values()), logits


def export(teacher: nn.Module, images: torch.Tensor, like: store.Schema) -> None:
    """Writes a store of these images' maps."""
    shown, logits = look(teacher, images)
    schema = dataclasses.replace(like, num_images=len(images))
    arrays = arrays_of(schema, torch.stack(shown, dim=1).cpu())
    with tempfile.TemporaryDirectory() as folder:
        writer = store.create(f"{folder}/maps.zarr", schema)
        (shard,) = writer.pending()
        labels = np.zeros(len(images), int)
        writer.write(shard, {**arrays, "logits": logits.cpu().numpy(), "labels": labels})
        writer.finish()


def peak_memory(step, device: torch.device) -> float:
    """Bytes that a step needs on top of what is there before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    peaks = []
    for _ in range(3):
        ctypes.CDLL("libc.so.6").malloc_trim(
            0
        )  # what earlier steps freed goes back to the system first
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
        before = 1024 * resident("VmRSS")
        step()
        peaks.append(1024 * resident("VmHWM") - before)
    return max(peaks)


def write_store(url: str, tokens: int, kind: str) -> store.Store:
    """A store of random Gaussians, or of their maps, for the Atto model."""
    side = int(tokens**0.5)
    sizes = dict(grid=(side, side), layers=7, heads=12)
    schema = store.Schema(
        kind=kind,
        num_images=IMAGES,
        **({} if kind == "predictions" else sizes),
        num_classes=10,
        dataset="random",
        dataset_sha256="0" * 64,
        teacher_sha256="0" * 64,
        parametrisation="loc_scale",
        **STORES[kind],
    )
    fewer = min(IMAGES, LARGEST // schema.bytes_per_image)
    schema = dataclasses.replace(schema, num_images=fewer)
    random_numbers = np.random.default_rng(0)
    writer = store.create(url, schema)
    for shard in writer.pending():
        n = shard.stop - shard.start
        arrays = {}
        if kind != "predictions":
            gaussians = random_numbers.normal(size=(n, 7, 12, tokens, 4)).astype(np.float32)
            gaussians[..., 2:] = np.abs(gaussians[..., 2:]) + 0.1
            arrays = {"gaussians": gaussians}
        if kind in ("topk", "dense"):
            arrays = arrays_of(schema, expected_map(torch.from_numpy(gaussians), schema.grid))
        writer.write(
            shard,
            {
                **arrays,
                "logits": random_numbers.normal(size=(n, 10)).astype(np.float32),
                "labels": random_numbers.integers(0, 10, n),
            },
        )
    writer.finish()
    return store.open(url)


def arrays_of(schema: store.Schema, maps: torch.Tensor) -> dict[str, np.ndarray]:
    """The arrays of a store of kind dense or topk, of maps [n, L, H, T, T]."""
    if schema.kind == "dense":
        return {"maps": maps.numpy()}
    keys, weights = top_k(maps, schema.k)
    return {"keys": keys.numpy(), "weights": weights.numpy()}


if __name__ == "__main__":
    main()
