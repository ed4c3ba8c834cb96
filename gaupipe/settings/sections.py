"""The base of every section of the settings, and the types of their fields."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from enum import Enum
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
Size = Annotated[int, Field(gt=0, le=10_000)]

HFDS = "hfds/"
"""Beginning of the name of a data set that Hugging Face's ``datasets`` reads."""
STREAMS = ("wds/", "hfids/", "tfds/")
"""Beginnings of timm's names for data sets that are read from first to last only."""
LOCAL = "local-dir:"


def with_whole_path(name: str) -> str:
    """The ``name`` of a model, ``local-dir:FOLDER`` with the folder's absolute path: later commands
    find it from any working directory."""
    if not name.startswith(LOCAL):
        return name
    return LOCAL + os.path.abspath(os.path.expanduser(name.removeprefix(LOCAL)))


ModelName = Annotated[str, AfterValidator(with_whole_path)]


def _keywords(args: dict[str, Any]) -> dict[str, Any]:
    """YAML reads ``{a:1}`` as one key without a value, which timm would leave out silently."""
    for name in args:
        if not name.isidentifier():
            hint = ": write {name: value}, with a space" if ":" in name else ""
            raise ValueError(f"{name!r} is no keyword{hint}")
    return args


Keywords = Annotated[dict[str, Any], AfterValidator(_keywords)]


def validate(values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The ``values`` as they are. Raises ValueError unless ``model`` takes them."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        raise ValueError(problem(error, model)) from None
    return values


class Scope(Enum):
    """What a setting belongs to, and so who may change it once a run has begun.

    It stands in the annotation of a field, or of a section for all settings in it. A setting
    without one belongs to the run.
    """

    RUN = "run"
    """Stays as it is from the start of the run: teacher and students share it."""
    STUDENT = "student"
    """Students of a run may differ in it, but each stays as it began. A teacher that reads it too
    has that of the run."""
    ANYTIME = "any time"
    """Where and how fast a run is computed, and what is shown of it: may change whenever a command
    continues the run."""


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
    parts = first["loc"]
    if first["type"] == "extra_forbidden":
        unknown = ".".join(map(str, parts))
        if "." in str(parts[-1]):
            return f"unknown setting {unknown!r}: YAML nests settings, as in 'train: {{epochs: 3}}'"
        return f"unknown setting {unknown!r}; {_hint(unknown, section)}"
    # of a setting with several types pydantic adds the type it tried, such as "constrained-int"
    names = [str(part) for part in parts if isinstance(part, int) or part.isidentifier()]
    location = ".".join(names) or "settings"
    message = first["msg"].removeprefix("Value error, ")
    given = "" if isinstance(first["input"], dict) else f", got {first['input']!r:.100}"
    return f"{location}: {message[0].lower() + message[1:]}{given}"


def _hint(unknown: str, section: type[BaseModel]) -> str:
    """What "a.b", which is no setting, could have meant: a near name beside it, a near name in
    another section, or else the names that are known there."""
    *parents, leaf = unknown.split(".")
    place = "".join(f"{parent}." for parent in parents)
    beside = list(fields_of(section, parents))
    elsewhere = [name for name in _names(section) if name.removeprefix(place) not in beside]
    elsewhere.sort(key=lambda name: not name.startswith(place))  # the same section's first
    leaves = [name.rpartition(".")[2] for name in elsewhere]
    near = [place + name for name in difflib.get_close_matches(leaf, beside, n=1, cutoff=0.7)]
    others = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)
    near += [elsewhere[leaves.index(name)] for name in others]
    if not near:
        near = [place + name for name in difflib.get_close_matches(leaf, beside, n=1, cutoff=0.5)]
    if not near:
        return f"known: {', '.join(beside)}"
    return f"did you mean {' or '.join(map(repr, near))}?"


def _names(section: type[BaseModel], place: str = "") -> Iterator[str]:
    """The "a.b" of all settings in a section."""
    for name, field in section.model_fields.items():
        yield place + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _names(inner, f"{place}{name}.")
