"""The command line: parses, builds what a stage is asked for, and calls it. One file a panel of the
help.

Python imports this package before gaupipe, which knows by it that it may leave torch and timm for
later.
"""


def main() -> None:
    """The command ``gaupipe``."""
    from stages.cli import program

    program.main()
