"""Lines for a terminal, which would break them in the middle of words, paths and commands."""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from typing import IO

from rich.cells import cell_len

QUOTED = re.compile(r"'gaupipe [^']*'")


def wrap(line: str, stream: IO[str], command: Sequence[str] = (), indent: int = 2) -> str:
    """``line``, with the ``command`` that it ends in, as ``stream`` should show it: in a pipe as it
    is; on a terminal broken between words, and the command below it, from where it can be copied.
    Lines after the first begin with ``indent`` spaces."""
    if not stream.isatty():
        return f"{line} {shlex.join(command)}".rstrip()
    columns = shutil.get_terminal_size().columns
    # a space that does not break keeps a command that is quoted in one piece, and a percentage
    whole = QUOTED.sub(lambda quoted: quoted[0].replace(" ", "\0"), line)
    whole = re.sub(r"(?<=\d) (?=%)", "\0", whole)
    lines = textwrap.wrap(
        whole,
        columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if command:
        lines.append(continued(command, columns))
    return "\n".join(lines).replace("\0", " ")


def continued(command: Sequence[str], columns: int) -> str:
    """A command that a shell takes as it stands: where it is longer than a line, with backslashes
    before some of its options, each of which stays with its value."""
    options: list[str] = []
    for word in map(shlex.quote, command):
        if options and not word.startswith("-"):
            options[-1] += f" {word}"
        else:
            options.append(word)
    lines = [f"  {options[0]}"]
    for option in options[1:]:
        if len(f"{lines[-1]} {option} \\") <= columns:
            lines[-1] += f" {option}"
        else:
            lines.append(f"    {option}")
    return " \\\n".join(lines)


def aligned(rows: Sequence[Sequence[str]], stream: IO[str], right: bool = False) -> list[str]:
    """A line for each of the ``rows``, whose columns stand below each other. The last column may be
    a path: on a terminal where it does not fit it is a line of its own, and can be copied."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    columns = shutil.get_terminal_size().columns
    fits = sum(widths) + 2 * (len(widths) - 1) <= columns or not stream.isatty()
    if not right:
        widths[-1] = 0

    lines = []
    for row in rows:
        padded = []
        for text, width in zip(row, widths, strict=True):
            space = " " * (width - cell_len(text))
            if right:
                padded.append(space + text)
            else:
                padded.append(text + space)

        if fits:
            lines.append("  ".join(padded).rstrip())
        else:
            *others, last = padded
            lines.append("  ".join(others).rstrip())
            lines.append(f"  {last}")
    return lines
