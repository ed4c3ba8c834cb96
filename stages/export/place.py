"""The place of a store that an export writes: what may be done there, and whether there is room."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import store
from gaupipe.distillation.export import decoder, is_complete, stored_export
from gaupipe.distillation.store_choice import choose_store
from gaupipe.settings import ExportSettings
from gaupipe.system import distributed
from gaupipe.system.device import choose_precision
from gaupipe.system.errors import UserError
from gaupipe.system.files import alone_in
from gaupipe.teachers.base import Teacher
from stages.runs.resources import SHARD_MB, check_disk, check_memory, export_memory

MOST_SHARD_MB = 4000
"""Each reader of a damaged shard, and ``verify``, holds one in memory."""
BUSY = "another process writes this store: wait for it to end, or choose another --out"


@dataclass(frozen=True)
class Place:
    """The place of a store, a path or URL, and what may be done there."""

    url: str
    overwrite: bool = False
    """Replace a complete store, which is refused otherwise."""
    repair: bool = False
    """Rewrite what :func:`store.verify` finds damaged, and nothing else; until that is finished no
    reader opens the store."""
    shard_mb: float = SHARD_MB
    """Size of a file, in 10^6 bytes before compression."""
    force: bool = False
    """Write a store that the disk does not seem to hold."""
    part: tuple[int, int] | None = None
    """(i, n) writes the shards of the i-th of n parts, counted from 1, and declares the store
    complete if no shard is missing then."""
    license: str | None = None
    """Of the images, as the Hub names it (``cc-by-4.0``), for the store's card."""

    @property
    def replaces(self) -> bool:
        """Whether a complete store may be written again."""
        return self.overwrite or self.repair

    def check(self) -> None:
        """Raises UserError or StoreError for options that exclude each other, and for a place where
        no store can be."""
        if self.overwrite and self.repair:
            raise UserError(
                "--overwrite writes everything anew and --repair only what is damaged: choose one"
            )
        if self.license is not None and not re.fullmatch(r"[\w.-]+", self.license):
            raise UserError(f"--license {self.license}: should be a name such as cc-by-4.0")
        if self.part is not None:
            number, parts = self.part
            if not 1 <= number <= parts:
                raise UserError(
                    f"--part {number}/{parts}: should be from 1/{parts} to {parts}/{parts}"
                )
            if self.overwrite or self.repair:
                option = "--overwrite" if self.overwrite else "--repair"
                raise UserError(
                    f"--part with {option}: each part would do away with what others have written: "
                    "remove the store first, or leave --part out"
                )
        if self.url == "":
            raise UserError("--out '': should be the path or URL of a store")
        if not self.repair:  # which says itself where there is nothing to repair
            store.check_place(self.url)
        if not 0 < self.shard_mb <= MOST_SHARD_MB:
            raise UserError(f"--shard-mb {self.shard_mb:g}: should be at most {MOST_SHARD_MB}")

    def check_resources(self, teacher: Teacher, schema: store.Schema) -> None:
        """Raises UserError for a store that the disk or the memory does not seem to hold."""
        folder = store.local_folder(self.url)
        if self.force or folder is None:
            return
        shared = sum(array.nbytes for array in (decoder(teacher, schema.kind) or {}).values())
        anyway = "or export-maps --force"
        remedy = f"choose another --out or --kind, fewer {teacher.fewer_images}, {anyway}"
        parts = 1 if self.part is None else self.part[1]  # each writes its share
        check_disk("export", schema.total_bytes // parts + shared, folder, remedy)
        needed = export_memory(teacher, schema, self.shard_mb)
        check_memory("export", needed, f"{teacher.lighter}, {anyway}")

    def choose(self, teacher: Teacher, options: dict[str, Any]) -> ExportSettings:
        """The kind of the store and its encoding, k and views."""
        stored = None if self.overwrite else stored_export(self.url)
        export = choose_store(teacher, stored, options)
        if teacher.width:
            precision = choose_precision(export.precision or "auto", teacher.device, teacher.width)
            export = export.model_copy(update={"precision": precision})
        return export

    @contextlib.contextmanager
    def held(self, teacher: Teacher, schema: store.Schema) -> Iterator[None]:
        """Keeps other processes out of a folder while a store is written there. Raises UserError
        where another one writes, or there is no room."""
        self.check_resources(teacher, schema)
        folder = store.local_folder(self.url)
        if folder is not None and not self.repair:
            with contextlib.suppress(OSError):  # the store says what is in its place
                folder.mkdir(parents=True, exist_ok=True)
        if folder is None or not folder.is_dir():
            yield
            return
        with alone_in(folder, BUSY, shared=self.part is not None):
            yield

    def open(self, teacher: Teacher, schema: store.Schema) -> store.Writer:
        """The writer of a rank. The first rank makes the store, or continues or repairs it."""
        if not distributed.is_main():
            return store.join(self.url)
        shard_bytes = int(self.shard_mb * 1e6)
        shared = decoder(teacher, schema.kind)
        if self.repair:
            return store.repair(self.url, schema, shard_bytes=shard_bytes, decoder=shared)
        if not self.overwrite and self.part is None and is_complete(self.url):
            raise UserError(
                f"{self.url} already holds a complete store: --overwrite replaces it, --repair "
                "rewrites what is damaged"
            )
        return store.create(
            self.url,
            schema,
            overwrite=self.overwrite,
            resume=not self.overwrite,
            shard_bytes=shard_bytes,
            decoder=shared,
        )
