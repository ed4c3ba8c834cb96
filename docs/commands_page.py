"""The arguments and options of every command, for docs/commands.md on the site.

They are read from the functions of ``stages/cli`` that typer makes the commands of, so the page
cannot differ from the program.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo


def all_commands(app: typer.Typer) -> str:
    """Markdown: a heading, a sentence and a table for each command, in the program's order."""
    return "\n".join(
        command(registered.name or name_of(registered.callback), registered.callback)
        for registered in app.registered_commands
        if registered.callback and not registered.hidden
    )


def name_of(function: Callable) -> str:
    """The command that typer makes of a function's name."""
    return function.__name__.replace("_", "-")


def command(name: str, function: Callable) -> str:
    """One command."""
    help_text = re.sub(r"\n\n+", "\n\n", inspect.getdoc(function) or "")
    lines = [f"### {name}", "", help_text, "", "| | meaning | default |", "|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in parameters(function)]
    return "\n".join([*lines, ""])


def parameters(function: Callable) -> Iterator[tuple[str, str, str]]:
    """(spelling, meaning, default) of each argument and option."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        extras = get_args(hints[name])[1:]
        if not extras:  # typer's own context
            continue
        info = next(extra for extra in extras if isinstance(extra, ArgumentInfo | OptionInfo))
        spelling = info.metavar
        if isinstance(info, OptionInfo):  # in Annotated typer keeps an option's name as a default
            spelling = f"{info.default.replace('/', ', ')} {spelling}".strip()
        yield f"`{spelling}`", _cell(info.help or ""), _cell(default(info, parameter.default))


def default(info: ArgumentInfo | OptionInfo, value: Any) -> str:
    """What the command takes without the option, as its help says it."""
    if isinstance(info.show_default, str):
        return info.show_default
    return "" if value is None or isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
