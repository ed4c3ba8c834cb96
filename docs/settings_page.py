"""docs/settings.md: every setting with its type, default and effect, from the settings' classes.

``python docs/settings_page.py > docs/settings.md`` writes the page.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from gaupipe.settings import Settings
from gaupipe.settings.sections import Section, section_of

OPENING = """\
# Settings

A run is described by a YAML file, and `--set` changes single settings of it:

```sh
gaupipe run mine.yaml --set phase_b.epochs=40 --set phase_b.optim.lr=0.002
```

A dot leads into a section: `phase_b.epochs` in the file is `epochs` under `phase_b`. A setting that
the file leaves out has its default. An unknown name is refused.

The command `python docs/settings_page.py > docs/settings.md` writes this page.
"""

WORDS = {bool: "true or false", str: "text", Path: "path", int: "whole number", float: "number"}


@dataclass
class Group:
    """One section: where it is found in the settings, its class, and its defaults."""

    places: list[str]
    section: type[Section]
    defaults: Section


def page(root: type[Section] = Settings) -> str:
    """The page as Markdown."""
    found = groups(root)
    links = {group.section: group.places[0] for group in found}
    return "\n".join([OPENING, *(_group_text(group, links) for group in found)])


def groups(root: type[Section] = Settings) -> list[Group]:
    """The sections in the order of the settings file; the same section in several places is one."""
    found: list[Group] = []

    def collect(place: str, section: type[Section], defaults: Section) -> None:
        for group in found:
            if group.section is section and group.defaults == defaults:
                group.places.append(place)
                break
        else:
            found.append(Group([place], section, defaults))
        for name, field in section.model_fields.items():
            inner = section_of(field.annotation)
            if inner:
                given = getattr(defaults, name)
                default = inner() if given is None else given
                collect(f"{place}.{name}" if place else name, inner, default)

    collect("", root, root())
    return found


def docstrings(section: type[Section]) -> dict[str, str]:
    """The text under each field of a class, in Markdown and on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            texts[field.target.id] = _markdown(str(below.value.value))
    return texts


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
    return " ".join(filter(None, [WORDS[annotation], _bounds(metadata)]))


def _bounds(metadata: tuple[Any, ...]) -> str:
    """The limits of a number, in words."""
    limits: dict[str, float] = {}
    for item in metadata:
        for constraint in item.metadata if isinstance(item, FieldInfo) else (item,):
            for name in ("gt", "ge", "lt", "le"):
                value = getattr(constraint, name, None)
                if value is not None:
                    limits[name] = value
    if limits.keys() == {"ge", "le"}:
        return f"from {limits['ge']} to {limits['le']}"
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    return " and ".join(f"{words[name]} {value}" for name, value in limits.items())


def rows(group: Group, links: dict[type[Section], str]) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, effect) of every setting of a section.

    A section inside it has a row only where it may be null. ``links`` says where it is described.
    """
    effects = docstrings(group.section)
    prefix = f"{group.places[0]}." if group.places[0] else ""
    defaults = group.defaults.model_dump(mode="json")
    for name, field in group.section.model_fields.items():
        inner = section_of(field.annotation)
        effect = effects.get(name, "")
        if inner and field.annotation is inner:
            continue
        if inner:
            where = links[inner]
            effect = effect or _markdown(inner.__doc__ or "")
            effect += f" See [{where}](#{where.replace('.', '')})."
        words = type_words(field.annotation, tuple(field.metadata))
        yield prefix + name, words, json.dumps(defaults[name]), effect


def _group_text(group: Group, links: dict[type[Section], str]) -> str:
    """The heading, the description and the table of one section."""
    place, *others = group.places
    heading = f"## {place}" if place else "## The run"
    lines = [heading, "", *_wrapped(_markdown(group.section.__doc__ or ""))]
    if others:
        same = _listed([f"`{other}`" for other in others], "and")
        lines += [
            "",
            *_wrapped(f"{same} {'have' if len(others) > 1 else 'has'} the same settings."),
        ]
    table = list(rows(group, links))
    if table:
        lines += ["", "| setting | type | default | effect |", "|---|---|---|---|"]
        lines += [
            f"| `{name}` | {kind} | `{default}` | {effect} |"
            for name, kind, default, effect in table
        ]
    return "\n".join([*lines, ""])


def _markdown(docstring: str) -> str:
    """A docstring on one line, its code in Markdown's quotes."""
    text = " ".join(docstring.split()).replace("|", "\\|")
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def _listed(values: list[str], word: str = "or") -> str:
    *most, last = values
    return f"{', '.join(most)} {word} {last}" if most else last


if __name__ == "__main__":
    print(page(), end="")
