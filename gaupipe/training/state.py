"""The state of a training: what a checkpoint holds, how it is written, and how it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from gaupipe.settings import OptimSettings
from gaupipe.settings.load import check_as_begun
from gaupipe.system import digests, distributed
from gaupipe.system.errors import UserError, one_line
from gaupipe.system.files import flush
from gaupipe.system.messages import LOG
from gaupipe.system.progress import EpochMetrics

Identity = dict[str, object]
"""Settings, data and teacher that a checkpoint belongs to, as a message names them: one with other
values is refused."""

Network = TypeVar("Network", bound=nn.Module)
"""A ViT, or the teacher with Gaussians."""


class RankInEpoch(TypedDict):
    """What a rank has done of an epoch."""

    images: int
    labelled: int
    """Those of the images that have a label."""
    sums: dict[str, Tensor]
    """Of each loss over these images."""
    processor_seconds: float


class BegunEpoch(TypedDict):
    """An epoch that has begun, in a checkpoint."""

    batches: int
    seconds: float
    ranks: list[RankInEpoch]


class BestEpoch(TypedDict):
    """The best epoch so far."""

    epoch: int
    """From 1."""
    modules: dict[str, Tensor]
    """The state_dict of :attr:`TrainingState.kept` after it."""


@dataclass
class TrainingState(Generic[Network]):
    """Everything that a checkpoint holds. Random numbers follow from (seed, epoch), and the rate
    from the update number, so nothing else is needed to go on."""

    network: Network
    optimizer: torch.optim.Optimizer
    schedule: Any
    optim: OptimSettings
    precision: str = "float32"
    per_image: Any = None
    """The parameters of single images (:class:`gaupipe.teachers.image_state.ImageState`), which lie
    in files of their own; None where a network has none."""
    identity: Identity = field(default_factory=dict)
    metrics: list[EpochMetrics] = field(default_factory=list)
    finished: bool = False
    epoch: BegunEpoch | None = None
    """None between two epochs."""
    best: BestEpoch | None = None

    def __post_init__(self) -> None:
        device = next(self.network.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "float16")
        self.ema: ModelEmaV3 | None = None
        if self.optim.ema:
            # without its warm-up a short training keeps the weights that it began with
            self.ema = ModelEmaV3(self.network, decay=self.optim.ema, use_warmup=True)

    @property
    def kept(self) -> Network:
        """The network that is evaluated and kept: its moving average where there is one."""
        return self.ema.module if self.ema else self.network

    @property
    def lr(self) -> float:
        """The learning rate of the last step, of the last block where blocks have their own."""
        group = self.optimizer.param_groups[0]
        return group["lr"] / group.get("lr_scale", 1.0)

    @property
    def batches(self) -> int:
        """Batches of the epoch that has begun."""
        return self.epoch["batches"] if self.epoch else 0

    def keep_best(self, metrics: EpochMetrics) -> int:
        """Copies the weights if the latest epoch, with these ``metrics``, has a better "val_acc"
        than all before it. Returns the number of epochs since the best one."""
        best = max(self.metrics, key=val_acc, default=None)
        if best is None or val_acc(metrics) > val_acc(best):
            best = metrics
            state = self.kept.state_dict()
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
            self.best = {"epoch": metrics["epoch"], "modules": weights}
        return metrics["epoch"] - best["epoch"]

    def save(self, folder: Path) -> None:
        """Writes ``folder/state.pt``: a reader sees the old one or the new one, never a part. Rank
        0 writes it once the per-image parameters of all ranks are on the disk."""
        per_image = None
        if self.per_image is not None:
            within = f"_{self.batches:07d}" if self.epoch else ""
            self.per_image.commit()
            per_image = self.per_image.save(folder, f"{len(self.metrics):04d}{within}")
        if distributed.is_main():  # no rank saves again before all have exchanged a loss
            self._write(folder, per_image)
        if self.per_image is not None:
            distributed.wait_for_main()  # an update overwrites what the checkpoint before needs

    def remove_superseded(self, folder: Path) -> None:
        """Deletes files of earlier and of killed saves."""
        if self.per_image is not None:
            self.per_image.remove_superseded(folder)

    def _write(self, folder: Path, per_image: dict[str, Any] | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / "state.pt.partial"
        state = {
            "modules": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
            "rows": per_image,
            "metrics": self.metrics,
            "identity": self.identity,
            "finished": self.finished,
            "epoch": self.epoch,
            "best": self.best,
        }
        digests.save(state, partial)
        partial.replace(folder / "state.pt")
        flush(folder)
        LOG.debug(f"wrote {folder / 'state.pt'} after epoch {len(self.metrics)}")
        self.remove_superseded(folder)

    def load(self, folder: Path, afresh: str = "in another --run-dir") -> None:
        """Continues from what :meth:`save` wrote last, if there is anything. Raises UserError as
        :func:`read_checkpoint`."""
        with read_checkpoint(folder, self.identity, afresh) as state:
            if state is None:
                return
            self.network.load_state_dict(state["modules"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            if self.ema:
                self.ema.load_state_dict(state["ema"])
            if self.per_image is not None:
                self.per_image.load(folder, state["rows"])
            self.metrics = state["metrics"]
            self.finished = state["finished"]
            self.epoch = state["epoch"]
            self.best = state["best"]


def kept_weights(state: dict[str, Any]) -> dict[str, Any]:
    """Of a checkpoint the weights of :attr:`TrainingState.kept`."""
    average = state["ema"]
    if average is None:
        weights: dict[str, Any] = state["modules"]
        return weights
    return {name.removeprefix("module."): tensor for name, tensor in average.items()}


@contextmanager
def read_checkpoint(
    folder: Path, identity: Identity, afresh: str = "in another --run-dir"
) -> Iterator[dict[str, Any] | None]:
    """Gives what :meth:`TrainingState.save` wrote last, while the block restores it; None where
    there is nothing. Raises UserError for a checkpoint that is damaged or not one of ours, and,
    with the difference, for one of another ``identity``, which end in where to start ``afresh``."""
    path = folder / "state.pt"
    if not path.is_file():
        yield None
        return
    try:
        digests.check(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        check_as_begun(folder, state["identity"], identity, afresh)
        yield state
        LOG.debug(f"read {path} of epoch {len(state['metrics'])}")
    except (UserError, OSError):
        raise
    except Exception as error:  # whatever torch makes of a foreign file
        raise UserError(
            f"{path} is damaged, or not a checkpoint of this run ({one_line(error)}): restore it "
            f"from a copy, or start afresh {afresh}"
        ) from None


def val_acc(metrics: EpochMetrics) -> float:
    """The accuracy of an epoch on the validation images, which every ViT has."""
    accuracy = metrics["val_acc"]
    assert accuracy is not None
    return accuracy
