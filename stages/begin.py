"""What a command does before it imports torch and timm, which takes seconds: it refuses paths that
are not there, and on a terminal says what it waits for. The stages, which Python calls too, check
the same paths and more."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from gaupipe.settings.sections import HFDS, LOCAL, STREAMS
from gaupipe.system.errors import UserError, one_line

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


def check_maps(url: str) -> None:
    """Raises StoreError for a folder without a store; an object store is not asked."""
    if not (Path(url) / "zarr.json").is_file():
        import store  # with zarr and tensorstore, half a second

        store.check_exists(url)


def check_data(data: Path, option: str = "--data", content: str = "CLASS/*.png") -> None:
    """Raises UserError unless an option names a folder that is there, or hfds/NAME."""
    if not data.exists() and not str(data).startswith((HFDS, *STREAMS)):
        raise UserError(f"{option} {data}: no such folder; {remedy(data, content)}")


def check_images(paths: Iterable[Path]) -> None:
    """Raises UserError for the first of some files and folders that is not there."""
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; give images, or folders of images")


def check_model(name: str | None) -> None:
    """Raises UserError for ``local-dir:FOLDER`` without the folder; any other name may be one of
    timm's."""
    if name is not None and name.startswith(LOCAL):
        folder = Path(name.removeprefix(LOCAL)).expanduser()
        if not folder.is_dir():
            raise UserError(f"{name}: there is no folder {folder}")


def remedy(folder: Path, content: str) -> str:
    """What to name in place of a folder of images that is not there."""
    beside = [path.name for path in folder.parent.glob("*") if path.is_dir()]
    close = difflib.get_close_matches(folder.name, beside, n=1)
    if close:
        return f"did you mean {folder.with_name(close[0])}?"
    return f"it should hold {content}"
