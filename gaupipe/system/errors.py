"""Errors that the command line shows without a traceback."""

import signal
import sys

OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc")
"""Words of torch's allocators, whose errors are RuntimeErrors on a CPU."""


class UserError(ValueError):
    """The user's mistake: one line saying what is wrong, where, and what would be right."""


class Stopped(BaseException):
    """A signal has ended a training, whose checkpoint is written. No error: nothing that handles
    errors should catch it."""

    def __init__(self, number: int, where: str) -> None:
        """``number`` is the signal's; ``where`` says how far the training has come."""
        super().__init__(number, where)
        self.number = signal.Signals(number)
        self.where = where

    def __str__(self) -> str:
        return f"stopped by {self.number.name} {self.where}, where the checkpoint is"


def one_line(error: BaseException) -> str:
    """The type and the text of another library's error, at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def mistake_of(error: BaseException) -> str | None:
    """The line about an error that the user can mend; None for any other, which is a bug."""
    store = sys.modules.get("store")  # where it has not been imported, it has raised nothing
    if isinstance(error, UserError) or (store and isinstance(error, store.StoreError)):
        return str(error)
    if isinstance(error, OSError) and (error.filename or error.errno is not None):
        return f"{error.filename or 'the disk'}: {error.strerror}"
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        reason = "out of memory"
        said = " ".join(str(error).split())[:200]
        if said:  # Python's own error says nothing
            reason += f" ({said})"
        return (
            f"{reason}: lower data.batch_size or take a smaller model; 'gaupipe plan' says what is "
            "needed"
        )
    return None
