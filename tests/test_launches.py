"""What a GPU would wait for, seen without one: the operations of a training step, augmentation
included, are as many for a large batch as for a small one, and none of them gives a number to the
host. ``tests/test_fake_gpu.py`` sees on which device they are."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import store
from gaupipe.data.batches import Batch
from gaupipe.data.buckets import Buckets
from gaupipe.data.draws import RANDAUGMENT, uniforms
from gaupipe.data.splits import ImageData
from gaupipe.distillation import job as distillation
from gaupipe.distillation.job import build_without_store
from gaupipe.distillation.reading import StoresOfSplit
from gaupipe.settings import ExportSettings, Settings
from gaupipe.settings.load import load
from gaupipe.teachers.base import MapShape, outline
from gaupipe.teachers.gaussian import GaussianTeacher
from gaupipe.teachers.image_state import ImageState
from gaupipe.training.epochs import Epoch
from gaupipe.training.job import build_plain, train, training_state
from stages.plan import random_data
from stores import make_arrays, make_schema, write_store

READS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal")
"""Operations whose result, or its shape, the host needs at once."""

EVERYTHING = [
    "augment={flip: true, crop_padding: 2, resized_crop: {}, erasing: 0.5, mixup: 0.8, "
    "cutmix: 1.0, randaugment: {ops: 2}}",
    "data.image_size=8",
    "threads=1",
    "model.args={embed_dim: 16, depth: 2, num_heads: 4}",
    "train.optim={name: adamw, lr: 0.001, clip_grad: 1.0, ema: 0.9}",
]

LEARNS_MAPS = ["phase_b.gamma=0.5", "phase_b.alpha=0.2"]


class Operations(TorchDispatchMode):
    """Counts the operations that torch executes, and those that the host waits for. A number on the
    CPU by intent, like the step count of an optimizer, is ``free`` to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.begin(set())

    def begin(self, free: set[int]) -> None:
        """Counts from now on."""
        self.counts: Counter[str] = Counter()
        self.reads: list[str] = []
        self.free = free

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if self.paused:
            return function(*args, **(kwargs or {}))
        if not function.is_view:  # which launches nothing
            self.counts[name] += 1
        if name in READS and args[0].data_ptr() not in self.free:
            self.reads.append(name)
        return function(*args, **(kwargs or {}))

    def leave_out(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, whose operations do not count."""

        def unseen(*args: Any) -> Any:
            self.paused = True
            try:
                return method(*args)
            finally:
                self.paused = False

        return unseen


def ids_of_all_operations(count: int, images: int, seed: int, operations: int) -> np.ndarray:
    """``count`` image ids, among which RandAugment draws every operation with both signs first and
    second: a batch in which nobody has some operation launches less."""
    ids = np.arange(images)
    draws = uniforms(seed, 0, ids, 4, RANDAUGMENT)
    chosen: dict[int, None] = {}
    for step in (0, 2):
        kinds = np.floor(draws[:, step] * operations) * 2 + (draws[:, step + 1] < 0.5)
        for kind in np.unique(kinds):
            chosen[int(np.flatnonzero(kinds == kind)[0])] = None
    rest = [one for one in ids.tolist() if one not in chosen]
    assert len(chosen) < count
    return np.array([*chosen, *rest][:count])


class Seen(Exception):
    """Ends a training after the step that was to be seen."""


Train = Callable[[Settings, ImageData, Path], None]


def operations_of_a_step(
    tmp_path, monkeypatch, train_it: Train, batch_size: int, *changes: str
) -> Operations:
    """Of the second step of a training, which has no first allocations. Per-image parameters live
    in the memory of the host, so what it does with them does not count."""
    settings = load("digits", [*EVERYTHING, f"data.batch_size={batch_size}", *changes])
    data = random_data(settings, 512, 10)
    chosen = ids_of_all_operations(batch_size, len(data.train), 0, len(settings.augment.operations))
    monkeypatch.setattr(Buckets, "epoch", lambda *_: [{0: chosen}] * 2)
    seen = Operations()
    steps: list[int] = []

    def end_batch(epoch: Epoch, batch: Batch, **values: Tensor) -> None:
        original(epoch, batch, **values)
        steps.append(len(batch))
        if len(steps) == 2:
            raise Seen
        states = epoch.loop.update.state.optimizer.state.values()
        seen.begin(free={state["step"].data_ptr() for state in states})

    original = Epoch.end_batch
    with monkeypatch.context() as patched, seen:
        patched.setattr(Epoch, "end_batch", end_batch)
        for name in ("gather", "update"):
            patched.setattr(ImageState, name, seen.leave_out(getattr(ImageState, name)))
        with pytest.raises(Seen):
            train_it(settings, data, tmp_path / str(batch_size))
    assert steps == [batch_size] * 2
    return seen


def train_teacher(settings: Settings, data: ImageData, folder: Path) -> None:
    teacher = GaussianTeacher.build(settings, data, folder)
    teacher.train(teacher.training_state(), folder)


def train_plainly(settings: Settings, data: ImageData, folder: Path) -> None:
    job = build_plain(settings, data)
    train(job, training_state(job), folder, "")


def train_with_local_maps(settings: Settings, data: ImageData, folder: Path) -> None:
    job = build_plain(settings, data)
    job = build_without_store(outline(settings, data), job.student, settings.student_training)
    train(job, training_state(job), folder, "")


def train_with_stored_maps(settings: Settings, data: ImageData, folder: Path) -> None:
    job = build_plain(settings, data)
    maps = stored_maps(folder, settings.export, data, job.student)
    job = distillation.build_distilled(
        settings,
        data,
        job.device,
        job.student,
        settings.student_training,
        StoresOfSplit(maps, maps),
    )
    train(job, training_state(job), folder, "")


def stored_maps(
    folder: Path, export: ExportSettings, data: ImageData, student: VisionTransformer
) -> store.Store:
    """Random maps of all training images."""
    shape = MapShape.of(student)
    schema = make_schema(
        kind=export.kind,
        k=export.k,
        num_images=len(data.train),
        num_classes=10,
        grid=shape.grid,
        layers=shape.layers,
        heads=shape.heads,
    )
    write_store(folder / "maps.zarr", schema, make_arrays(schema))
    return store.open(folder / "maps.zarr")


@pytest.mark.parametrize(
    "train_it,changes",
    [
        (train_plainly, []),
        (train_with_local_maps, ["phase_a.teacher=local", "phase_b.gamma=0.5"]),
        (train_with_stored_maps, ["export.kind=gaussian", *LEARNS_MAPS]),
        (train_with_stored_maps, ["export.kind=topk", "export.k=8", *LEARNS_MAPS]),
        (train_teacher, ["phase_a.augment=true"]),
        (
            train_teacher,
            ["phase_a.augment=true", "phase_a.mode=expected", "phase_a.per_image=table"],
        ),
    ],
    ids=["train", "local", "gaussian", "topk", "phase A", "phase A, expected"],
)
def test_a_step_launches_as_much_for_few_images_as_for_many_and_reads_nothing(
    tmp_path, monkeypatch, train_it, changes
):
    few, many = (
        operations_of_a_step(tmp_path, monkeypatch, train_it, size, *changes) for size in (64, 256)
    )
    assert few.reads == many.reads == []
    assert few.counts == many.counts
    assert few.counts.total() > 300  # it has seen the forward and the backward pass
