"""How long it takes to open a folder of small images: the first time, when every file is read for
its digest, and again, when the cache knows them all.

    python benchmarks/image_folder.py
    python benchmarks/image_folder.py --images 100000 --size 64

PNG files of random pixels go to a temporary folder below --folder and are deleted. They have just
been written: what is timed is the work of listing, reading and identifying, not the disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from timing import record, spread

from gaupipe.data import splits as data
from gaupipe.data.images import SETTLED_NS
from gaupipe.settings import DataSettings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--size", type=int, default=32, help="height and width in pixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="default: that of temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder) / "images"
        size = write(root, arguments.images, arguments.size)
        print(f"{arguments.images:,} files, {size / 1e6:,.0f} MB")
        time.sleep(SETTLED_NS / 1e9)
        settings = DataSettings(name="folder", root=root, image_size=arguments.size)
        seconds: dict[str, list[tuple[float, float]]] = {"first time": [], "cached": []}
        for number in range(arguments.rounds):
            os.environ["GAUPIPE_CACHE"] = f"{folder}/cache{number}"
            for times in seconds.values():
                started, worked = time.perf_counter(), time.process_time()
                data.load_data(settings)
                times.append((time.perf_counter() - started, time.process_time() - worked))
        for name, times in seconds.items():
            for clock, values in zip(
                ("elapsed", "of the processor"), zip(*times, strict=True), strict=True
            ):
                record(f"{name}, seconds {clock}", values)
                print(f"{name}, seconds {clock}: {spread(values)}")


def write(root: Path, images: int, size: int) -> int:
    """Random images of ten classes; the bytes of all files."""
    generator = np.random.default_rng(0)
    total = 0
    for number in range(images):
        path = root / "train" / f"class{number % 10}" / f"{number:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(256, size=(size, size, 3), dtype=np.uint8)).save(path)
        total += path.stat().st_size
    return total


if __name__ == "__main__":
    main()
