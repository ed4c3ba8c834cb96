"""How the program runs and ends: a mistake of the user's is one line, and what was interrupted says
how it goes on."""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Any, NoReturn

import typer

from gaupipe.system import distributed
from gaupipe.system.errors import Stopped, mistake_of, one_line
from gaupipe.system.messages import show_messages
from stages.begin import say
from stages.cli import look, measure, share, train  # noqa: F401  (their commands join the app)
from stages.cli.app import DEBUG, app

PANELS = ("Train", "Measure", "Look", "Share")
app.registered_commands.sort(key=lambda each: PANELS.index(str(each.rich_help_panel)))

# typer brings its own copy of click or uses the installed one
UsageError: Any = typer.BadParameter.__base__

WITH_RESUME = ("phase-a", "phase-b", "train")
"""Commands that continue only with --resume; the others do so by themselves."""

CONTINUE = (*WITH_RESUME, "run", "export-maps", "compare")


def main() -> None:
    """The ``gaupipe`` command. Exit codes: 0 done, 2 the user's mistake in one line, 130 and 143
    ended by Ctrl-C and SIGTERM, 1 anything else."""
    # a thread of torch that waits lets other processes work: between them it would wait for long
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in ("stdout", "stderr"):  # a daemon may have closed one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open until the process ends)
    # a terminal that cannot show a character shows a question mark
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    show_messages()
    here = distributed.launch()
    if here.rank:  # results are rank 0's
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (open until the process ends)
    watch = None
    try:
        with distributed.process_group() as watch:
            code = app(standalone_mode=False)  # typer answers Ctrl-C with 130
        if code == 130 and here.rank == 0:
            if name_of_command() in CONTINUE:
                say("interrupted; to go on:", again())
            else:
                say("interrupted")
        end(code)
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "gaupipe"
        message = error.format_message().replace("Value error, ", "")
        fail(f"{message} ({command} -h shows how)", watch)
    except Stopped as stopped:
        say(how_far(stopped, here.world_size > 1), again())
        end(128 + stopped.number)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if distributed.is_lost(error):
            fail(f"another rank has ended: {str(error).splitlines()[0]}", watch, code=1)
        mistake = mistake_of(error)
        if mistake is not None:
            if os.environ.get(DEBUG):  # it may be a file that a developer's own code misses
                traceback.print_exc()
            fail(mistake, watch)
        if watch is None:
            raise
        traceback.print_exc()
        fail(one_line(error), watch, code=1)


def how_far(stopped: Stopped, in_a_world: bool) -> str:
    """How far a training that was stopped is; the command that continues it follows."""
    launched = " (with torchrun, as before)" if in_a_world else ""
    return f"{stopped}; to go on{launched}:"


def name_of_command() -> str:
    """The command of this process: the first argument that is one, after the program's options."""
    names = {command.name for command in app.registered_commands}
    return next((argument for argument in sys.argv[1:] if argument in names), "")


def again() -> list[str]:
    """The command that continues this one."""
    arguments = sys.argv[1:]
    if name_of_command() in WITH_RESUME and "--resume" not in arguments:
        arguments = [*arguments, "--resume"]
    return ["gaupipe", *arguments]


def fail(mistake: str, watch: distributed.Watch | None, code: int = 2) -> NoReturn:
    """Ends with an exit code, in a world all ranks, and says why in one line."""
    if watch is not None:
        watch.end_all(mistake, code)
    distributed.say(mistake)
    end(code)


def end(code: int | None) -> NoReturn:
    """Ends this process; None is success.

    In a world it ends at once: while Python takes its objects apart, torch may wait for ever for a
    thread of a group of processes, or abort because of one.
    """
    if distributed.launch().world_size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)
