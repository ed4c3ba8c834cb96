"""What the loops of both phases share: the epochs, with their log and checkpoints, the update of
the network, scores."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.nn.parallel import DistributedDataParallel

from gaupipe import digests, distributed
from gaupipe.augment import Mix, mixed_targets
from gaupipe.config import OptimSettings, Settings, flatten
from gaupipe.data import Batches
from gaupipe.errors import UserError
from gaupipe.image_buckets import BucketedState
from gaupipe.image_state import ImageState
from gaupipe.progress import EpochProgress, MetricsLog


def seed_epoch(seed: int, epoch: int) -> None:
    """Starts torch's generators from (seed, epoch) and the rank alone, so that a resumed run draws
    what an unbroken one draws."""
    torch.manual_seed((seed * 1_000_003 + epoch) * 7 + (distributed.rank() << 40))


Network = TypeVar("Network", bound=nn.Module)
"""What is trained: a ViT, or the teacher with Gaussians."""


@dataclass
class TrainingState(Generic[Network]):
    """What a checkpoint holds. Nothing else is needed to go on: every epoch draws its random
    numbers from (seed, epoch) and the schedule from the update number."""

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

    def __post_init__(self) -> None:
        device = next(self.modules.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "float16")
        self.ema = ModelEmaV3(self.modules, decay=self.optim.ema) if self.optim.ema else None

    @property
    def kept(self) -> Network:
        """The modules that are evaluated and kept: their moving average where there is one."""
        return self.ema.module if self.ema else self.modules

    def save(self, folder: Path) -> None:
        """Writes ``folder/state.pt``, and its digest to ``SHA256SUMS``, so that a reader finds
        the old one or the new one, never a part. Rank 0 writes it once the per-image parameters of
        all ranks are on the disk."""
        per_image: dict[str, Any] | None = None
        if isinstance(self.per_image, BucketedState):
            per_image = {"buckets": self.per_image.save(folder, len(self.metrics))}
        elif self.per_image:
            per_image = self.per_image.state_dict()
        distributed.on_main(lambda: self._write(folder, per_image))
        distributed.on_main(lambda: self.remove_superseded(folder))

    def remove_superseded(self, folder: Path) -> None:
        """Deletes what earlier saves, killed ones too, left in ``folder`` beside the last
        checkpoint."""
        if isinstance(self.per_image, BucketedState):
            self.per_image.remove_superseded(folder)

    def _write(self, folder: Path, per_image: dict[str, Any] | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / "state.pt.partial"
        with partial.open("wb") as file:
            hashed = digests.HashedFile(file)
            torch.save(
                {
                    "modules": self.modules.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scaler": self.scaler.state_dict(),
                    "ema": self.ema.state_dict() if self.ema else None,
                    "rows": per_image,
                    "metrics": self.metrics,
                    "identity": self.identity,
                    "finished": self.finished,
                },
                hashed,  # type: ignore[arg-type]  # torch asks it for no more than write and flush
            )
            file.flush()
            os.fsync(file.fileno())
        digests.replace(partial, folder / "state.pt", hashed.hexdigest())

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
        # a setting that a later version adds was at its default; phase A of version 0.1 recorded
        # no settings
        defaults = flatten(Settings()) if "seed" in recorded else {}
        known = defaults | recorded
        for name in known.keys() & self.identity.keys() | recorded.keys():
            old, new = known[name], self.identity.get(name)
            if old != new:
                raise UserError(
                    f"{folder} was started with {name} {old}, now it is {new}: change it back, or "
                    "start afresh in another --run-dir"
                )
        numbers = [entry["epoch"] for entry in state["metrics"]]
        if not isinstance(state["finished"], bool) or (state["finished"] and not numbers):
            raise ValueError("it does not say which epochs are done")
        self.modules.load_state_dict(state["modules"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])
        if isinstance(self.per_image, BucketedState):
            self.per_image.load(folder, state["rows"]["buckets"])
        elif self.per_image:
            self.per_image.load_state_dict(state["rows"])
        self.metrics, self.finished = state["metrics"], state["finished"]


def has_checkpoint(folder: Path) -> bool:
    """Whether :meth:`TrainingState.save` has written to ``folder``."""
    return (folder / "state.pt").is_file()


class Update:
    """What one batch does to the network: its gradients and, every ``accumulate`` batches, a
    step."""

    def __init__(self, state: TrainingState, steps: int) -> None:
        """``steps`` is the number of batches in an epoch."""
        self.state, self.steps = state, steps
        self.losses: nn.Module | None = None
        self.batch = len(state.metrics) * steps
        self.device = next(state.modules.parameters()).device
        self.parameters = [
            parameter for group in state.optimizer.param_groups for parameter in group["params"]
        ]

    def replicated(self, losses: nn.Module) -> nn.Module:
        """What is to compute the losses of an epoch: :func:`gaupipe.distributed.replicated`. Made
        anew for every epoch, so that ranks sum gradients in the same order after an
        interruption."""
        self.losses = distributed.replicated(losses)
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
        :attr:`~gaupipe.data.Batch.weight`. Raises Agreed for one that is not finite, on any
        rank."""
        state, accumulate = self.state, self.state.optim.accumulate
        epoch, step = divmod(self.batch, self.steps)
        state.schedule.step_update(self.batch)
        if weight != 1.0:
            loss = loss * weight
        of_world = distributed.total(loss.detach()) / distributed.size()
        if not torch.isfinite(of_world):
            raise distributed.Agreed(self._diverged(of_world, epoch, step))
        # the last steps of an epoch may be fewer than the others accumulate
        self.group = min(accumulate, self.steps - step // accumulate * accumulate)
        self.scale, self.weight = state.scaler.get_scale(), weight
        state.scaler.scale(loss / self.group).backward()
        if self._steps_now():
            self._step()
        self.batch += 1

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
            nn.utils.clip_grad_norm_(self.parameters, state.optim.clip_grad)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
        if state.ema:
            state.ema.update(state.modules)

    def _diverged(self, loss: Tensor, epoch: int, step: int) -> str:
        optim, rate = self.state.optim, self.state.optimizer.param_groups[0]["lr"]
        return (
            f"the loss is {loss.item()} in epoch {epoch + 1}, step {step + 1} of {self.steps} "
            f"(lr {rate:.3g}, {self.state.precision}, clip_grad {optim.clip_grad}): lower "
            "optim.lr or raise optim.warmup_epochs; the checkpoint of the epoch before is kept"
        )


class Epoch:
    """One epoch while it is trained: its number, from 0, and the means of its losses."""

    def __init__(self, number: int, progress: EpochProgress) -> None:
        self.number = number
        self.progress = progress
        self.started = time.monotonic()
        self.images = 0
        self.sums: dict[str, Tensor] = {}
        self.metrics: dict[str, Any] = {}

    def add(self, images: int, **values: Tensor) -> None:
        """Counts a batch of this many images, with the means of its losses over them."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach() * images
        self.images += images
        self.progress.advance(images * distributed.size())

    def means(self) -> dict[str, float]:
        """The mean of each loss over the images of the epoch, those of all ranks. The time of
        training ends here."""
        if distributed.size() > 1:
            self.images = int(distributed.total(torch.tensor(self.images)))
            sums = torch.stack([*self.sums.values()])
            self.sums = dict(zip(self.sums, distributed.total(sums), strict=True))
        self.seconds = time.monotonic() - self.started
        return {name: (total / self.images).item() for name, total in self.sums.items()}

    def finish(self, **metrics: Any) -> None:
        """What metrics.jsonl is to say of the epoch, beside its number, time and speed."""
        self.metrics = {
            "epoch": self.number + 1,
            **metrics,
            "seconds": round(self.seconds, 3),
            "images_per_s": round(self.images / self.seconds, 1),
        }


def epochs(
    state: TrainingState, folder: Path, progress: EpochProgress, seed: int
) -> Iterator[Epoch]:
    """The epochs that are left until the caller sets ``state.finished``.

    Each starts torch's generators from (seed, epoch) and the rank alone. When the caller comes back
    for the next, the epoch is written to ``folder``/metrics.jsonl and ``folder``/checkpoint.
    """
    log = distributed.on_main(lambda: MetricsLog(folder / "metrics.jsonl", state.metrics))
    distributed.on_main(lambda: state.remove_superseded(folder / "checkpoint"))
    while not state.finished:
        epoch = Epoch(len(state.metrics), progress)
        state.modules.train()
        seed_epoch(seed, epoch.number)
        yield epoch
        state.metrics.append(epoch.metrics)
        distributed.on_main(lambda: log.append(epoch.metrics))  # noqa: B023  (called at once)
        state.save(folder / "checkpoint")


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
    right, right5, count, loss = distributed.total(sums).tolist()
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
