"""What a GPU would wait for, seen without one: the operations of a training step, augmentation
included, are as many for a large batch as for a small one, and none of them gives a number to the
host. ``tests/test_fake_gpu.py`` sees on which device they are."""

from collections import Counter

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batches
from gaupipe.data.draws import RANDAUGMENT, uniforms
from gaupipe.distillation import local
from gaupipe.settings.load import load
from gaupipe.training.epochs import loop
from gaupipe.training.job import build, training_state
from stages.plan import random_data

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


class Operations(TorchDispatchMode):
    """Counts the operations that torch executes, and those that the host waits for. A number on the
    CPU by intent, like the step count of an optimizer, is ``free`` to be read."""

    def __init__(self, free: set[int]) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.reads: list[str] = []
        self.free = free

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if not function.is_view:  # which launches nothing
            self.counts[name] += 1
        if name in READS and args[0].data_ptr() not in self.free:
            self.reads.append(name)
        return function(*args, **(kwargs or {}))


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


def operations_of_a_step(tmp_path, monkeypatch, batch_size: int, teacher: bool) -> Operations:
    """Of the second step of a training, which has no first allocations."""
    changes = [*EVERYTHING, f"data.batch_size={batch_size}"]
    if teacher:
        changes += ["phase_a.teacher=local", "phase_b.gamma=0.5"]
    settings = load("digits", changes)
    data = random_data(settings, 512, 10)
    job = build(settings, data)
    if teacher:
        job = local.build(settings, data, job.device, job.student)
    state = training_state(job)
    training = Batches(data.train, data, job.device, batch_size)
    chosen = ids_of_all_operations(batch_size, len(data.train), 0, len(settings.augment.operations))
    order = [{0: chosen}] * 2
    monkeypatch.setattr(type(training.buckets), "epoch", lambda *_: order)
    with loop(settings, state, training, tmp_path / str(batch_size), "", 1) as running:
        epoch = next(iter(running.epochs()))
        batches = training.epoch(0, Augment(job.augment, 0))
        for _ in range(2):
            steps = [state["step"] for state in state.optimizer.state.values()]
            seen = Operations({step.data_ptr() for step in steps})
            with seen:
                batch = next(batches)
                with running.update.forward():
                    result = job.losses(batch, job.epochs[0].gamma)
                running.update.backward(result.loss, batch.weight)
                running.update.step()
                epoch.add(len(batch), **result.by_name())
        assert len(batch) == batch_size
    return seen


@pytest.mark.parametrize("teacher", [False, True], ids=["train", "phase B, local"])
def test_a_step_launches_as_much_for_few_images_as_for_many_and_reads_nothing(
    tmp_path, monkeypatch, teacher
):
    few, many = (operations_of_a_step(tmp_path, monkeypatch, size, teacher) for size in (64, 256))
    assert few.reads == many.reads == []
    assert few.counts == many.counts
    assert few.counts.total() > 300  # it has seen the forward and the backward pass
