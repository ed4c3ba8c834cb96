"""An attention class by key, with options bound to it."""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import nn

from gaupipe.attention import ATTENTION
from gaupipe.attention.base import StudentAttention, nearest
from gaupipe.system.errors import UserError


def attention_class(key: str) -> type[StudentAttention]:
    """The class of an attention. Raises UserError for an unknown key."""
    if key not in ATTENTION:
        raise UserError(
            f"unknown attention {key!r}{nearest(key, ATTENTION)}; one of your own is made known by "
            f"gaupipe.register({key!r}, Class), for commands in a file that --import names"
        )
    return ATTENTION[key]


def check_options(cls: type[nn.Module], options: dict[str, Any]) -> None:
    """Raises UserError for an unknown option of an attention class, and for a value of another type
    than a number or switch of its default."""
    parameters = inspect.signature(cls).parameters.items()
    defaults = {
        name: parameter.default
        for name, parameter in parameters
        if "VAR" not in parameter.kind.name  # timm's own, behind *args and **kwargs
    }
    defaults.pop("grid", None)  # the model's to give
    for name, value in options.items():
        if name not in defaults:
            raise UserError(f"unknown option {name!r} of {cls.__name__}{nearest(name, defaults)}")
        kind = type(defaults[name])
        if kind is bool and not isinstance(value, bool):
            raise UserError(f"option {name!r} of {cls.__name__} is {value!r}; true or false fits")
        if kind is float and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"option {name!r} of {cls.__name__} is {value!r}; a number fits")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"option {name!r} of {cls.__name__} is {value}; a finite number fits")


def bind_options(cls: type[StudentAttention], options: dict[str, Any], **more: Any) -> type:
    """A class for timm's ``attn_layer``, which may be no partial: ``cls`` with these options, and
    with ``more`` arguments. Raises UserError for a wrong option."""
    check_options(cls, options)
    made: Any = cls.in_models(options)
    if made is not cls:
        return made

    class Bound(made):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **options, **more, **kwargs)

        def __reduce__(self) -> tuple[Any, ...]:
            """Copies are of ``cls``: a reader of a pickle does not know this class."""
            return without_state, (made,), self.__getstate__()

    Bound.__name__ = Bound.__qualname__ = made.__name__
    return Bound


def without_state(cls: type[nn.Module]) -> nn.Module:
    """An instance whose state is read next."""
    return cls.__new__(cls)


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
