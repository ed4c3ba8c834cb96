"""Trains every row of a comparison with every seed, and writes its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import timm

import store
from gaupipe.attention import STUDENTS
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData
from gaupipe.distillation.export import UNKNOWN, make_schema
from gaupipe.distillation.store_choice import choose_store
from gaupipe.distillation.student import check_student
from gaupipe.settings import Settings
from gaupipe.settings.load import read_yaml
from gaupipe.settings.places import folder_of
from gaupipe.settings.sections import LOCAL
from gaupipe.system import digests
from gaupipe.system.device import prepare_device
from gaupipe.system.errors import UserError
from gaupipe.system.files import write_whole
from gaupipe.system.messages import LOG
from gaupipe.system.progress import duration
from gaupipe.teachers.base import outline
from gaupipe.training import loggers
from gaupipe.training.curves import save
from gaupipe.training.settle import settle
from gaupipe.training.student import outline_student
from gaupipe.vit.fine_tuning import weights_sha256
from stages.compare.figures import curves
from stages.compare.report import Comparison, report
from stages.compare.rows import Row, default_rows, resolve, select_rows, sweep_rows
from stages.compare.tables import tables
from stages.compare.trainings import RowTraining, as_teacher
from stages.compare.workers import train
from stages.runs.locks import locked
from stages.runs.timing import student_seconds, teacher_seconds


def compare(
    settings: Settings,
    run_dir: Path,
    *,
    students: Sequence[str],
    seeds: Sequence[int],
    sweep: str | None = None,
    only: Sequence[str] = (),
    jobs: int = 1,
    test: bool = False,
    imports: Sequence[Path] = (),
) -> Comparison:
    """Runs what has not finished yet of every row. Returns the results and writes them.

    students   attentions of the students
    seeds      every row is run with each
    sweep      a file of further rows, or the name of a shipped one
    only       names of the rows to run, with the plain ViT; none are all rows. Other rows are in
               the results if they have finished
    jobs       trainings at once
    test       also score the finished trainings on the test split
    imports    files with attentions of the user's own, which each process imports

    A training whose loss diverges is reported as failed. Raises UserError, before anything is
    written, for a row that cannot be run and for a folder that holds something else.
    """
    name = "compare"
    rows = default_rows(settings, students)
    if sweep is not None:
        name = Path(sweep).stem
        rows = sweep_rows(read_yaml(sweep, "sweeps"), sweep, rows)
    asked = select_rows(rows, only) if only else rows
    loggers.check(settings.log.to)
    read = reader(settings.download, unlabelled=not all(row.plain for row in rows))
    planned = plan(rows, settings, seeds, run_dir, read, test, imports)
    check_folder(run_dir)

    with locked(run_dir, "comparison"):
        # all that have finished are told together: Holm's correction is for all of them
        trainings = [
            row
            for row in planned
            if row[0].row in asked or all(training.read() for training in row)
        ]
        every = {training.folder: training for training in chain(*trainings)}.values()
        left = sum(training.read() is None for training in every)
        if left:
            line = f"{left} of {len(every)} trainings are left"
            LOG.info(f"compare: {line}, about {duration(seconds_left(trainings, read) / jobs)}")
        del read  # and the images, which the processes of the trainings read for themselves
        outcomes = train([*chain(*trainings)], jobs, imports)
        results = report(settings.data.title, trainings, outcomes)
        write_whole(run_dir / f"{name}.json", json.dumps(asdict(results), indent=1) + "\n")
        save(curves(results), run_dir / name)
        lines = [f"# {results.data}", f"![Curves of all rows]({name}.png)\n", *tables(results)]
        write_whole(report_in(run_dir, sweep), "\n".join(lines))
    return results


def report_in(run_dir: Path, sweep: str | None) -> Path:
    """The file with all tables of a comparison, or of its rows with a sweep."""
    if sweep is None:
        return run_dir / "report.md"
    return run_dir / f"report-{Path(sweep).stem}.md"


def plan(
    rows: Sequence[Row],
    base: Settings,
    seeds: Sequence[int],
    run_dir: Path,
    read: Callable[[Settings], ImageData],
    test: bool = False,
    imports: Sequence[Path] = (),
) -> list[list[RowTraining]]:
    """For each row its training with each seed, on what ``read`` gives. Raises UserError for a row
    that cannot be run."""

    def row_trainings(row: Row) -> list[RowTraining]:
        settings = settle(resolve(row, base))
        data = read(settings)
        if test and data.test is None:
            raise UserError(f"--test: data set {data.name} has no test split")
        settings = check_row(row, settings, data)
        sources = sources_of(settings, row.plain, imports)
        own_attention = {}
        if settings.model.attention not in STUDENTS:
            own_attention = digests_of(imports)
        return [
            RowTraining(
                row=row,
                settings=settings.model_copy(update={"seed": seed}),
                root=run_dir,
                data_sha256=(data.both_sha256, None if row.plain else data.unlabelled_sha256),
                image_size=data.image_size,
                test_sha256=data.test_sha256 if test else None,
                sources=sources,
                own_attention=own_attention,
            )
            for seed in seeds
        ]

    return [row_trainings(row) for row in rows]


def reader(download: bool, unlabelled: bool) -> Callable[[Settings], ImageData]:
    """Gives the data set of settings, and reads it once: most rows have the same images. Those
    without labels are read only if some row learns from them."""
    loaded: dict[str, ImageData] = {}

    def read(settings: Settings) -> ImageData:
        name = settings.data.model_dump_json()
        if name not in loaded:
            loaded[name] = load_data(settings.data, download, unlabelled)
        return loaded[name]

    return read


def seconds_left(
    trainings: Sequence[Sequence[RowTraining]], read: Callable[[Settings], ImageData]
) -> float:
    """Seconds of the trainings that have not finished, and of their teachers, one after the other:
    of each row some steps are measured, on what ``read`` gives."""
    seconds = 0.0
    taught: set[Path] = set()
    for seeds in trainings:
        left = [training for training in seeds if training.read() is None]
        if not left:
            continue
        settings = left[0].settings
        data = read(settings)
        images = len(data.train)
        both = len(data.with_unlabelled())
        teachers: set[Path] = set()
        if left[0].row.plain:
            each = student_seconds(settings, data, settings.train, images)
        else:
            train = settings.student_training
            gammas = settings.phase_b.gammas(train.epochs)
            each = student_seconds(settings, data, train, both, gammas)
            teachers = {training.teacher_run.path for training in left if not training.exported}
        seconds += len(left) * each
        if teachers - taught:
            teacher = outline(as_teacher(settings), data)
            trained, each = teacher_seconds(teacher, images)
            exported = both * (settings.export.views or 1) * each
            seconds += len(teachers - taught) * (trained + exported)
            taught |= teachers
    return seconds


def sources_of(settings: Settings, plain: bool, imports: Sequence[Path]) -> dict[str, str]:
    """Digests of the files that a row's settings name, so that a training is not taken for that of
    a file that was changed."""
    names = [settings.model.name]
    if not plain:
        names.append(settings.phase_a.teacher)
    modules = [timm.model_entrypoint(name).__module__ for name in names if timm.is_model(name)]
    sources: dict[str, str] = {}
    for name in names:
        sources |= weights_sha256(name)
        if name.startswith(LOCAL):  # which also says how images are prepared
            sources[f"{name}/config.json"] = digests.sha256(folder_of(name) / "config.json")
    if not {path.stem for path in imports}.isdisjoint(modules):
        sources |= digests_of(imports)
    return sources


def digests_of(imports: Sequence[Path]) -> dict[str, str]:
    return {path.name: digests.sha256(path) for path in imports}


def check_row(row: Row, settings: Settings, data: ImageData) -> Settings:
    """The settings of a row with the store that its student needs. Raises UserError, naming the
    row, for what its training could not do."""
    try:
        prepare_device(settings.device, settings.threads)
        if row.plain:
            outline_student(settings, data, settings.train)
            return settings
        teacher = outline(settings, data)
        check_student(teacher)
        teacher.begin(Path()).training_state()
        if teacher.kind.stored:
            export = choose_store(teacher)
            make_schema(teacher, export, sha256=UNKNOWN)
            return settings.model_copy(update={"export": export})
    except (UserError, store.StoreError) as error:
        raise UserError(f"{row.name}: {error}") from None
    return settings


def check_folder(run_dir: Path) -> None:
    """Raises UserError for a folder that holds something else than a comparison."""
    names = set()
    if run_dir.is_dir():
        names = {path.name for path in run_dir.iterdir()}
    has_runs = not names.isdisjoint({"students", "teachers"})
    is_comparison = names == {"lock"} or ("lock" in names and has_runs)
    if run_dir.is_file() or (names and not is_comparison):
        raise UserError(f"{run_dir} exists and holds no comparison: choose another --run-dir")
