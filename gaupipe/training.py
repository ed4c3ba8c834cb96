"""What both phases share: device and seeds, models, the optimizer and its schedule, one pass over the data, scores,
and the state that a checkpoint holds."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from gaupipe import digests
from gaupipe.augment import Augment
from gaupipe.config import ModelSettings, OptimSettings, Settings, flatten
from gaupipe.data import Batches, ImageData
from gaupipe.errors import UserError
from gaupipe.gaussians import Geometry
from gaupipe.image_state import ImageState
from gaupipe.initialisation import start_weights
from gaupipe.progress import EpochProgress


def select_device(settings: Settings) -> torch.device:
    """The device the settings name; ``auto`` is a GPU where there is one. Raises UserError for one that is not there."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device: {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def build_vit(model: ModelSettings, data: ImageData, attention: str = "standard", **options: Any) -> nn.Module:
    """The timm model that the settings name, sized for the data, its weights started as the settings say."""
    import timm
    if not timm.is_model(model.name):
        import difflib
        near = difflib.get_close_matches(model.name, timm.list_models("gauvit_*"), n=1, cutoff=0)
        raise UserError(f"model.name: unknown model {model.name!r}; did you mean {near[0]!r}?")
    sizes = dict(img_size=data.image_size, in_chans=data.channels, num_classes=data.num_classes)
    try:
        vit = timm.create_model(model.name, attention=attention, **{**sizes, **model.args}, **options)
    except UserError:
        raise
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"model.args: {model.name} cannot be built for {data.image_size}-pixel images with "
                        f"{model.args}: {error}") from None
    start_weights(vit, model)
    return vit


def build_optimizer(vit: nn.Module, optim: OptimSettings, epochs: int, steps_per_epoch: int,
                    extra_groups: list[dict[str, Any]] = ()) -> tuple[torch.optim.Optimizer, Any]:
    """timm's optimizer for ``vit`` and timm's schedule with linear warm-up, stepped with the update number.

    ``extra_groups`` are parameter groups with rates of their own, which follow the same schedule. Raises UserError for
    what timm cannot make.
    """
    from timm.optim import create_optimizer_v2, get_optimizer_class, param_groups_weight_decay
    from timm.scheduler import create_scheduler_v2

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [*param_groups_weight_decay(model, optim.weight_decay, no_weight_decay_list=model.no_weight_decay()),
                *extra_groups]

    try:
        takes = inspect.signature(get_optimizer_class(optim.name, bind_defaults=False)).parameters
        options = {"betas": optim.betas} if "betas" in takes else {}
        optimizer = create_optimizer_v2(vit, opt=optim.name, lr=optim.lr, param_group_fn=groups, **options)
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"optim.name: timm cannot make {optim.name!r}: {error}") from None
    warmup = min(optim.warmup_epochs, epochs)
    try:
        schedule, _ = create_scheduler_v2(
            optimizer, optim.schedule, min_lr=optim.min_lr, warmup_lr=optim.min_lr, warmup_epochs=warmup, warmup_prefix=True,
            step_on_epochs=False, updates_per_epoch=steps_per_epoch, **{"num_epochs": epochs - warmup or 1} | optim.schedule_args)
        if schedule is None:
            raise ValueError("'constant' holds the rate")
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"optim.schedule: timm cannot make {optim.schedule!r} of {epochs} epochs with "
                        f"{optim.schedule_args}: {error}") from None
    return optimizer, schedule


def seed_epoch(seed: int, epoch: int) -> None:
    """Starts torch's generators from (seed, epoch) alone, so that a resumed run draws what an unbroken one draws."""
    torch.manual_seed((seed * 1_000_003 + epoch) * 7)


@dataclass
class TrainingState:
    """What a checkpoint holds. Nothing else is needed to go on: every epoch draws its random numbers from (seed, epoch)
    and the schedule from the update number."""

    modules: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    optim: OptimSettings
    precision: str = "float32"
    rows: ImageState | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    """What the state belongs to; a checkpoint of something else is refused."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self) -> None:
        device = next(self.modules.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "float16")
        self.ema = ModelEmaV3(self.modules, decay=self.optim.ema) if self.optim.ema else None

    @property
    def kept(self) -> nn.Module:
        """The modules that are evaluated and kept: their moving average where there is one."""
        return self.ema.module if self.ema else self.modules

    def save(self, folder: Path) -> None:
        """Writes ``folder/state.pt``, and its digest to ``SHA256SUMS``, so that a reader finds
        the old one or the new one, never a part."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / "state.pt.partial"
        with partial.open("wb") as file:
            hashed = digests.HashedFile(file)
            torch.save({"modules": self.modules.state_dict(), "optimizer": self.optimizer.state_dict(),
                        "scaler": self.scaler.state_dict(), "ema": self.ema.state_dict() if self.ema else None,
                        "rows": self.rows.state_dict() if self.rows else None, "metrics": self.metrics,
                        "identity": self.identity, "finished": self.finished}, hashed)
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
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            self._restore(state, folder)
        except (UserError, OSError):
            raise
        except Exception as error:  # whatever torch makes of a foreign file
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"{path} is damaged, or not a checkpoint of this run ({reason[:200]}): "
                "restore it from a copy, or start afresh in another --run-dir"
            ) from None
        return True

    def _restore(self, state: dict[str, Any], folder: Path) -> None:
        if not isinstance(state, dict):
            raise TypeError(f"it holds a {type(state).__name__}")
        known = flatten(Settings()) | state["identity"]  # a setting that a later version adds was at its default
        for name in known.keys() & self.identity.keys() | state["identity"].keys():
            old, new = known[name], self.identity.get(name)
            if old != new:
                raise UserError(
                    f"{folder} was started with {name} {old}, now it is {new}: "
                    "change it back, or start afresh in another --run-dir"
                )
        epochs = [row["epoch"] for row in state["metrics"]]
        if not isinstance(state["finished"], bool) or state["finished"] and not epochs:
            raise ValueError("it does not say which epochs are done")
        self.modules.load_state_dict(state["modules"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])
        if self.rows:
            self.rows.load_state_dict(state["rows"])
        self.metrics, self.finished = state["metrics"], state["finished"]


def train_epoch(state: TrainingState, batches: Batches, device: torch.device, augment: Augment, progress: EpochProgress,
                step: Callable[[Tensor, Tensor, Tensor, Geometry | None], tuple[dict[str, Tensor], Tensor | None]]
                ) -> dict[str, float]:
    """One pass over the training images; the means of the values that ``step`` names.

    ``step(images, labels, image_ids, geometry)`` returns ({"loss": ..., ...}, rows), where rows [B, ...] are the leaf tensor of
    the images' rows, or None. A row's gradient is that of its own image's loss, whatever the size of the batch. Raises
    UserError when the loss is not finite; the checkpoint of the last epoch stays.
    """
    state.modules.train()
    epoch, steps, accumulate = len(state.metrics), batches.steps(), state.optim.accumulate
    seed_epoch(augment.seed, epoch)
    totals: dict[str, Tensor] = {}
    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    dtype = getattr(torch, state.precision)
    for number, (images, labels, image_ids, geometry) in enumerate(batches.augmented(device, (augment.seed, epoch), augment)):
        state.schedule.step_update(epoch * steps + number)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            values, rows = step(images, labels, image_ids, geometry)
        if not torch.isfinite(values["loss"]):
            raise UserError(f"the loss is {values['loss'].item()} in epoch {epoch + 1}, step {number + 1} of {steps} "
                            f"(lr {state.optimizer.param_groups[0]['lr']:.3g}, {state.precision}, "
                            f"clip_grad {state.optim.clip_grad}): lower optim.lr or raise optim.warmup_epochs; "
                            "the checkpoint of the epoch before is kept")
        scale = state.scaler.get_scale()
        group = min(accumulate, steps - number // accumulate * accumulate)  # the last one may be smaller
        state.scaler.scale(values["loss"] / group).backward()
        if rows is not None:
            gradient = (rows.grad * (len(image_ids) * group / scale)).cpu()
            finite = torch.isfinite(gradient).flatten(1).all(1)  # float16 overflows now and then, in single images
            state.rows.update(image_ids[finite], gradient[finite])
        if (number + 1) % accumulate == 0 or number + 1 == steps:
            if state.optim.clip_grad is not None:
                state.scaler.unscale_(state.optimizer)
                nn.utils.clip_grad_norm_(parameters, state.optim.clip_grad)
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.optimizer.zero_grad()
            if state.ema:
                state.ema.update(state.modules)
        for name, value in values.items():
            totals[name] = totals.get(name, 0) + value.detach() * len(images)
        progress.advance(len(images))
    return {name: (total / len(batches.split)).item() for name, total in totals.items()}


@torch.no_grad()
def score(log_probabilities: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Accuracy, top-5 accuracy and cross-entropy of batches of (log-probabilities or logits [B, C], labels [B])."""
    right = right5 = count = 0
    loss = 0.0
    for logits, labels in log_probabilities:
        logits = logits.float()
        loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == labels.unsqueeze(-1)
        right += best[:, 0].sum().item()
        right5 += best.any(-1).sum().item()
        count += len(labels)
    return {"acc": right / count, "top5": right5 / count, "loss": loss / count}


def score_model(model: nn.Module, batches: Batches, device: torch.device) -> dict[str, float]:
    """:func:`score` of a model in eval mode over a split."""
    model.eval()
    with torch.inference_mode():
        return score((model(images), labels) for images, labels, _ in batches.epoch(device))
