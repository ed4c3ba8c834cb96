"""Export: what the finished teacher knows about every training image goes to the attention-map
store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import store
from gaupipe.data.splits import ImageData
from gaupipe.distillation.export import Exported, is_complete, make_schema, stored_export
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.settings import ExportSettings, Settings, scope
from gaupipe.settings.augment import AugmentSettings
from gaupipe.settings.load import Overrides, parse, read_overrides, with_anytime, with_overrides
from gaupipe.settings.sections import Scope
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.messages import LOG
from gaupipe.teachers.base import Teacher
from gaupipe.teachers.files import open_model
from gaupipe.teachers.vit import other_teacher
from stages.export.place import Place
from stages.export.writing import write
from stages.runs import ranks
from stages.runs.directory import RunDirectory, store_of_unlabelled
from stages.runs.locks import locked
from stages.runs.trained import load_teacher


@dataclass(frozen=True)
class ExportRequest:
    """A store that is to be written, and the teacher whose maps it gets: that of a run whose phase
    A has finished, or another one in its place."""

    run: RunDirectory
    settings: Settings
    """Those of the run, and on which device, and whatever else may change at any time."""
    place: Place
    """Where the store is written, and how."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`gaupipe.settings.ExportSettings`. What is None or left out is as in the
    store that is there, or else as the settings say."""
    teacher: str | None = None
    """A trained ViT, named as ``phase_a.teacher`` is; None is the run's own teacher."""
    overrides: Overrides = ()
    """``phase_a.teacher_args...=value``, of ``teacher``, and settings that may change at any
    time."""
    download: bool = False
    """Fetch the published weights of the teacher."""
    augment: AugmentSettings | None = None
    """Draws the views; None is the run's ``augment``."""
    data: ImageData | None = None
    """The data set of the run, where it has been read already."""

    @property
    def is_own_store(self) -> bool:
        """True if the store is the run's own, which phase B reads unless told otherwise."""
        return self.run.is_store(self.place.url)

    def check(self) -> None:
        """Raises UserError for options that do not go together."""
        if self.teacher is not None and self.is_own_store:
            raise UserError(
                f"--teacher {self.teacher}: {self.place.url} is for the maps of the run's own "
                "teacher: name another store with --out, which 'gaupipe phase-b --maps' then reads"
            )
        for name in read_overrides(self.overrides):
            of_teacher = self.teacher and f"{name}.".startswith("phase_a.teacher_args.")
            if not of_teacher and scope(name) is not Scope.ANYTIME:
                raise UserError(
                    f"{name}: belongs to the run: 'export-maps' takes what may change at any "
                    "time, such as threads, and with another --teacher phase_a.teacher_args"
                )
        self.place.check()

    def load(self) -> Teacher:
        """The finished teacher of the run, or the other one, on the run's data."""
        changes = read_overrides(self.overrides)
        now = {name: changes[name] for name in changes if scope(name) is Scope.ANYTIME}
        settings = parse(with_overrides(self.settings.model_dump(mode="json"), now))
        if self.download:
            settings = settings.model_copy(update={"download": True})
        images = self.data or self.run.load_data(settings, unlabelled=True)
        teacher: Teacher
        if self.teacher is None:
            teacher = load_teacher(self.run, images, settings=settings)
        else:
            tree = with_overrides({"phase_a": {"teacher_args": {}}}, changes)
            args = tree["phase_a"]["teacher_args"]
            teacher = other_teacher(settings, images, self.teacher, args)
        if self.augment is not None:
            teacher.settings = teacher.settings.model_copy(update={"augment": self.augment})
        return teacher


def export_run(request: ExportRequest) -> str | None:
    """Writes a store and returns its path or URL; None for a teacher that needs none. An
    unfinished store of the same teacher is continued: its finished shards stay."""
    request.check()
    settings = request.settings
    if not settings.phase_a.kind.stored and request.teacher is None:
        url = None if request.is_own_store else request.place.url
        say_nothing_to_export(settings, url)
        return None
    place = request.place
    with locked(request.run.path, "run", shared=place.part is not None):
        with distributed.rank_zero_first():
            teacher = request.load()
        teacher.say_before()
        teacher.prepare_export()
        data = teacher.data
        stores = [(place, Exported.train(data))]
        if data.unlabelled is not None:
            others = replace(place, url=store_of_unlabelled(place.url))
            stores.append((others, Exported.unlabelled(data)))
        complete = [is_complete(each.url, teacher.sha256) for each, _ in stores]
        goes_on = not place.replaces and not all(complete)
        asked = request.asked
        if goes_on and complete[0]:  # phase B reads both as one: the second is as the first
            asked = as_written(place.url, asked)
        for (each, images), is_there in zip(stores, complete, strict=True):
            if is_there and goes_on:
                LOG.info(f"export: {each.url} is complete")
            else:
                export(teacher, each, asked, images)
    return place.url


def say_nothing_to_export(settings: Settings, out: str | None) -> None:
    """Says that the teacher needs no store. Raises UserError for a place that is to get one."""
    teacher = settings.phase_a.teacher
    if out is not None:
        raise UserError(
            f"--out {out}: the maps of {teacher} are stored nowhere, phase B makes them: leave it "
            "out"
        )
    LOG.info(f"export: {teacher} needs no store: phase B makes its maps")


def export_model(
    model: str,
    files: Sequence[Path],
    place: Place,
    asked: dict[str, Any],
    *,
    image_size: int | None = None,
    download: bool = False,
) -> str:
    """Writes a store of a model's maps of image ``files``, class and register tokens included, and
    returns its path or URL. No run is needed. ``image_size`` is as in
    :func:`gaupipe.teachers.files.open_model`, ``asked`` as in :class:`ExportRequest`."""

    with distributed.rank_zero_first():
        place.check()
        kind = asked.get("kind")
        if kind in MAP_KINDS and store.KINDS[kind].has_maps and not store.KINDS[kind].has_prefix:
            raise UserError(f"--kind {kind}: the maps of a model are stored as topk or dense")
        teacher = open_model(model, files, download, image_size)[0]
    teacher.say_before()
    teacher.prepare_export()
    export(teacher, place, asked, Exported.train(teacher.data))
    return place.url


def export(teacher: Teacher, place: Place, asked: dict[str, Any], images: Exported) -> None:
    """Writes the store of what a teacher says of some ``images``."""
    chosen = place.choose(teacher, asked)  # before any rank has begun a store there
    ranks.check_same(teacher.settings, teacher.data, teacher.named_sha256())
    kind = chosen.kind
    if kind == "predictions" and not teacher.predicts:
        raise UserError(f"--kind {kind}: the teacher predicts no classes: choose topk or dense")
    schema = make_schema(teacher, chosen, images, teacher.sha256)
    with contextlib.ExitStack() as held:
        if distributed.is_main():
            held.enter_context(place.held(teacher, schema))
        # no rank goes on before all have listed what is pending, so they list the same shards
        with distributed.rank_zero_first():
            writer = place.open(teacher, schema)
            pending = writer.pending()
        write(teacher, writer, pending, images.split, place.part, place.license)


def ensure(
    run_dir: Path,
    *,
    out: str | None = None,
    export: ExportSettings | None = None,
    augment: AugmentSettings | None = None,
    data: ImageData | None = None,
    now: Settings | None = None,
) -> None:
    """Writes the store of a run, unless it is complete, or its teacher needs none. ``export`` says
    what is stored; None leaves that to the settings, as for ``augment``;
    ``now`` says on which device, and whatever else may change at any time; None is as the run
    began."""
    directory = RunDirectory(run_dir)
    settings = directory.settings()
    if now is not None:
        settings = with_anytime(settings, now)
    url = out or str(directory.maps)
    asked = {} if export is None else export.model_dump(exclude_none=True)
    urls = [url]
    if data is not None and data.unlabelled is not None:
        urls.append(store_of_unlabelled(url))
    there = False
    if distributed.is_main():
        there = not settings.phase_a.kind.stored or are_there(urls, directory, asked)
    if not distributed.from_main(there):
        place = Place(url)
        export_run(ExportRequest(directory, settings, place, asked, augment=augment, data=data))


def are_there(urls: Sequence[str], directory: RunDirectory, asked: dict[str, Any]) -> bool:
    """True if the stores are complete, and of the run's teacher. Raises UserError where the first
    one was written otherwise than ``asked``."""
    if not all(is_complete(url, directory.teacher_digest()) for url in urls):
        return False
    as_written(urls[0], asked)
    return True


def as_written(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The options with which a complete store was written. Raises UserError where others were
    ``asked``."""
    stored = stored_export(url)
    assert stored is not None  # it is complete
    for name, value in asked.items():
        if value is not None and getattr(stored, name) != value:
            raise UserError(
                f"{url} already holds a complete store with {name} {getattr(stored, name)}, "
                f"asked {value}: 'gaupipe export-maps --overwrite' replaces it"
            )
    return vars(stored)
