"""Results on standard output: tables on a terminal, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any


def on_terminal() -> bool:
    return sys.stdout.isatty()


def print_rich(*renderables: Any) -> None:
    from rich.console import Console

    for renderable in renderables:
        Console().print(renderable)


def show(values: dict[str, Any], as_json: bool, tables: Callable[[Any], Iterable]) -> None:
    """Prints named values as JSON or as ``tables``."""
    if as_json:
        print(json.dumps(values))
    else:
        print_rich(*tables(values))


def report(values: dict[str, Any], as_json: bool) -> None:
    """Prints named values as JSON, or as a line each, with at most four decimals."""
    text = json.dumps(values)
    if as_json:
        print(text)
        return
    width = max(map(len, values))
    rounded = json.loads(text, parse_float=lambda number: round(float(number), 4))
    for name, value in rounded.items():
        print(f"{name:<{width}} {value}")
