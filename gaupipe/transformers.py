"""The attentions for Hugging Face's transformers. Needs the extra ``gaupipe[transformers]``.

Importing this module makes ``attn_implementation="gau_belief"``, ``"gau_xsa"`` and
``"gau_attentionx"`` known to the decoders of transformers.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from gaupipe.attention import ATTENTION
from gaupipe.attention.base import choice
from gaupipe.attention.kernels import perpendicular
from gaupipe.attention.options import check_options
from gaupipe.system.errors import UserError
from gaupipe.vit.cached_attention import attend, visible_and_own


def belief(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """D [B, T, H, d_m], what belief-attention gives to the output projection (*BeliefFormer, eqs.
    10-14*)."""
    mh, v = attend(module, *args, **kwargs)
    return perpendicular(mh.flatten(2), v.flatten(2)).view_as(mh), None


def xsa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """D_s [B, T, H, d_m], perpendicular to V in each head (*BeliefFormer, eqs. 15-16*)."""
    return perpendicular(*attend(module, *args, **kwargs)), None


def attentionx(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """V - gamma MH [B, T, H, d_m] (*AttentionX, eq. 10*). ``gau_options`` of the model's
    configuration may hold ``gamma`` and ``mask_diagonal``."""
    options = getattr(module.config, "gau_options", None) or {}
    if not options.keys() <= {"gamma", "mask_diagonal"}:
        check_options(ATTENTION["attentionx"], options)
    mh, v = attend(module, *args, hide_own=options.get("mask_diagonal", True), **kwargs)
    return torch.sub(v, mh, alpha=options.get("gamma", 1.0)), None


def register() -> None:
    """Makes the attentions known to transformers. Models with an attention of their own are refused
    by UserError; a model trained with one of the attentions and loaded with another one warns."""
    functions = {f"gau_{f.__name__}": f for f in (belief, xsa, attentionx)}
    for name, function in functions.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, visible_and_own)
    accepted = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(accepted)
    def checked(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> str:
        before = getattr(self.config, "gau_implementation", None)
        if str(requested).startswith("gau_"):
            choice("attn_implementation", str(requested), functions)
        if requested in functions and not self._can_set_attn_implementation():
            raise UserError(
                f"{type(self).__name__} has its own attention, which transformers cannot replace "
                f"by {requested!r}"
            )
        if requested in functions:
            self.config.gau_implementation = requested  # config.json keeps it
        elif before:
            warnings.warn(
                f"the model had attn_implementation={before!r}, which its weights expect, and has "
                f"{requested or 'the standard attention'} now",
                stacklevel=2,
            )
        return accepted(self, requested, *args, **kwargs)

    if not hasattr(accepted, "__wrapped__"):
        PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign, assignment]


register()
