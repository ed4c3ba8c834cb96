"""An epoch of images from a tar archive and from a table of Hugging Face's datasets, over the same
epoch from a folder.

    python benchmarks/packed.py PHOTOS [--images 1000]

PHOTOS is a folder of class folders. The archive and the table hold the same files and go to a
temporary folder. The three take turns in one process, without the cache, so that every epoch reads
and decodes; with the cache all three read the same decoded pixels. The first epoch of each warms
up. The time is the processor's.
"""

from __future__ import annotations

import argparse
import statistics
import tarfile
import tempfile
from functools import partial
from pathlib import Path

import torch
from timing import record, seconds, spread

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.settings import DataSettings
from gaupipe.settings.augment import AugmentSettings

CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=64, help="pixels a side")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(path for path in arguments.photos.glob("*/*") if path.is_file())
    files = files[:: max(1, len(files) // arguments.images)][: arguments.images]
    with tempfile.TemporaryDirectory() as folder:
        places = write(files, Path(folder))
        epochs = {name: batches(place, arguments.size) for name, place in places.items()}
        times: dict[str, list[float]] = {name: [] for name in epochs}
        for number in range(arguments.rounds + 1):
            for name, images in epochs.items():
                times[name].append(seconds(partial(read, images, number), CPU))
    for name in ("tar", "hfds"):
        pairs = zip(times[name][1:], times["folder"][1:], strict=True)
        ratios = [packed / plain for packed, plain in pairs]
        record(f"an epoch from {name}, over one from a folder", ratios)
        print(f"{name}: {spread(ratios)} of a folder's {statistics.median(times['folder']):.1f} s")


def write(files: list[Path], folder: Path) -> dict[str, DataSettings]:
    """The same images as files, as an archive, and as a table."""
    import datasets

    plain = folder / "folder"
    for path in files:
        copy = plain / path.parent.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    with tarfile.open(folder / "images.tar", "w") as tar:
        for path in sorted(plain.glob("*/*")):
            tar.add(path, path.relative_to(plain))
    datasets.disable_progress_bars()
    table = datasets.load_dataset("imagefolder", data_dir=str(plain), cache_dir=str(folder / "c"))
    table.save_to_disk(str(folder / "saved"))
    return {
        "folder": DataSettings(name="folder", root=plain),
        "tar": DataSettings(name="folder", root=folder / "images.tar"),
        "hfds": DataSettings(name="hfds/saved", root=folder),
    }


def batches(place: DataSettings, size: int) -> Batches:
    changes = {"image_size": size, "cache": "none", "val_fraction": 0.1}
    data = load_data(place.model_copy(update=changes))
    return Batches(data.train, data, CPU, 64)


def read(images: Batches, number: int) -> None:
    for _ in images.epoch(number, Augment(AugmentSettings(flip=True), 0)):
        pass


if __name__ == "__main__":
    main()
