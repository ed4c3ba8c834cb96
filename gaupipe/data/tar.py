"""Images in tar archives, of which WebDataset's shards are some."""

from __future__ import annotations

import functools
import os
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gaupipe.data.decoding import is_image
from gaupipe.data.folder import (
    WITHOUT_LABELS,
    check_levels,
    check_masks,
    folders_in,
    is_hidden,
    number_first,
    split_of,
)
from gaupipe.data.images import stamp_of
from gaupipe.data.packed import Images
from gaupipe.system.errors import UserError
from gaupipe.system.messages import warn_once


class Member(NamedTuple):
    """An image in an archive. Its label is "" until its folder says which class it is of."""

    path: str
    label: str
    archive: int
    offset: int
    bytes: int


class Archive(NamedTuple):
    """A .tar, the split that its name or its folder names, and its stamp."""

    path: Path
    split: str | None
    stamp: tuple[str, int]


class TarMembers:
    """The bytes of ``members`` of archives."""

    def __init__(self, archives: Sequence[Archive], members: Sequence[Member]) -> None:
        self.archives = archives
        self.places = np.array([member[2:] for member in members])  # archive, offset, bytes

    def read(self, position: int) -> bytes:
        archive, offset, size = self.places[position].tolist()
        return read_part(self.archives[archive].path, offset, size)

    def place(self, position: int) -> str:
        return str(self.archives[self.places[position, 0]].path)

    def stamp(self, position: int) -> tuple[str, int]:
        archive, offset, _ = self.places[position].tolist()
        stamp, changed_ns = self.archives[archive].stamp
        return f"{stamp} {offset}", changed_ns


def read_part(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def find_archives(root: Path) -> tuple[Archive, ...]:
    """The .tar files of a data set; none where ``root`` is neither a .tar nor a folder of such
    files. A folder ``unlabelled`` may lie beside them."""
    splits: dict[Path, str | None] = {}
    if root.is_file():
        splits[root] = None

    # the split of an archive is a word of its name, as in imagenet-train-0001.tar
    for path in sorted(root.glob("[!.]*.tar")):
        words = re.findall("[A-Za-z]+", path.stem)
        splits[path] = next(filter(None, map(split_of, words)), None)

    # or the name of its folder
    folders = []
    if root.is_dir():
        folders = folders_in(root)
    for folder in folders:
        if folder.name.lower() in WITHOUT_LABELS:
            continue
        inside = sorted(folder.glob("[!.]*.tar"))
        if split_of(folder.name) is None or not inside or folders_in(folder):
            return ()  # a folder of a class, or with some
        splits |= dict.fromkeys(inside, split_of(folder.name))

    without = [path for path, split in splits.items() if split is None]
    if len(without) not in (0, len(splits)):
        raise UserError(f"{without[0]}: the names of all archives should have train, val or test")
    return tuple(Archive(path, split, stamp_of(str(path))) for path, split in splits.items())


@functools.lru_cache(maxsize=1)  # settings are chosen by the images before these are loaded
def images_in(root: Path, archives: tuple[Archive, ...]) -> dict[str, Images]:
    """The images of each split in the ``archives``, by the headers of all members. The class of an
    image is what the file .cls beside it says (WebDataset); else the folder that it lies in, or
    else its archive's name. Raises UserError for an archive that is not whole, and for an image
    without a class, or of which the class is doubtful."""
    members: list[Member] = []
    for number, archive in enumerate(archives):
        members += members_of(archive, number)
    if not members:
        raise UserError(f"{root}: no image that Pillow reads is in there")
    labelled = any(member.label for member in members)
    if labelled:
        for member in members:
            if not member.label:
                raise _without_class(archives, member)

    while _in_one_folder(members):  # as tar packs a folder that it is given
        members = [member._replace(path=member.path.partition("/")[2]) for member in members]

    in_splits = any(split_of(member.path.split("/")[0]) for member in members)
    found: dict[str, list[Member]] = {}
    for member in members:
        split = "train"
        path = member.path
        if in_splits:
            first, _, path = path.partition("/")
            split = split_of(first) or ""
        label = member.label
        if not label:
            folder, has_folder, _ = path.partition("/")
            if split and not has_folder:
                raise _without_class(archives, member)
            label = sys.intern(folder)  # one string for all images of a class
        found.setdefault(split, []).append(member._replace(path=path, label=label))
    others = found.pop("", [])
    if others:
        warn_once(f"{root}: left out {len(others)} images that are of no split")

    splits = {}
    for split, inside in found.items():
        # image ids are places in this order, which must not depend on how tar packed them
        inside.sort(key=lambda member: (number_first(member.label), member.path))
        names = [member.path for member in inside]
        labels = [member.label for member in inside]
        if not labelled:
            _check_classes(root, names, in_splits)
        splits[split] = Images(names, labels, TarMembers(archives, inside))
    return splits


def _check_classes(root: Path, names: Sequence[str], in_splits: bool) -> None:
    """Raises UserError where folders are no classes, as those of a folder are refused."""
    classes: dict[str, list[str]] = {}
    for name in names:
        classes.setdefault(name.split("/")[0], []).append(name)
    check_masks(root, classes)
    if in_splits:
        return
    check_levels(root, classes)
    for name in classes:
        if name.lower() in WITHOUT_LABELS:
            raise UserError(
                f"{root}: {name}/ would be a class like the folders beside it: put these into "
                "train/, or give it another name"
            )


@functools.lru_cache(maxsize=1)  # settings are chosen by their number before these are loaded
def images_without_labels(
    root: Path, archives: tuple[Archive, ...]
) -> tuple[list[str], TarMembers]:
    """The names and bytes of all images in the ``archives`` of one place. Raises UserError for an
    archive that is not whole, and where none holds an image."""
    members = []
    for number, archive in enumerate(archives):
        folder = ""
        if len(archives) > 1:  # two may have files of one name
            folder = f"{archive.path.stem}/"
        for name, offset, size in _files_in(archive.path):
            if is_image(name):
                members.append(Member(f"{folder}{name}", "", number, offset, size))
    if not members:
        raise UserError(f"{root}: no image that Pillow reads is in there")
    members.sort()  # image ids are places in this order, which how tar packed them plays no part in
    return [member.path for member in members], TarMembers(archives, members)


def members_of(archive: Archive, number: int) -> Iterator[Member]:
    """The images of an archive. Their paths begin with the archive's split, if it has one. Raises
    UserError for samples of WebDataset with several classes or images, or with none of its classes.
    """
    path = archive.path
    images: list[tuple[str, int, int]] = []
    labels: dict[str, str] = {}
    described: set[str] = set()
    for name, offset, size in _files_in(path):
        if name.lower().endswith(".cls"):
            if _key(name) in labels:
                raise _doubtful(path, name, "files .cls")
            labels[_key(name)] = _class_in(path, name, read_part(path, offset, size))
        elif is_image(name):
            images.append((name, offset, size))
        elif "/" not in name or name.lower().endswith(".json"):
            described.add(_key(name))
    seen: set[str] = set()
    all_flat = not any("/" in name for name, _, _ in images)
    for name, offset, size in images:
        flat = "/" not in name
        label = labels.get(_key(name), "")
        if label:
            if _key(name) in seen:
                raise _doubtful(path, name, "images")
            seen.add(_key(name))
        if not labels and _key(name) in described:
            raise UserError(
                f"{path}: {name} may have its class in another file beside it, and only files .cls "
                "are read: write such files, or pack the images alone, in folders CLASS/"
            )
        folder = ""
        if flat and (label or (all_flat and not archive.split)):
            folder = f"{path.stem}/"
        if archive.split is not None and split_of(name.partition("/")[0]) != archive.split:
            folder = f"{archive.split}/{folder}"  # train.tar may or may not have a folder train/
        yield Member(f"{folder}{name}", label, number, offset, size)


def _class_in(archive: Path, name: str, content: bytes) -> str:
    label = content.decode(errors="replace").strip()
    is_list = label.startswith(("[", "{"))
    if label in ("", "-1") or is_list or not label.isprintable():
        raise UserError(
            f"{archive}: {name} should hold one class, as text in one line, not {label[:20]!r}"
        )
    return label


def _doubtful(archive: Path, name: str, files: str) -> UserError:
    return UserError(
        f"{archive}: several {files} have the name {_key(name)} up to the first dot, which is the "
        f"name of a sample (WebDataset); {name} is one of them: rename or take out all but one"
    )


def _without_class(archives: Sequence[Archive], member: Member) -> UserError:
    return UserError(
        f"{archives[member.archive].path}: {member.path} has no class: it should have a file .cls "
        "beside it, as all others then have, or should lie in a folder CLASS/"
    )


def _files_in(archive: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, bytes) of the files in an archive that are not hidden. Raises UserError for
    one that ends early or is compressed, for a sparse file and for a link."""
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            whole = os.fstat(file.fileno()).st_size
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # it would hold a million
                parts = (part for part in member.name.split("/") if part not in ("", "."))
                name = "/".join(parts)
                if not member.offset_data <= tar.offset <= whole:  # the place of the next member
                    raise tarfile.ReadError(f"{name} has {member.size} bytes by its header")
                if any(map(is_hidden, name.split("/"))):
                    continue
                if member.issparse():
                    raise UserError(
                        f"{archive}: {name} is stored without its zeros: pack it again, without "
                        "tar's option --sparse (-S)"
                    )
                if member.islnk() or member.issym():
                    raise UserError(
                        f"{archive}: {name} is a link to {member.linkname}: pack what is linked "
                        "to, by 'tar --dereference --hard-dereference'"
                    )
                if member.isreg():
                    yield name, member.offset_data, member.size
            file.seek(tar.offset)
            end = file.read(tarfile.RECORDSIZE)
    except UserError:
        raise
    except (tarfile.TarError, ValueError, OverflowError, MemoryError) as error:  # odd sizes
        raise _not_whole(archive, str(error) or "damaged") from None
    if len(end) < tarfile.BLOCKSIZE or end.strip(b"\0"):  # to tarfile any damage is the end
        raise _not_whole(archive, "damaged or cut off before its end mark")


def _not_whole(archive: Path, reason: str) -> UserError:
    remedy = "fetch it again"
    if archive.suffix != ".tar":
        remedy = "unpack it, and name the folder"
    return UserError(f"{archive}: is no whole, uncompressed .tar ({reason}); {remedy}")


def _key(name: str) -> str:
    """WebDataset's name of a sample: the path up to the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _in_one_folder(members: Sequence[Member]) -> bool:
    """True where all images lie in one folder that is neither a class nor a split."""
    first = {member.path.partition("/")[0] for member in members}
    deep = all(member.path.count("/") > 1 for member in members)
    return len(first) == 1 and deep and split_of(*first) is None
