"""Checking every bit of a store, and making damaged parts pending again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping

import numpy as np

from store.errors import DamagedStore, StoreError, damaged
from store.files import Files
from store.layout import ROOT, SHARD_BYTES, Layout, open_layout, plan
from store.manifest import (
    FINISHED,
    MANIFEST,
    Shards,
    finished_shards,
    read_checked,
    read_manifest,
    sha256,
)
from store.schema import Schema
from store.writer import Writer, refuse_another, refuse_another_decoder


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
        images = f"images {self.start} to {last}"
        if last == self.start:
            images = f"image {last}"
        return f"shard {self.shard}, {self.array}, {images}: {self.what}"


def verify(
    url: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> list[Problem]:
    """Everything wrong in the store at `url`; empty when every file is there, complete, and no bit
    has changed.

    `progress(done, total)` is called after every shard. Raises StoreError when there is no store or
    no access.
    """
    files = Files(url)
    if files.read(ROOT) is None and files.read(MANIFEST) is not None:
        return [Problem(str(damaged(files.url, f"{ROOT} is missing")))]
    try:
        layout, manifest = open_layout(files)
        shards = finished_shards(files)
    except DamagedStore as error:
        return [Problem(str(error))]
    problems = []
    if not layout.complete:
        problems.append(Problem(f"{files.url}: the store is incomplete"))
    for key in manifest.metadata.keys() - {ROOT}:
        try:
            read_checked(files, manifest, key)
        except DamagedStore as error:
            problems.append(Problem(str(error)))
    absent = set(range(layout.num_shards)) - shards.keys()
    if absent:
        count = f"{len(absent)} of {layout.num_shards} shards"
        problems.append(Problem(f"{files.url}: {count} are not written yet"))
    found = check_shards(files, layout, shards, progress)
    return problems + [problem for problem in found if problem.shard not in absent]


def check_shards(
    files: Files,
    layout: Layout,
    shards: Shards,
    progress: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Everything wrong in the images' files, which the manifest's `shards` name."""
    problems = []
    for index in range(layout.num_shards):
        shard = layout.shard(index)
        for name in layout.names:
            what = _check_file(files, layout, shards, name, index)
            if what is not None:
                problems.append(Problem(what, index, name, shard.start, shard.stop))
        if progress:
            progress(index + 1, layout.num_shards)
    return problems


def _check_file(files: Files, layout: Layout, shards: Shards, name: str, index: int) -> str | None:
    """What is wrong with a shard's file of an array, in words."""
    written = shards.get(index, {}).get(name)
    if written is None:
        return "not written yet"
    data = files.read(layout.shard_file(name, index))
    if data is None:
        return "the shard's file is missing"
    if sha256(data) != written.sha256:
        return "the shard's file is not the one that was written"
    return None


def repair(
    url: str | os.PathLike[str],
    schema: Schema,
    *,
    shard_bytes: int = SHARD_BYTES,
    decoder: Mapping[str, np.ndarray] | None = None,
) -> Writer:
    """Rewrites a store's metadata and makes the shards pending that the manifest refuses; the
    others are kept. Without a readable manifest all shards are pending.

    The writer that comes back has those shards in `pending()`: write them and call `finish()`.
    `schema`, `shard_bytes` and `decoder` are those of the export that made the store. Raises
    StoreError when the store is of another schema or has another decoder.
    """
    files = Files(url)
    root = files.read(ROOT)
    stored = None
    with contextlib.suppress(DamagedStore):
        stored = read_manifest(files)
    if root is None and stored is None:
        raise StoreError(
            f"{files.url}: no attention-map store there to repair; "
            "export one with gaupipe export-maps"
        )
    per_shard = None
    with contextlib.suppress(DamagedStore):
        if root is not None:
            found = Layout.from_root_file(root, stored, files.url)
            refuse_another(files.url, schema, found.schema)
            per_shard = found.images_per_shard
        if stored is not None:
            refuse_another_decoder(files, stored, decoder)
    layout, metadata, manifest = plan(schema, shard_bytes, decoder, per_shard)
    shards: Shards = {}
    if stored is not None and stored.metadata.get(ROOT) == manifest.metadata[ROOT]:
        shards = finished_shards(files)
    else:  # the files of another store, or of shards of another size, may have the same names
        for begins in (FINISHED, *(f"{name}/c/" for name in layout.names)):
            files.delete_all(files.list(begins))
    # before the root: a killed repair must not leave a manifest of another store with it
    files.write(MANIFEST, dataclasses.replace(manifest, shards=shards).to_file())
    files.write(ROOT, layout.root_file())
    files.write_all(metadata)
    writer = Writer(files, layout, manifest)
    problems = check_shards(files, layout, shards)
    writer.reopen(problem.shard for problem in problems if problem.shard is not None)
    return writer
