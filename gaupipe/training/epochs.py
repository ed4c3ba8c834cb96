"""The epochs of a training, with their log and checkpoints: between epochs, and within them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gaupipe.data.augment import Augment
from gaupipe.data.batches import Batch, Batches
from gaupipe.data.draws import seed_of
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.errors import Stopped
from gaupipe.system.progress import EpochMetrics, EpochProgress, write_metrics
from gaupipe.system.signals import Pauses
from gaupipe.training.curves import draw
from gaupipe.training.state import BegunEpoch, RankInEpoch, TrainingState
from gaupipe.training.step_log import StepLog
from gaupipe.training.sums import Sums
from gaupipe.training.update import Update

SHOWN = ("loss", "acc")
"""Means of the epoch on the progress bar."""


@dataclass
class Loop:
    """A training while it runs, in ``folder``."""

    folder: Path
    seed: int
    total: int
    """Epochs in all."""
    batches: Batches
    augment: Augment
    update: Update
    progress: EpochProgress
    step_log: StepLog

    def epochs(self) -> Iterator[Epoch]:
        """The epochs that are left until the caller sets ``state.finished``.

        The first one may go on in its middle (:attr:`Epoch.first`). Each ends with :meth:`save`.
        """
        state = self.update.state
        if distributed.is_main():
            write_metrics(self.folder / "metrics.jsonl", state.metrics)
            state.remove_superseded(self.folder / "checkpoint")
        with self.update.pauses:
            while not state.finished:
                state.network.train()
                self.batches.keep(len(state.metrics), self.augment)
                yield Epoch(self)

    def save(self, epoch: Epoch, metrics: EpochMetrics) -> None:
        """Writes an epoch to ``folder``/metrics.jsonl and ``folder``/checkpoint, and tells the
        loggers. Raises Stopped then after a signal."""
        state = self.update.state
        pauses = self.update.pauses
        state.metrics.append(metrics)
        state.epoch = None
        if distributed.is_main():
            write_metrics(self.folder / "metrics.jsonl", [metrics], "a")
        self.step_log.epoch(metrics)
        state.save(self.folder / "checkpoint")
        pauses.saved()
        pauses.all_reduce()  # a signal may have reached another rank alone
        if pauses.signal:
            raise Stopped(pauses.signal, f"after epoch {epoch.number + 1}")

    def is_last(self, epoch: Epoch) -> bool:
        return epoch.number + 1 == self.total

    def show(self, epoch: Epoch, loss: float, **accuracies: float | None) -> None:
        """Shows the loss and the named ``accuracies`` of an epoch that has finished."""
        values = {"loss": f"{loss:.3f}"}
        for name, accuracy in accuracies.items():
            if accuracy is not None:
                values[name] = f"{100 * accuracy:.1f} %"
        values["time"] = f"{epoch.seconds:.1f} s"
        self.progress.epoch(epoch.number + 1, values)


@contextmanager
def loop(
    settings: Settings,
    state: TrainingState[Any],
    batches: Batches,
    augment: Augment,
    folder: Path,
    label: str,
    total: int,
    remarks: Sequence[str] = (),
) -> Iterator[Loop]:
    """The training of ``state`` on ``batches``, of which ``augment`` draws views, for ``total``
    epochs, some of them done before. One that begins says the ``remarks``; one that ends draws its
    curves."""
    update = Update(state, batches.steps, Pauses(settings.checkpoint_minutes))
    progress = EpochProgress(label, len(batches.split), total, len(state.metrics))
    for module in state.network.modules():
        if isinstance(module, VisionTransformer):  # of others batch norm would see images twice
            module.set_grad_checkpointing(settings.grad_checkpointing)
    with progress, closing(StepLog(settings, folder, update, batches)) as step_log:
        progress.line(f"{label}: {what_is_left(state, update, batches, total)}")
        if not state.metrics:
            for remark in remarks:
                progress.line(f"{label}: {remark}")
        yield Loop(folder, settings.seed, total, batches, augment, update, progress, step_log)
    if distributed.is_main():
        draw({label: state.metrics}, folder / "curves")
        progress.line(f"{label}: curves in {folder / 'curves.png'} and .svg")


def what_is_left(state: TrainingState[Any], update: Update, batches: Batches, total: int) -> str:
    """The images, the parameters and the machine of a training that begins or goes on."""
    done = len(state.metrics)
    if state.finished:
        return f"has finished after {done} epochs: nothing is left to train"
    parameters = sum(parameter.numel() for parameter in state.network.parameters())
    images = f"{len(batches.split):,} images"
    unlabelled = len(batches.split) - batches.split.labelled
    if unlabelled:
        images += f" ({unlabelled:,} of them without labels)"
    return (
        f"{images}, {parameters:,} parameters, {update.device}, {state.precision}, "
        f"epochs {done + 1} to {total}"
    )


class Epoch:
    """One epoch while it is trained: its number, from 0, and the means of its losses.

    Every batch starts torch's generators from (seed, epoch, batch, rank), so that a resumed run
    draws what an unbroken one draws.
    """

    def __init__(self, loop: Loop) -> None:
        state = loop.update.state
        self.loop = loop
        self.number = len(state.metrics)
        self.first = state.batches
        """The number of the batch to begin with."""
        self.done = self.first
        """Batches of the epoch that have ended."""
        self.sums = Sums()
        self.started = time.monotonic()
        self.processor_started = time.process_time()
        loop.step_log.begin_line()
        if state.epoch:
            self._load(state.epoch)
        self._seed()

    def end_batch(self, batch: Batch, **values: Tensor) -> None:
        """Adds the means of a batch's losses. Writes a checkpoint where one is due, and raises
        Stopped then after a signal."""
        update = self.loop.update
        step_log = self.loop.step_log
        for sums in (self.sums, step_log.sums):
            sums.add(batch, values)
        self.done += 1
        progress = self.loop.progress
        if progress.is_stale:
            means = self.sums.means()
            shown = " ".join(f"{name} {means[name]:.3f}" for name in SHOWN if name in means)
            progress.show(f"{progress.label} {self.number + 1}/{self.loop.total} {shown}")
        progress.advance(len(batch) * distributed.world_size())
        if step_log.every and update.batch % step_log.every == 0:
            step_log.write(self.number)
        # an epoch with a checkpoint in it has another at its end, before an evaluation that may be
        # as long
        is_last = self.done == update.steps
        ends_long_epoch = is_last and update.state.epoch is not None
        if update.stepped and (update.pauses.due or ends_long_epoch):
            self._save()
        self._seed()

    def end(self) -> dict[str, float]:
        """The mean of each loss over the images of all ranks. The time of training ends here, that
        of the processor is of all ranks. Raises UserError for a loss that is not finite."""
        self.loop.update.check()
        self.processor_seconds = time.process_time() - self.processor_started
        if distributed.world_size() > 1:
            mine = self.sums
            counts = [mine.images, mine.labelled, self.processor_seconds]
            totals = distributed.all_reduce_sum(torch.tensor(counts, dtype=torch.float64))
            images, labelled, self.processor_seconds = totals.tolist()
            values = distributed.all_reduce_sum(torch.stack([*mine.values.values()]))
            by_name = dict(zip(mine.values, values, strict=True))
            self.sums = Sums(int(images), int(labelled), by_name)
        self.seconds = time.monotonic() - self.started
        return self.sums.means()

    def metrics(self, **values: float | None) -> EpochMetrics:
        """The epoch's line in metrics.jsonl: the losses and accuracies ``values``, and the time of
        training until :meth:`end`."""
        line = {
            "epoch": self.number + 1,
            **values,
            "seconds": round(self.seconds, 3),
            "processor_seconds": round(self.processor_seconds, 3),
            "images_per_s": round(self.sums.images / self.seconds, 1),
        }
        return cast(EpochMetrics, line)

    def _seed(self) -> None:
        torch.manual_seed(seed_of(self.loop.seed, self.number, self.done, distributed.rank()))

    def _save(self) -> None:
        """Writes a checkpoint. The time that this takes does not count."""
        self.loop.update.check()
        began = time.monotonic()
        processor_began = time.process_time()
        update = self.loop.update
        mine: RankInEpoch = {
            "images": self.sums.images,
            "labelled": self.sums.labelled,
            "sums": {name: total.cpu() for name, total in self.sums.values.items()},
            "processor_seconds": processor_began - self.processor_started,
        }
        update.state.epoch = {
            "batches": self.done,
            "seconds": began - self.started,
            "ranks": distributed.all_gather_object(mine),
        }
        update.state.save(self.loop.folder / "checkpoint")
        self.started += time.monotonic() - began
        self.processor_started += time.process_time() - processor_began
        update.pauses.saved()
        if update.pauses.signal:
            where = f"in epoch {self.number + 1}, after batch {self.done} of {update.steps}"
            raise Stopped(update.pauses.signal, where)

    def _load(self, saved: BegunEpoch) -> None:
        """Takes over what :meth:`_save` wrote: of the ranks that there were, every so many."""
        ranks = saved["ranks"]
        self.loop.progress.skip(sum(rank["images"] for rank in ranks))
        mine = ranks[distributed.rank() :: distributed.world_size()]
        self.started -= saved["seconds"]
        self.processor_started -= sum(rank["processor_seconds"] for rank in mine)
        self.sums.images = sum(rank["images"] for rank in mine)
        self.sums.labelled = sum(rank["labelled"] for rank in mine)
        for name, total in ranks[0]["sums"].items():
            sums = [rank["sums"][name] for rank in mine]
            value = sum(sums, torch.zeros_like(total))
            self.sums.values[name] = value.to(self.loop.update.device)
