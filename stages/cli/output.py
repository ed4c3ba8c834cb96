"""Results on standard output: tables on a terminal, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text


def on_terminal() -> bool:
    return sys.stdout.isatty()


def print_rich(*renderables: Any) -> None:
    """Prints tables, and lines of text that the terminal breaks, so that they can be copied."""
    from rich.console import Console
    from rich.text import Text

    for renderable in renderables:
        Console(markup=False, emoji=False).print(renderable, soft_wrap=isinstance(renderable, Text))


def show(values: Mapping[str, Any], as_json: bool, tables: Iterable[Any]) -> None:
    """Prints named values as JSON or as ``tables``."""
    if as_json:
        print(json.dumps(values))
    else:
        print_rich(*tables)


def lines_of(values: Mapping[str, Any]) -> Iterator[Text]:
    """A line for each of the named values that there is, with at most four decimals."""
    from rich.text import Text

    text = json.dumps(dict(single_values(values)))  # to round numbers in lists, too
    rounded = json.loads(text, parse_float=lambda number: round(float(number), 4))
    width = max(map(len, rounded))
    for name, value in rounded.items():
        yield Text(f"{name:<{width}} {value}")


def single_values(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each value that is not None; those of a dictionary are named as settings
    are, such as ``data.name``."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", item) for inner, item in single_values(value))
        elif value is not None:
            yield name, value
