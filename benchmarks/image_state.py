"""How fast per-image parameters are gathered and updated, and what they take, for several numbers
of images.

    python benchmarks/image_state.py            1e4, 1e5 and 1e6 images of 1024 parameters, in files
    python benchmarks/image_state.py --images 50000 --row 21504   CIFAR-10 Atto (26 GB of disk)

Every N is filled by one whole epoch. Then rounds follow: each times, in random order, a gather, an
update, a copy in memory, and a sequential read and a synchronous write on the disk of as many bytes
as a batch of records has. A ratio is of times per byte (a gather moves the parameters; an
update moves the records, once in and once out, which counts once) and is taken within a round; the
table shows the median over the rounds with the quartiles in brackets. ``mapped`` is the time of the
same gather and update on numpy.memmap, in the same rounds, as a ratio to ours.

Files go to a temporary folder below --folder and are deleted; the program stops if fewer than 20 GB
would stay free.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from timing import record, spread

from gaupipe.data.buckets import Buckets
from gaupipe.teachers.image_state import ImageState, record_words

BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["table", "one"], default="table")
    parser.add_argument("--images", default="10000,100000,1000000")
    parser.add_argument("--row", type=int, default=1024, help="parameters of an image")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "one":
        print(json.dumps(measure(arguments, int(arguments.images))))
    else:
        table(arguments)


def table(arguments: argparse.Namespace) -> None:
    """A process of its own for each N, so that peak memory is that N's."""
    words = record_words(arguments.row)
    print(
        f"{arguments.row} parameters an image, "
        f"{words * 4 / arguments.row:.0f} bytes a parameter and place, "
        f"records of {words * 4:,} bytes, batches of {BATCH}\n"
    )
    print(
        "| N | bytes | images gathered /s | images updated /s | gather / memcpy | "
        "update / memcpy | gather / disk read | update / disk write | mapped gather | "
        "mapped update | first epoch, images/s | end_epoch, s | anonymous MB, before and after | "
        "peak resident MB | memcpy MB/s | disk read MB/s | disk write MB/s |"
    )
    print("|---" * 17 + "|")
    for images in map(int, arguments.images.split(",")):
        command = [sys.executable, __file__, "one", "--images", str(images)]
        for name in ("row", "rounds", "folder"):
            command += [f"--{name}", str(getattr(arguments, name))]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            sys.exit(result.returncode)
        r = json.loads(result.stdout.strip().splitlines()[-1])
        print(
            f"| {images:,} | {r['bytes'] / 1e9:.2f} GB | {r['gather']} | {r['update']} | "
            f"{r['gather/memcpy']} | {r['update/memcpy']} | {r['gather/read']} | "
            f"{r['update/write']} | {r['mapped gather/gather']} | {r['mapped update/update']} | "
            f"{r['fill']:,.0f} | {r['end_epoch']:.2f} | "
            f"{r['before_mb']:,.0f}, {r['anonymous_mb']:,.0f} | {r['peak_mb']:,.0f} | "
            f"{r['memcpy_mb_s']} | {r['read_mb_s']} | {r['write_mb_s']} |",
            flush=True,
        )


def measure(arguments: argparse.Namespace, images: int) -> dict:
    """Rates of one N as text "median (quartiles)", and its bytes and memory."""
    words = record_words(arguments.row)
    size = images * words * 4
    needed = 2 * size
    if shutil.disk_usage(arguments.folder).free - needed < 20e9:
        sys.exit(f"{arguments.folder}: {needed / 1e9:.1f} GB are needed and 20 GB should stay free")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        state = ImageState(
            Buckets(images), torch.zeros(arguments.row), lr=0.1, folder=Path(folder) / "rows"
        )
        gradient = torch.randn(BATCH, arguments.row)
        before = dict(status())
        started = time.perf_counter()
        for image_ids in torch.randperm(images).split(BATCH):
            state.update(image_ids, gradient[: len(image_ids)])
        fill = images / (time.perf_counter() - started)
        started = time.perf_counter()
        state.commit()
        end_epoch = time.perf_counter() - started
        for image_ids in torch.randperm(images).split(BATCH)[:100]:
            state.gather(image_ids)
        after = dict(status())

        block = BATCH * words * 4
        source = torch.randint(
            0, 100, (64 * 2**20,), dtype=torch.int32
        )  # larger than the processor's caches
        target = torch.empty_like(source)
        disk = os.open(Path(folder) / "disk", os.O_RDWR | os.O_CREAT)
        sequential = np.random.default_rng(0).bytes(64 * 2**20)
        for part in range(16):
            os.pwrite(disk, sequential, part * len(sequential))
        os.fsync(disk)
        os.posix_fadvise(disk, 0, 0, os.POSIX_FADV_DONTNEED)
        position = [0, 0, 0]

        def memcpy() -> None:
            start = position[0] = (position[0] + block // 4) % (len(source) - block // 4)
            target[start : start + block // 4].copy_(source[start : start + block // 4])

        def read() -> None:
            start = position[1] = (position[1] + block) % (16 * len(sequential) - block)
            os.pread(disk, block, start)
            os.posix_fadvise(disk, start, block, os.POSIX_FADV_DONTNEED)

        def write() -> None:
            start = position[2] = (position[2] + block) % (16 * len(sequential) - block)
            os.pwrite(disk, sequential[:block], start)
            os.fdatasync(disk)
            os.posix_fadvise(disk, start, block, os.POSIX_FADV_DONTNEED)

        batch = {}
        work = {
            "memcpy": memcpy,
            "read": read,
            "write": write,
            "gather": lambda: state.gather(batch["ids"]),
            "update": lambda: state.update(batch["update"], gradient),
        }
        paths = [Path(folder) / "rows/bucket-0000" / f"records.{place}" for place in (1, 0)]
        os.truncate(paths[1], size)
        current, other = (
            torch.from_numpy(np.memmap(path, np.int32, "r+", shape=(images, words)))
            for path in paths
        )

        def mapped_update() -> None:
            """What an update adds to reading and writing is the same for both: its
            arithmetic is left out there and measured here by one on a copy."""
            records = current[batch["mapped update"]]
            scratch.update(torch.arange(BATCH), gradient)
            other[batch["mapped update"]] = records

        scratch = ImageState(
            Buckets(BATCH), torch.zeros(arguments.row), lr=0.1, folder=Path(folder) / "scratch"
        )
        work["mapped gather"] = lambda: current[batch["mapped"], : arguments.row]
        work["mapped update"] = mapped_update
        times: dict[str, list[float]] = {name: [] for name in work}
        names = list(work)
        for number in range(arguments.rounds + 2):
            batch = {
                "ids": torch.randint(images, (BATCH,)),
                "update": torch.randperm(images)[:BATCH],
                "mapped": torch.randint(images, (BATCH,)),
                "mapped update": torch.randperm(images)[:BATCH],
            }
            random.shuffle(names)
            for name in names:
                started = time.perf_counter()
                work[name]()
                if number > 1:
                    times[name].append(time.perf_counter() - started)
        os.close(disk)
    result = {
        "bytes": size,
        "fill": fill,
        "end_epoch": end_epoch,
        "before_mb": before["RssAnon"] / 1e3,
        "anonymous_mb": after["RssAnon"] / 1e3,
        "peak_mb": after["VmHWM"] / 1e3,
    }
    for name in ("gather", "update"):
        result[name] = spread([BATCH / t for t in times[name]], ",.0f")
    for name in ("memcpy", "read", "write"):
        result[f"{name}_mb_s"] = spread([block / t / 1e6 for t in times[name]], ",.0f")
    for name, base in (
        ("gather", "memcpy"),
        ("update", "memcpy"),
        ("gather", "read"),
        ("update", "write"),
        ("mapped gather", "gather"),
        ("mapped update", "update"),
    ):
        per_byte = words / arguments.row if name == "gather" else 1
        pairs = zip(times[name], times[base], strict=True)
        ratios = [per_byte * mine / theirs for mine, theirs in pairs]
        record(f"{images:,} images, {name} / {base}", ratios)
        result[f"{name}/{base}"] = spread(ratios, ".2f")
    return result


def status() -> list[tuple[str, int]]:
    """Memory of this process in kB: VmHWM is the most it ever had resident, RssAnon its own,
    RssFile mapped files."""
    return [
        (line.split(":")[0], int(line.split()[1]))
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(("VmHWM", "Rss"))
    ]


if __name__ == "__main__":
    main()
