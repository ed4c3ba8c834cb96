"""The base of every section of the settings, and the types of their fields."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Sequence
from enum import Flag, auto
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]

LOCAL = "local-dir:"


def with_whole_path(name: str) -> str:
    """The ``name`` of a model, ``local-dir:FOLDER`` with the folder's absolute path: later commands
    find it from any working directory."""
    if not name.startswith(LOCAL):
        return name
    return LOCAL + os.path.abspath(os.path.expanduser(name.removeprefix(LOCAL)))


def attention_of(name: str) -> dict[str, Any]:
    """``student`` and ``attention_options`` of a model, as the config.json of a ``local-dir:``
    says; any other model has standard attention."""
    own = {}
    if name.startswith(LOCAL):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            config = Path(with_whole_path(name).removeprefix(LOCAL)) / "config.json"
            own = json.loads(config.read_bytes())["model_args"]
    options = own.get("attention_options") or {}
    return {"student": own.get("attention", "standard"), "attention_options": options}


ModelName = Annotated[str, AfterValidator(with_whole_path)]


class Scope(Flag):
    """The part of a run that a setting belongs to, and so who may change it.

    It stands in the annotation of a field, or of a section for all settings in it. A setting
    without one belongs to the run, and stays as it is from the start of the run.
    """

    RUN = 0
    MACHINE = auto()
    """Where and how fast a run is computed: may change whenever the run is continued."""
    WATCH = auto()
    """What is shown of a training: may change too, but is the same on all ranks."""
    ANYTIME = MACHINE | WATCH
    EXPORT = auto()
    """The store: every export may have another."""
    STUDENT = auto()
    """The student or the baseline alone: students of one teacher may differ in it."""
    PHASE = auto()
    """Teacher and student each: students may differ in it, also from their teacher."""
    COMMAND = auto()
    """The student that a command trains: commands of one run may name another."""
    RESUME = auto()
    """May change when the training of a student is continued."""
    TEACHER = auto()
    """Says how a student learns from a teacher: means nothing to a baseline."""


class Section(BaseModel):
    """A group of settings that refuses unknown keys and numbers that are not finite, and cannot be
    changed once made."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: Any, field: ValidationInfo) -> Any:
        """Pydantic would read true as 1."""
        values = value if isinstance(value, list | tuple) else [value]
        is_switch = cls.model_fields[str(field.field_name)].annotation is bool
        if not is_switch and any(isinstance(one, bool) for one in values):
            raise ValueError("true and false are not values of this setting")
        return value


def section_of(annotation: Any) -> type[Section] | None:
    """The section that an annotation ``X`` or ``X | None`` stands for, if it is one."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def fields_of(section: type[BaseModel], parents: Sequence[str]) -> dict[str, FieldInfo]:
    """The fields of the section inside ``section`` that ``parents`` lead to. Raises KeyError where
    they lead to none."""
    for parent in parents:
        inner = section_of(section.model_fields[parent].annotation)
        if inner is None:
            raise KeyError(parent)
        section = inner
    return section.model_fields


def problem(error: ValidationError, section: type[BaseModel]) -> str:
    """The first problem of the settings of a ``section`` in one line: where, what, and the
    value."""
    first = error.errors()[0]
    location = ".".join(map(str, first["loc"])) or "settings"
    if first["type"] == "extra_forbidden":
        *parents, unknown = map(str, first["loc"])
        fields = fields_of(section, parents)
        hint = f"known: {', '.join(fields)}"
        for near in difflib.get_close_matches(unknown, fields, n=1, cutoff=0.5):
            hint = f"did you mean {'.'.join([*parents, near])!r}?"
        return f"unknown setting {location!r}; {hint}"
    message = first["msg"].removeprefix("Value error, ")
    given = "" if isinstance(first["input"], dict) else f", got {first['input']!r:.100}"
    return f"{location}: {message[0].lower() + message[1:]}{given}"
