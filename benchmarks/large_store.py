"""Seconds and memory that a store of many images takes to open, verify and read in shuffled order.

    python benchmarks/large_store.py [--images 12800 128000 1280000]

Each store is made (Gaussians of 4 tokens, the same in every shard) and then read in a process of
its own. Memory is anonymous resident memory (RssAnon) above that after the imports; what the kernel
keeps of files is not counted, since it gives that back. The time is the processor's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np

import store

BATCH = 128
BATCHES = (100, 400)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, nargs="+", default=[12_800, 128_000, 1_280_000])
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for images in arguments.images:
        with tempfile.TemporaryDirectory() as folder:
            for step in (make, measure):
                process = spawn.Process(target=step, args=(Path(folder) / "maps.zarr", images))
                process.start()
                process.join()
                assert process.exitcode == 0


def make(url: Path, images: int) -> None:
    """A store of Gaussians, 512 bytes an image."""
    schema = store.Schema(
        kind="gaussian",
        num_images=images,
        grid=(2, 2),
        layers=4,
        heads=4,
        num_classes=10,
        dataset="made",
        dataset_sha256="",
        teacher_sha256="",
    )
    writer = store.create(url, schema)
    generator = np.random.default_rng(0)
    count = writer.shards[0].stop
    rows = {"gaussians": 0.5 + generator.random((count, 4, 4, 4, 4), np.float32)}
    rows["logits"] = generator.random((count, 10), np.float32)
    rows["labels"] = generator.integers(0, 10, count)
    for shard in writer.shards:
        writer.write(shard, {name: row[: shard.stop - shard.start] for name, row in rows.items()})
    writer.finish()


def measure(url: Path, images: int) -> None:
    """Prints a line for each thing that is done with the store."""
    began = resident()

    def say(what: str) -> None:
        nonlocal started
        seconds = time.process_time() - started
        print(f"{images:>9,} {what:20} {seconds:6.2f} s {resident() - began:6.1f} MB", flush=True)
        started = time.process_time()

    started = time.process_time()
    maps = store.open(url)
    say("open")
    order = np.random.default_rng(0).permutation(images)
    say("order of an epoch")
    for batches in BATCHES:
        size = min(batches * BATCH, images)
        for batch in maps.prefetch(np.array_split(order[:size], batches)):
            assert len(batch["labels"])
        say(f"{batches} batches")
    assert store.verify(url) == []
    say("verify")


def resident() -> float:
    """Anonymous resident memory in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1000


if __name__ == "__main__":
    main()
