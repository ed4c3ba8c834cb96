"""How a command begins: it says what it is about to do, and imports torch and timm, which takes
seconds, and a user's own files."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gaupipe.system.errors import UserError, one_line
from gaupipe.system.messages import LOG

WAITS = "gaupipe: imports torch, which takes some seconds"


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A line on a terminal, for as long as the block takes to import torch; none where it has been
    imported."""
    shown = sys.stderr.isatty() and "torch" not in sys.modules
    if shown:
        print(WAITS, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print(" " * len(WAITS), end="\r", file=sys.stderr, flush=True)


def say(line: str, command: Sequence[Any] = ()) -> None:
    """A message; a ``command`` that ends it can be copied from a terminal."""
    LOG.info(f"gaupipe: {line}", extra={"command": [str(word) for word in command]})


@contextlib.contextmanager
def begins(what: str) -> Iterator[None]:
    """Says what a command is about to do, and then imports torch, which takes seconds."""
    say(f"{what} ...")
    with importing():
        yield


def starts(
    what: str, settings: Any, folder: Path, attention: str | None = None, model: str = ""
) -> contextlib.AbstractContextManager[None]:
    """:func:`begins`, of a job with these settings."""
    attention = attention or settings.model.attention
    model = model or f"{settings.model.name}, attention {attention}"
    return begins(f"{what}: {settings.data.title}, {model}, into {folder}")


def import_file(path: Path) -> None:
    """Runs a user's file as a module of its name. Raises UserError where it is not there or
    fails."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"--import {path}: should be a Python file, whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with importing():
        import gaupipe.vit.models  # noqa: F401  (timm should know the attentions of gaupipe too)

        try:
            spec.loader.exec_module(module)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"--import {path}: {one_line(error)}") from error


def check_store(url: str) -> None:
    """Raises StoreError for a folder without a store; an object store is not asked."""
    if not (Path(url) / "zarr.json").is_file():
        import store  # with zarr and tensorstore, half a second

        store.check_exists(url)
