"""What a training is made of: the device, a ViT, its optimizer and schedule, as the settings
say."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Sequence
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2, get_optimizer_class, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from torch import nn

import gaupipe.vit.models  # noqa: F401  (timm learns gaupipe's names)
from gaupipe.data.splits import ImageData
from gaupipe.settings import ModelSettings, OptimSettings, Settings
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.vit.initialisation import start_weights


def select_device(settings: Settings) -> torch.device:
    """The device the settings name; ``auto`` is a GPU where there is one, and each rank of a
    machine has a GPU of its own. Raises UserError for one that is not there."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    name = distributed.local_device(name)
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device: {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise UserError("device: 'meta' holds no numbers: take cpu, cuda or auto")
    return device


def build_vit(
    model: ModelSettings,
    data: ImageData,
    attention: str = "standard",
    device: str | None = None,
    changes: tuple[str, dict[str, Any]] = ("model.args", {}),
    **options: Any,
) -> VisionTransformer:
    """The timm model that the settings name, sized for the data, its weights started as the
    settings say.

    ``device`` "meta" builds it without weights, to see whether it can be built. ``changes`` are a
    setting, for messages, and its keywords, which win over those of ``model.args``. Raises
    UserError where it cannot be built, and for images that patches do not cover.
    """
    if not timm.is_model(model.name):
        near = difflib.get_close_matches(model.name, timm.list_models("gauvit_*"), n=1, cutoff=0)
        raise UserError(f"model.name: unknown model {model.name!r}; did you mean {near[0]!r}?")
    setting, changed = changes
    args = {**model.args, **changed}
    sizes = dict(img_size=data.image_size, in_chans=data.channels, num_classes=data.num_classes)
    try:
        placed: dict[str, Any] = {"device": device} if device else {}
        vit = timm.create_model(
            model.name, attention=attention, **{**sizes, **args}, **options, **placed
        )
        assert isinstance(vit, VisionTransformer)  # no other model of timm's takes an attention
        of_patches = setting if "patch_size" in changed else "model.args"
        _check_patches(vit.patch_embed.patch_size, data.image_size, of_patches)
        start_weights(vit, model)
    except UserError:
        raise
    except Exception as error:  # whatever timm's classes make of keywords they were not written for
        if "unexpected keyword argument 'attention'" in str(error):
            known = ", ".join(timm.list_models("gauvit_*_patch*"))
            raise UserError(
                f"model.name: {model.name} has no choice of attentions: take one of {known}"
            ) from None
        settings = f"model.args and {setting}" if changed else "model.args"
        raise UserError(
            f"{settings}: {model.name} cannot be built for {data.image_size}-pixel images with "
            f"{args}: {_reason(error)}"
        ) from None
    return vit


def _check_patches(patch: tuple[int, int], image_size: int, setting: str) -> None:
    """timm drops the border of an image that is no whole number of patches high and wide."""
    step = math.lcm(*patch)
    if image_size % step:
        below, above = image_size // step * step, -(-image_size // step) * step
        near = f"{below} or {above}" if below else str(above)
        raise UserError(
            f"data.image_size: patches of {patch[0]} x {patch[1]} pixels do not cover images of "
            f"{image_size} x {image_size}; {near} would fit, or another {setting}.patch_size"
        )


def _reason(error: Exception) -> str:
    """The first line of an error, with its type where that says more."""
    text = (str(error).splitlines() or [""])[0]
    return (
        text
        if isinstance(error, ValueError | RuntimeError) and text
        else f"{type(error).__name__} {text}".strip()
    )


def build_optimizer(
    vit: VisionTransformer,
    optim: OptimSettings,
    epochs: int,
    steps_per_epoch: int,
    extra_groups: Sequence[dict[str, Any]] = (),
) -> tuple[torch.optim.Optimizer, Any]:
    """timm's optimizer for ``vit`` and timm's schedule with linear warm-up, stepped with the update
    number.

    ``extra_groups`` are parameter groups with rates of their own, which follow the same schedule.
    Raises UserError for what timm cannot make.
    """

    def groups(_vit: nn.Module) -> list[dict[str, Any]]:
        return [
            *param_groups_weight_decay(
                vit, optim.weight_decay, no_weight_decay_list=vit.no_weight_decay()
            ),
            *extra_groups,
        ]

    try:
        takes = inspect.signature(get_optimizer_class(optim.name, bind_defaults=False)).parameters
        options: dict[str, Any] = {"betas": optim.betas} if "betas" in takes else {}
        optimizer = create_optimizer_v2(
            vit, opt=optim.name, lr=optim.lr, param_group_fn=groups, **options
        )
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"optim.name: timm cannot make {optim.name!r}: {error}") from None
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
