"""A folder with a folder of images for each class: which images it has, and what else is there."""

from __future__ import annotations

import functools
import multiprocessing
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gaupipe.data.decoding import suffix_of, suffixes
from gaupipe.system.errors import UserError

LeftOut = list[tuple[str, str]]
"""(why, path) of what is not among the images."""

LOOP = "link to a folder read already"


@dataclass(frozen=True)
class Layout:
    """The folders that hold a folder of images for each class; None where there is none."""

    train: Path
    val: Path | None
    test: Path | None


def layout(root: Path) -> Layout:
    """Where the images of each split lie below ``root``.

    ``train/`` holds the training images, and ``val/`` (or ``validation/``) and ``test/`` the
    others. A single folder beside ``train/`` holds the test images, whatever its name. Without
    any of these folders all class folders lie in ``root`` itself. Raises UserError for a ``root``
    that is not there, is empty, or holds other images than those for training alone.
    """
    found = {name: root / name for name in ("train", "val", "validation", "test")}
    found = {name: folder for name, folder in found.items() if folder.is_dir()}
    val, test = found.get("val") or found.get("validation"), found.get("test")
    if "train" in found:
        return Layout(found["train"], val if test else None, test or val)
    if found or not root.is_dir() or not any(entry.is_dir() for entry in _entries(root)):
        raise UserError(
            f"data.root: no folder {str(root / 'train')!r}; it should hold train/CLASS/*.png "
            f"and, for test images, val/CLASS/*.png; or {str(root)!r} should hold CLASS/*.png"
        )
    return Layout(root, None, None)


def training_classes(folder: Path, left_out: LeftOut) -> dict[str, list[str]]:
    """:func:`find_classes` of the training images. Raises UserError for a single class too."""
    classes = find_classes(folder, left_out)
    if len(classes) > 1:
        return classes
    [name] = classes
    below = [entry for entry in _entries(folder / name) if entry.is_dir()]
    instead = f"; if the folders in {folder / name} are the classes, name it" if below else ""
    raise UserError(
        f"data.root: {folder} holds one class only, {name!r}; two or more are needed{instead}"
    )


def find_classes(folder: Path, left_out: LeftOut) -> dict[str, list[str]]:
    """{class: its images} as torchvision's ImageFolder finds them, all sorted by name.

    Images are paths relative to ``folder``, with '/' between folders. They may lie in sub-folders
    of their class. What is not among them is added to ``left_out``. Raises UserError for what
    cannot be meant: no class folder, a class without images, a link to nothing in a class's place.
    """
    place = folder.resolve()
    above = {_identity(os.stat(parent)) for parent in (place, *place.parents)}
    start = len(os.path.join(folder, ""))
    classes = {}
    for entry in _entries(folder):
        found = _stat(entry.path)
        if entry.name.startswith("."):
            left_out.append(("hidden", entry.path))
        elif found is None:
            raise UserError(f"data.root: {entry.path} is a link that leads nowhere")
        elif not stat.S_ISDIR(found.st_mode):
            left_out.append(("outside a class folder", entry.path))
        elif _identity(found) in above:
            left_out.append((LOOP, entry.path))
        else:
            images = _class_images(entry.path, above | {_identity(found)}, left_out)
            classes[entry.name] = sorted(path[start:].replace(os.sep, "/") for path in images)
    if not classes:
        raise UserError(
            f"data.root: {folder} holds no class folder; it should hold one folder of "
            f"images for each class, as in {folder / 'cat' / '1.png'}"
        )
    return classes


def _class_images(folder: str, entered: set[tuple[int, int]], left_out: LeftOut) -> list[str]:
    """Paths of the images of a class."""
    others: LeftOut = []
    images = list(_images(folder, entered, others))
    if not images:
        instead = f", only {_counted(others)}" if others else ""
        raise UserError(
            f"data.root: the class folder {folder} holds no image that Pillow reads"
            f"{instead}; put images there or remove it"
        )
    left_out += others
    return images


def _images(folder: str, entered: set[tuple[int, int]], left_out: LeftOut) -> Iterator[str]:
    """Paths of the images under a folder, no folder entered twice."""
    for entry in _entries(folder):
        found = _stat(entry.path)
        suffix = suffix_of(entry.name)
        if entry.name.startswith("."):
            left_out.append(("hidden", entry.path))
        elif found and stat.S_ISDIR(found.st_mode):
            if _identity(found) in entered:
                left_out.append((LOOP, entry.path))
            else:
                entered.add(_identity(found))
                yield from _images(entry.path, entered, left_out)
        elif found and not stat.S_ISREG(found.st_mode):
            left_out.append(("pipe or device", entry.path))
        elif suffix in suffixes():
            yield entry.path  # a link to nothing too: it is refused when it is read
        else:
            left_out.append((suffix or "without suffix", entry.path))


def say_left_out(root: Path, left_out: LeftOut) -> None:
    """Says in one line on stderr, once, what a folder holds besides images.

    Worker processes leave it to the process that started them.
    """
    if left_out and multiprocessing.parent_process() is None:
        [(most, _)] = Counter(why for why, _ in left_out).most_common(1)
        example = next(path for why, path in left_out if why == most)
        _say(f"data.root {root}: left out {_counted(left_out)}; for example {example}")


@functools.cache
def _say(line: str) -> None:
    print(" ".join(line.split()), file=sys.stderr)


def _counted(left_out: LeftOut) -> str:
    """'.txt (3), hidden (1)', the most frequent first."""
    counts = Counter(why for why, _ in left_out).most_common()
    shown = [f"{why} ({count})" for why, count in counts[:6]]
    if len(counts) > 6:
        shown.append(f"others ({sum(count for _, count in counts[6:])})")
    return ", ".join(shown)


def _entries(folder: str | Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _stat(path: str) -> os.stat_result | None:
    """Of what a link leads to; None for a link that leads nowhere."""
    try:
        return os.stat(path)
    except OSError:
        return None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
