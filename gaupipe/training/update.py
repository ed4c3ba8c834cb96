"""The step that a batch makes: schedule, loss over all ranks, gradients, clipping, average."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.signals import Pauses
from gaupipe.training.state import TrainingState

CHECK_EVERY = 50
"""Batches after which their losses are read: to read a number of a GPU is to wait for it, and a
loss that is read at every step stops a GPU between all of them."""


ASK_EVERY = 8
"""Batches after which ranks ask each other for requests of a checkpoint. After a signal a training
has seconds, which hold some more steps, and an exchange with every batch would cost all of them."""


class Update:
    """The backward pass of each batch and, every ``accumulate`` batches, a step."""

    def __init__(self, state: TrainingState[Any], steps: int, pauses: Pauses | None = None) -> None:
        """``steps`` is the number of batches in an epoch. ``pauses`` learn every some batches what
        the other ranks request."""
        self.state = state
        self.steps = steps
        self.pauses = pauses or Pauses()
        self.ask_every = ASK_EVERY
        if distributed.world_size() == 1 or self.pauses.seconds == 0:  # a checkpoint at every step
            self.ask_every = 1
        self.losses: nn.Module | None = None
        self.batch = len(state.metrics) * steps + state.batches
        self.stepped = False
        """True if the network made a step after the last batch."""
        self.grad_norm: Tensor | None = None
        """The norm of the gradient in the last step, before it was clipped."""
        self.unchecked: list[tuple[Tensor, float]] = []
        """The loss and the learning rate of each batch since :meth:`check`."""
        self.log_norm = False
        """Compute the norm also where gradients are not clipped."""
        self.device = next(state.network.parameters()).device
        self.parameters = [
            parameter for group in state.optimizer.param_groups for parameter in group["params"]
        ]

    def data_parallel(self, losses: nn.Module) -> nn.Module:
        """The ``losses`` module of an epoch, with gradients that are means over all ranks. Made
        anew for every epoch, so that ranks sum gradients in the same order after an
        interruption."""
        self.losses = losses
        if distributed.world_size() > 1:
            devices = None if self.device.type == "cpu" else [self.device]
            self.losses = DistributedDataParallel(losses, device_ids=devices)
        return self.losses

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The context of a forward pass: autocast, and no exchange of gradients before the last of
        the accumulated batches."""
        dtype = getattr(torch, self.state.precision)
        exchange: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if isinstance(self.losses, DistributedDataParallel) and not self._steps_now():
            exchange = self.losses.no_sync()  # DDP decides in the forward pass what backward does
        with exchange, torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            yield

    def _steps_now(self) -> bool:
        """True if the network makes a step after this batch."""
        step = self.batch % self.steps + 1
        return step % self.state.optim.accumulate == 0 or step == self.steps

    def _steps_made(self) -> int:
        """Steps of the network since the first batch of all, with that of this batch."""
        accumulate = self.state.optim.accumulate
        epochs, batches = divmod(self.batch, self.steps)
        return epochs * math.ceil(self.steps / accumulate) + batches // accumulate + 1

    def backward(self, loss: Tensor, weight: float = 1.0) -> float:
        """The backward pass of one batch's loss, the mean over its images on this rank, of that
        :attr:`~gaupipe.data.batches.Batch.weight`. Returns the number by which the loss was
        multiplied before it went back."""
        state = self.state
        state.schedule.step_update(self.batch)  # by the batch's number: a resumed run has its rate
        if weight != 1.0:  # DDP takes the mean over ranks, whose parts of a batch differ in size
            loss = loss * weight
        self.unchecked.append((loss.detach(), state.lr))  # to read it now would wait for the GPU
        accumulate = state.optim.accumulate
        first = self.batch % self.steps // accumulate * accumulate  # of those that the step adds up
        added_up = min(accumulate, self.steps - first)  # the last step of an epoch may have fewer
        scale = state.scaler.get_scale() * weight / added_up  # before a step changes the scaler's
        state.scaler.scale(loss / added_up).backward()
        return scale

    def step_if_due(self) -> None:
        """A step of the optimizer, if the gradients of enough batches are added up. Ends a batch.
        Raises UserError as :meth:`check`."""
        state = self.state
        self.stepped = self._steps_now()
        if self.stepped:
            if state.optim.clip_grad is not None:
                state.scaler.unscale_(state.optimizer)  # the norm is of the true gradients
                self.grad_norm = nn.utils.clip_grad_norm_(self.parameters, state.optim.clip_grad)
            elif self.log_norm:
                # unscaled here and not in place, so that clip_grad: null leaves the gradients alone
                gradients = [one.grad for one in self.parameters if one.grad is not None]
                self.grad_norm = nn.utils.get_total_norm(gradients) / state.scaler.get_scale()
            state.scaler.step(state.optimizer)  # no step where float16 made a gradient infinite
            state.scaler.update()
            state.optimizer.zero_grad()  # not before each batch: they are added up
            if state.ema:
                state.ema.update(state.network, self._steps_made())
        self.batch += 1
        if self.batch % self.ask_every == 0:
            self.pauses.all_reduce()
        if self.batch % CHECK_EVERY == 0:
            self.check()

    def check(self) -> None:
        """Raises UserError, on every rank, for the first loss since the last call that is not
        finite in the mean over ranks. What the steps after it have made of the parameters must not
        be saved, so this belongs before every checkpoint. Collective."""
        if not self.unchecked:
            return
        losses, rates = zip(*self.unchecked, strict=True)
        self.unchecked.clear()
        means = distributed.all_reduce_sum(torch.stack(losses)) / distributed.world_size()
        first = self.batch - len(losses)
        for batch, (loss, lr) in enumerate(zip(means.tolist(), rates, strict=True), first):
            if not math.isfinite(loss):
                epoch, step = divmod(batch, self.steps)
                where = f"in epoch {epoch + 1}, step {step + 1} of {self.steps}"
                clip = self.state.optim.clip_grad
                how = f"lr {lr:.3g}, {self.state.precision}, clip_grad {clip}"
                raise UserError(
                    f"the loss is {loss} {where} ({how}): lower optim.lr or raise "
                    "optim.warmup_epochs, and where it is the first step model.init_std; "
                    "the last checkpoint is kept"
                )


def per_image_gradient(parameters: Tensor, scale: float) -> Tensor:
    """The gradient of the per-image parameters [B, ...] of a batch whose loss, multiplied by
    ``scale``, has gone back: for each image that of its own loss, whatever the size of the
    batch."""
    gradient = parameters.grad
    assert gradient is not None  # the loss has gone back
    return gradient * (len(parameters) / scale)
