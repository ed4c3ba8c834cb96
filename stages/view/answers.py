"""Who waits for an answer of a page, so that what is read ahead can give way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

MOMENT = 0.4
"""Seconds after an answer in which nothing is read ahead."""


class Answers:
    """The answers that are being computed, each on a thread of its own."""

    def __init__(self) -> None:
        self._awaited = 0
        self._latest = 0.0
        """When the latest was there."""
        self._counting = threading.Lock()

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """While somebody waits for an answer."""
        with self._counting:
            self._awaited += 1
        try:
            yield
        finally:
            with self._counting:
                self._awaited -= 1
                self._latest = time.monotonic()

    def wait_until_idle(self) -> None:
        """Returns when nobody waits for an answer, or has waited a moment ago."""
        while self._awaited or time.monotonic() - self._latest < MOMENT:
            time.sleep(MOMENT / 4)
