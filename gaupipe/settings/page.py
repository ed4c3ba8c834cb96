"""Every setting with its type, default and effect, from the settings' classes: for
``gaupipe settings`` and for docs/settings.md on the site."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from gaupipe.settings import Settings
from gaupipe.settings.sections import Section, section_of

WORDS = {bool: "true or false", str: "text", int: "whole number", float: "number"}


class Setting(NamedTuple):
    """A setting: its type in words, its default in JSON, its effect in Markdown."""

    name: str
    type: str
    default: str
    effect: str


def sections(
    defaults: Section | None = None, place: str = ""
) -> Iterator[tuple[str, Section, list[Setting]]]:
    """(name, defaults, settings) of every section, in the order of the settings file. A section
    that may be null is a setting too."""
    defaults = defaults or Settings()
    effects, values = docstrings(type(defaults)), defaults.model_dump(mode="json")
    settings, inside = [], []
    for field, info in type(defaults).model_fields.items():
        name, inner = f"{place}.{field}".strip("."), section_of(info.annotation)
        effect = effects.get(field, "")
        if inner:
            inside.append((getattr(defaults, field) or inner(), name))
            effect = _markdown(inner.__doc__ or "") + f" See [{name}](#{name.replace('.', '')})."
        if inner is None or info.annotation is not inner:
            words = type_words(info.annotation, tuple(info.metadata))
            settings.append(Setting(name, words, json.dumps(values[field]), effect))
    yield place, defaults, settings
    for section in inside:
        yield from sections(*section)


def page() -> str:
    """All settings as Markdown. A section with the defaults of one before it has no table."""
    texts = []
    before: dict[str, str] = {}
    for place, defaults, settings in sections():
        text = f"## {place or 'The run'}\n\n{_wrapped(_markdown(type(defaults).__doc__ or ''))}\n"
        if same := before.get(repr(defaults)):
            text += f"\nThe settings are those of [{same}](#{same.replace('.', '')}).\n"
        elif settings:
            text += "\n| setting | type | default | effect |\n|---|---|---|---|\n"
            text += "".join(
                f"| `{name}` | {words} | `{default}` | {_cell(effect)} |\n"
                for name, words, default, effect in settings
            )
        before[repr(defaults)] = place
        texts.append(text)
    return "\n".join(texts)


def as_text(prefix: str, width: int) -> str:
    """The settings whose names begin with the words of ``prefix``, for a terminal of so many
    columns; empty where there are none."""
    wrap = partial(textwrap.wrap, width=width, initial_indent=" " * 4, subsequent_indent=" " * 4)
    lines = []
    for _, _, settings in sections():
        for name, words, default, effect in settings:
            if not prefix or f"{name}.".startswith(f"{prefix}."):
                said = re.sub(r" See \[[^]]*\]\(#[^)]*\)\.$", "", effect)
                said = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", said).replace("`", "")
                lines += [f"{name} = {default}", *wrap(words.replace("`", "")), *wrap(said)]
    return "\n".join(lines)


def docstrings(section: type[Section]) -> dict[str, str]:
    """The text under each field of a class, in Markdown and on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: _markdown(str(below.value.value))
        for field, below in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def type_words(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """An annotation in words, such as ``whole number above 0 or null``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_words(arguments[0], (*metadata, *arguments[1:]))
    if origin in (Union, UnionType):
        return _listed(
            ["null" if kind is NoneType else type_words(kind, metadata) for kind in arguments]
        )
    if origin is Literal:
        return _listed([f"`{value}`" for value in arguments])
    if origin in (list, tuple):
        fixed = origin is tuple and Ellipsis not in arguments
        return f"list{f' of {len(arguments)}' if fixed else ''} (each: {type_words(arguments[0])})"
    if origin is dict or annotation is dict:
        return "keywords"
    if section_of(annotation):
        return "section"
    return f"{WORDS.get(annotation, 'path')} {_bounds(metadata)}".strip()


def _bounds(metadata: tuple[Any, ...]) -> str:
    """The limits of a number, in words."""
    constraints = [
        constraint
        for item in metadata
        for constraint in (item.metadata if isinstance(item, FieldInfo) else (item,))
    ]
    limits = {
        name: getattr(constraint, name)
        for constraint in constraints
        for name in ("gt", "ge", "lt", "le")
        if getattr(constraint, name, None) is not None
    }
    if limits.keys() == {"ge", "le"}:
        return f"from {limits['ge']} to {limits['le']}"
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    return " and ".join(f"{words[name]} {value}" for name, value in limits.items())


def _markdown(docstring: str) -> str:
    """A docstring on one line, its code in Markdown's quotes."""
    return re.sub(r"``([^`]*)``", r"`\1`", " ".join(docstring.split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _listed(values: list[str]) -> str:
    *most, last = values
    return f"{', '.join(most)} or {last}" if most else last
