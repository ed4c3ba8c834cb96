"""The epochs of a training, with their log and checkpoints: between epochs, and within them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.batches import Batches
from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.errors import Stopped
from gaupipe.system.progress import EpochProgress, MetricsLog
from gaupipe.system.signals import Pauses
from gaupipe.training.state import TrainingState, Update
from gaupipe.training.step_log import StepLog


@dataclass
class Loop:
    """A training while it runs, in ``folder``."""

    folder: Path
    seed: int
    total: int
    """Epochs in all."""
    update: Update
    progress: EpochProgress
    steps: StepLog

    def epochs(self) -> Iterator[Epoch]:
        """As :func:`epochs`."""
        return epochs(self.update, self.folder, self.progress, self.seed, self.steps)

    def is_last(self, epoch: Epoch) -> bool:
        """Whether an epoch is the last of all."""
        return epoch.number + 1 == self.total

    def line(self, epoch: Epoch, text: str) -> None:
        """Prints what there is to say of an epoch that has finished."""
        self.progress.line(
            f"{self.progress.label} epoch {epoch.number + 1}/{self.total}: {text}, "
            f"{epoch.seconds:.1f} s"
        )


@contextmanager
def loop(
    settings: Settings, state: TrainingState, batches: Batches, folder: Path, label: str, total: int
) -> Iterator[Loop]:
    """The training of ``state`` on ``batches`` for ``total`` epochs, of which some may be done,
    with its bar, its log and its checkpoints."""
    pauses = Pauses(settings.checkpoint_minutes, settings.checkpoint_steps)
    update = Update(state, batches.steps, pauses)
    progress = EpochProgress(label, len(batches.split), total, len(state.metrics))
    with progress, StepLog(settings, folder, update, batches) as steps:
        yield Loop(folder, settings.seed, total, update, progress, steps)


def epochs(
    update: Update, folder: Path, progress: EpochProgress, seed: int, steps: StepLog | None = None
) -> Iterator[Epoch]:
    """The epochs that are left until the caller sets ``state.finished`` of what is updated.

    Each starts torch's generators from (seed, epoch) and the rank alone; the first one may go on in
    its middle (:attr:`Epoch.first`). When the caller comes back for the next, the epoch is written
    to ``folder``/metrics.jsonl and ``folder``/checkpoint, and ``steps`` hears of it. Raises
    Stopped, with a checkpoint written, where a signal has asked for it.
    """
    state, pauses = update.state, update.pauses
    log = distributed.on_main(lambda: MetricsLog(folder / "metrics.jsonl", state.metrics))
    distributed.on_main(lambda: state.remove_superseded(folder / "checkpoint"))
    with pauses:
        while not state.finished:
            epoch = Epoch(update, folder / "checkpoint", progress, seed, steps)
            state.modules.train()
            yield epoch
            state.metrics.append(epoch.metrics)
            state.epoch = None
            distributed.on_main(lambda: log.append(epoch.metrics))  # noqa: B023  (called at once)
            if steps:
                steps.epoch(epoch.metrics)
            state.save(folder / "checkpoint")
            pauses.saved()
            pauses.all_reduce()
            if pauses.signal:
                raise Stopped(pauses.signal, f"after epoch {epoch.number + 1}")


class Epoch:
    """One epoch while it is trained: its number, from 0, and the means of its losses.

    Beside what :class:`gaupipe.training.state.TrainingState` always has, a checkpoint in its
    middle has:

    * the batches that are done and the seconds they took
    * of each rank, its share of the sums of losses and the state of torch's generators
    * the state of the generators that it is told to :meth:`follow`, and :attr:`lists`

    On another number of ranks than before, rank 0 takes over all sums, and torch's generators start
    from (seed, epoch, batch, rank).
    """

    def __init__(
        self,
        update: Update,
        folder: Path,
        progress: EpochProgress,
        seed: int,
        steps: StepLog | None = None,
    ) -> None:
        self.update, self.folder, self.progress, self.steps = update, folder, progress, steps
        self.number, self.first = len(update.state.metrics), update.state.batches
        """``first`` is the number of the batch to begin with: 0, or where a checkpoint was
        written."""
        self.batches = self.first
        self.started, self.processor_started = time.monotonic(), time.process_time()
        self.images = 0
        self.sums: dict[str, Tensor] = {}
        self.lists: dict[str, list[Any]] = {}
        """What is measured now and then in the course of the epoch, for its metrics: JSON, the same
        on all ranks."""
        self.metrics: dict[str, Any] = {}
        self._seed = seed
        self._generators: dict[int, torch.Generator] = {}
        self._saved: dict[str, Any] | None = update.state.epoch
        seed_epoch(seed, self.number)
        if steps:
            steps.start_epoch(self._saved and self._saved.get("line"))
        if self._saved:
            self._go_on(self._saved)

    def follow(self, generators: Mapping[int, torch.Generator]) -> None:
        """Keeps these generators in checkpoints within the epoch, and puts them where the
        checkpoint has them. Their keys name them on all ranks. On another type of device than the
        checkpoint's they start from (seed, epoch, batch, key)."""
        self._generators.update(generators)
        saved = self._saved["generators"] if self._saved else {}
        for name in generators.keys() & saved.keys():
            if self._saved and self._saved["device"] == self.update.device.type:
                generators[name].set_state(saved[name])
            else:
                generators[name].manual_seed(self._fresh_seed(name))

    def _fresh_seed(self, name: int) -> int:
        """A seed from (seed, epoch, first batch, ``name``)."""
        words = np.random.SeedSequence((self._seed, self.number, self.first, name))
        return int(words.generate_state(1, np.uint64)[0])

    def add(self, images: int, **values: Tensor) -> None:
        """Ends a batch of this many images, with the means of its losses over them. Writes a
        checkpoint where one is due; raises Stopped then where a signal has asked for it."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach() * images
        self.images += images
        self.batches += 1
        self.progress.advance(images * distributed.world_size())
        if self.steps:
            self.steps.batch(self.number, images, values)
        # after the last batch: an evaluation may be long, too
        last = self.batches == self.update.steps and self._saved is not None
        if self.update.stepped and (self.update.pauses.due or last):
            self._save()

    def means(self) -> dict[str, float]:
        """The mean of each loss over the images of the epoch, those of all ranks. The time of
        training ends here."""
        if distributed.world_size() > 1:
            self.images = int(distributed.all_reduce_sum(torch.tensor(self.images)))
            sums = torch.stack([*self.sums.values()])
            self.sums = dict(zip(self.sums, distributed.all_reduce_sum(sums), strict=True))
        self.seconds = time.monotonic() - self.started
        self.processor_seconds = time.process_time() - self.processor_started
        return {name: (total / self.images).item() for name, total in self.sums.items()}

    def finish(self, **metrics: Any) -> None:
        """What metrics.jsonl is to say of the epoch, beside its number, time and speed, and
        :attr:`lists`."""
        self.metrics = {
            "epoch": self.number + 1,
            **metrics,
            **self.lists,
            "seconds": round(self.seconds, 3),
            "processor_seconds": round(self.processor_seconds, 3),
            "images_per_s": round(self.images / self.seconds, 1),
        }

    def _save(self) -> None:
        """Writes a checkpoint. The time that this takes does not count."""
        began, pauses = time.monotonic(), self.update.pauses
        processor_began = time.process_time()
        generators = {name: one.get_state() for name, one in self._generators.items()}
        of_rank = {
            "images": self.images,
            "sums": {name: total.cpu() for name, total in self.sums.items()},
            "random": random_state(self.update.device),
        }
        self._saved = self.update.state.epoch = {
            "batches": self.batches,
            "seconds": began - self.started,
            "processor_seconds": processor_began - self.processor_started,
            "lists": self.lists,
            "line": self.steps.state() if self.steps else None,
            "device": self.update.device.type,
            "generators": distributed.all_gather_dict(generators),
            "ranks": distributed.all_gather_object(of_rank),
        }
        self.update.state.save(self.folder)
        took = time.monotonic() - began
        self.started += took
        self.processor_started += time.process_time() - processor_began
        if self.steps:
            self.steps.pause(took)
        pauses.saved()
        if pauses.signal:
            where = f"in epoch {self.number + 1}, after batch {self.batches} of {self.update.steps}"
            raise Stopped(pauses.signal, where)

    def _go_on(self, saved: dict[str, Any]) -> None:
        """Takes over what :meth:`_save` wrote down."""
        self.started -= saved["seconds"]
        self.processor_started -= saved["processor_seconds"]
        self.lists.update(saved["lists"])
        ranks, device = saved["ranks"], self.update.device
        self.progress.skip(sum(rank["images"] for rank in ranks))
        if len(ranks) == distributed.world_size():
            mine = ranks[distributed.rank()]
            restore_random_state(mine["random"], device)
        else:
            mine = added_up(ranks) if distributed.is_main() else added_up(ranks, 0)
            torch.manual_seed(self._fresh_seed(distributed.rank()))
        self.images = mine["images"]
        self.sums = {name: total.to(device) for name, total in mine["sums"].items()}


def added_up(ranks: list[dict[str, Any]], share: int = 1) -> dict[str, Any]:
    """Images and sums of losses of all ranks, or for a ``share`` of 0 none of them."""
    sums: dict[str, Tensor] = {}
    for name in ranks[0]["sums"]:
        sums[name] = share * torch.stack([rank["sums"][name] for rank in ranks]).sum(0)
    return {"images": share * sum(rank["images"] for rank in ranks), "sums": sums}


def seed_epoch(seed: int, epoch: int) -> None:
    """Starts torch's generators from (seed, epoch) and the rank alone, so that a resumed run draws
    what an unbroken one draws."""
    torch.manual_seed((seed * 1_000_003 + epoch) * 7 + (distributed.rank() << 40))


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators on the CPU and on ``device``, by the type of their device."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Goes back to a :func:`random_state`; on another type of device the CPU's alone."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
