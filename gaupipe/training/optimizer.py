"""The optimizer of a network and its learning rate schedule, both timm's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2, get_optimizer_info
from timm.scheduler import create_scheduler_v2

from gaupipe.settings import OptimSettings
from gaupipe.system.errors import UserError

GAUSSIANS = ("*.attn.prior", "*.attn.predictor")
"""Parameters of gaupipe's attentions that have two axes or more and are no matrices but
coordinates: timm's Muon would make their updates orthogonal."""


def build_optimizer(
    vit: VisionTransformer,
    optim: OptimSettings,
    epochs: int,
    steps_per_epoch: int,
    extra_groups: Sequence[dict[str, Any]] = (),
) -> tuple[torch.optim.Optimizer, Any]:
    """timm's optimizer for ``vit`` and its schedule, stepped with the update number.

    ``extra_groups`` are parameter groups with rates of their own, which timm's Muon updates as
    AdamW does, like :data:`GAUSSIANS`. Raises UserError for what timm cannot make, and for a rate
    that would rise from ``lr`` to ``min_lr``.
    """
    if optim.min_lr > optim.lr:
        raise UserError(
            f"optim.min_lr: {optim.min_lr:g} is above optim.lr, {optim.lr:g}: set it to "
            f"{optim.lr:g} or less"
        )
    try:
        optimizer = create_optimizer_v2(
            vit,
            opt=optim.name,
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            **_checked_args(optim),
        )
        for group in extra_groups:
            optimizer.add_param_group({**group, "use_fallback": True})
    except (AssertionError, ValueError, TypeError, ImportError, IndexError) as error:
        given = f" with {optim.args}" if optim.args else ""
        raise UserError(f"optim.name: timm cannot make {optim.name!r}{given}: {error}") from None
    warmup = min(optim.warmup_epochs, epochs)
    cycle: dict[str, Any] = {"num_epochs": epochs - warmup or 1, **optim.schedule_args}
    try:
        schedule, _ = create_scheduler_v2(
            optimizer,
            optim.schedule,
            min_lr=optim.min_lr,
            warmup_lr=optim.min_lr,
            warmup_epochs=warmup,
            warmup_prefix=True,
            step_on_epochs=False,
            updates_per_epoch=steps_per_epoch,
            **cycle,
        )
        if schedule is None:
            raise ValueError("'constant' holds the rate")
        for update in (epochs * steps_per_epoch - 1, 0):  # a rate that cannot be computed fails now
            schedule.step_update(update)
    except (AssertionError, ValueError, TypeError, ArithmeticError) as error:
        raise UserError(
            f"optim.schedule: timm cannot make {optim.schedule!r} of {epochs} epochs with "
            f"{optim.schedule_args}: {error}"
        ) from None
    return optimizer, schedule


def check_optimizer(model: Any, optim: OptimSettings, epochs: int) -> None:
    """Raises UserError for an optimizer or a schedule that timm cannot make for a ``model``, which
    may be on the meta device."""
    build_optimizer(model, optim, epochs, steps_per_epoch=100)  # how many plays no part


def _checked_args(optim: OptimSettings) -> dict[str, Any]:
    """``optim.args``, Adam's usual betas, and Muon's list of what it leaves to AdamW, which other
    optimizers ignore, with :data:`GAUSSIANS`. Raises ValueError for an unusable optimizer."""
    info = get_optimizer_info(optim.name)
    if info.second_order:
        raise ValueError("it needs second derivatives, which a training step does not compute")
    if "kron" in optim.name:
        raise ValueError("it compiles its first step for minutes")
    betas = optim.args.get("betas", (0.9, 0.999))
    if not (isinstance(betas, list | tuple) and betas and {*map(type, betas)} <= {int, float}):
        raise ValueError(f"betas: {betas!r} should be a list of numbers such as [0.9, 0.999]")
    usual = {"betas": (0.9, 0.999)} if info.has_betas and info.num_betas == 2 else {}
    fallback = optim.args.get("fallback_list", [])
    if not (isinstance(fallback, list | tuple) and all(isinstance(name, str) for name in fallback)):
        raise ValueError(
            f"fallback_list: {fallback!r} should be a list of names such as ['head.*']"
        )
    left_to_adamw = [*GAUSSIANS, *fallback]
    return usual | optim.args | {"fallback_list": left_to_adamw}
