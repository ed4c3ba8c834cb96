"""How fast stored maps are read in shuffled order, against zarr-python and np.memmap, and how large
they are.

    python benchmarks/stored_maps.py               every kind, for CIFAR-10 Atto
    python benchmarks/stored_maps.py --kinds gaussian --rounds 20 --megabytes 1000

A round draws new image ids, and every reader gathers batches of 256 of them, one reader after the
other: our store, our store preloaded into memory, np.memmap of the same numbers uncompressed in one
file, and zarr-python on the store's own files, one batch only, also with its fused pipeline and
that of zarrs where these are installed. ``taskset -c 0`` leaves them one core. Ratios are taken
within a round and shown as medians with quartiles. Cold: before each reader's turn its files are
dropped from the page cache (fsync, then posix_fadvise DONTNEED) and it opens them anew.
Gaussians are made like a teacher's: smooth over the tokens, plus noise of every image's own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import zarr
import zarr.core.codec_pipeline
from timing import record, spread

import store
from gaupipe.maps.gaussians import expected_map

BATCH, BATCHES = 256, 4
KINDS = {
    "gaussian": dict(kind="gaussian"),
    "uint8": dict(kind="gaussian", encoding="uint8"),
    "embedding": dict(kind="embedding", embedding_dim=256),
    "dense": dict(kind="dense"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--megabytes", type=int, default=400, help="numbers in each store before compression"
    )
    arguments = parser.parse_args()
    for name in arguments.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            bench(name, Path(folder), arguments.rounds, arguments.megabytes * 10**6)


def bench(name: str, folder: Path, rounds: int, num_bytes: int) -> None:
    schema = make_schema(num_images=BATCH * BATCHES, **KINDS[name])
    schema = make_schema(num_images=max(BATCH, num_bytes // schema.bytes_per_image), **KINDS[name])
    main_array = next(iter(schema.arrays))
    url, raw = folder / "maps.zarr", folder / "raw"
    write(url, raw, schema, main_array)
    spec = schema.arrays[main_array]
    bytes_per_image = store.open(url).size_on_disk() / schema.num_images
    readers: dict[str, tuple[Callable, int]] = {
        "store": (lambda: store.open(url).gather, BATCHES),
        "preloaded": (lambda: store.open(url, preload_bytes=2**40).gather, BATCHES),
        "memmap": (lambda: np.memmap(raw, spec.dtype, "r", shape=spec.shape).__getitem__, BATCHES),
    }
    for reader, pipeline in pipelines().items():
        readers[reader] = (partial(open_array, url / main_array, pipeline), 1)
    print(f"{name}: {bytes_per_image:,.0f} bytes an image, {schema.bytes_per_image:,} raw")
    rng = np.random.default_rng(0)
    for cache in ("warm", "cold"):
        speeds: dict[str, list[float]] = {reader: [] for reader in readers}
        processor_speeds: dict[str, list[float]] = {reader: [] for reader in readers}
        if cache == "cold":
            del speeds["preloaded"]  # its files are not read again
        gathers = {reader: readers[reader][0]() for reader in speeds}
        for round_ in range(rounds + 1):
            for reader in speeds:
                opening, batches = readers[reader]
                if cache == "cold":
                    drop_from_cache(folder)
                    gathers[reader] = opening()
                ids = rng.permutation(schema.num_images)[: batches * BATCH]
                started, cpu_started = time.perf_counter(), time.process_time()
                for start in range(0, len(ids), BATCH):
                    gathers[reader](ids[start : start + BATCH])
                if round_:  # the first round warms the cache
                    processor_speeds[reader].append(len(ids) / (time.process_time() - cpu_started))
                    speeds[reader].append(len(ids) / (time.perf_counter() - started))
        for reader in speeds:
            ratios = ratio(speeds["store"], speeds[reader])
            record(f"{name}, {cache}, times {reader}", ratios)
            processor_ratios = ratio(processor_speeds["store"], processor_speeds[reader])
            record(f"{name}, {cache}, times {reader}, in processor time", processor_ratios)
            line = f"store / this {spread(ratios):<24} in CPU time {spread(processor_ratios)}"
            print(f"  {cache} {reader:<22} {spread(speeds[reader], ',.0f'):<28} {line}", flush=True)


def ratio(ours: list[float], theirs: list[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def pipelines() -> dict[str, str]:
    """The ways to decode that the installed zarr-python has, by name."""
    module = "zarr.core.codec_pipeline."
    paths = {f"zarr {zarr.__version__}": module + "BatchedCodecPipeline"}
    if hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
        paths[f"zarr {zarr.__version__}, fused"] = module + "FusedCodecPipeline"
    if find_spec("zarrs"):
        paths[f"zarrs {metadata.version('zarrs')}"] = "zarrs.ZarrsCodecPipeline"
    return paths


def open_array(path: Path, pipeline: str) -> Callable:
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        return zarr.open_array(path, mode="r").oindex.__getitem__


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def make_schema(**changes) -> store.Schema:
    return store.Schema(
        **{
            **dict(
                grid=(8, 8),
                layers=7,
                heads=12,
                num_classes=10,
                dataset="benchmark",
                dataset_sha256="",
                teacher_sha256="",
            ),
            **changes,
        }
    )


def write(url: Path, raw: Path, schema: store.Schema, main_array: str) -> None:
    decoder = {"weight": np.ones((256, 256), np.float32)} if schema.kind == "embedding" else None
    writer = store.create(url, schema, decoder=decoder)
    spec = schema.arrays[main_array]
    uncompressed = np.memmap(raw, spec.dtype, "w+", shape=spec.shape)
    for shard in writer.pending():
        n = shard.stop - shard.start
        values = make_numbers(schema, n, shard.index)
        writer.write(
            shard,
            {
                main_array: values,
                "labels": np.arange(n) % 10,
                "logits": np.random.default_rng(shard.index).normal(size=(n, 10)),
            },
        )
        uncompressed[shard.start : shard.stop] = values
    writer.finish()
    uncompressed.flush()


def make_numbers(schema: store.Schema, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if schema.kind == "embedding":
        return rng.normal(size=(n, schema.layers, schema.embedding_dim)).astype(np.float16)
    gaussians = make_gaussians(rng, n, schema.layers, schema.heads, schema.grid[0])
    if schema.kind == "gaussian":
        return gaussians
    maps = np.empty((n, *schema.arrays["maps"].shape[1:]), np.float16)
    for image, values in enumerate(gaussians):
        maps[image] = expected_map(torch.from_numpy(values), schema.grid).numpy()
    return maps


def make_gaussians(
    rng: np.random.Generator, n: int, layers: int, heads: int, size: int
) -> np.ndarray:
    """[n, layers, heads, size * size, 4] float32: a prior that varies smoothly over the grid and
    noise of each image."""
    x, y = np.meshgrid(np.linspace(-1, 1, size), np.linspace(-1, 1, size))
    own_place = np.stack([x, y], axis=-1).reshape(-1, 2)
    head_rng = np.random.default_rng(0)
    reach, offset = (
        head_rng.uniform(0.2, 1, (layers, heads, 1, 1)),
        head_rng.normal(0, 0.4, (layers, heads, 1, 2)),
    )
    prior = np.concatenate(
        [
            reach * own_place + offset,
            head_rng.normal(-1, 0.5, (layers, heads, 1, 2)) + 0.3 * own_place,
        ],
        axis=-1,
    )
    half = np.arange(size) * 2 // size
    coarse = rng.normal(0, 0.3, (n, layers, heads, 2, 2, 4))[:, :, :, half][:, :, :, :, half]
    smooth = coarse.reshape(n, layers, heads, size * size, 4)
    raw = prior + smooth + rng.normal(0, 0.2, (n, layers, heads, size * size, 4))
    return np.concatenate([raw[..., :2], np.exp(raw[..., 2:])], axis=-1).astype(np.float32)


if __name__ == "__main__":
    main()
