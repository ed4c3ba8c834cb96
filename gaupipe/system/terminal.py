"""Lines for a terminal, which would break them in the middle of words, paths and commands."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import IO

from rich.cells import cell_len

QUOTED = re.compile(r"'gaupipe [^']*'")


def fitted(line: str, stream: IO[str], command: str = "", indent: int = 2) -> str:
    """``line``, with the ``command`` that it ends in, as ``stream`` should show it: unchanged in a
    pipe; on a terminal broken between words, a command only where it is longer than a line, and
    ``command`` on a line of its own, from which it can be copied. Lines after the first begin with
    ``indent`` spaces."""
    if not stream.isatty():
        return f"{line} {command}".strip()
    columns = shutil.get_terminal_size().columns
    # a space that does not break keeps a command that is quoted in one piece
    whole = QUOTED.sub(lambda quoted: quoted[0].replace(" ", "\0"), line)
    lines = textwrap.wrap(
        whole,
        columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if command:
        lines.append(f"  {command}")
    return "\n".join(lines).replace("\0", " ")


def aligned(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """A line for each of the ``rows``, whose columns stand below each other. The last column is as
    long as it is: a path there can be copied, because no line is broken."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    if not right:
        widths[-1] = 0
    lines = []
    for row in rows:
        padded = []
        for text, width in zip(row, widths, strict=True):
            space = " " * (width - cell_len(text))
            padded.append(space + text if right else text + space)
        lines.append("  ".join(padded).rstrip())
    return lines
