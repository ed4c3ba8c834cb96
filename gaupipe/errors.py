"""What the command line shows without a traceback."""

import sys


class UserError(ValueError):
    """The user's mistake: one line saying what is wrong, where, and what would be right."""


def mistake_of(error: BaseException) -> str | None:
    """What to say of an error that the user can mend; None for any other, which is a bug."""
    store = sys.modules.get("store")  # where it has not been imported, it has raised nothing
    if isinstance(error, UserError) or (store and isinstance(error, store.StoreError)):
        return str(error)
    if isinstance(error, OSError) and (error.filename or error.errno is not None):
        return f"{error.filename or 'the disk'}: {error.strerror}"
    return None
