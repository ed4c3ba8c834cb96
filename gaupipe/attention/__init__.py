"""The attentions by key. A new one is a new file and one line of :data:`ATTENTION`."""

from __future__ import annotations

import inspect

from torch import nn

from gaupipe.attention.attentionx import AttentionX
from gaupipe.attention.belief import BeliefAttention
from gaupipe.attention.belief2 import Belief2Attention
from gaupipe.attention.belief_star import BeliefStarAttention
from gaupipe.attention.functional import nearest
from gaupipe.attention.gaussian import GaussianAttention
from gaupipe.attention.standard import StandardAttention
from gaupipe.attention.xsa import ExclusiveAttention
from gaupipe.errors import UserError

ATTENTION: dict[str, type[nn.Module]] = {
    "standard": StandardAttention,
    "belief": BeliefAttention,
    "belief_star": BeliefStarAttention,
    "xsa": ExclusiveAttention,
    "belief2": Belief2Attention,
    "attentionx": AttentionX,
    "gaussian": GaussianAttention,
}


def attention_class(key: str) -> type[nn.Module]:
    """The class of an attention. Raises UserError for an unknown key."""
    if key not in ATTENTION:
        raise UserError(f"unknown attention {key!r}{nearest(key, ATTENTION)}")
    return ATTENTION[key]


def check_options(cls: type[nn.Module], options: dict) -> None:
    """Raises UserError for an option that an attention class does not have."""
    known = [name for name, parameter in inspect.signature(cls).parameters.items()
             if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]
    for name in options:
        if name not in known:
            raise UserError(f"unknown option {name!r} of {cls.__name__}{nearest(name, known)}")


def bind_options(cls: type[nn.Module], options: dict) -> type[nn.Module]:
    """A class for timm's ``attn_layer`` whose instances are those of ``cls`` with these options.

    timm takes a class, not a partial; this one makes instances of ``cls`` itself, so models pickle as ever. Raises
    UserError for an option that ``cls`` does not have.
    """
    check_options(cls, options)

    class Bound(cls):
        def __new__(kind, *args, **kwargs) -> nn.Module:
            return cls(*args, **options, **kwargs)

    return Bound


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


import gaupipe.models  # noqa: E402, F401  (timm learns the names as soon as the registry exists)
