"""Lines for a terminal, which would break them in the middle of words, paths and commands."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import IO

QUOTED = re.compile(r"'gaupipe [^']*'")


def fitted(line: str, stream: IO[str], command: str = "") -> str:
    """``line``, with the ``command`` that it ends in, as ``stream`` should show it: unchanged in a
    pipe; on a terminal broken between words, a command only where it is longer than a line, and
    ``command`` on a line of its own, from which it can be copied."""
    if not stream.isatty():
        return f"{line} {command}".strip()
    columns = shutil.get_terminal_size().columns
    # a space that does not break keeps a command that is quoted in one piece
    whole = QUOTED.sub(lambda quoted: quoted[0].replace(" ", "\0"), line)
    lines = textwrap.wrap(
        whole, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    if command:
        lines.append(f"  {command}")
    return "\n".join(lines).replace("\0", " ")
