"""The command line: parses, builds what a stage is asked for, and calls it. One file a panel of the
help.

Python imports this package before gaupipe, which knows by it that it may leave torch and timm for
later.
"""

import sys


def main() -> None:
    """The command ``gaupipe``."""
    try:
        from stages.cli import program

        program.main()
    except KeyboardInterrupt:  # before there is a command that could say how it goes on
        print("gaupipe: interrupted", file=sys.stderr)
        sys.exit(130)
