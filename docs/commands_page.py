"""The arguments and options of every command, for docs/commands.md on the site.

They are read from the functions of ``gaupipe.cli`` that typer makes the commands of, so the page
cannot differ from the program.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
        annotation, *extras = get_args(hints[name])
        info = next(extra for extra in extras if isinstance(extra, ArgumentInfo | OptionInfo))
        values = choices(annotation)
        metavar = info.metavar or ("" if annotation is bool else name.upper())
        if isinstance(info, ArgumentInfo):
            spelling = metavar
        else:
            # in Annotated[..., typer.Option("--set")] typer keeps the first name as a default
            given = [info.default, *(info.param_decls or ())]
            names = [given_name for given_name in given if str(given_name).startswith("-")]
            if not names:  # typer's own, and for a flag its opposite
                own = name.replace("_", "-")
                names = [f"--{own}", f"--no-{own}"] if annotation is bool else [f"--{own}"]
            spelling = " ".join(filter(None, [", ".join(names), "" if values else metavar]))
        meaning = info.help or ""
        if values:
            meaning += f" One of {', '.join(values)}."
        yield f"`{spelling}`", _cell(meaning), _cell(default(info, parameter.default))


def choices(annotation: Any) -> list[str]:
    """The values of an option that takes one of several words."""
    kinds = (annotation, *get_args(annotation))
    return [f"`{word}`" for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def default(info: ArgumentInfo | OptionInfo, value: Any) -> str:
    """What the command takes without the option, as its help says it."""
    if isinstance(info.show_default, str):
        return "" if info.show_default == "none" else info.show_default
    return "" if value is None or isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
