"""Seconds and memory that a store of many images takes to open, verify and read in shuffled order.

    python benchmarks/large_store.py [--images 12800 128000 1280000]
    python benchmarks/large_store.py --predictions 1000     of so many classes, with names of images

Each store is made (Gaussians of 4 tokens, or predictions, the same in every shard) and then read in
a process of its own, as phase B reads it. Memory is anonymous resident memory (RssAnon) above that
after the imports; what the kernel keeps of files is not counted, since it gives that back. The time
is the processor's.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np

import store

BATCH = 128
BATCHES = (100, 400, math.inf, math.inf)
"""Batches that are read one after the other: some of an epoch, and two whole ones."""
NAME_BYTES = 29


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, nargs="+", default=[12_800, 128_000, 1_280_000])
    parser.add_argument("--predictions", type=int, metavar="CLASSES")
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for images in arguments.images:
        with tempfile.TemporaryDirectory() as folder:
            for step in (make, measure):
                given = (Path(folder) / "maps.zarr", schema_of(images, arguments.predictions))
                process = spawn.Process(target=step, args=given)
                process.start()
                process.join()
                assert process.exitcode == 0


def schema_of(images: int, predictions: int | None) -> store.Schema:
    """Gaussians, 512 bytes an image; or predictions of so many classes and the names of images
    without labels."""
    facts = {"num_images": images, "dataset": "made", "dataset_sha256": "", "teacher_sha256": ""}
    if predictions is None:
        maps = {"grid": (2, 2), "layers": 4, "heads": 4}
        return store.Schema(kind="gaussian", num_classes=10, **maps, **facts)
    names = {"labelled": False, "name_bytes": NAME_BYTES}
    return store.Schema(kind="predictions", num_classes=predictions, **names, **facts)


def make(url: Path, schema: store.Schema) -> None:
    """Writes a store of random numbers."""
    writer = store.create(url, schema)
    generator = np.random.default_rng(0)
    count = writer.shards[0].stop
    rows = {
        name: 0.5 + generator.random((count, *spec.shape[1:]), np.float32)
        for name, spec in schema.arrays.items()
    }
    if schema.labelled:
        rows["labels"] = generator.integers(0, schema.num_classes, count)
    for shard in writer.shards:
        arrays = {name: row[: shard.stop - shard.start] for name, row in rows.items()}
        if schema.name_bytes is not None:
            names = [f"n{image // 1300:08}/{image:014}.JPEG" for image in range(*shard[1:])]
            arrays["names"] = store.pack_names(names, schema.name_bytes)
        writer.write(shard, arrays)
    writer.finish()


def measure(url: Path, schema: store.Schema) -> None:
    """Prints a line for each thing that is done with the store."""
    began = resident()
    images = schema.num_images

    def say(what: str) -> None:
        nonlocal started
        seconds = time.process_time() - started
        print(f"{images:>9,} {what:20} {seconds:6.2f} s {resident() - began:6.1f} MB", flush=True)
        started = time.process_time()

    files = [path.stat().st_size for path in url.rglob("*") if path.is_file()]
    print(f"{images:>9,} {len(files):,} files, {sum(files):,} bytes of {schema.total_bytes:,}")
    started = time.process_time()
    maps = store.open(url)
    say("open")
    order = np.random.default_rng(0).permutation(images)
    say("order of an epoch")
    read = [name for name in schema.arrays if name != "names"]
    for most in BATCHES:
        batches = min(most, -(-images // BATCH))
        shuffled = np.array_split(order[: batches * BATCH], batches)
        for batch in maps.prefetch(shuffled, names=read):
            assert len(batch["logits"])
        say(f"{batches:,} batches")
    assert store.verify(url) == []
    say("verify")


def resident() -> float:
    """Anonymous resident memory in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1000


if __name__ == "__main__":
    main()
