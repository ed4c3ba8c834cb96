"""Images per second of the export against the bare teacher forward.

    python benchmarks/export.py [CONFIG] [--set a.b=c ...] [--repeats R] [--kind gaussian]
    python benchmarks/export.py docs/results/data/given_cifar10.yaml --kind topk --repeats 3 \
        --set data.train_images=300 --set export.views=null        a real DeiT-Ti

The teacher is fresh; the Gaussians of its prior get noise, so that maps compress as those of a
teacher that has learned do. With --set phase_a.teacher=vit it is an ordinary ViT, with
local-dir:FOLDER or a name of timm's that one. A repeat runs the forward alone over all images, then
the export of the same images; both read the images through the same loader. Prints a line per
repeat and the ratio, in seconds and in processor time of all threads.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from timing import record, spread

import store
from gaupipe.data.load import load_data
from gaupipe.distillation.export import decoder, make_schema
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.distillation.store_choice import choose_store
from gaupipe.models import save_student
from gaupipe.settings import Settings
from gaupipe.settings.load import load
from gaupipe.teachers.base import Teacher, outline
from stages.export.writing import write


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="digits")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--kind", default="gaussian", choices=sorted(MAP_KINDS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shard-mb", type=float, default=32)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments, Path(folder))


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    """Both in turn, ``repeats`` times."""
    settings = load(arguments.config, arguments.set)
    job = fresh_teacher(settings, folder)
    ratios, cpu_ratios = [], []
    for repeat in range(arguments.repeats + 1):  # the first one warms up
        cpu_started = time.process_time()
        forward = len(job.data.train) / bare_forward(job)
        forward_cpu = time.process_time() - cpu_started
        writer = store.create(
            folder / "maps.zarr",
            make_schema(job, choose_store(job, given={"kind": arguments.kind})),
            overwrite=True,
            decoder=decoder(job, arguments.kind),
            shard_bytes=int(arguments.shard_mb * 1e6),
        )
        started, cpu_started = time.perf_counter(), time.process_time()
        write(job, writer, writer.pending(), job.data.train)
        speed = len(job.data.train) / (time.perf_counter() - started)
        if repeat:
            cpu_ratios.append(forward_cpu / (time.process_time() - cpu_started))
            ratios.append(speed / forward)
            print(
                f"forward {forward:10,.0f} images/s   export {speed:10,.0f} images/s   "
                f"ratio {ratios[-1]:.3f}"
            )
    record(f"export of {arguments.kind} over the forward pass", ratios)
    print(f"ratio: {spread(ratios, '.3f')}, min {min(ratios):.3f}, max {max(ratios):.3f}")
    print(f"in processor time: {spread(cpu_ratios, '.3f')}")


def fresh_teacher(settings: Settings, folder: Path) -> Teacher:
    """A teacher that has learned nothing, in eval mode."""
    teacher = outline(settings, load_data(settings.data)).begin(folder)
    if settings.phase_a.teacher == "vit":
        save_student(teacher.network, folder / "teacher", **teacher.data.data_config)
        teacher = teacher.finished(settings, teacher.data, folder)
    if settings.phase_a.teacher == "gaussian":
        with torch.no_grad():
            teacher.network.prior += 0.3 * torch.randn_like(teacher.network.prior)
    teacher.network.eval()
    return teacher


@torch.inference_mode()
def bare_forward(teacher: Teacher) -> float:
    """Seconds for the predictions of all training images, nothing kept."""
    generator = torch.Generator(teacher.device).manual_seed(0)
    network = teacher.network
    started = time.perf_counter()
    for batch in teacher.batches(teacher.data.train).in_order():
        if "gaussians" in teacher.forms:
            gaussians = network.gaussians(teacher.parameters(batch.ids))
            network.predict(batch.images, gaussians, network.passes, generator)
        else:
            network(batch.images)
    if teacher.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
