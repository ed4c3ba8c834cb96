"""Images a second that reach a model, against timm's loader with as many workers; and how much of a
training step waits for images.

    python benchmarks/input.py
    python benchmarks/input.py --images 4000 --rounds 5 --workers 1
    python benchmarks/input.py --workers 0 --parts loaders
    python benchmarks/input.py --parts step
    python benchmarks/input.py --workers 0 --parts loaders --sizes 500 --photos FOLDER

JPEG files go to a temporary folder below --folder and are deleted. Those of 500 pixels are --files
different images, each under several names (hard links). All have just been written: what is timed
is the work, not the disk. With --photos they are the JPEG files below a folder. spdl takes part in
squares where it is installed, with one thread. All loaders make normalised float32 batches on the
device, of the same pixels: squares of 32 pixels of the small images, and of 224 pixels of the large
ones, bilinear; or random resized crops of the full-size images, flipped. Each loader has read all
images once before it is timed. Things compared take turns in one process. With --workers 0 on a
CPU, processor time is counted, which leaves out what else runs on the machine; else the time that
passes.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timing import record, spread
from timm.data import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    ImageDataset,
    create_loader,
)
from torch import Tensor
from torch.nn.functional import cross_entropy

import gaupipe.vit.models  # noqa: F401  (registers the models)
from gaupipe.data.augment import Augment, AugmentSettings
from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData
from gaupipe.settings import DataSettings
from gaupipe.system import machine

BATCH = 128
SEEN = {32: 32, 500: 224}
"""Pixels of the model's images, for those of the files."""
MODELS = {32: "gauvit_atto_patch4_32", 500: "gauvit_tiny_patch16_224"}
SQUARES = AugmentSettings()
CROPS = AugmentSettings(resized_crop={"full_size": True}, flip=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=numbers, default=[32, 500], help="pixels of the files")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--files", type=int, default=2_000, help="different images of 500 pixels")
    parser.add_argument("--photos", type=Path, help="folder of JPEG files to read instead")
    parser.add_argument("--workers", type=numbers, help="default: all processor cores but one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="training steps in a round")
    parser.add_argument("--parts", default="loaders,step")
    parser.add_argument("--threads", type=int, help="of torch; default: all processor cores")
    parser.add_argument("--folder", type=Path, help="default: that of temporary files")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, parts = torch.device(arguments.device), arguments.parts.split(",")
    workers = arguments.workers or [max(1, machine.cores() - 1)]
    torch.set_num_threads(arguments.threads or machine.cores())
    print(f"torch {torch.__version__}, timm {timm.__version__}, {machine.cores()} cores, {device}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        os.environ["GAUPIPE_CACHE"] = f"{folder}/cache"
        for size in arguments.sizes:
            root = Path(folder) / str(size)
            written = write(root, size, arguments.images, arguments.files, arguments.photos)
            print(f"\n{arguments.images:,} files of {size} pixels, {written / 1e3:.1f} kB each")
            for count in workers if "loaders" in parts else []:
                compare_loaders(root, size, count, device, arguments.rounds)
            if "step" in parts:
                share_that_waits(root, size, max(workers), device, arguments)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def write(root: Path, size: int, images: int, files: int, photos: Path | None) -> float:
    """Images of two classes; the mean bytes of a file."""
    for name in ("a", "b"):
        (root / "train" / name).mkdir(parents=True)
    paths = [root / "train" / "ab"[n % 2] / f"{n:06}.jpg" for n in range(images)]
    if photos is not None:
        sources = sorted(photos.rglob("*.jpg"))
        for path, photo in zip(paths, cycle(sources), strict=False):
            path.symlink_to(photo.resolve())
        return sum(photo.stat().st_size for photo in sources) / len(sources)
    different = images if size < 100 else min(images, files)
    with ProcessPoolExecutor(machine.cores()) as pool:
        work = partial(write_jpeg, size)
        total = sum(pool.map(work, range(different), paths[:different], chunksize=64))
    for number in range(different, images):
        os.link(paths[number % different], paths[number])
    return total / different


def write_jpeg(size: int, seed: int, path: Path) -> int:
    """Writes coloured noise, coarse and fine, 4 to 3 where it is large. The bytes of the file."""
    draw, width, height = np.random.default_rng(seed), size, size if size < 100 else size * 3 // 4
    pixels = np.full((height, width, 3), 128.0)
    for step, strength in ((64, 60), (16, 35), (4, 18), (1, 6)):
        noise = draw.normal(size=(max(2, height // step), max(2, width // step), 3))
        for channel in range(3):
            layer = Image.fromarray(noise[..., channel].astype(np.float32))
            layer = layer.resize((width, height), Image.Resampling.BICUBIC)
            pixels[..., channel] += strength * np.asarray(layer)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return path.stat().st_size


Epoch = Callable[[], Iterable[Tensor]]
"""The normalised images of an epoch, batch by batch."""


def gaupipe_epoch(data: ImageData, workers: int | str, device: torch.device, crops: bool) -> Epoch:
    batches = Batches(data.train, data, device, BATCH, workers)
    augment, epoch = Augment(CROPS if crops else SQUARES, 0), iter(range(10**9))
    return lambda: (batch.images for batch in batches.epoch(next(epoch), augment))


def timm_epoch(root: Path, size: int, workers: int, device: torch.device, crops: bool) -> Epoch:
    loader = create_loader(
        ImageDataset(str(root / "train")),
        input_size=(3, SEEN[size], SEEN[size]),
        batch_size=BATCH,
        is_training=crops,
        color_jitter=0.0,
        interpolation="bilinear",
        crop_pct=1.0,
        num_workers=workers,
        use_prefetcher=device.type == "cuda",
        pin_memory=device.type == "cuda",
        device=device,
    )
    return lambda: (images.to(device) for images, _ in loader)


def spdl_epoch(root: Path, size: int) -> Epoch:
    """By spdl, which decodes and resizes with FFmpeg, in one thread."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    paths, side = [*map(str, (root / "train").glob("*/*"))], SEEN[size]
    filters = f"scale={side}:{side}:force_original_aspect_ratio=increase:flags=bilinear"
    filters += f",crop={side}:{side},format=pix_fmts=rgb24"
    mean, std = (torch.tensor(value) for value in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))

    def batch(names: list[str]) -> Tensor:
        buffer = spdl.io.load_image_batch(
            names, width=None, height=None, pix_fmt=None, filter_desc=filters
        )
        images = (spdl.io.to_torch(buffer) / 255 - mean) / std
        return images.permute(0, 3, 1, 2).contiguous()

    def epoch() -> Iterator[Tensor]:
        random.shuffle(paths)
        batches = [paths[start : start + BATCH] for start in range(0, len(paths), BATCH)]
        line = PipelineBuilder().add_source(batches).pipe(batch).add_sink(2).build(num_threads=1)
        with line.auto_stop():
            yield from line

    return epoch


def load(root: Path, size: int, cache: str) -> ImageData:
    """With all but two of the images for training, as timm's loader has all."""
    count = len(list((root / "train" / "a").iterdir()))
    settings = {"image_size": SEEN[size], "cache": cache, "val_fraction": 1 / count}
    return load_data(DataSettings(name="folder", root=root, **settings))


def contestants(
    root: Path, size: int, workers: int, device: torch.device
) -> Iterator[tuple[bool, dict[str, Callable]]]:
    """For squares and for crops of full-size images (True): an epoch's images by loader."""
    decoding, cached = load(root, size, "none"), load(root, size, "auto")
    for crops in (False, True):
        epochs = {
            "timm": timm_epoch(root, size, workers, device, crops),
            "gaupipe": gaupipe_epoch(decoding, workers, device, crops),
            "gaupipe, kept": gaupipe_epoch(cached, workers if crops else "auto", device, crops),
        }
        if find_spec("spdl") and not crops:
            epochs["spdl"] = spdl_epoch(root, size)
        yield crops, epochs


def compare_loaders(root: Path, size: int, workers: int, device: torch.device, rounds: int) -> None:
    """Prints images a second of timm's loader, and ratios to it."""
    clock = time.perf_counter if workers or device.type == "cuda" else time.process_time
    for crops, epochs in contestants(root, size, workers, device):
        rates: dict[str, list[float]] = {name: [] for name in epochs}
        for number in range(rounds + 1):
            for name, epoch in epochs.items():
                count, began = 0, clock()
                for images in epoch():
                    count += len(images)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if number:  # the first round warms up
                    rates[name].append(count / (clock() - began))
        what = "crops of full-size images" if crops else "squares"
        print(f"{what}, {workers} workers: timm {spread(rates['timm'], ',.0f')} images/s")
        for name in list(epochs)[1:]:
            ratios = [ours / timms for ours, timms in zip(rates[name], rates["timm"], strict=True)]
            record(f"{size} pixels, {what}, {workers} workers, {name}, times timm", ratios)
            print(f"    {name}: {spread(ratios)} of timm, {spread(rates[name], ',.0f')} images/s")


def stepper(size: int, device: torch.device) -> Callable:
    """A training step on images, in bfloat16 on a GPU."""
    model = timm.create_model(MODELS[size], num_classes=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step(images: Tensor) -> None:
        labels = torch.zeros(len(images), dtype=torch.long, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def share_that_waits(
    root: Path, size: int, workers: int, device: torch.device, arguments: argparse.Namespace
) -> None:
    """Prints the share of the time of a training in which it waits for a batch: reading, copying to
    the device, augmenting and normalising. It waits for the GPU after each step."""
    step = stepper(size, device)
    for crops, epochs in contestants(root, size, workers, device):
        shares: dict[str, list[float]] = {name: [] for name in epochs}
        for number in range(arguments.rounds + 1):
            for name, epoch in epochs.items():
                share = share_of_epoch(epoch(), step, arguments.steps, device)
                if number:
                    shares[name].append(100 * share)
        what = "crops of full-size images" if crops else "squares"
        print(f"share of a step of {MODELS[size]} that waits, %, {what}, {workers} workers:")
        for name, values in shares.items():
            record(f"{size} pixels, {what}, {workers} workers, {name}, % that waits", values)
            print(f"    {name}: {spread(values, '.1f')}")


def share_of_epoch(
    images: Iterable[Tensor], step: Callable, steps: int, device: torch.device
) -> float:
    """Of the steps after the first four, for which the batches that were read ahead are enough."""
    waited, began, iterator = 0.0, 0.0, iter(images)
    for number in range(steps + 4):
        if number == 4:
            waited, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batch = next(iterator)
        if device.type == "cuda":
            torch.cuda.synchronize()
        waited += time.perf_counter() - asked
        step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return waited / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
