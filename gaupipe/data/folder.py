"""A folder with a folder of images for each class: which images it has, what they are like, and
what else is there."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gaupipe.data.decoding import is_image
from gaupipe.settings.sections import HFDS, STREAMS
from gaupipe.system.errors import UserError
from gaupipe.system.messages import warn_once

SPLITS = {
    "train": ("train", "training", "train_set", "training_set", "seg_train"),
    "val": ("val", "valid", "validation", "val_set", "validation_set", "seg_val"),
    "test": ("test", "testing", "test_set", "testing_set", "seg_test"),
}
"""Names of the folders of each split, in lower case: any case will do."""

OF_OTHER_PROGRAMS = ("__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN")
"""Folders that other programs put beside images, some with small copies of these."""

HEIC = (".heic", ".heif", ".hif")
"""Suffixes of a format of photos that Pillow does not read by itself."""

MASK = re.compile(
    r"(.+)[-_. ](mask|seg|segmentation|groundtruth|annotation|label)s?[-_ ]?\d*", re.IGNORECASE
)
"""The name, without its suffix, of a mask beside an image."""

IMAGES = ("images", "image", "imgs", "photos")
MASKS = ("masks", "mask", "labels", "annotations", "segmentation")
"""Names of two folders of one class: its images, and what belongs to them."""

WITHOUT_LABELS = ("unlabelled", "unlabeled")
"""Names of a folder of images without labels, beside that of the training images."""


def place_of(data: str) -> dict[str, str | None]:
    """``name`` and ``root`` of the settings ``data`` of images that one text names: a folder or an
    archive, or hfds/ and a folder or a name of the Hub."""
    name = data.removeprefix(HFDS)
    if os.path.isdir(f"/{name}") and not os.path.isdir(name):
        name = f"/{name}"  # hfds//data/mine, of which pathlib makes hfds/data/mine
    if os.path.exists(data) or not data.startswith((HFDS, *STREAMS)):
        return {"name": "folder", "root": os.path.abspath(data)}
    if not os.path.isdir(name):
        return {"name": data, "root": None}
    folder = Path(os.path.abspath(name))  # later commands find it from any working directory
    return {"name": f"{HFDS}{folder.name}", "root": str(folder.parent)}


def whole_place(data: str) -> str:
    """The same place, so that later commands find it from any working directory."""
    where = place_of(data)
    root = where["root"]
    if root is None:
        return data
    if where["name"] == "folder":
        return root
    return f"{HFDS}{root}/{str(where['name']).removeprefix(HFDS)}"


@dataclass(frozen=True)
class SplitFolders:
    """Folders that hold a folder of images for each class; None where there is none."""

    train: Path
    val: Path | None
    test: Path | None
    unlabelled: Path | None = None
    """Its images may lie at any depth."""


def find_splits(root: Path) -> SplitFolders:
    """Finds the folders of each split below ``root``, which :data:`SPLITS` names.

    Without any of these folders all class folders lie in ``root`` itself. One line on stderr, once,
    tells of folders beside ``train/`` that are of no split. Raises UserError for a ``root`` that is
    not there, is empty, or holds images, but none for training, for two folders of one split, and
    for a folder ``unlabelled`` or of a split among those of classes.
    """
    beside: list[Path] = []
    if root.is_dir():
        beside = folders_in(root)
    folders: dict[str, Path] = {}
    others = []
    for folder in beside:
        split = split_of(folder.name)
        if folder.name.lower() in WITHOUT_LABELS:
            split = "unlabelled"
        if split is None:
            others.append(folder.name)
        elif split in folders:
            raise UserError(
                f"data.root: {folders[split]} and {folder} are both named as {split}/ may be: "
                "rename one of them, or take it out"
            )
        else:
            folders[split] = _unwrapped(folder, split)
    unlabelled = folders.get("unlabelled")
    if "train" in folders:
        if others:
            warn_once(
                f"data.root {root}: left out the folders beside the training images that are "
                f"neither validation nor test images: {', '.join(others)}"
            )
        return SplitFolders(folders["train"], folders.get("val"), folders.get("test"), unlabelled)
    held_out = [folder for folder in folders.values() if folder != unlabelled]
    if not beside or any(map(folders_in, held_out)):
        moved = ""
        if not root.exists():
            moved = (
                "; if the images of a run have moved, repeat its command (run; phase-a or train "
                "with --resume) with --data NEW --run-dir RUN"
            )
        raise UserError(
            f"data.root: no folder {str(root / 'train')!r}; it should hold train/CLASS/*.png "
            f"(val/ and test/ may stand beside train/); or {str(root)!r} should hold CLASS/*.png"
            f"{moved}"
        )
    if folders:
        [folder, *_] = folders.values()
        raise UserError(
            f"data.root: {folder} would be a class like the folders beside it: put these into "
            f"{root / 'train'}, or give it another name"
        )
    return SplitFolders(root, None, None)


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, without hidden ones."""
    entries = sorted(folder.iterdir())
    return [entry for entry in entries if entry.is_dir() and not is_hidden(entry.name)]


def is_hidden(name: str) -> bool:
    """True for a file or folder that nobody means by the images in a folder."""
    return name.startswith(".") or name in OF_OTHER_PROGRAMS


def number_first(label: str) -> tuple[int, str]:
    """Sorts numbers by their value, and other text as text."""
    return (int(label) if label.isdecimal() else 0, label)


def split_of(name: str) -> str | None:
    """The split that a folder's name names."""
    for split, names in SPLITS.items():
        if name.lower() in names:
            return split
    return None


def _unwrapped(folder: Path, split: str) -> Path:
    """The folder of a split, or the one of the same split that is all it holds: an archive may
    have seg_train/seg_train/CLASS."""
    inside = folders_in(folder)
    if len(inside) == 1 and split_of(inside[0].name) == split:
        return inside[0]
    return folder


def check_classes(
    classes: Iterable[str], known: Iterable[str], place: str, training: object
) -> None:
    """Raises UserError if images in a ``place`` have a class that the ``training`` images lack."""
    unknown = sorted({*classes} - {*known})
    if not unknown:
        return
    name = unknown[0]
    for other in known:
        if spelling(name) == spelling(other):
            raise UserError(
                f"{place} has the class {name!a}, which {training} spells {other!a}: rename one"
            )
    raise UserError(f"{place} has the class {name!r}, which {training} lacks")


def spelling(name: str) -> str:
    """What a reader sees of a name: accents in one form, without spaces around it."""
    return unicodedata.normalize("NFC", name).strip()


def check_spelling(classes: Iterable[str], title: str) -> None:
    """Raises UserError for two classes of a data set whose names look alike."""
    seen: dict[str, str] = {}
    for name in classes:
        other = seen.setdefault(spelling(name), name)
        if other != name:
            raise UserError(
                f"data set {title}: the classes {other!a} and {name!a} look alike: rename one, or "
                "put their images together"
            )


def find_classes(folder: Path, is_split: bool = False) -> dict[str, list[str]]:
    """{class: its images} as torchvision's ImageFolder finds them, all sorted by name, but classes
    whose names are numbers by their value, as timm does.

    Images are paths relative to ``folder``, with '/' between folders. They may lie in sub-folders
    of their class. One line on stderr, once, tells of other files. Raises UserError for a folder
    without class folders, for classes without images, for masks beside images, and, unless the
    folder's name says that it ``is_split``, where all classes, or one of them, hold sub-folders
    that look like the classes: :func:`check_levels`.
    """
    classes = {}
    empty = []
    astray = []
    others = []
    start = len(str(folder / "x")) - 1  # 0 in the current folder, whose name no path has
    for entry in sorted(folder.iterdir(), key=lambda entry: number_first(entry.name)):
        if is_hidden(entry.name):
            continue
        if entry.is_symlink() and not entry.exists():
            raise UserError(f"data.root: {entry} is a link that leads nowhere")
        if not entry.is_dir():
            if is_image(entry.name):
                astray.append(str(entry))
            else:
                others.append(str(entry))
            continue
        images, rest = images_below(entry)
        others += rest
        if images:
            classes[entry.name] = [path[start:].replace(os.sep, "/") for path in images]
        else:
            empty.append(entry.name)
    say_left_out(f"data.root {folder}", others, astray)
    if empty:
        more = ""
        if len(empty) > 1:
            more = f", and {len(empty) - 1} others do not either ({_first_three(empty[1:])})"
        raise UserError(
            f"data.root: the class folder {folder / empty[0]} holds no image that Pillow "
            f"reads{more}; put images there or remove it"
        )
    if not classes:
        raise UserError(
            f"data.root: {folder} holds no class folder; it should hold one folder of "
            "images for each class"
        )
    check_masks(folder, classes)
    if not is_split:
        check_levels(folder, classes)
    return classes


def say_left_out(place: str, others: Sequence[str], astray: Sequence[str] = ()) -> None:
    """Says which files of a place are left out, and why, if there are any: ``others`` are no
    images, and images ``astray`` are in no class folder."""
    heic = [path for path in others if path.lower().endswith(HEIC)]
    reasons = {
        "images in no class folder": astray,
        "HEIC photos, which have to be converted, to JPEG for example": heic,
        "files that are no images": [path for path in others if path not in {*heic}],
    }
    parts = [
        f"{what}: {len(paths)}, such as {paths[0]}" for what, paths in reasons.items() if paths
    ]
    if parts:
        warn_once(f"{place}: left out {'; '.join(parts)}")


def check_masks(folder: Path, classes: Mapping[str, list[str]]) -> None:
    """Raises UserError for masks beside the images that they belong to, or in a folder beside that
    of the images."""
    names = {name.lower() for name in classes}
    if names & {*IMAGES} and names & {*MASKS}:
        raise UserError(
            f"data.root: {folder} holds {_first_three([*classes])}, which look like images and "
            "their masks: put the images of each class into a folder of their own"
        )
    stems = {os.path.splitext(image)[0] for images in classes.values() for image in images}
    masks = []
    for stem in sorted(stems):
        match = MASK.fullmatch(stem)
        if match and match[1] in stems:
            masks.append(stem)
    if masks:
        raise UserError(
            f"data.root: {folder} holds masks beside images, {len(masks)} of {len(stems)} files, "
            f"such as {masks[0]}: move them out, or rename what is no mask"
        )


def check_levels(folder: Path, classes: Mapping[str, list[str]]) -> None:
    """Raises UserError where the folders taken for classes are parts of a data set, or where one of
    them is the data set."""
    inside = {name: frozenset(map(_inner_folder, images)) for name, images in classes.items()}
    first = next(iter(inside.values()))
    if len(classes) > 1 and {*inside.values()} == {first} and len(first) > 1 and "" not in first:
        raise UserError(
            f"data.root: {folder} holds {_first_three([*classes])}, and each of them the same "
            f"folders {_first_three(sorted(first))}, which look like the classes: name the parts "
            "train, val and test, or take one of them"
        )
    flat = [name for name, folders in inside.items() if len(folders) == 1]
    for name, folders in inside.items():
        has_splits = "train" in map(split_of, folders)
        if "" not in folders and (has_splits or (len(folders) > 1 and flat)):
            raise UserError(
                f"data.root: {folder} holds {_first_three([*classes])}, and {name} no images but "
                f"the folders {_first_three(sorted(folders, key=number_first))}: if these are the "
                f"data set, name {folder / name}; otherwise put the images of {name} into itself"
            )


def _inner_folder(image: str) -> str:
    """The folder in its class folder that an image lies in; '' where it lies in none."""
    _class, *folders, _file = image.split("/")
    return folders[0] if folders else ""


def _first_three(names: list[str]) -> str:
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += ", ..."
    return text


def images_below(folder: Path) -> tuple[list[str], list[str]]:
    """Paths of the images below a folder, sorted, and of other files there. Links to folders are
    followed, hidden files and folders are left out. Raises OSError for a folder that may not be
    read."""
    images = []
    others = []
    for path in _files(folder):
        # a link to nothing, too: it is refused when it is read
        if is_image(path) and (os.path.isfile(path) or not os.path.exists(path)):
            images.append(path)
        else:
            others.append(path)
    return sorted(images), others


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
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        yield from (os.path.join(place, name) for name in names if not is_hidden(name))


def _refuse(error: OSError) -> None:
    raise error


@dataclass(frozen=True)
class FolderFacts:
    """The facts about a folder of images that settings are chosen by."""

    counts: dict[str, int]  # training images of each class
    width: int  # in pixels, the median over the sampled training images, as the height
    height: int
    val: int | None = None  # images in a folder for validation; None: a part of those for training
    test: int | None = None
    unlabelled: int = 0
    """Images without labels, without copies of the others."""

    @property
    def images(self) -> int:
        """Training images, and validation images that are a part of them."""
        return sum(self.counts.values())

    @property
    def shorter(self) -> int:
        """The median image's shorter side in pixels."""
        return min(self.width, self.height)

    def __str__(self) -> str:
        most = max(self.counts, key=self.counts.__getitem__)
        least = min(self.counts, key=self.counts.__getitem__)
        text = f"{self.images:,} training images of {len(self.counts)} classes"
        if self.counts[most] > self.counts[least]:
            text += f" ({self.counts[least]:,} of {least} to {self.counts[most]:,} of {most})"
        if self.val is not None:
            text += f", {self.val:,} validation images"
        test = "no" if self.test is None else f"{self.test:,}"
        text += f", {test} test images, "
        if self.unlabelled:
            text += f"{self.unlabelled:,} images without labels, "
        return f"{text}{self.width} x {self.height} pixels"
