"""Export: what the finished teacher knows about every training image goes to the attention-map
store."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import store
from gaupipe.data.splits import ImageData
from gaupipe.distillation.export import (
    decoder,
    is_complete,
    make_schema,
    outputs,
    stored_export,
)
from gaupipe.distillation.files import FilesJob, open_model
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.distillation.local import described
from gaupipe.distillation.store_choice import chosen
from gaupipe.distillation.teacher import TeacherJob
from gaupipe.distillation.vit_teacher import other_teacher
from gaupipe.settings import ExportSettings, Settings
from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.load import with_overrides
from gaupipe.system import distributed
from gaupipe.system.device import choose_precision
from gaupipe.system.errors import UserError
from gaupipe.system.files import alone_in
from gaupipe.system.progress import EpochProgress
from gaupipe.teachers.vit import VitTeacher
from stages import phase_a
from stages.phase_a.trained_vit import probe_where_others_are_predicted, say_what_students_lack
from stages.publish import store_card
from stages.runs import ranks
from stages.runs.directory import RunDirectory
from stages.runs.resources import check_disk, check_memory, make_plan

WRITERS = min(4, os.cpu_count() or 1)
"""Shards that are encoded and stored at once, each on a thread of its own."""
MOST_SHARD_MB = 4000
"""Each reader of a damaged shard, and ``verify``, holds one in memory."""
MAP_BYTES = 8
"""Of each number of a batch's maps: float32, and what is stored of it."""
BUSY = "another process writes this store: wait for it to end, or choose another --out"


@dataclass(frozen=True)
class ExportRequest:
    """The store that the teacher of a run is to write.

    kind, encoding, k, views, grid, layers
               as in :class:`gaupipe.settings.ExportSettings`; None is what the store that is there
               has, else what the settings say
    out        path or URL of the store; None is the run's own
    overwrite  replaces a complete store, which is refused otherwise
    repair     rewrites what :func:`store.verify` finds damaged, and nothing else; until that is
               finished no reader opens the store
    shard_mb   size of a file, in 10^6 bytes before compression
    force      writes a store that the disk does not seem to hold
    teacher    a trained ViT, named as ``phase_a.teacher`` is, in place of the run's own teacher
    overrides  ``phase_a.teacher_args...=value``, of ``teacher``
    download   fetch the published weights of ``teacher``
    augment    draws the views; None is the run's ``augment``
    part       (i, n) writes the shards of the i-th of n parts, counted from 1, and declares the
               store complete if no shard is missing then
    license    of the images, as the Hub names it (``cc-by-4.0``), for the store's card
    """

    run: RunDirectory
    kind: str | None = None
    encoding: str | None = None
    k: int | None = None
    views: int | None = None
    grid: tuple[int, int] | None = None
    layers: list[int] | None = None
    out: str | None = None
    overwrite: bool = False
    repair: bool = False
    shard_mb: float = 32
    force: bool = False
    teacher: str | None = None
    overrides: Sequence[str] = ()
    download: bool = False
    augment: AugmentSettings | None = None
    part: tuple[int, int] | None = None
    license: str | None = None

    @property
    def place(self) -> Place:
        url = str(self.run.maps) if self.out is None else self.out
        names = ("overwrite", "repair", "shard_mb", "force", "part", "license")
        return Place(url, **{name: getattr(self, name) for name in names})

    @property
    def kind_options(self) -> dict[str, object]:
        names = ("kind", "encoding", "k", "views", "grid", "layers")
        return {name: getattr(self, name) for name in names}

    def check(self) -> Settings:
        """The settings of the run. Raises UserError for options that do not go together, StoreError
        for a place where no store can be."""
        if self.teacher is not None and self.out is None:
            raise UserError(
                f"--teacher {self.teacher}: {self.run.maps} is for the maps of the run's own "
                "teacher: name another store with --out, which 'gaupipe phase-b --maps' then reads"
            )
        for override in self.overrides:
            name = override.partition("=")[0]
            if self.teacher is None or not f"{name}.".startswith("phase_a.teacher_args."):
                raise UserError(
                    f"--set {name}: 'export-maps' takes phase_a.teacher_args alone: it belongs to "
                    "the run; it is for another --teacher"
                )
        self.place.check()
        return self.run.settings()  # a folder that is no run is left alone

    def load(self, settings: Settings, data: ImageData | None = None) -> TeacherJob[Any]:
        """The finished teacher of the run, or the other one, on the run's data."""
        job: TeacherJob[Any]
        if self.teacher is None:
            job = phase_a.load(self.run, data, download=self.download)
        else:
            tree = with_overrides({"phase_a": {"teacher_args": {}}}, self.overrides)
            settings = settings.model_copy(update={"download": self.download})
            images = data or self.run.load_data(settings)
            args = tree["phase_a"]["teacher_args"]
            job = other_teacher(settings, images, self.teacher, args, self.download)
        if self.augment is not None:
            job.settings = job.settings.model_copy(update={"augment": self.augment})
        return job


def run(
    run_dir: Path, kind: str | None = None, *, data: ImageData | None = None, **options: Any
) -> str | None:
    """Writes the store of a run whose phase A has finished and returns its path or URL; None for
    the teacher local, which has none. ``options`` are those of :class:`ExportRequest`; ``data`` is
    the data set of the settings, where it has been read already.

    An unfinished store of the same teacher is continued: its finished shards stay.
    """
    request = ExportRequest(RunDirectory(run_dir), kind, **options)
    settings = request.check()
    if settings.phase_a.is_local and request.teacher is None:
        say_nothing_to_export(settings, request.out)
        return None
    with request.run.locked(shared=request.part is not None):
        job = distributed.main_first(lambda: request.load(settings, data))
        say_what_students_lack(job)
        probe_where_others_are_predicted(job)
        return export(job, request.place, request.kind_options)


def say_nothing_to_export(settings: Settings, out: str | None) -> None:
    """Says that the teacher local has no store. Raises UserError for a place that is to get it."""
    if out is not None:
        raise UserError(
            f"--out {out}: the maps of the teacher local are stored nowhere, phase B makes them: "
            "leave it out"
        )
    if distributed.is_main():
        maps = described(settings.phase_a)
        print(
            f"gaupipe: export: nothing to store: the teacher local has {maps}; "
            "phase B makes its maps",
            file=sys.stderr,
        )


def run_model(
    model: str,
    files: Sequence[Path],
    out: str,
    kind: str | None = None,
    *,
    encoding: str | None = None,
    k: int | None = None,
    image_size: int | None = None,
    download: bool = False,
    **how: Any,
) -> str:
    """Writes a store of a model's maps of image ``files``, class and register tokens included, and
    returns its path or URL. No run is needed. ``image_size`` is as in
    :func:`gaupipe.distillation.files.open_model`, the other arguments are those of
    :class:`ExportRequest`; ``how`` are those of :class:`Place`."""
    place = Place(out, **how)

    def load() -> TeacherJob[Any]:
        place.check()
        if kind is not None and kind in MAP_KINDS and not store.KINDS[kind].has_prefix:
            raise UserError(f"--kind {kind}: the maps of a model are stored as topk or dense")
        return open_model(model, files, download, image_size)[0]

    job = distributed.main_first(load)
    return export(job, place, {"kind": kind, "encoding": encoding, "k": k})


@dataclass(frozen=True)
class Place:
    """The place of a store, and what may be done there; as in :class:`ExportRequest`."""

    url: str
    overwrite: bool = False
    repair: bool = False
    shard_mb: float = 32
    force: bool = False
    part: tuple[int, int] | None = None
    license: str | None = None

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
        store.check_place(self.url)
        if not 0 < self.shard_mb <= MOST_SHARD_MB:
            raise UserError(f"--shard-mb {self.shard_mb:g}: should be at most {MOST_SHARD_MB}")

    def check_resources(self, job: TeacherJob[Any], schema: store.Schema) -> None:
        """Raises UserError for a store that the disk or the memory does not seem to hold."""
        folder = store.local_folder(self.url)
        if self.force or folder is None:
            return
        has_files = isinstance(job, FilesJob)
        images = "--images" if has_files else "data.train_images"
        shared = sum(array.nbytes for array in (decoder(job, schema.kind) or {}).values())
        place = f"choose another --out or --kind, or fewer {images}"
        parts = 1 if self.part is None else self.part[1]  # each writes its share
        check_disk("export", schema.total_bytes // parts + shared, folder, place)
        if has_files:
            maps = schema.layers * schema.heads * schema.tokens**2
            batch = min(job.settings.data.eval_batch_size, schema.num_images) * maps * MAP_BYTES
            shard = max(int(self.shard_mb * 1e6), schema.bytes_per_image)
            needed = batch + min((WRITERS + 2) * shard, 2 * schema.total_bytes)
            check_memory("export", needed, "take a smaller --image-size or --model")
        else:
            world_size = distributed.world_size()
            plan = make_plan(job.settings, job.teacher, job.data, world_size=world_size)
            check_memory("export", plan.memory_bytes)

    def choose(self, job: TeacherJob[Any], options: dict[str, Any]) -> ExportSettings:
        """The kind of the store and its encoding, k and views."""
        stored = None if self.overwrite else stored_export(self.url)
        student = None
        if not job.settings.phase_a.learns_gaussians:
            student = job.student_shape
        export = chosen(job.settings, stored, options, job.shape, student)
        if isinstance(job.teacher, VitTeacher):
            width = job.teacher.model.num_features
            precision = choose_precision(export.precision or "auto", job.device, width)
            export = export.model_copy(update={"precision": precision})
        return export

    @contextlib.contextmanager
    def held(self, job: TeacherJob[Any], schema: store.Schema) -> Iterator[None]:
        """Keeps other processes out of a folder while a store is written there. Raises UserError
        where another one writes, or there is no room."""
        self.check_resources(job, schema)
        folder = store.local_folder(self.url)
        if folder is not None and not self.repair:
            with contextlib.suppress(OSError):  # the store says what is in its place
                folder.mkdir(parents=True, exist_ok=True)
        if folder is None or not folder.is_dir():
            yield
            return
        with alone_in(folder, BUSY, shared=self.part is not None):
            yield

    def open(self, job: TeacherJob[Any], schema: store.Schema) -> store.Writer:
        """The writer of a rank: the first one makes the store, or continues or repairs it."""
        if not distributed.is_main():
            return store.join(self.url)
        shard_bytes = int(self.shard_mb * 1e6)
        shared = decoder(job, schema.kind)
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


def export(job: TeacherJob[Any], place: Place, options: dict[str, Any]) -> str:
    """Writes the store of a teacher and returns its URL."""
    asked = place.choose(job, options)  # before any rank has begun a store there
    ranks.check_same(job.settings, job.data, job.named_sha256())
    schema = make_schema(job, asked, job.sha256)
    with contextlib.ExitStack() as held:
        if distributed.is_main():
            held.enter_context(place.held(job, schema))
        write(job, distributed.main_first(lambda: place.open(job, schema)), place)
    return place.url


def ensure(
    run_dir: Path,
    *,
    out: str | None = None,
    export: ExportSettings | None = None,
    augment: AugmentSettings | None = None,
    data: ImageData | None = None,
) -> str:
    """The store of a run: as it is if it is complete, else written; of the teacher local none.
    ``export`` says what is stored; None leaves that to :func:`run`, as for ``augment``."""
    directory = RunDirectory(run_dir)
    url = out or str(directory.maps)
    options = {} if export is None else export.model_dump(exclude_none=True)

    def is_there() -> bool:
        if directory.settings().phase_a.is_local:
            return True
        if not is_complete(url, directory.teacher_digest()):
            return False
        stored = stored_export(url)
        for name, value in options.items():
            if stored is not None and getattr(stored, name) != value:
                raise UserError(
                    f"{url} already holds a complete store with {name} {getattr(stored, name)}, "
                    f"asked {value}: 'gaupipe export-maps --overwrite' replaces it"
                )
        return True

    if not distributed.from_main(is_there):
        run(run_dir, out=out, data=data, augment=augment, **options)
    return url


def write(job: TeacherJob[Any], writer: store.Writer, place: Place) -> None:
    """Runs the teacher over the images of every pending shard, or of those of a part; shards
    are encoded and stored while the next are made. Part i of n has the shards i - 1, i - 1 + n, and
    so on, and of W ranks rank r writes every W-th of the pending ones."""
    schema = writer.schema
    number, count = place.part or (1, 1)
    everything = distributed.from_main(writer.pending)  # other parts may be written meanwhile
    pending = [shard for shard in everything if shard.index % count == number - 1]
    images = sum(shard.stop - shard.start for shard in pending)
    mine = pending[distributed.rank() :: distributed.world_size()]
    losses: list[Tensor] = []
    started = time.monotonic()
    world_size = distributed.world_size()
    with (
        EpochProgress("export", images, 1) as progress,
        ThreadPoolExecutor(WRITERS, "export") as pool,
    ):
        progress.line(announcement(schema, images, place.part))
        batches = job.batches(job.data.train)
        writes: deque[Future[Any]] = deque()
        for shard in mine:
            entries = np.arange(shard.start, shard.stop)
            parts = []
            for ids, arrays in outputs(job, schema, batches, entries, losses=losses):
                parts.append(arrays)
                progress.advance(len(ids) * world_size)
            if len(writes) == WRITERS:
                writes.popleft().result()
            whole = parts[0]
            if len(parts) > 1:
                whole = {name: np.concatenate([part[name] for part in parts]) for name in whole}
            writes.append(pool.submit(writer.write, shard, whole))
        for write in writes:
            write.result()
        all_losses = distributed.all_gather_object(losses)  # once all ranks' shards are stored
        missing = distributed.from_main(lambda: finish(writer, everything, place))
        seconds = time.monotonic() - started
        entry = entry_of(schema)
        speed = images / max(seconds, 1e-9)
        progress.line(f"export: {images:,} {entry}s in {seconds:.1f} s, {speed:,.0f} {entry}s/s")
        gathered = [loss for rank_losses in all_losses for loss in rank_losses]
        if line := loss_line(schema, gathered, images):
            progress.line(f"export: {line}")
        if missing:
            progress.line(f"export: {missing:,} of {len(writer.shards):,} shards are other parts'")


def finish(writer: store.Writer, pending: Sequence[store.Shard], place: Place) -> int:
    """Adds the card and declares the store complete, unless shards are missing, of which it returns
    the number. What other processes may have written is read back first: by a part, on object
    storage, which knows no locks, and where nothing was ``pending``. Raises StoreError for files
    that are not what was written."""
    if writer.complete:
        writer.drop_entries()
        return 0
    missing = len(writer.pending())
    if missing and place.part is not None:
        return missing
    alone = place.part is None and store.local_folder(writer.url) is not None
    if not alone or not pending:
        shards = (problem.shard for problem in store.verify(writer.url))
        damaged = {shard for shard in shards if shard is not None}
        if damaged:
            writer.reopen(damaged)
            raise store.StoreError(
                f"{writer.url}: the files of {len(damaged)} shards are not what their processes "
                "wrote; they count as missing now: repeat gaupipe export-maps"
            )
    writer.add_card(store_card.text(writer.schema, place.license))
    writer.finish(alone)
    return 0


def entry_of(schema: store.Schema) -> str:
    return "image" if schema.views == 1 else "view"


def announcement(schema: store.Schema, images: int, part: tuple[int, int] | None = None) -> str:
    """The amount that is about to be written, in one line."""
    written = schema.num_images - images
    entry = entry_of(schema)
    size = schema.bytes_per_image
    kind = schema.kind if schema.k is None else f"{schema.kind} with k {schema.k}"
    if blocks := schema.extra.get("layers"):
        kind += f" of blocks {', '.join(map(str, blocks))}"
    if "pooled_from" in schema.extra:
        kind += " on {} x {} tokens".format(*schema.grid)
    each = f", {schema.views} of each image," if schema.views > 1 else ""
    already = ""
    if part is not None:
        already = ", part {} of {}".format(*part)
    elif written:
        already = f", {written:,} are there already"
    return (
        f"export: {images:,} {entry}s{each} as {kind}, {schema.encoding}{already}, "
        f"at most {images * size / 1e6:,.1f} MB ({size / 1e3:,.1f} kB each) before compression"
    )


def loss_line(schema: store.Schema, losses: Sequence[Tensor], images: int) -> str:
    """The mean of the :func:`lost` sums over the images; "" where nothing is lost."""
    if not losses or not (means := torch.stack([*losses]).sum(0) / images).any():
        return ""
    meaning = "attention on class and register tokens, which is left out, per block"
    if schema.kind == "gaussian":
        meaning = "share of Gaussians whose means the 8-bit codes clip, per block (heads)"
    spans = (f"{row.mean():.3f} ({row.min():.3f}-{row.max():.3f})" for row in means)
    return f"{meaning}: {', '.join(spans)}"
