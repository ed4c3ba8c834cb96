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
from typing import Any

from gaupipe.settings.sections import HFDS, LOCAL, STREAMS
from gaupipe.system import distributed
from gaupipe.system.errors import UserError, one_line
from gaupipe.system.files import check_file
from stages.runs.directory import RunDirectory

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


def check_paths(
    *,
    run_dir: Path | None = None,
    new_run: Path | None = None,
    maps: str | None = None,
    data: Path | None = None,
    images: Iterable[Path] | None = None,
    model: str | None = None,
    files: Iterable[tuple[Any, ...]] = (),
) -> None:
    """Raises UserError or StoreError for the first path that a command cannot use.

    run_dir  the folder of a run
    new_run  the folder of a run, or nothing
    maps     path or URL of a store; an object store is not asked
    data     a folder of images
    images   files and folders
    model    ``local-dir:FOLDER``; any other name may be one of timm's
    files    of files to be written the arguments of :func:`check_file`; the path may be None

    In a world of several processes nothing is checked: torch has been imported by then, and one
    process speaks for all.
    """
    if distributed.launch().world_size > 1:
        return
    if run_dir is not None:
        RunDirectory(run_dir).settings()
    if new_run is not None:
        RunDirectory(new_run).check_place()
    if maps is not None and not (Path(maps) / "zarr.json").is_file():
        import store  # with zarr and tensorstore, half a second

        store.check_exists(maps)
    named = str(data).startswith((HFDS, *STREAMS))
    if data is not None and not data.exists() and not named:
        raise UserError(f"--data {data}: no such folder; {remedy(data)}")
    for path in images or ():
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; give images, or folders of images")
    if model is not None and model.startswith(LOCAL):
        folder = Path(model.removeprefix(LOCAL)).expanduser()
        if not folder.is_dir():
            raise UserError(f"{model}: there is no folder {folder}")
    for option, path, *suffixes in files:
        if path is not None:
            check_file(option, path, *suffixes)


def remedy(folder: Path) -> str:
    """What to name in place of a folder of images that is not there."""
    beside = [path.name for path in folder.parent.glob("*") if path.is_dir()]
    close = difflib.get_close_matches(folder.name, beside, n=1)
    if close:
        return f"did you mean {folder.with_name(close[0])}?"
    return "it should hold CLASS/*.png"
