"""What the loops of both phases share beside their epochs (:mod:`gaupipe.training.epochs`): what a
checkpoint holds, the update of the network, scores."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.nn.parallel import DistributedDataParallel

from gaupipe.data.augment import Mix, mixed_targets
from gaupipe.data.batches import Batches
from gaupipe.settings import OptimSettings
from gaupipe.system import digests, distributed
from gaupipe.system.errors import UserError
from gaupipe.system.signals import Pauses
from gaupipe.teachers.image_buckets import BucketedState
from gaupipe.teachers.image_state import ImageState

Network = TypeVar("Network", bound=nn.Module)
"""What is trained: a ViT, or the teacher with Gaussians."""


@dataclass
class TrainingState(Generic[Network]):
    """What a checkpoint holds. Nothing else is needed to go on: every epoch draws its random
    numbers from (seed, epoch), and the schedule is a function of the update number. ``epoch`` has
    what the middle of an epoch needs beside."""

    modules: Network
    optimizer: torch.optim.Optimizer
    schedule: Any
    optim: OptimSettings
    precision: str = "float32"
    per_image: ImageState | BucketedState | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    """What the state belongs to; a checkpoint of something else is refused."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    epoch: dict[str, Any] | None = None
    """How far the epoch after those of ``metrics`` has come: what
    :class:`gaupipe.training.epochs.Epoch` wrote down; None between two epochs."""
    best: dict[str, Any] | None = None
    """{"epoch": its number from 1, "modules": the state of :attr:`kept` after it} of the epoch
    that :meth:`keep_best` found best; None where it was not asked."""

    def __post_init__(self) -> None:
        device = next(self.modules.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "float16")
        self.ema = ModelEmaV3(self.modules, decay=self.optim.ema) if self.optim.ema else None

    @property
    def kept(self) -> Network:
        """The modules that are evaluated and kept: their moving average where there is one."""
        return self.ema.module if self.ema else self.modules

    def keep_best(self, metrics: dict[str, Any], by: str) -> int:
        """Remembers the weights of the epoch that has just been trained if no epoch before was as
        good, and returns how many epochs the best one is back.

        ``metrics`` are what metrics.jsonl is to say of the epoch, ``by`` is one of them: a loss
        (the smallest is best) or an accuracy.
        """
        sign = -1 if by.endswith("loss") else 1
        # without the weights of epochs that version 0.1 trained
        before = [entry for entry in self.metrics if math.isfinite(entry[by])]
        best = max(before, key=lambda entry: sign * entry[by], default=None)
        if best is None or sign * metrics[by] > sign * best[by]:
            best = metrics
            weights = {
                name: one.to("cpu", copy=True) for name, one in self.kept.state_dict().items()
            }
            self.best = {"epoch": metrics["epoch"], "modules": weights}
        return metrics["epoch"] - best["epoch"]

    def save(self, folder: Path) -> None:
        """Writes ``folder/state.pt``, and its digest to ``SHA256SUMS``, so that a reader finds
        the old one or the new one, never a part. Rank 0 writes it once the per-image parameters of
        all ranks are on the disk."""
        per_image = None
        if self.per_image is not None:
            self.per_image.commit()
            per_image = self.per_image.save(folder, self._moment())

        def write() -> None:
            self._write(folder, per_image)
            self.remove_superseded(folder)

        distributed.on_main(write)

    def remove_superseded(self, folder: Path) -> None:
        """Deletes what earlier saves, killed ones too, left in ``folder`` beside the last
        checkpoint."""
        if isinstance(self.per_image, BucketedState):
            self.per_image.remove_superseded(folder)

    def _moment(self) -> str:
        """Names what is trained so far."""
        within = f"_{self.batches:07d}" if self.epoch else ""
        return f"{len(self.metrics):04d}{within}"

    @property
    def batches(self) -> int:
        """Batches of the epoch that has begun."""
        return self.epoch["batches"] if self.epoch else 0

    def _write(self, folder: Path, per_image: dict[str, Any] | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / "state.pt.partial"
        state = {
            "modules": self.modules.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
            "rows": per_image,
            "metrics": self.metrics,
            "identity": self.identity,
            # versions that know no "epoch" refuse one that says neither True nor False
            "finished": None if self.epoch else self.finished,
            "epoch": self.epoch,
            "best": self.best,
        }
        digests.replace(partial, folder / "state.pt", digests.save(state, partial))

    def load(self, folder: Path) -> bool:
        """Continues from what :meth:`save` wrote last; False where there is nothing. Raises
        UserError for a checkpoint that is damaged or not one of ours, and, with the difference,
        for one of another identity."""
        path = folder / "state.pt"
        if not path.is_file():
            return False
        digests.check(path)
        try:
            self._restore(
                torch.load(path, map_location="cpu", weights_only=True, mmap=True), folder
            )
        except (UserError, OSError):
            raise
        except (
            Exception
        ) as error:  # torch.load and load_state_dict raise whatever a foreign file makes of them
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"{path} is damaged, or not a checkpoint of this run ({reason[:200]}): restore "
                "it from a copy, or start afresh in another --run-dir"
            ) from None
        return True

    def _restore(self, state: dict[str, Any], folder: Path) -> None:
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__}")
        recorded = state["identity"]
        for name in self.identity.keys() | recorded.keys():
            old, new = recorded.get(name), self.identity.get(name)
            if old != new:
                raise UserError(
                    f"{folder} was started with {name} {old}, now it is {new}: change it back, or "
                    "start afresh in another --run-dir"
                )
        numbers = [entry["epoch"] for entry in state["metrics"]]
        epoch = state.get("epoch")  # none in earlier versions
        finished = False if epoch else state["finished"]
        if not isinstance(finished, bool) or (finished and not numbers):
            raise ValueError("it does not say which epochs are done")
        self.modules.load_state_dict(state["modules"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])
        if self.per_image is not None:
            self.per_image.load(folder, state["rows"])
        self.metrics, self.finished, self.epoch = state["metrics"], finished, epoch
        self.best = state.get("best")


def has_checkpoint(folder: Path) -> bool:
    """Whether :meth:`TrainingState.save` has written to ``folder``."""
    return (folder / "state.pt").is_file()


class Update:
    """What one batch does to the network: its gradients and, every ``accumulate`` batches, a
    step."""

    def __init__(self, state: TrainingState, steps: int, pauses: Pauses | None = None) -> None:
        """``steps`` is the number of batches in an epoch. ``pauses`` are told of each step, and
        learn with each batch what the other ranks request; None requests nothing."""
        self.state, self.steps, self.pauses = state, steps, pauses or Pauses()
        self.losses: nn.Module | None = None
        self.batch = len(state.metrics) * steps + state.batches
        self.stepped = False
        """Whether the network made a step after the last batch."""
        self.grad_norm: Tensor | None = None
        """The norm of the gradient in the last step, before it was clipped."""
        self.log_norm = False
        """Whether somebody wants the norm where gradients are not clipped."""
        self.device = next(state.modules.parameters()).device
        self.parameters = [
            parameter for group in state.optimizer.param_groups for parameter in group["params"]
        ]

    def data_parallel(self, losses: nn.Module) -> nn.Module:
        """What is to compute the losses of an epoch:
        :func:`gaupipe.system.distributed.data_parallel`. Made anew for every epoch, so that ranks
        sum gradients in the same order after an interruption."""
        self.losses = distributed.data_parallel(losses)
        if isinstance(self.losses, DistributedDataParallel) and self.batch % self.steps:
            return Rehearsed(self.losses, self.parameters)
        return self.losses

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The context of a forward pass: the settings' precision, and gradients that wait for the
        last of the batches that are accumulated before ranks exchange them."""
        dtype = getattr(torch, self.state.precision)
        waits: contextlib.AbstractContextManager = contextlib.nullcontext()
        if isinstance(self.losses, DistributedDataParallel) and not self._steps_now():
            waits = self.losses.no_sync()
        with waits, torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            yield

    def _steps_now(self) -> bool:
        """Whether the network makes a step after this batch."""
        step = self.batch % self.steps + 1
        return step % self.state.optim.accumulate == 0 or step == self.steps

    def __call__(self, loss: Tensor, weight: float = 1.0) -> None:
        """Goes back from the loss of one batch, the mean over its images on this rank, of that
        :attr:`~gaupipe.data.batches.Batch.weight`. Raises ErrorOnAllRanks for one that is not
        finite, on any rank."""
        state, accumulate = self.state, self.state.optim.accumulate
        epoch, step = divmod(self.batch, self.steps)
        state.schedule.step_update(self.batch)
        if weight != 1.0:
            loss = loss * weight
        of_world = self._shared(loss.detach())
        if not torch.isfinite(of_world):
            raise distributed.ErrorOnAllRanks(self._diverged(of_world, epoch, step))
        # the last steps of an epoch may be fewer than the others accumulate
        self.group = min(accumulate, self.steps - step // accumulate * accumulate)
        self.scale, self.weight = state.scaler.get_scale(), weight
        state.scaler.scale(loss / self.group).backward()
        self.stepped = self._steps_now()
        if self.stepped:
            self._step()
        self.batch += 1

    def _shared(self, loss: Tensor) -> Tensor:
        """The mean of a loss over ranks. Their requests for a pause travel along."""
        requests = self.pauses.requests()
        if distributed.world_size() > 1:
            mine = torch.cat([loss.view(1), loss.new_tensor(requests)])
            loss, *shared = distributed.all_reduce_sum(mine).unbind()
            loss, requests = loss / distributed.world_size(), torch.stack(shared).tolist()
        self.pauses.take_sum(requests)
        return loss

    def per_image_gradient(self, parameters: Tensor) -> Tensor:
        """The gradient of per-image parameters [B, ...], for each image that of its own loss,
        whatever the size of the batch."""
        gradient = parameters.grad
        assert gradient is not None  # the loss has gone back
        return gradient * (len(parameters) * self.group / (self.scale * self.weight))

    def _step(self) -> None:
        state = self.state
        if state.optim.clip_grad is not None:
            state.scaler.unscale_(state.optimizer)
            self.grad_norm = nn.utils.clip_grad_norm_(self.parameters, state.optim.clip_grad)
        elif self.log_norm:
            gradients = [one.grad for one in self.parameters if one.grad is not None]
            self.grad_norm = nn.utils.get_total_norm(gradients) / state.scaler.get_scale()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
        if state.ema:
            state.ema.update(state.modules)
        self.pauses.stepped()

    def _diverged(self, loss: Tensor, epoch: int, step: int) -> str:
        optim, rate = self.state.optim, self.state.optimizer.param_groups[0]["lr"]
        return (
            f"the loss is {loss.item()} in epoch {epoch + 1}, step {step + 1} of {self.steps} "
            f"(lr {rate:.3g}, {self.state.precision}, clip_grad {optim.clip_grad}): lower "
            "optim.lr or raise optim.warmup_epochs; the last checkpoint is kept"
        )


class Rehearsed(nn.Module):
    """DistributedDataParallel ``losses`` for an epoch that goes on in its middle.

    DistributedDataParallel sums the gradients of its first backward pass in one order, and in
    another one from then on, which is that in which they came. Three ranks or more see the
    difference in the last bits. So the first batch goes forward and back once without effect.
    """

    def __init__(self, losses: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.losses, self.trained, self.rehearsed = losses, parameters, False

    def forward(self, *arguments: Any) -> Any:
        if not self.rehearsed:
            self._rehearse(arguments)
            self.rehearsed = True
        return self.losses(*arguments)

    def _rehearse(self, arguments: tuple) -> None:
        waits, self.losses.require_backward_grad_sync = (
            self.losses.require_backward_grad_sync,
            True,
        )
        device = self.trained[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            losses = self.losses(*arguments)
            (losses["loss"] if isinstance(losses, dict) else losses).backward()
        self.losses.require_backward_grad_sync = waits
        for tensor in (*self.trained, *arguments):
            if isinstance(tensor, Tensor):
                tensor.grad = None


@torch.no_grad()
def score(log_probabilities: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Accuracy, top-5 accuracy and cross-entropy of batches of (log-probabilities or logits [B,
    C], labels [B]), over those of all ranks."""
    sums = torch.zeros(4, dtype=torch.float64)  # right, right among five, images, loss
    for logits, labels in log_probabilities:
        logits = logits.float()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels.unsqueeze(-1)
        right, right5 = int(best[:, 0].sum()), int(best.any(-1).sum())
        sums += torch.tensor([right, right5, len(labels), loss], dtype=torch.float64)
    right, right5, count, loss = distributed.all_reduce_sum(sums).tolist()
    return {"acc": right / count, "top5": right5 / count, "loss": loss / count}


def score_model(model: nn.Module, batches: Batches) -> dict[str, float]:
    """:func:`score` of a model in eval mode over a split."""
    model.eval()
    with torch.inference_mode():
        return score((model(batch.images), batch.labels) for batch in batches.of_rank())


def label_targets(labels: Tensor, mixed: Mix | None, logits: Tensor) -> Tensor:
    """Labels [B], or for a mixed batch the probabilities [B, C] that their mix stands for."""
    return (
        labels
        if mixed is None
        else mixed_targets(one_hot(labels, logits.shape[-1]).to(logits.dtype), mixed)
    )


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Share of the batch whose largest logit is its label."""
    return (logits.argmax(-1) == labels).float().mean()
