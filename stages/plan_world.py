"""Plan for several processes: what each needs, what they exchange, and how long it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gaupipe.data.splits import ImageData

from gaupipe.data.buckets import Buckets, too_many
from gaupipe.distillation.kinds import chosen
from gaupipe.distillation.student import build_student
from gaupipe.settings import Settings
from gaupipe.system.errors import UserError
from stages.runs.resources import Plan, Sizes, count, gigabytes

GRADIENT_BYTES = 4
"""Of one number: gradients are float32, also with autocast."""


def share(
    settings: Settings,
    data: ImageData,
    sizes: Sizes,
    plan: Plan,
    seconds: dict[str, float] | None,
    world_size: int,
    bandwidth: float | None,
) -> dict[str, Any]:
    """What a world of ``world_size`` ranks needs, as plain JSON values.

    memory_bytes_per_rank     resident on the CPU in phase A: a process, the data set, the network,
                              and the per-image parameters of the rank's buckets
    memory_bytes              of all ranks together
    disk_bytes_per_rank       that rank 0 writes, which writes most: its share of the per-image
                              parameters and the checkpoint of the network ("phase_a"), and its
                              share of the store of the settings' kind ("store")
    disk_bytes                of all ranks together, by the same names
    exchanged_bytes           that a rank sends in one step, by phase: 2 (W - 1) / W of the
                              gradient, as a ring does
    exchanged_bytes_in_all    that all ranks together send in one step, by phase
    seconds                   of each stage: those of one process divided by W, and the exchange at
                              ``bandwidth`` (Gbit/s of one rank), none of it hidden behind the
                              backward pass; None where no steps were measured

    Raises UserError for a number of ranks that cannot share the buckets.
    """
    buckets = settings.data.buckets or world_size
    if buckets % world_size:
        raise UserError(
            f"--world-size {world_size}: should divide data.buckets, which is {buckets}"
        )
    if too_many(plan.images, buckets, settings.data.batch_size):
        raise UserError(
            f"--world-size {world_size}: {buckets} buckets of {plan.images} images are too many "
            f"for batches of {settings.data.batch_size}: take fewer, or a larger data.batch_size"
        )
    per_image = plan.memory_bytes - plan.fixed_memory_bytes
    per_rank = plan.fixed_memory_bytes + per_image // world_size
    disk = disk_bytes(settings, sizes, plan)
    of_network = 2 * plan.fixed_checkpoint_bytes
    disk_per_rank = {
        "phase_a": of_network + -(-(disk["phase_a"] - of_network) // world_size),
        "store": -(-disk["store"] // world_size),
    }
    with torch.device("meta"):
        student = count(build_student(settings, data))
    teacher = sizes.network_parameters + sizes.prior_parameters
    trained = settings.phase_a.teacher in ("gaussian", "vit")
    numbers = {"phase_a": teacher if trained else 0, "phase_b": student}
    share_of_ring = 2 * (world_size - 1) / world_size
    exchanged = {
        phase: round(share_of_ring * GRADIENT_BYTES * parameters)
        for phase, parameters in numbers.items()
    }
    return {
        "world_size": world_size,
        "buckets": buckets,
        "memory_bytes_per_rank": per_rank,
        "memory_bytes": per_rank * world_size,
        "disk_bytes_per_rank": disk_per_rank,
        "disk_bytes": disk,
        "exchanged_bytes": exchanged,
        "exchanged_bytes_in_all": {phase: world_size * sent for phase, sent in exchanged.items()},
        "bandwidth_gbit": bandwidth,
        "seconds": seconds and times(settings, plan, exchanged, seconds, world_size, bandwidth),
    }


def disk_bytes(settings: Settings, sizes: Sizes, plan: Plan) -> dict[str, int]:
    """What phase A and the store of the settings' kind take on the disk, before compression."""
    export = chosen(settings, tokens=sizes.grid[0] * sizes.grid[1])
    return {"phase_a": plan.phase_a_disk_bytes, "store": plan.store_bytes[str(export.kind)]}


def times(
    settings: Settings,
    plan: Plan,
    exchanged: dict[str, int],
    seconds: dict[str, float],
    world_size: int,
    bandwidth: float | None,
) -> dict[str, float]:
    """Seconds of each stage in a world."""
    steps = Buckets(plan.images).steps(settings.data.batch_size)
    shared = {name: value / world_size for name, value in seconds.items()}
    if bandwidth is None:
        return shared
    epochs = {"phase_a": settings.phase_a.max_epochs, "phase_b": settings.phase_b.epochs}
    for phase, count_of_epochs in epochs.items():
        exchange = steps * exchanged[phase] * 8 / (bandwidth * 1e9)
        shared[f"{phase}_epoch"] += exchange
        shared[phase] += exchange * count_of_epochs
    return shared


def lines(world: dict[str, Any], duration: Any) -> Iterator[tuple[str, ...]]:
    """The lines of the table: name, value, remark."""
    size = world["world_size"]
    yield f"with {size} processes", "", f"data.buckets {world['buckets']}"
    yield "memory, each", gigabytes(world["memory_bytes_per_rank"])
    yield "memory, all", gigabytes(world["memory_bytes"])
    for name, disk in (("each", world["disk_bytes_per_rank"]), ("all", world["disk_bytes"])):
        parts = f"phase A {gigabytes(disk['phase_a'])}, store {gigabytes(disk['store'])}"
        yield f"disk, {name}", gigabytes(sum(disk.values())), parts
    for phase, sent in world["exchanged_bytes"].items():
        name, of_all = phase.replace("_", " "), gigabytes(world["exchanged_bytes_in_all"][phase])
        yield (
            f"exchange, {name}",
            gigabytes(sent),
            f"sent by each process in a step, {of_all} by all",
        )
    if world["seconds"]:
        speed = world["bandwidth_gbit"]
        remark = f"exchange at {speed:g} Gbit/s" if speed else "without exchange (--bandwidth)"
        for name in ("phase_a_epoch", "phase_a", "export", "phase_b_epoch", "phase_b"):
            yield f"time, {name.replace('_', ' ')}", duration(world["seconds"][name]), remark
