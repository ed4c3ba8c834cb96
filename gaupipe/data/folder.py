"""A folder with a folder of images for each class: which images it has, what they are like, and
what else is there."""

from __future__ import annotations

import functools
import multiprocessing
import os
import stat
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gaupipe.data.decoding import identify, refusing, suffix_of, suffixes
from gaupipe.system.errors import UserError

LeftOut = list[tuple[str, str]]
"""(why, path) of what is not among the images."""

SAMPLE = 200
"""Images whose headers are read to see what the images are like."""


@dataclass(frozen=True)
class Layout:
    """The folders that hold a folder of images for each class; None where there is none."""

    train: Path
    val: Path | None
    test: Path | None


def layout(root: Path) -> Layout:
    """Finds the folders of each split below ``root``.

    ``train/`` holds the training images, ``val/`` (or ``validation/``) the validation images, and
    ``test/`` the test images. Without any of these folders all class folders lie in ``root``
    itself. Raises UserError for a ``root`` that is not there, is empty, or holds images, but none
    for training.
    """
    folders = {name: root / name for name in ("train", "val", "validation", "test")}
    folders = {name: folder for name, folder in folders.items() if folder.is_dir()}
    val, test = folders.get("val") or folders.get("validation"), folders.get("test")
    if "train" in folders:
        return Layout(folders["train"], val, test)
    if folders or not root.is_dir() or not any(entry.is_dir() for entry in _entries(root)):
        moved = "; if the images of a run have moved, repeat its command (run, phase-a or train) "
        moved += "with --data NEW --run-dir RUN"
        raise UserError(
            f"data.root: no folder {str(root / 'train')!r}; it should hold train/CLASS/*.png "
            f"(val/ and test/ may stand beside train/); or {str(root)!r} should hold CLASS/*.png"
            f"{'' if root.exists() else moved}"
        )
    return Layout(root, None, None)


def training_classes(folder: Path, left_out: LeftOut) -> dict[str, list[str]]:
    """:func:`find_classes` of the training images. Raises UserError for a single class too."""
    classes = find_classes(folder, left_out)
    if len(classes) == 1:
        inside = folder / min(classes)
        below = any(entry.is_dir() for entry in _entries(inside))
        instead = f"; if the folders in {inside} are the classes, name it" if below else ""
        raise UserError(
            f"data.root: {folder} holds one class only, {inside.name!r}; two or more are needed"
            f"{instead}"
        )
    return classes


def find_classes(folder: Path, left_out: LeftOut) -> dict[str, list[str]]:
    """{class: its images} as torchvision's ImageFolder finds them, all sorted by name.

    Images are paths relative to ``folder``, with '/' between folders. They may lie in sub-folders
    of their class. What is not among them is added to ``left_out``. Raises UserError for what
    cannot be meant: no class folder, a class without images, a link to nothing in a class's place,
    a class whose name is no text.
    """
    place = folder.resolve()
    above = {_identity(os.stat(parent)) for parent in (place, *place.parents)}
    start = len(os.path.join(folder, ""))
    classes = {}
    for entry, status in _visible(folder, above, left_out):
        if status is None:
            raise UserError(f"data.root: {entry.path} is a link that leads nowhere")
        if not stat.S_ISDIR(status.st_mode):
            left_out.append(("outside a class folder", entry.path))
        elif any("\ud800" <= letter <= "\udfff" for letter in entry.name):  # Python's stand-ins
            raise UserError(f"data.root: rename {entry.path!r}: the name is not UTF-8")
        else:
            images = _class_images(entry.path, above | {_identity(status)}, left_out)
            classes[entry.name] = sorted(path[start:].replace(os.sep, "/") for path in images)
    if not classes:
        raise UserError(
            f"data.root: {folder} holds no class folder; it should hold one folder of "
            f"images for each class, as in {folder / 'cat' / '1.png'}"
        )
    return classes


def _class_images(folder: str, entered: set[tuple[int, int]], left_out: LeftOut) -> list[str]:
    """Paths of the images of a class. No folder is entered twice."""
    others: LeftOut = []
    images, folders = [], [folder]
    while folders:
        for entry, status in _visible(folders.pop(), entered, others):
            suffix = suffix_of(entry.name)
            if status and stat.S_ISDIR(status.st_mode):
                entered.add(_identity(status))
                folders.append(entry.path)
            elif status and not stat.S_ISREG(status.st_mode):
                others.append(("pipe or device", entry.path))
            elif suffix in suffixes():
                images.append(entry.path)  # a link to nothing too: it is refused when it is read
            else:
                others.append((suffix or "without suffix", entry.path))
    if not images:
        instead = f", only {_counted(others)}" if others else ""
        raise UserError(
            f"data.root: the class folder {folder} holds no image that Pillow reads"
            f"{instead}; put images there or remove it"
        )
    left_out += others
    return images


def _visible(
    folder: str | Path, entered: set[tuple[int, int]], left_out: LeftOut
) -> Iterator[tuple[os.DirEntry, os.stat_result | None]]:
    """Entries of a folder and their status, without hidden ones and links to folders that have been
    ``entered``."""
    for entry in _entries(folder):
        status = status_of(entry.path)
        if entry.name.startswith("."):
            left_out.append(("hidden", entry.path))
        elif status and _identity(status) in entered:
            left_out.append(("link to a folder read already", entry.path))
        else:
            yield entry, status


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
    rest = sum(count for _, count in counts[6:])
    shown = [*counts[:6], ("others", rest)] if rest else counts
    return ", ".join(f"{why} ({count})" for why, count in shown)


def _entries(folder: str | Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def status_of(path: str) -> os.stat_result | None:
    """Status of the file that a link leads to; None for a link that leads nowhere."""
    try:
        return os.stat(path)
    except OSError:
        return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@dataclass(frozen=True)
class FolderFacts:
    """The facts about a folder of images that settings are chosen by."""

    counts: dict[str, int]  # training images of each class
    width: int  # in pixels, the median over the sampled training images, as the height
    height: int
    val: int | None = None  # images in a folder for validation; None: a part of those for training
    test: int | None = None

    @property
    def images(self) -> int:
        """Training images, and validation images that are a part of them."""
        return sum(self.counts.values())

    @property
    def shorter(self) -> int:
        """The median image's shorter side in pixels."""
        return min(self.width, self.height)

    def __str__(self) -> str:
        most, least = (pick(self.counts, key=self.counts.__getitem__) for pick in (max, min))
        classes = f"{self.images:,} training images of {len(self.counts)} classes"
        if self.counts[most] > self.counts[least]:
            classes += f" ({self.counts[least]:,} of {least} to {self.counts[most]:,} of {most})"
        val = "" if self.val is None else f", {self.val:,} validation images"
        test = "no" if self.test is None else f"{self.test:,}"
        return f"{classes}{val}, {test} test images, {self.width} x {self.height} pixels"


def facts_of(root: Path) -> FolderFacts:
    """Looks at a folder. No pixels are read. Raises UserError for a folder that cannot be meant,
    and for a sampled file that is no image."""
    left_out: LeftOut = []  # it is said when the images are read
    folders = layout(root)
    classes = training_classes(folders.train, left_out)
    names = [name for images in classes.values() for name in images]
    sampled = dict.fromkeys(names[i * len(names) // SAMPLE] for i in range(SAMPLE))
    widths, heights = zip(*(_size(folders.train / name) for name in sampled), strict=True)
    val, test = (
        sum(map(len, find_classes(folder, left_out).values())) if folder else None
        for folder in (folders.val, folders.test)
    )
    return FolderFacts(
        counts={name: len(images) for name, images in classes.items()},
        width=round(statistics.median(widths)),
        height=round(statistics.median(heights)),
        val=val,
        test=test,
    )


def _size(path: Path) -> tuple[int, int]:
    """(width, height) of an image file."""
    with refusing(str(path)), open(path, "rb") as file, identify(file, str(path)) as image:
        return image.size
