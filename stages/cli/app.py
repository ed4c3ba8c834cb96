"""The program ``gaupipe`` without its commands: each file of a panel adds those of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.messages import show_messages
from gaupipe.system.version import __version__
from stages.begin import import_file
from stages.cli.options import option, parse_path, untyped

DEBUG = "GAUPIPE_DEBUG"
"""The environment variable of --debug."""

IN_A_WORLD = ("run", "phase-a", "export-maps", "phase-b", "train", "evaluate")
"""Commands that several processes, started by torchrun, share."""


app = typer.Typer(
    cls=untyped(TyperGroup),
    name="gaupipe",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Vision transformers: train them with other attention layers, alone or in two phases, and "
    "look at their attention maps.\n\nExample: `gaupipe run`, then `gaupipe view`",
)


def command(panel: str, name: str | None = None) -> Callable[[Any], Any]:
    """A command of the group ``panel`` of the program's help, called ``name``, else as its function
    is."""

    def add(function: Any) -> Any:
        called = name or function.__name__
        return app.command(called, cls=untyped(TyperCommand), rich_help_panel=panel)(function)

    return add


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, option("--version", "Print the version and stop.")] = False,
    files: Annotated[
        list[Path] | None,
        option(
            "--import FILE",
            "A Python file with attentions of your own (gaupipe.register), before the command; "
            "repeatable.",
            parser=parse_path,
        ),
    ] = None,
    debug: Annotated[
        bool, option("--debug", "Show where an error was raised.", envvar=DEBUG, show_envvar=True)
    ] = False,
    verbose: Annotated[bool, option("-v", "Say more: what is read and written.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"  # of the processes that a command starts, too
    show_messages(logging.DEBUG if verbose else logging.INFO)
    context.obj = files or []  # for the processes that a command starts
    for file in context.obj:
        import_file(file)
    if version:
        print(f"gaupipe {__version__}")
    elif context.invoked_subcommand is None:
        context.get_help()
    elif distributed.world_size() > 1 and context.invoked_subcommand not in IN_A_WORLD:
        raise UserError(
            f"{context.invoked_subcommand} is a job for one process: start it without "
            f"torchrun, which is for {', '.join(IN_A_WORLD)}"
        )
