"""What a folder of many image files costs: opening it, the first step, an epoch's reads, an export
of a model's predictions by one process, by two and after a kill, and verify.

    python benchmarks/many_files.py PHOTOS MODEL OUT.json [--images 10000 100000]
    python benchmarks/many_files.py PHOTOS MODEL OUT.json --only export

PHOTOS is a folder of class folders, MODEL the folder of a timm model. Of each class the first
images are linked into a folder of their own. Every step is a process, or two,
and has the processor's seconds of all of them, imports included, and the peak of the largest one's
resident memory; what is measured for several numbers of images says what grows with them.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from first_step import MEASURED as FIRST_STEP

HERE = Path(__file__).parent
OPEN = """
import sys
from pathlib import Path
from gaupipe.data.load import load_data
from gaupipe.settings import DataSettings

root = Path(sys.argv[1]).resolve()
settings = DataSettings(
    name="folder", root=root, image_size=64, val_fraction=0.1, cache=sys.argv[2]
)
data = load_data(settings)
"""
EPOCH = (
    OPEN
    + """
import packed
import torch
from gaupipe.data.batches import Batches

torch.set_num_threads(1)
packed.read(Batches(data.train, data, packed.CPU, 128), 0)
"""
)
STORE = """
import sys
import numpy as np
import store

maps = store.open(sys.argv[1])
order = np.random.default_rng(0).permutation(len(maps))
for _ in maps.prefetch(np.split(order, range(128, len(order), 128))):
    pass
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--only", default="", help="steps that begin so")
    arguments = parser.parse_args()
    rows = []
    for images in arguments.images:
        with tempfile.TemporaryDirectory(dir=arguments.photos.parent) as folder:
            model = arguments.model.resolve()
            steps = measure(arguments.photos, model, images, Path(folder), arguments.only)
        rows.append({"images": images, "steps": steps})
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


def measure(
    photos: Path, model: Path, images: int, folder: Path, only: str
) -> list[dict[str, object]]:
    """What each step took of so many images."""
    link(photos, folder / "data", images)
    with tarfile.open(folder / "data.tar", "w") as tar:
        tar.add(folder / "data", "data")
    os.environ["GAUPIPE_CACHE"] = str(folder / "cache")
    os.environ["OMP_NUM_THREADS"] = "1"
    time.sleep(3)  # digests of files that have just changed are not kept
    steps: list[dict[str, object]] = []

    def step(name: str, *words: object, until: Path | None = None) -> None:
        if not name.startswith(only):
            return
        started = time.monotonic()
        with open(folder / "said", "w") as said:
            process = subprocess.Popen(
                list(map(str, words)), cwd=folder, stdout=said, stderr=subprocess.STDOUT
            )
            if until is not None:
                kill_after(process, until)
            _, status, used = os.wait4(process.pid, 0)
        if until is None and status != 0:
            sys.exit(f"{name}:\n{(folder / 'said').read_text()}")
        took = {
            "step": name,
            "core_seconds": round(used.ru_utime + used.ru_stime, 1),
            "seconds": round(time.monotonic() - started, 1),
            "peak_mb": round(used.ru_maxrss / 1e3),
        }
        print(f"{images:>9,}  {json.dumps(took)}", flush=True)
        steps.append(took)

    python = (sys.executable, "-c")
    gaupipe = (sys.executable, "-m", "gaupipe")
    export = ("export-maps", "--model", f"local-dir:{model}", "--images", "data")
    export += ("--kind", "predictions", "--out")
    two = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])

    step("imports", *python, "import torch, timm")
    step("open, first time", *python, OPEN, "data", "auto")
    step("open", *python, OPEN, "data", "auto")
    step("plan", *gaupipe, "plan", "--data", "data")
    first = ("train", "--data", "data", "--run-dir", "first", "--set", "threads=1")
    step("first step", *python, FIRST_STEP, *first)
    step("epoch of the folder, cached", *python, EPOCH, "data", "auto")
    step("epoch of the folder, without the cache", *python, EPOCH, "data", "none")
    step("open the tar, first time", *python, OPEN, "data.tar", "auto")
    step("epoch of the tar, without the cache", *python, EPOCH, "data.tar", "none")
    step("export", *gaupipe, *export, "one.zarr")
    step("export by two", *two, "-m", "gaupipe", *export, "two.zarr")
    step("export, killed", *gaupipe, *export, "again.zarr", until=folder / "again.zarr/logits/c/0")
    step("export, resumed", *gaupipe, *export, "again.zarr")
    for other in ("two.zarr", "again.zarr"):  # nothing to compare where no export was asked for
        assert same(folder / "one.zarr", folder / other), other
    step("export, verified", *gaupipe, "verify", "again.zarr")
    step("export, an epoch's reads", *python, STORE, "again.zarr")
    return steps


def link(photos: Path, folder: Path, images: int) -> None:
    """As many images of each class, the first by name."""
    classes = sorted(entry for entry in photos.iterdir() if entry.is_dir())
    for entry in classes:
        place = folder / entry.name
        place.mkdir(parents=True)
        for path in sorted(entry.iterdir())[: images // len(classes)]:
            os.link(path, place / path.name)


def kill_after(process: subprocess.Popen[bytes], path: Path) -> None:
    """Kills a process once a file is there."""
    while not path.exists():
        assert process.poll() is None, "ended before it was killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)


def same(one: Path, other: Path) -> bool:
    """Whether the arrays of two stores agree in every byte."""
    chunks: Sequence[str] = [
        str(path.relative_to(one)) for path in one.rglob("c/**/*") if path.is_file()
    ]
    assert chunks, one
    _, different, failed = filecmp.cmpfiles(one, other, chunks, shallow=False)
    return not different and not failed


if __name__ == "__main__":
    main()
