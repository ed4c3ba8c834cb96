"""Every setting with its type, default and effect, from the settings' classes: for
``gaupipe settings`` and for docs/commands.md on the site."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from gaupipe.settings import Settings
from gaupipe.settings.sections import Section, section_of

TYPE_WORDS = {"boolean": "true or false", "string": "text", "integer": "whole number"}
LIMITS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}


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
    values = defaults.model_dump(mode="json")
    schemas = type(defaults).model_json_schema()["properties"]

    settings = []
    inside = []  # sections, which come after the settings of this one
    for field, info in type(defaults).model_fields.items():
        name = f"{place}.{field}".strip(".")
        inner = section_of(info.annotation)
        effect = _markdown(info.description or "")
        if inner:
            inside.append((getattr(defaults, field) or inner(), name))
            effect = _markdown(inner.__doc__ or "") + f" See [{name}](#{_anchor(name)})."

        may_be_null = info.annotation is not inner
        if inner is None or may_be_null:
            words = type_words(schemas[field])
            default = json.dumps(values[field])
            settings.append(Setting(name, words, default, effect))

    yield place, defaults, settings
    for section in inside:
        yield from sections(*section)


def page() -> str:
    """All settings as Markdown. A section with the defaults of one before it has no table."""
    texts = []
    before: dict[str, str] = {}
    for place, defaults, settings in sections():
        heading = f"Section {place}" if place else "The run"
        text = f"#### {heading}\n\n{_markdown(type(defaults).__doc__ or '')}\n"
        if same := before.get(repr(defaults)):
            text += f"\nThe settings are those of [{same}](#{_anchor(same)}).\n"
        elif settings:
            text += "\n| setting | type | default | effect |\n|---|---|---|---|\n"
            text += "".join(
                "| `{}` | {} | `{}` | {} |\n".format(*(one.replace("|", "\\|") for one in setting))
                for setting in settings
            )
        before[repr(defaults)] = place
        texts.append(text)
    return "\n".join(texts)


def as_text(prefix: str, width: int) -> str:
    """The settings whose names begin with the words of ``prefix``, for a terminal of so many
    columns; empty where there are none."""
    lines = []
    for _, _, settings in sections():
        for setting in settings:
            if prefix and not f"{setting.name}.".startswith(f"{prefix}."):
                continue
            effect = re.sub(r" See \[[^]]*\]\(#[^)]*\)\.$", "", setting.effect)
            effect = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", effect)  # a link's text alone
            lines.append(f"{setting.name} = {setting.default}")
            for text in (setting.type, effect):
                indent = " " * 4
                plain = text.replace("`", "")
                lines += textwrap.wrap(
                    plain, width, initial_indent=indent, subsequent_indent=indent
                )
    return "\n".join(lines)


def type_words(schema: dict[str, Any]) -> str:
    """The JSON schema of a setting in words, such as ``whole number above 0 or null``."""
    if "anyOf" in schema:
        return _listed([type_words(one) for one in schema["anyOf"]])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return _listed([f"`{value}`" for value in schema["enum"]])
    if "$ref" in schema:
        return "section"

    kind = schema["type"]
    if kind == "object":
        return "keywords"
    if kind == "array" and "prefixItems" in schema:
        several = schema["prefixItems"]
        return f"list of {len(several)} (each: {type_words(several[0])})"
    if kind == "array":
        return f"list (each: {type_words(schema['items'])})"

    # a number or a string, perhaps within limits
    limits = [f"{word} {schema[name]}" for name, word in LIMITS.items() if name in schema]
    if {"minimum", "maximum"} <= schema.keys():
        limits = [f"from {schema['minimum']} to {schema['maximum']}"]
    kind = schema.get("format", kind)
    return f"{TYPE_WORDS.get(kind, kind)} {' and '.join(limits)}".strip()


def _anchor(section: str) -> str:
    return "section-" + section.replace(".", "")


def _markdown(docstring: str) -> str:
    """A docstring on one line, its code in Markdown's quotes."""
    return re.sub(r"``([^`]*)``", r"`\1`", " ".join(docstring.split()))


def _listed(values: list[str]) -> str:
    *most, last = values
    return f"{', '.join(most)} or {last}" if most else last
