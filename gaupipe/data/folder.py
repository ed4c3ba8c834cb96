"""A folder with a folder of images for each class: which images it has, what they are like, and
what else is there."""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gaupipe.data.decoding import identify, is_image, refusing
from gaupipe.system.errors import UserError

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
    if folders or not root.is_dir() or not any(map(Path.is_dir, root.iterdir())):
        moved = "; if the images of a run have moved, repeat its command (run, phase-a or train) "
        moved += "with --data NEW --run-dir RUN"
        raise UserError(
            f"data.root: no folder {str(root / 'train')!r}; it should hold train/CLASS/*.png "
            f"(val/ and test/ may stand beside train/); or {str(root)!r} should hold CLASS/*.png"
            f"{'' if root.exists() else moved}"
        )
    return Layout(root, None, None)


def find_classes(folder: Path) -> dict[str, list[str]]:
    """{class: its images} as torchvision's ImageFolder finds them, all sorted by name.

    Images are paths relative to ``folder``, with '/' between folders. They may lie in sub-folders
    of their class. One line on stderr, once, tells of other files. Raises UserError for a folder
    without class folders, and for a class without images.
    """
    classes, others, start = {}, [], len(os.path.join(folder, ""))
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_symlink() and not entry.exists():
            raise UserError(f"data.root: {entry} is a link that leads nowhere")
        if not entry.is_dir():
            others.append(str(entry))
            continue
        images: list[str] = []
        for path in _files(entry):
            # a link to nothing, too: it is refused when it is read
            is_one = is_image(path) and (os.path.isfile(path) or not os.path.exists(path))
            (images if is_one else others).append(path)
        if not images:
            raise UserError(
                f"data.root: the class folder {entry} holds no image that Pillow reads; put "
                "images there or remove it"
            )
        classes[entry.name] = sorted(path[start:].replace(os.sep, "/") for path in images)
    if not classes:
        raise UserError(
            f"data.root: {folder} holds no class folder; it should hold one folder of "
            "images for each class"
        )
    if others and multiprocessing.parent_process() is None:
        count = f"{len(others)} file{'s' * (len(others) > 1)}"
        _say(f"data.root {folder}: left out {count} that are no images, such as {others[0]}")
    return classes


def _files(folder: Path) -> Iterator[str]:
    """Paths of the files below a folder. Links are followed, but no folder is entered twice, nor
    one around it. Hidden ones are left out."""
    entered = {os.path.realpath(parent) for parent in Path(os.path.abspath(folder)).parents}
    for place, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        real = os.path.realpath(place)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(place, name) for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise error


@functools.cache
def _say(line: str) -> None:
    print(line, file=sys.stderr)


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
    folders = layout(root)
    classes = find_classes(folders.train)
    names = [name for images in classes.values() for name in images]
    sampled = dict.fromkeys(names[i * len(names) // SAMPLE] for i in range(SAMPLE))
    widths, heights = zip(*(_size(folders.train / name) for name in sampled), strict=True)
    val, test = (
        sum(map(len, find_classes(folder).values())) if folder else None
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
    with refusing(str(path)), open(path, "rb") as file, identify(file) as image:
        return image.size
