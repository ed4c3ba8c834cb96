"""Checking every bit of a store, and making damaged parts pending again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping

import numpy as np

from store.encoding import image_crc32c
from store.errors import DamagedStore, StoreError
from store.files import Files
from store.layout import (
    ROOT,
    SHARD_BYTES,
    Layout,
    Shard,
    plan,
    read_checked,
    read_metadata,
)
from store.schema import Schema
from store.shards import decode_shard, encode_shard
from store.writer import Writer, refuse_another

MOST_LISTED = 10_000
"""Unfinished shards that are named one by one."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something wrong in a store. `shard` (index), `array` and the images `start` <= id < `stop`
    are None for metadata."""

    what: str
    shard: int | None = None
    array: str | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        if self.shard is None or self.start is None or self.stop is None:
            return self.what
        last = self.stop - 1
        images = f"image {last}" if last == self.start else f"images {self.start} to {last}"
        return f"shard {self.shard}, {self.array}, {images}: {self.what}"


def verify(
    url: str | os.PathLike, progress: Callable[[int, int], None] | None = None
) -> list[Problem]:
    """Everything wrong in the store at `url`; empty when every file is there, complete, and no bit
    has changed.

    `progress(done, total)` is called after every shard. Raises StoreError when there is no store or
    no access.
    """
    files = Files(url)
    root = files.read(ROOT)
    if root is None and files.list():
        return [Problem(f"{files.url}: {ROOT} is missing")]
    try:
        layout = Layout.from_root_file(root, files.url)
    except DamagedStore as error:
        return [Problem(str(error))]
    problems = [] if layout.complete else [Problem(f"{files.url}: the store is incomplete")]
    damaged = set()
    for key in layout.files_sha256:
        name = key.partition("/")[0]
        try:
            read_checked(files, layout, key)
        except DamagedStore as error:
            problems.append(Problem(str(error)))
            damaged.add(name)
    if not damaged & layout.records.keys():
        problems += check_shards(
            files, layout, [name for name in layout.names if name not in damaged], progress
        )
    return problems


def check_shards(
    files: Files,
    layout: Layout,
    names: list[str],
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Everything wrong in the shards of these arrays, whose metadata is sound."""
    metadata = {name: read_metadata(files, layout, name) for name in (*names, *layout.records)}
    finished, problems = layout.finished(files), []
    missing = layout.num_shards - len(finished)
    if missing > MOST_LISTED:  # metadata may speak of more shards than could be listed
        unwritten = f"{missing} of {layout.num_shards} shards are not written yet"
        problems.append(Problem(f"{unwritten}, or the records of them are lost"))
    elif missing:
        indices = sorted(set(range(layout.num_shards)) - set(finished))
        problems += [_not_written(layout.shard(index), name) for index in indices for name in names]
    for index in finished:
        shard = layout.shard(index)
        records = {}
        for name in layout.records:
            values = _read_record(files, layout, name, metadata[name], shard)
            if values is not None:
                records[name] = values
        for name in names:
            if len(records) < len(layout.records):
                problems.append(_not_written(shard, name))
            else:
                problems += _check_file(files, layout, metadata[name], name, shard, records)
        if progress:
            progress(index + 1, layout.num_shards)
    return sorted(problems, key=lambda problem: problem.shard or 0)


def _not_written(shard: Shard, name: str) -> Problem:
    return Problem("not written yet, or the record of it is damaged", shard.index, name, *shard[1:])


def _read_record(
    files: Files, layout: Layout, name: str, metadata: dict, shard: Shard
) -> np.ndarray | None:
    """The shard's rows of a record; None when they are missing or any bit of their file has
    changed."""
    key, rows = layout.shard_file(name, shard.index), layout.record_rows(name, shard)
    data = files.read(key)
    if data is None:
        return None
    within = key.partition("/")[2]
    values = decode_shard(metadata, within, rows, data)
    if any(isinstance(row, str) for row in values):
        return None
    whole = np.stack(values)
    return whole if encode_shard(metadata, within, rows, whole) == data else None


def _check_file(
    files: Files,
    layout: Layout,
    metadata: dict,
    name: str,
    shard: Shard,
    records: Mapping[str, np.ndarray],
) -> list[Problem]:
    def problem(what: str, start: int = shard.start, stop: int = shard.stop) -> Problem:
        return Problem(what, shard.index, name, start, stop)

    key, column = layout.shard_file(name, shard.index), layout.names.index(name)
    data = files.read(key)
    if data is None:
        return [problem("the shard's file is missing")]
    mask = np.uint32(layout.image_mask(name, shard.index))
    checksums = records["image_crc32c"][:, column] ^ mask
    images = decode_shard(metadata, key.partition("/")[2], shard, data)
    problems = []
    for image, values in enumerate(images, shard.start):
        if isinstance(values, str):
            problems.append(problem(values, image, image + 1))
        elif image_crc32c(values[None]) != checksums[image - shard.start]:
            problems.append(problem("not what was written for it", image, image + 1))
    size = int(records["shard_nbytes"][0, column])
    digest = bytes(records["shard_sha256"][0, column])
    if not problems and len(data) != size:
        problems.append(problem(f"the shard's file has {len(data)} bytes, {size} were written"))
    elif not problems and layout.shard_digest(name, shard.index, data) != digest:
        problems.append(problem("the shard's file is not the one that was written"))
    return _merge(problems)


def _merge(problems: list[Problem]) -> list[Problem]:
    """Neighbouring images with the same trouble become one problem."""
    merged: list[Problem] = []
    for problem in problems:
        if merged and merged[-1].what == problem.what and merged[-1].stop == problem.start:
            problem = dataclasses.replace(problem, start=merged.pop().start)
        merged.append(problem)
    return merged


def repair(
    url: str | os.PathLike,
    schema: Schema,
    *,
    shard_bytes: int = SHARD_BYTES,
    decoder: Mapping[str, np.ndarray] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Writer:
    """Rewrites a store's metadata and makes its damaged shards pending; intact ones are kept.

    The writer that comes back has those shards in `pending()`: write them and call `finish()`.
    `schema`, `shard_bytes` and `decoder` are those of the export that made the store. Raises
    StoreError when the store is of another schema.
    """
    files = Files(url)
    root = files.read(ROOT)
    try:
        stored = Layout.from_root_file(root, files.url) if root is not None else None
    except DamagedStore:
        stored = None
    if stored is not None:
        refuse_another(files.url, schema, stored.schema)
    elif not files.list("shard_sha256/"):
        raise StoreError(
            f"{files.url}: no attention-map store there to repair; "
            "export one with gaupipe export-maps"
        )
    per_shard = None if stored is None else stored.images_per_shard
    layout, metadata = plan(schema, shard_bytes, decoder, per_shard)
    files.write(ROOT, layout.root_file())
    files.write_all(metadata)
    writer = Writer(files, layout)
    problems = check_shards(files, layout, layout.names, progress)
    writer.reopen(problem.shard for problem in problems if problem.shard is not None)
    return writer
