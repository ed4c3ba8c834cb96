"""Checking every bit of a store, and making damaged parts pending again."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping

import numpy as np

from store.errors import DamagedStore, StoreError
from store.files import Files
from store.layout import RECORDS, ROOT, SHARD_BYTES, Layout, Shard, metadata_files, plan, read_checked, sha256, shard_key
from store.schema import Schema
from store.shards import decode_shard, encode_shard
from store.writer import Writer


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something wrong in a store. `shard` (index), `array` and the images `start` <= id < `stop` are None for metadata."""

    what: str
    shard: int | None = None
    array: str | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        if self.shard is None:
            return self.what
        images = f"image {self.start}" if self.stop == self.start + 1 else f"images {self.start} to {self.stop - 1}"
        return f"shard {self.shard}, {self.array}, {images}: {self.what}"


def verify(url: str | os.PathLike, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Everything wrong in the store at `url`; empty when every file is there, complete, and no bit has changed.

    `progress(done, total)` is called after every shard. Raises StoreError when there is no store or no access.
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
        try:
            read_checked(files, layout, key)
        except DamagedStore as error:
            problems.append(Problem(str(error)))
            damaged.add(key.partition("/")[0])
    if not damaged & set(RECORDS):
        problems += check_shards(files, layout, [name for name in layout.names if name not in damaged], progress)
    return problems


def check_shards(files: Files, layout: Layout, names: list[str],
                 progress: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Everything wrong in the shards of these arrays, whose metadata is sound."""
    metadata = {name: json.loads(read_checked(files, layout, f"{name}/zarr.json")) for name in (*names, *RECORDS)}
    problems = []
    for shard in layout.shards:
        records = [_read_record(files, name, metadata[name], shard) for name in RECORDS]
        for name in names:
            if records[0] is None or records[1] is None:
                problems.append(Problem("not written yet, or the record of it is damaged", shard.index, name, shard.start,
                                        shard.stop))
            else:
                digest, size = (record[layout.names.index(name)] for record in records)
                problems += _check_file(files, layout, metadata[name], name, shard, bytes(digest).hex(), int(size))
        if progress:
            progress(shard.index + 1, len(layout.shards))
    return problems


def _read_record(files: Files, name: str, metadata: dict, shard: Shard) -> np.ndarray | None:
    """The shard's row of `shard_sha256` or `shard_nbytes`; None when it is missing or any bit of its file has changed."""
    key, row = shard_key(shard.index, len(metadata["shape"])), Shard(shard.index, shard.index, shard.index + 1)
    data = files.read(f"{name}/{key}")
    values = decode_shard(metadata, key, row, data)[0] if data is not None else None
    return values if isinstance(values, np.ndarray) and encode_shard(metadata, key, row, values[None]) == data else None


def _check_file(files: Files, layout: Layout, metadata: dict, name: str, shard: Shard, digest: str,
                size: int) -> list[Problem]:
    def problem(what: str, start: int = shard.start, stop: int = shard.stop) -> Problem:
        return Problem(what, shard.index, name, start, stop)

    key = layout.shard_file(name, shard.index)
    data = files.read(key)
    if data is None:
        return [problem("the shard's file is missing")]
    found = []
    for image, values in enumerate(decode_shard(metadata, key.partition("/")[2], shard, data), shard.start):
        if isinstance(values, str):
            found.append(problem(values, image, image + 1))
        elif values.dtype.kind == "f" and not np.isfinite(values).all():
            found.append(problem("values that are not finite", image, image + 1))
    if not found and len(data) != size:
        found.append(problem(f"the shard's file has {len(data)} bytes, {size} were written"))
    if not found and sha256(data) != digest:
        found.append(problem("the shard's file is not the one that was written"))
    return _merge(found)


def _merge(problems: list[Problem]) -> list[Problem]:
    """Neighbouring images with the same trouble become one problem."""
    merged: list[Problem] = []
    for problem in problems:
        if merged and merged[-1].what == problem.what and merged[-1].stop == problem.start:
            problem = dataclasses.replace(problem, start=merged.pop().start)
        merged.append(problem)
    return merged


def repair(url: str | os.PathLike, schema: Schema, *, shard_bytes: int = SHARD_BYTES,
           decoder: Mapping[str, np.ndarray] | None = None,
           progress: Callable[[int, int], None] | None = None) -> Writer:
    """Rewrites a store's metadata and makes its damaged shards pending; intact ones are kept.

    The writer that comes back has those shards in `pending()`: write them and call `finish()`. `schema`, `shard_bytes`
    and `decoder` are those of the export that made the store. Raises StoreError when the store is of another schema.
    """
    files = Files(url)
    layout, metadata = plan(schema, shard_bytes, decoder)
    root = files.read(ROOT)
    try:
        stored = Layout.from_root_file(root, files.url) if root is not None else None
    except DamagedStore:
        stored = None
    if stored is None and not files.list("shard_sha256/"):
        raise StoreError(f"{files.url}: no attention-map store there to repair; export one with gaupipe export-maps")
    if stored is not None:
        if difference := schema.difference(stored.schema):
            raise StoreError(f"{files.url}: another export is there, with {difference}; --overwrite replaces it")
        metadata = metadata_files(schema, stored.images_per_shard, decoder)
        layout = Layout(schema, stored.images_per_shard, {key: sha256(data) for key, data in metadata.items()})
    files.write(ROOT, layout.root_file())
    files.write_all(metadata)
    writer = Writer(files, layout)
    writer.reopen(problem.shard for problem in check_shards(files, layout, layout.names, progress))
    return writer
