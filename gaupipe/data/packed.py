"""Images that lie in tar archives, or in tables of Hugging Face's ``datasets``: bytes are read by
position, and nothing is unpacked."""

from __future__ import annotations

import io
import os
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from gaupipe.data.decoding import is_image
from gaupipe.data.folder import folders_in, say_once, split_of
from gaupipe.data.images import FileImages, as_asked, stamp_of
from gaupipe.settings import DataSettings
from gaupipe.settings.sections import HFDS
from gaupipe.system.errors import UserError, one_line

IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp")
LABEL_COLUMNS = ("label", "fine_label", "labels", "cls", "class")
"""Columns of a table, the likeliest first; ``cls`` and ``jpg`` are WebDataset's names."""


class Reader(Protocol):
    """Gives the bytes of an image; for messages the archive or table that they are in; and their
    stamp, as :meth:`FileImages.stamp` does."""

    def read(self, position: int) -> bytes: ...

    def place(self, position: int) -> str: ...

    def stamp(self, position: int) -> tuple[str, int]: ...


class PackedImages(FileImages):
    """Images whose bytes a ``reader`` gives by position. Ids, digests, decoding and cache are those
    of files with these names."""

    reader: Reader
    places: list[int]
    """The reader's position of each image: it has those that were left out, too."""

    def open(self, position: int) -> io.BytesIO:
        return io.BytesIO(self.reader.read(self.places[position]))

    def path(self, position: int) -> str:
        return f"{self.reader.place(self.places[position])}/{self.names[position]}"

    def stamp(self, position: int) -> tuple[str, int]:
        return self.reader.stamp(self.places[position])

    def only(self, kept: np.ndarray) -> FileImages:
        other = super().only(kept)
        assert isinstance(other, PackedImages)
        other.places = [self.places[position] for position in kept]
        return other


class Images(NamedTuple):
    """The images of a split: their names and classes, all classes in order, and their bytes."""

    names: list[str]
    labels: list[str]
    classes: list[str]
    reader: Reader


def sources_of(
    place: Path, splits: Mapping[str, Images], settings: DataSettings
) -> dict[str, FileImages]:
    """The sources of the ``splits``, without images that :func:`as_asked` leaves out. Raises
    UserError without training images, for a class that these lack, and for two images of one name.
    """
    if "train" not in splits:
        raise UserError(f"{place}: has images for {', '.join(splits)}, and none for training")
    classes = splits["train"].classes
    numbers = {name: number for number, name in enumerate(classes)}
    sources: dict[str, FileImages] = {}
    for split, images in splits.items():
        unknown = sorted({*images.labels} - numbers.keys())
        if unknown:
            raise UserError(f"{place}: {split} has the class {unknown[0]!r}, which train lacks")
        [(name, times)] = Counter(images.names).most_common(1)
        if times > 1:
            raise UserError(f"{place}: {times} images have the name {name}; leave one of them")
        labels = np.array([numbers[label] for label in images.labels])
        source = PackedImages(place / split, images.names, labels, settings, classes)
        source.reader = images.reader
        source.places = [*range(len(labels))]
        sources[split] = as_asked(source)
    return sources


def number_first(label: str) -> tuple[int, str]:
    """Sorts numbers by their value, and other text as text."""
    return (int(label) if label.isdecimal() else 0, label)


# ---- tar archives --------------------------------------------------------------------------------


class Member(NamedTuple):
    """An image in an archive, which its path in the data set and its class have brought here."""

    path: str
    label: str | None
    archive: int
    offset: int
    bytes: int


class TarMembers:
    """The bytes of ``members`` of archives."""

    def __init__(self, archives: Sequence[Path], members: Sequence[Member]) -> None:
        self.archives = archives
        self.stamps = [stamp_of(str(path)) for path in archives]
        self.places = np.array([member[2:] for member in members])  # archive, offset, bytes

    def read(self, position: int) -> bytes:
        archive, offset, size = self.places[position].tolist()
        return read_part(self.archives[archive], offset, size)

    def place(self, position: int) -> str:
        return str(self.archives[self.places[position, 0]])

    def stamp(self, position: int) -> tuple[str, int]:
        archive, offset, _ = self.places[position].tolist()
        stamp, changed_ns = self.stamps[archive]
        return f"{stamp} {offset}", changed_ns


def read_part(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def find_archives(root: Path) -> dict[Path, str | None]:
    """The .tar files of a data set, each with the split that a word of its name, or its folder,
    names. Empty where ``root`` is neither a .tar nor a folder of them alone."""
    if root.is_file():
        return {root: None}
    archives: dict[Path, str | None] = {}
    for path in sorted(root.glob("[!.]*.tar")):
        words = re.findall("[A-Za-z]+", path.stem)
        archives[path] = next(filter(None, map(split_of, words)), None)
    for folder in folders_in(root) if root.is_dir() else []:
        inside = sorted(folder.glob("[!.]*.tar"))
        if split_of(folder.name) is None or not inside:
            return {}  # a folder of a class
        archives |= dict.fromkeys(inside, split_of(folder.name))
    without = [path for path, split in archives.items() if split is None]
    if len(without) not in (0, len(archives)):
        raise UserError(f"{without[0]}: the names of all archives should have train, val or test")
    return archives


def tar_sources(root: Path, settings: DataSettings) -> dict[str, FileImages]:
    """The images in the archives of :func:`find_archives`. The class of an image is what the file
    .cls beside it says (WebDataset); else the folder that it lies in, or else its archive's name.
    Raises UserError for an archive that is not whole, and for an image without a class."""
    archives = find_archives(root)
    members: list[Member] = []
    for number, (path, split) in enumerate(archives.items()):
        start = f"{split}/" if split else ""
        members += members_of(path, number, start)
    if not members:
        raise UserError(f"{root}: no image that Pillow reads is in there")
    while _in_one_folder(members):  # as tar packs a folder that it is given
        members = [member._replace(path=member.path.partition("/")[2]) for member in members]
    in_splits = any(split_of(member.path.split("/")[0]) == "train" for member in members)
    found: dict[str, list[Member]] = {}
    for member in members:
        split = "train"
        if in_splits:
            first, _, rest = member.path.partition("/")
            split = split_of(first) or ""
            member = member._replace(path=rest)
        label = member.label or member.path.split("/")[0]
        found.setdefault(split, []).append(member._replace(label=label))
    if others := found.pop("", []):
        say_once(f"{root}: left out {len(others)} images that are of no split")
    splits = {}
    for split, inside in found.items():
        inside.sort(key=lambda member: (number_first(member.label or ""), member.path))
        names = [member.path for member in inside]
        labels = [member.label or "" for member in inside]
        classes = sorted({*labels}, key=number_first)
        splits[split] = Images(names, labels, classes, TarMembers([*archives], inside))
    return sources_of(root, splits, settings)


def members_of(archive: Path, number: int, start: str) -> Iterator[Member]:
    """The images of an archive, whose paths begin with ``start``."""
    images: list[tuple[str, int, int]] = []
    labels: dict[str, str] = {}
    for name, offset, size in _files_in(archive):
        if name.endswith(".cls"):
            labels[_key(name)] = read_part(archive, offset, size).decode(errors="replace").strip()
        elif is_image(name):
            images.append((name, offset, size))
    for name, offset, size in images:
        label = labels.get(_key(name))
        flat = "/" not in name
        if label is None and (labels or (flat and start)):
            raise UserError(
                f"{archive}: {name} has no class: it should have a file .cls beside it, as others "
                "have, or should lie in a folder CLASS/"
            )
        folder = f"{archive.stem}/" if flat else ""
        yield Member(f"{start}{folder}{name}", label, number, offset, size)


def _files_in(archive: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, bytes) of the files in an archive, without hidden ones. Raises UserError for
    an archive that ends early or is compressed."""
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # it would hold a million
                parts = [part for part in member.name.split("/") if part not in ("", ".")]
                if member.isreg() and not any(part.startswith(".") for part in parts):
                    yield "/".join(parts), member.offset_data, member.size
            file.seek(tar.offset)
            end = file.read(tarfile.RECORDSIZE)
    except tarfile.TarError as error:
        raise _not_whole(archive, str(error)) from None
    if len(end) < tarfile.BLOCKSIZE or end.strip(b"\0"):  # to tarfile any damage is the end
        raise _not_whole(archive, "damaged or cut off before its end mark")


def _not_whole(archive: Path, reason: str) -> UserError:
    return UserError(f"{archive}: is no whole, uncompressed .tar ({reason}); fetch it again")


def _key(name: str) -> str:
    """WebDataset's name of a sample: the path up to the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _in_one_folder(members: Sequence[Member]) -> bool:
    """True where all images lie in one folder that is neither a class nor a split."""
    first = {member.path.partition("/")[0] for member in members}
    deep = all(member.path.count("/") > 1 for member in members)
    return len(first) == 1 and deep and split_of(*first) is None


# ---- Hugging Face's datasets ---------------------------------------------------------------------


class Rows:
    """The bytes of images in the ``column`` of a table called ``name``, or in the files that it
    names."""

    def __init__(self, name: str, table: Any, column: str) -> None:
        self.name = name
        self.table = table.select_columns([column])
        self.column = column
        files = [stamp_of(file["filename"]) for file in table.cache_files]
        # of a table in memory there is no knowing: it has changed at the end of time
        self.stamp_of_table = " ".join(text for text, _ in files)
        self.changed_ns = max((changed for _, changed in files), default=sys.maxsize)

    def read(self, position: int) -> bytes:
        image = self.table[position][self.column]
        if image["bytes"] is not None:
            return image["bytes"]
        return Path(image["path"]).read_bytes()

    def place(self, position: int) -> str:
        return self.name

    def stamp(self, position: int) -> tuple[str, int]:
        image = self.table[position][self.column]
        if image["bytes"] is not None:
            return f"{self.stamp_of_table} {position}", self.changed_ns
        return stamp_of(image["path"])


def row_sources(settings: DataSettings, download: bool) -> dict[str, FileImages]:
    """The images of ``data.name: hfds/NAME``: of the folder NAME in ``data.root``, or of the Hub's
    data set, which ``download`` fetches. Raises UserError for what cannot be read or lacks labels.
    """
    splits: dict[str, Images] = {}
    for name, table in _tables(settings, download).items():
        split = split_of(name)
        if split is None:
            say_once(f"{settings.name}: left out {name}, which is neither train, val nor test")
            continue
        images = _images_of(f"{settings.name}/{name}", table)
        if images is not None:
            splits[split] = images
        elif split != "train":
            say_once(f"{settings.name}: left out {name}, in which images have no labels")
        else:
            raise UserError(
                f"{settings.name}: no labels in the columns {', '.join(table.column_names)}: the "
                f"classes should be in a column {LABEL_COLUMNS[0]!r}"
            )
    return sources_of(Path(settings.name), splits, settings)


def _tables(settings: DataSettings, download: bool) -> dict[str, Any]:
    """The tables of a data set, by their names of the splits."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.name: {settings.name} needs pip install 'gaupipe[hfds]'") from None
    name = settings.name.removeprefix(HFDS)
    folder = Path(settings.root or "", name)
    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or not download
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            loaded = datasets.load_dataset(str(folder.resolve()))
        else:
            loaded = datasets.load_dataset(name, cache_dir=settings.root and str(settings.root))
    except Exception as error:  # whatever its readers of many formats raise
        raise UserError(
            f"data.name: {settings.name} cannot be read ({one_line(error)}); it should be a folder "
            "in data.root, or a name of the Hub, which download=true fetches"
        ) from None
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _images_of(name: str, table: Any) -> Images | None:
    """The images of a table; None where it, or one of its images, has no label."""
    import datasets

    features = table.features
    typed = [column for column in features if isinstance(features[column], datasets.Image)]
    columns = [*typed, *(column for column in IMAGE_COLUMNS if column in features)]
    if not columns:
        raise UserError(f"{name}: no images in the columns {', '.join(features)}")
    classed = [column for column in features if isinstance(features[column], datasets.ClassLabel)]
    named = [column for column in LABEL_COLUMNS if column in features]
    if not named + classed:
        return None
    label = [*named, *classed][0]
    values = table.select_columns([label])[:][label]
    if None in values or -1 in values:
        return None
    if label in classed:
        labels = [features[label].names[value] for value in values]
        classes = [text for text in features[label].names if text in {*labels}]
    else:
        labels = [str(value) for value in values]
        classes = sorted({*labels}, key=number_first)
    table = table.cast_column(columns[0], datasets.Image(decode=False))
    path = f"{columns[0]}.path"
    paths = table.flatten().select_columns([path])[:][path]
    names = [os.path.basename(path or "") or f"{place:09}" for place, path in enumerate(paths)]
    names = [f"{label}/{name}" for label, name in zip(labels, names, strict=True)]
    return Images(names, labels, classes, Rows(name, table, columns[0]))
