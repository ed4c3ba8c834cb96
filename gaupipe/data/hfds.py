"""Images in tables of Hugging Face's ``datasets``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gaupipe.data.folder import WITHOUT_LABELS, number_first, split_of
from gaupipe.data.images import stamp_of
from gaupipe.data.packed import Images
from gaupipe.settings import DataSettings
from gaupipe.settings.sections import HFDS
from gaupipe.system.errors import UserError, one_line
from gaupipe.system.imports import pip_install
from gaupipe.system.messages import warn_once

if TYPE_CHECKING:
    from datasets import Dataset

IMAGE_COLUMN = "image"

LABEL_COLUMNS = ("label", "fine_label", "labels", "cls", "class")
"""Columns of a table, the likeliest first; ``cls`` is WebDataset's name."""


class Rows:
    """The bytes of images in the ``column`` of a table called ``name``, or in the files that it
    names."""

    def __init__(self, name: str, table: Dataset, column: str) -> None:
        self.name = name
        self.table = table.select_columns([column])
        self.column = column
        files = [stamp_of(file["filename"]) for file in table.cache_files]
        # of a table in memory there is no knowing: it has changed at the end of time
        self.stamp_of_table = " ".join(text for text, _ in files)
        self.changed_ns = max((changed for _, changed in files), default=sys.maxsize)

    def read(self, position: int) -> bytes:
        image = self.table[position][self.column]
        content: bytes | None = image["bytes"]
        if content is None:
            content = Path(image["path"]).read_bytes()
        return content

    def place(self, position: int) -> str:
        return self.name

    def stamp(self, position: int) -> tuple[str, int]:
        image = self.table[position][self.column]
        if image["bytes"] is not None:
            return f"{self.stamp_of_table} {position}", self.changed_ns
        return stamp_of(image["path"])


def rows_with_labels(settings: DataSettings, download: bool) -> dict[str, Images]:
    """The images of each split of ``data.name: hfds/NAME``: of the folder NAME in ``data.root``, or
    of the Hub's data set, which ``download`` fetches. A single split of another name is taken for
    training. Raises UserError for what cannot be read or lacks labels."""
    splits: dict[str, Images] = {}
    tables = _tables(settings, download)
    for name, table in tables.items():
        split = split_of(name)
        if len(tables) == 1:
            split = split or "train"
        if split is None:
            warn_once(f"{settings.name}: left out {name}, which is neither train, val nor test")
            continue
        if split in splits:
            raise UserError(
                f"{settings.name}: has two splits for {split}, {name} is one of them: keep one"
            )
        images = _images_of(f"{settings.name}/{name}", table)
        if images is not None:
            splits[split] = images
        elif split != "train":
            warn_once(f"{settings.name}: left out {name}, in which images have no labels")
        else:
            raise UserError(
                f"{settings.name}: no labels in the columns {', '.join(table.column_names)}: the "
                f"classes should be in a column {LABEL_COLUMNS[0]!r}"
            )
    if not splits:
        raise UserError(
            f"{settings.name}: has {', '.join(tables)}: one split with labels should be called "
            "train, val or test"
        )
    return splits


def _tables(settings: DataSettings, download: bool) -> dict[str, Dataset]:
    """The tables of a data set, by their names of the splits."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.name: {settings.name} needs {pip_install('hfds')}") from None
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
            cache_dir = None if settings.root is None else str(settings.root)
            loaded = datasets.load_dataset(name, cache_dir=cache_dir)
    except Exception as error:  # whatever its readers of many formats raise
        raise UserError(
            f"data.name: {settings.name} cannot be read ({one_line(error)}); it should be a folder "
            "in data.root, or a name of the Hub, which download=true fetches"
        ) from None
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _images_of(name: str, table: Dataset) -> Images | None:
    """The images of a table; None where it has no labels. Raises UserError where some images have
    none, or have several."""
    import datasets

    files, reader = _names_and_bytes(name, table)
    features = table.features
    classed = [column for column in features if isinstance(features[column], datasets.ClassLabel)]
    named = [column for column in LABEL_COLUMNS if column in features]
    both = [column for column in named if column in classed]
    if not named + classed:
        return None
    label, *others = dict.fromkeys([*both, *classed, *named])
    if others:
        warn_once(
            f"{name}: the classes are those of the column {label}, not of {', '.join(others)}"
        )
    kind = features[label]
    dtype = getattr(kind, "dtype", "lists")
    if label not in classed and not (isinstance(kind, datasets.Value) and is_name(dtype)):
        raise UserError(
            f"{name}: the column {label!r} holds {dtype}, and should hold one class for each "
            "image: its name or a whole number"
        )
    values = table.select_columns([label])[:][label]
    without = [place for place, value in enumerate(values) if value in (None, "", -1)]
    if len(without) == len(values):
        return None
    if without:
        raise UserError(
            f"{name}: {len(without)} of {len(values)} images have no label in the column "
            f"{label!r} (none, or -1), such as that of row {without[0]}: label them or take them "
            "out"
        )
    classes = None
    if label in classed:
        labels = [kind.names[value] for value in values]
        present = {*labels}
        classes = [text for text in kind.names if text in present]
        if all(map(str.isdecimal, classes)):  # an imagefolder's come as text
            classes.sort(key=number_first)
    else:
        labels = [str(value) for value in values]
    names = [f"{label}/{file}" for label, file in zip(labels, files, strict=True)]
    if len({*names}) < len(names):  # the files of several folders
        numbered = zip(labels, _numbered(files), strict=True)
        names = [f"{label}/{file}" for label, file in numbered]
    return Images(names, labels, reader, classes)


def is_name(dtype: str) -> bool:
    """True if values of a column of this type may be names of classes."""
    return dtype.endswith("string") or dtype.startswith(("int", "uint", "bool"))


def _names_and_bytes(name: str, table: Dataset) -> tuple[list[str], Rows]:
    """Of each image in a table the name of its file, or else its number, and its bytes. Of several
    columns of images that with the name ``image`` is meant. Raises UserError
    without it, and for rows without an image."""
    import datasets

    features = table.features
    columns = [column for column in features if isinstance(features[column], datasets.Image)]
    if not columns:
        raise UserError(f"{name}: no images in the columns {', '.join(features)}")
    if len(columns) > 1 and IMAGE_COLUMN not in columns:
        raise UserError(
            f"{name}: images in the columns {', '.join(columns)}: that of the photos should be "
            f"called {IMAGE_COLUMN!r}"
        )
    column = columns[0]
    if len(columns) > 1:
        column = IMAGE_COLUMN
        others = [other for other in columns if other != column]
        warn_once(f"{name}: left out the images in {', '.join(others)}, beside those in {column}")
    table = table.cast_column(column, datasets.Image(decode=False))
    path = f"{column}.path"
    flat = table.flatten()
    no_bytes = flat.data.column(f"{column}.bytes").is_null().to_numpy()
    no_path = flat.data.column(path).is_null().to_numpy()
    missing = (no_bytes & no_path).sum()
    if missing:
        raise UserError(f"{name}: {missing} of {len(table)} rows have no {column}: take them out")
    paths = flat.select_columns([path])[:][path]
    names = [os.path.basename(path or "") or f"{place:09}" for place, path in enumerate(paths)]
    return names, Rows(name, table, column)


def _numbered(files: Sequence[str]) -> list[str]:
    """Other names for files of several folders, which may have one name."""
    return [f"{place:09}/{file}" for place, file in enumerate(files)]


def rows_without_labels(settings: DataSettings, download: bool) -> tuple[list[str], Rows]:
    """The names and bytes of the images of ``data.name: hfds/NAME`` without labels, or else those
    for training, whatever their labels. Raises UserError for what cannot be read."""
    tables = _tables(settings, download)
    without = [name for name in tables if name.lower() in WITHOUT_LABELS]
    training = [name for name in tables if len(tables) == 1 or split_of(name) == "train"]
    taken = without or training
    if len(taken) != 1:
        raise UserError(
            f"{settings.name}: one split should be unlabelled or for training, and it has "
            f"{', '.join(tables)}"
        )
    [split] = taken
    if len(tables) > 1:
        warn_once(f"data.unlabelled: {split} of {settings.name} is taken ({', '.join(tables)})")
    names, reader = _names_and_bytes(f"{settings.name}/{split}", tables[split])
    return _numbered(names), reader
