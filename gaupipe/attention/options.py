"""An attention class by key, with options bound to it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from gaupipe.attention import ATTENTION
from gaupipe.attention.base import StudentAttention, choice, nearest
from gaupipe.system.errors import UserError


def attention_class(key: str) -> type[StudentAttention]:
    """The class of an attention. Raises UserError for an unknown key."""
    return ATTENTION[choice("attention", key, ATTENTION)]


def check_options(cls: type[nn.Module], options: dict[str, Any]) -> None:
    """Raises UserError for an unknown option of an attention class, and for a value of another type
    than a number or switch of its default."""
    parameters = inspect.signature(cls).parameters.items()
    defaults = {name: p.default for name, p in parameters if "VAR" not in p.kind.name}
    defaults.pop("grid", None)  # the model's to give
    for name, value in options.items():
        if name not in defaults:
            raise UserError(f"unknown option {name!r} of {cls.__name__}{nearest(name, defaults)}")
        kind = type(defaults[name])
        if kind is bool and not isinstance(value, bool):
            raise UserError(f"option {name!r} of {cls.__name__} is {value!r}; true or false fits")
        if kind is float and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"option {name!r} of {cls.__name__} is {value!r}; a number fits")


def bind_options(cls: type[StudentAttention], options: dict[str, Any], **more: Any) -> type:
    """A class for timm's ``attn_layer`` that makes instances of ``cls`` with these options, and
    with ``more`` arguments. Raises UserError for a wrong option.

    timm takes a class, not a partial; instances are of ``cls`` itself, so models pickle as ever.
    """
    check_options(cls, options)
    made: Any = cls.in_models(options)
    if made is not cls:
        return made

    def new(_bound: type, *args: Any, **kwargs: Any) -> nn.Module:
        return made(*args, **options, **more, **kwargs)  # type: ignore[misc]

    return type("Bound", (made,), {"__new__": new})


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
