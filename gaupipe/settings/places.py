"""Places that a user names, of images and of weights: what can be refused before torch is imported.
Commands ask here first, and whatever reads a place asks here again."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from gaupipe.settings.sections import HFDS, LOCAL, STREAMS
from gaupipe.system.errors import UserError

REMEDY = "local-dir:FOLDER, a folder with config.json, or a timm name with weights is right"


def check_images(paths: Iterable[Path]) -> None:
    """Raises UserError for the first of some files and folders that is not there."""
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; give images, or folders of images")


def check_data(data: Path, option: str = "--data", content: str = "CLASS/*.png") -> None:
    """Raises UserError unless an ``option`` names a folder that is there, or a data set by one of
    timm's names, such as hfds/NAME. ``content`` is what the folder should hold."""
    if data.exists() or str(data).startswith((HFDS, *STREAMS)):
        return
    beside = [path.name for path in data.parent.glob("*") if path.is_dir()]
    close = difflib.get_close_matches(data.name, beside, n=1)
    remedy = f"it should hold {content}"
    if close:
        remedy = f"did you mean {data.with_name(close[0])}?"
    raise UserError(f"{option} {data}: no such folder; {remedy}")


def check_model(name: str | None) -> None:
    """Raises UserError for ``local-dir:FOLDER`` without the folder; any other name may be one of
    timm's."""
    if name is not None and name.startswith(LOCAL):
        folder_of(name)


def folder_of(name: str, remedy: str = REMEDY) -> Path:
    """The folder that ``local-dir:FOLDER`` names. Raises UserError, ending in ``remedy``, where
    there is none."""
    folder = Path(name.removeprefix(LOCAL)).expanduser()
    if not folder.is_dir():
        raise UserError(f"{name}: there is no folder {folder}; {remedy}")
    return folder
