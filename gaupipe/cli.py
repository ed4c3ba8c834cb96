"""The command line: parses, loads the settings and calls one function of ``stages``. Heavy
imports wait for a command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from gaupipe import __version__
from gaupipe.attention import STUDENTS
from gaupipe.system import distributed
from gaupipe.system.errors import Stopped, UserError, mistake_of
from stages.begin import check_paths, importing

# typer brings its own copy of click or uses the installed one
UsageError: Any = typer.BadParameter.__base__

IN_A_WORLD = ("run", "phase-a", "export-maps", "phase-b", "train", "evaluate")
"""Commands that several processes, started by torchrun, share."""

WITH_RESUME = ("phase-a", "phase-b", "train")
"""Commands that continue only with --resume; the others do so by themselves."""

CONTINUE = (*WITH_RESUME, "run", "export-maps", "compare")


def _untyped(kind: Any) -> Any:
    """A kind of typer's commands whose help shows no type for a flag or an argument."""

    class Untyped(kind):
        def get_params(self, context: Any) -> list[Any]:
            params = super().get_params(context)
            for param in params:
                if getattr(param, "is_flag", param.param_type_name == "argument"):
                    param.display_type_rich = lambda ctx: None
            return params

    return Untyped


app = typer.Typer(
    cls=_untyped(TyperGroup),
    name="gaupipe",
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Vision transformers: train them with other attention layers, alone or in two phases, and "
    "look at their attention maps.\n\nExample: `gaupipe run`, then `gaupipe view`",
)

if TYPE_CHECKING:
    Student = str  # a checker does not run what lists the attentions
else:
    Student = Literal[STUDENTS]


def _command(panel: str, name: str | None = None) -> Callable[[Any], Any]:
    """A command of the group ``panel`` of the program's help."""
    return app.command(name, cls=_untyped(TyperCommand), rich_help_panel=panel)


def _option(usage: str, help: str, default: str | bool = True, **more: Any) -> Any:
    """An option, written as in the help: ``--set A.B=C``; a name without a value is a flag.
    ``default`` is what the help says holds without the option, if not the default itself."""
    name, _, metavar = usage.partition(" ")
    return typer.Option(name, metavar=metavar, help=help, show_default=default, **more)


def _argument(metavar: str, help: str, default: str | bool = True, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=default, **more)


def _path(text: str) -> Path:
    """A path of the command line, which an unset variable of a script may have left empty."""
    if not text:
        raise typer.BadParameter("is empty; the current folder is '.'")
    return Path(text)


def complete_config() -> list[str]:
    """For the shell's completion: the shipped configurations. The shell adds files by itself."""
    from gaupipe.settings.load import shipped

    return shipped()


ConfigArgument = Annotated[
    str | None,
    _argument(
        "CONFIG",
        "A YAML file, or the name of a shipped configuration.",
        "digits",
        autocompletion=complete_config,
    ),
]
DataFolder = Annotated[
    Path | None,
    _option(
        "--data FOLDER",
        "A folder of your images in place of CONFIG; the settings are chosen from the images.",
        parser=_path,
    ),
]
RunDir = Annotated[
    Path | None,
    _option("--run-dir FOLDER", "The run's folder.", "the run used last", parser=_path),
]
NewRunDir = Annotated[
    Path | None,
    _option(
        "--run-dir FOLDER",
        "The run's folder.",
        "runs/ and the name of CONFIG or FOLDER",
        parser=_path,
    ),
]
STUDENT = {
    "help": "The student: its attention, or the --name it was trained under.",
    "default": "the one trained last",
}
StudentName = Annotated[str | None, _option("--student NAME", **STUDENT)]
StudentArgument = Annotated[str | None, _argument("STUDENT", **STUDENT)]
Attention = Annotated[
    Student | None,
    _option(
        "--student ATTENTION",
        f"One of {', '.join(STUDENTS)}.",
        "model.attention",
        case_sensitive=False,
    ),
]
Plain = Annotated[bool, _option("--plain", "The ViT trained without a teacher.")]
Overrides = Annotated[list[str] | None, _option("--set A.B=C", "Change one setting; repeatable.")]
Epochs = Annotated[int | None, _option("--epochs N", "Epochs.", "train.epochs", min=1)]
LearningRate = Annotated[
    float | None, _option("--lr RATE", "Learning rate after the warm-up.", "train.optim.lr")
]
TeacherEpochs = Annotated[
    int | None, _option("--epochs N", "Most epochs.", "phase_a.max_epochs", min=1)
]
TeacherLearningRate = Annotated[
    float | None, _option("--lr RATE", "Learning rate after the warm-up.", "phase_a.optim.lr")
]
BatchSize = Annotated[
    int | None, _option("--batch-size N", "Images in a step.", "data.batch_size", min=1)
]
Seed = Annotated[int | None, _option("--seed N", "Seed of all random numbers.", "seed", min=0)]
Resume = Annotated[bool, _option("--resume", "Continue from the last checkpoint.")]
Force = Annotated[bool, _option("--force", "Start even if memory or disk look too small.")]
Teacher = Annotated[
    str | None,
    _option(
        "--teacher NAME",
        "gaussian, vit, local, local-dir:FOLDER, or a timm name with published weights.",
        "phase_a.teacher",
    ),
]
Download = Annotated[
    bool, _option("--download", "Fetch published weights that are not on this machine.")
]
AnyModel = Annotated[
    str | None,
    _option(
        "--model NAME",
        "In place of a run: a timm name, hf-hub:NAME, local-dir:FOLDER, a student's folder.",
    ),
]
ImagePaths = Annotated[
    list[Path] | None,
    _option(
        "--images PATH",
        "Images for --model: files, or folders of images; repeatable.",
        parser=_path,
    ),
]
ImageSize = Annotated[
    int | None,
    _option("--image-size N", "Pixels for --model.", "the model's; view: fewer", min=1),
]
Store = Annotated[
    str | None,
    _argument("STORE", "Path or URL of an attention-map store.", "that of the run"),
]
Predictions = Annotated[
    Path | None, _option("--out FILE", "Write all predictions: CSV, or JSON by its name.")
]
AsJson = Annotated[bool, _option("--json", "Print JSON.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, _option("--version", "Print the version and stop.")] = False,
) -> None:
    if version:
        print(f"gaupipe {__version__}")
    elif context.invoked_subcommand is None:
        context.get_help()
    elif distributed.world_size() > 1 and context.invoked_subcommand not in IN_A_WORLD:
        raise distributed.ErrorOnAllRanks(
            f"{context.invoked_subcommand} is a job for one process: start it without "
            f"torchrun, which is for {', '.join(IN_A_WORLD)}"
        )


@_command("Train")
def run(
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    student: Attention = None,
    teacher: Teacher = None,
    download: Download = False,
) -> None:
    """All stages, then a table of what was gained.

    Stages that have finished are not run again.

    Example: `gaupipe run --data photos --student belief2`
    """
    overrides = _with_options(overrides, "train", epochs, lr, batch_size, seed)
    overrides = _with_model(overrides, "phase_a.teacher", teacher, download)
    settings, folder = _settings(config, overrides, run_dir, data, student)
    check_paths(new_run=folder)
    with _starts("all stages", settings, folder, student):
        from stages import run as stage

    lines = stage.run(settings, folder, student)
    _print_rich(stage.table(lines, f"{settings.data.name}: {folder}"))
    _say_next(["evaluate", "--run-dir", folder], ["view", "--run-dir", folder])


@_command("Train", "phase-a")
def phase_a(
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    epochs: TeacherEpochs = None,
    lr: TeacherLearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    resume: Resume = False,
    force: Force = False,
    teacher: Teacher = None,
    download: Download = False,
) -> None:
    """Make the teacher: train it, or take a trained ViT.

    Example: `gaupipe phase-a fashion_mnist --epochs 20`
    """
    overrides = _with_options(overrides, "phase_a", epochs, lr, batch_size, seed)
    overrides = _with_model(overrides, "phase_a.teacher", teacher, download)
    settings, folder = _settings(config, overrides, run_dir, data)
    check_paths(new_run=folder)
    with _starts("phase A", settings, folder, model=f"teacher {settings.phase_a.teacher}"):
        from stages import phase_a as stage

    stage.run(settings, folder, resume=resume, force=force)
    following = "phase-b" if settings.phase_a.is_local else "export-maps"
    _say_next([following, "--run-dir", folder])
    print(folder)


@_command("Train", "export-maps")
def export_maps(
    run_dir: RunDir = None,
    kind: Annotated[
        str | None,
        _option("--kind KIND", "Such as gaussian, topk or dense.", "what fits the teacher"),
    ] = None,
    encoding: Annotated[
        Literal["float16", "uint8"] | None,
        _option("--encoding TYPE", "float16 or uint8.", "what fits the kind"),
    ] = None,
    k: Annotated[
        int | None,
        _option("--k N", "Keys of a query that topk stores.", "export.k", min=1, max=255),
    ] = None,
    views: Annotated[
        int | None, _option("--views N", "Augmented views of each image.", min=2, max=10000)
    ] = None,
    teacher: Annotated[
        str | None,
        _option("--teacher NAME", "A ViT: local-dir:FOLDER or a timm name.", "the run's teacher"),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        _option(
            "--set PHASE_A.TEACHER_ARGS=Y",
            "Keywords of timm.create_model for --teacher, such as {num_classes: 0}.",
        ),
    ] = None,
    model: AnyModel = None,
    files: ImagePaths = None,
    image_size: ImageSize = None,
    download: Download = False,
    out: Annotated[
        str | None,
        _option("--out PATH-OR-URL", "Where the store goes.", "maps.zarr in the run directory"),
    ] = None,
    overwrite: Annotated[bool, _option("--overwrite", "Replace a store that is there.")] = False,
    repair: Annotated[bool, _option("--repair", "Rewrite only what verify finds damaged.")] = False,
    shard_mb: Annotated[float, _option("--shard-mb MB", "Shard, uncompressed.", min=0.001)] = 32,
    force: Force = False,
) -> None:
    """Write the attention maps and predictions of a run's teacher, or of any ViT, to a zarr store.

    An export that was interrupted goes on where it stopped when the same command is given again.

    Example: `gaupipe export-maps --model vit_small_patch16_224 --images photos --out maps.zarr`
    """
    options: dict[str, Any] = {"encoding": encoding, "k": k, "download": download}
    options |= {"overwrite": overwrite, "repair": repair, "shard_mb": shard_mb, "force": force}
    if not _names_model(model, files, image_size) or model is None:
        options |= {"views": views, "teacher": teacher, "overrides": overrides or []}
        run_dir = _run(run_dir)
        check_paths(model=teacher if out else None)
        with _begins(f"export: the teacher of {run_dir}"):
            from stages import export as stage

        if (url := stage.run(run_dir, kind, out=out, **options)) is not None:
            print(url)
        return
    of_run = {"run-dir": run_dir, "views": views, "teacher": teacher, "set": overrides}
    for name in (name for name, value in of_run.items() if value):
        raise UserError(f"--{name}: belongs to a run: leave it out with --model")
    if out is None:
        raise UserError(f"--model {model}: name the store with --out PATH-OR-URL")
    check_paths(images=files, model=model)
    with _begins(f"export: {model}, into {out}"):
        from stages import export as stage

    print(stage.run_model(model, files or (), out, kind, image_size=image_size, **options))


@_command("Train", "phase-b")
def phase_b(
    run_dir: RunDir = None,
    student: Attention = None,
    name: Annotated[
        str | None,
        _option("--name NAME", "The student's folder.", "the attention"),
    ] = None,
    overrides: Overrides = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    maps: Annotated[
        str | None, _option("--maps PATH-OR-URL", "The store.", "maps.zarr in the run directory")
    ] = None,
    distill: Annotated[
        bool, _option("--distill/--no-distill", "--no-distill trains on the labels alone.")
    ] = True,
    resume: Resume = False,
) -> None:
    """Distil the stored maps into an ordinary ViT, which timm loads.

    Example: `gaupipe phase-b --student belief2 --epochs 40`
    """
    overrides = _with_options(overrides, "train", epochs, lr, batch_size, seed)
    run_dir = _run(run_dir)
    from stages.runs import students

    options: dict[str, Any] = {"maps_url": maps, "resume": resume, "distilled": distill}
    check_paths(maps=maps if distill and maps else None)
    request = students.begin(run_dir, student, name=name, overrides=overrides, **options)
    with _starts("phase B", request.settings, request.folder):
        from stages import phase_b as stage

    stage.run_request(request)
    named = ["--run-dir", run_dir, "--student", request.name]
    _say_next(["evaluate", *named, *["--plain"] * (not distill)], ["view", *named[:2]])
    print(request.folder / "student")


@_command("Train")
def train(
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    student: Attention = None,
    model: Annotated[
        str | None,
        _option(
            "--model NAME",
            "Fine-tune these weights: a timm name, or local-dir:FOLDER.",
            "model.name, from the start",
        ),
    ] = None,
    download: Download = False,
    resume: Resume = False,
) -> None:
    """Train a ViT on the labels alone: no teacher, no store.

    Example: `gaupipe train --data photos --student xsa --epochs 30`
    """
    overrides = _with_options(overrides, "train", epochs, lr, batch_size, seed)
    overrides = _with_model(overrides, "model.name", model, download)
    from gaupipe.settings.load import check_plain

    distributed.main_first(lambda: check_plain(_names(overrides)))
    settings, folder = _settings(config, overrides, run_dir, data, student, plain=True)
    from stages.runs.directory import RunDirectory

    attention = student or settings.model.attention
    trained = RunDirectory(folder).student(attention, distilled=False)
    check_paths(new_run=folder)
    with _starts("training", settings, trained, attention):
        from stages import train as stage

    stage.run(settings, folder, attention, resume=resume)
    named = ["--run-dir", folder, "--student", attention]
    both = RunDirectory(folder).is_distilled(attention)  # phase B has one of this name, too
    _say_next(["evaluate", *named, *["--plain"] * both], ["view", *named])
    print(trained / "student")


@_command("Measure")
def evaluate(
    run_dir: RunDir = None,
    student: StudentName = None,
    test: Annotated[bool, _option("--test", "The test images, not the validation images.")] = False,
    data: Annotated[
        Path | None,
        _option("--data FOLDER", "Images in a folder for each class.", "validation", parser=_path),
    ] = None,
    plain: Plain = False,
    out: Predictions = None,
    confusion: Annotated[
        Path | None, _option("--confusion FILE.png", "Draw the confusion matrix.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Accuracy of a trained student, for each class too, and its most confident mistakes.

    Example: `gaupipe evaluate --test --out predictions.csv --confusion confusion.png`
    """
    if test and data is not None:
        raise UserError(f"--test and --data {data}: choose one")
    run_dir = _run(run_dir)
    check_paths(data=data, files=[("--out", out), ("--confusion", confusion, ".png")])
    with _begins(f"evaluate: {student or 'the student trained last'} of {run_dir}"):
        from stages import evaluate as stage
        from stages.evaluate.by_class import summary, tables

    split, distilled = "test" if test else "val", False if plain else None
    options: dict[str, Any] = {"folder": data, "out": out, "confusion": confusion}
    scores = stage.run(run_dir, student, split=split, distilled=distilled, **options)
    _report(scores if as_json else summary(scores), as_json)
    if not as_json:
        _print_rich(*tables(scores))
        look = ["view", "--run-dir", run_dir, "--student", scores["student"]]
        if scores["mistakes"] and data is None and not plain:
            # the page opens with the most confident one
            look += ["--split", scores["split"], "--image", scores["mistakes"][0]["image"]]
        _say_next(look)


@_command("Look")
def predict(
    source: Annotated[
        str,
        _argument("SOURCE", "A student's folder, local-dir:FOLDER, or a timm name with weights."),
    ],
    paths: Annotated[
        list[Path], _argument("PATHS", "Images, and folders of images.", parser=_path)
    ],
    top: Annotated[int, _option("--top N", "Classes for each image.", min=1)] = 1,
    out: Predictions = None,
    download: Download = False,
) -> None:
    """The classes of images, by the folder of a student alone.

    Prints CSV, and a table on a terminal.

    Example: `gaupipe predict runs/digits/phase_b/belief2/student photos --out classes.csv`
    """
    check_paths(images=paths, model=source, files=[("--out", out)])
    with _begins(f"predict: {source}"):
        from stages import predict as stage

    predictions = stage.run(source, paths, top=top, download=download)
    if out is not None:
        stage.write(predictions, out)
        print(out)
    elif _on_terminal():
        _print_rich(stage.table(predictions))
    else:
        print(stage.as_csv(predictions), end="")
    stage.check_readable(predictions)


@_command("Look", "settings")
def settings_page(
    name: Annotated[
        str | None,
        _argument("NAME", "A section, a setting, or a shipped configuration.", "all settings"),
    ] = None,
) -> None:
    """Settings with default, type and meaning, or a shipped configuration.

    Example: `gaupipe settings phase_b`
    """
    from gaupipe.settings.load import shipped, text_of
    from gaupipe.settings.page import as_text

    if name in shipped():
        print(text_of(name), end="")
    elif text := as_text(name or "", shutil.get_terminal_size().columns):
        print(text)
    else:
        raise UserError(
            f"settings: {name!r} is no setting or section such as phase_b, and no shipped "
            f"configuration: {', '.join(shipped())}"
        )


@_command("Share", "export-student")
def export_student(
    run_dir: RunDir = None,
    student: StudentName = None,
    format: Annotated[
        Literal["onnx", "pt2"],
        _option("--format FORMAT", "onnx, or pt2, the program that torch.export makes."),
    ] = "onnx",
    out: Annotated[
        Path | None,
        _option("--out FILE", "Where the model goes.", "student.FORMAT beside the student"),
    ] = None,
    plain: Plain = False,
) -> None:
    """Write a student as ONNX or by torch.export.

    The file is run, and its outputs are compared with the student's. ONNX needs
    `pip install 'gaupipe[onnx]'`.

    Example: `gaupipe export-student --student belief2 --out belief2.onnx`
    """
    run_dir = _run(run_dir)
    check_paths(files=[("--out", out)])
    with _begins(f"export: {student or 'the student trained last'} of {run_dir}, as {format}"):
        from stages.publish import export_student as stage

    path, difference = stage.run(
        run_dir, student, format=format, out=out, distilled=False if plain else None
    )
    print(f"{path}: logits agree with the student's to {difference:.1e}")


@_command("Share")
def publish(
    out: Annotated[
        Path, _option("--out FOLDER", "A new folder for model, settings and model card.")
    ],
    student: StudentArgument = None,
    run_dir: RunDir = None,
    plain: Plain = False,
) -> None:
    """Give a student to others: a folder that timm loads, and 'hf upload' uploads.

    The run fills in its model card; the licence is left to you.

    Example: `gaupipe publish belief2 --out my-student`
    """
    run_dir = _run(run_dir)
    with _begins(f"publish: {student or 'the student trained last'} of {run_dir}, into {out}"):
        from stages.publish import folder as stage

    print(stage.run(run_dir, student, out=out, distilled=False if plain else None))


@_command("Measure")
def compare(
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: Annotated[
        Path | None,
        _option(
            "--run-dir FOLDER", "The comparison.", "runs/compare- and the name of CONFIG or FOLDER"
        ),
    ] = None,
    overrides: Overrides = None,
    students: Annotated[
        str | None, _option("--students A,B", "Attentions of the students.", "model.attention")
    ] = None,
    seeds: Annotated[str, _option("--seeds A,B", "Seeds of every row of the tables.")] = "0,1,2",
    sweep: Annotated[
        str | None,
        _option("--sweep SWEEP", "Further rows: a YAML list of settings, or a shipped sweep."),
    ] = None,
    rows: Annotated[
        list[str] | None,
        _option("--row NAME", "Run only this row and the plain ViT; repeatable.", "all"),
    ] = None,
    targets: Annotated[
        str | None,
        _option(
            "--targets 0.8,0.84",
            "Count the epochs to these validation accuracies.",
            "95, 98 and 100 % of the plain ViT's",
        ),
    ] = None,
    jobs: Annotated[int, _option("--jobs N", "Trainings at the same time.", min=1)] = 1,
    test: Annotated[bool, _option("--test", "Also score finished runs on the test split.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train baselines, distilled students and controls with several seeds.

    Says accuracy over cost, which differences the seeds decide, and the epochs to an accuracy.
    Runs that have finished are not made again. Tables go to the terminal and JSON, curves to PNG
    and SVG.

    Example: `gaupipe compare --students standard,belief2 --seeds 0,1,2`
    """
    name = Path(config or "digits").stem if data is None else data.absolute().name
    folder = run_dir or Path("runs") / f"compare-{name}"
    settings, _ = _settings(config, overrides, folder, data)
    from pydantic import Field

    from gaupipe.settings import StudentKey

    students = settings.model.attention if students is None else students
    attentions = _listed("--students", students, StudentKey)
    seed, share = Annotated[int, Field(ge=0, lt=2**31)], Annotated[float, Field(gt=0, le=1)]
    numbers = _listed("--seeds", seeds, seed)
    goals = [] if targets is None else _listed("--targets", targets, share)
    with _starts("comparison", settings, folder, ", ".join(attentions)):
        from stages import compare as stage

    options: dict[str, Any] = {"sweep": sweep, "only": rows or [], "jobs": jobs, "test": test}
    options |= {"students": attentions, "seeds": numbers, "targets": goals}
    _show(stage.run(settings, folder, **options), as_json, stage.tables)
    if not as_json:
        print(folder)


@_command("Look")
def inspect(
    maps: Store = None,
    run_dir: RunDir = None,
    student: Annotated[
        str | None, _option("--student NAME", "The maps of this student, beside the stored ones.")
    ] = None,
    image: Annotated[int | None, _option("--image ID", "The image whose map is shown.")] = None,
    layer: Annotated[int | None, _option("--layer L", "Encoder block, from 0.", "0")] = None,
    head: Annotated[str | None, _option("--head H|mean", "Head, from 0.", "mean")] = None,
    query: Annotated[
        str | None,
        _option(
            "--query Q|mean",
            "A patch, from 0 in row-major order; class or 'register 1' where the store has these.",
            "mean",
        ),
    ] = None,
    view: Annotated[int | None, _option("--view V", "Stored view, from 0.", "0")] = None,
    png: Annotated[Path | None, _option("--png FILE", "Draw the map over the image.")] = None,
    as_json: AsJson = False,
) -> None:
    """The contents of a store: a summary, or the map of one image.

    Example: `gaupipe inspect --image 7 --layer 1 --png map.png`
    """
    if student is not None and maps is not None:
        raise UserError("inspect: give a STORE or a --student (of --run-dir), not both")
    run_dir = _run(run_dir) if maps is None else run_dir
    check_paths(maps=maps, files=[("--png", png, ".png")] if image is not None else [])
    with _begins(f"inspect: {maps or run_dir}"):
        from stages.look import inspect as stage

    shown = {"layer": layer, "head": head, "query": query, "view": view, "png": png}
    options: dict[str, Any] = {key: value for key, value in shown.items() if value is not None}
    if image is None:
        for name, value in ({"student": student} | options).items():
            if value is not None:
                raise UserError(
                    f"--{name} {value}: shows one image's map: name the image with --image ID"
                )
        _report(stage.summary(maps, run_dir), as_json)
        return
    seen = stage.attention(image, url=maps, run_dir=run_dir, student=student, **options)
    _show(seen, as_json, lambda seen: [stage.heat_map(seen)])


@_command("Look")
def view(
    maps: Store = None,
    run_dir: RunDir = None,
    students: Annotated[
        list[str] | None,
        _option("--student NAME", "Students beside the store; repeatable.", "all that finished"),
    ] = None,
    images: Annotated[
        list[int] | None,
        _option("--image ID", "The first image; with --html the images, repeatable.", "0"),
    ] = None,
    html: Annotated[
        Path | None, _option("--html FILE", "Write a page that needs no server, and stop.")
    ] = None,
    model: AnyModel = None,
    files: ImagePaths = None,
    download: Download = False,
    split: Annotated[
        Literal["train", "val", "test"] | None,
        _option(
            "--split SPLIT",
            "train, val or test: the images to open with.",
            "those of the store, else val",
        ),
    ] = None,
    random_weights: Annotated[
        bool, _option("--random-weights", "Do without the weights of the --model: initialise it.")
    ] = False,
    image_size: ImageSize = None,
    port: Annotated[int | None, _option("--port N", "Port.", "8642", min=1, max=65535)] = None,
    open_browser: Annotated[bool, _option("--open/--no-open", "Open a browser.")] = True,
) -> None:
    """Look at attention maps in a browser: of a store, or of any ViT.

    Needs `pip install 'gaupipe[view]'`.

    Example: `gaupipe view --model vit_small_patch14_dinov2.lvd142m --images photos --download`
    """
    if not _names_model(model, files, image_size):
        if random_weights:
            raise UserError("--random-weights: belongs to --model NAME")
        run_dir = _run(run_dir) if maps is None else run_dir
    pages = [("--html", html, ".html", ".htm")]
    check_paths(maps=maps, images=files, model=model, files=pages)
    with _begins(f"view: {model or maps or run_dir}"):
        from stages import view as stage

    options: dict[str, Any] = {"students": students, "split": split, "images": images, "html": html}
    options |= {"model": model, "files": files or (), "image_size": image_size}
    options |= {"download": download, "random_weights": random_weights}
    options |= {"port": port, "open_browser": open_browser}
    stage.run(maps, run_dir, **options)


@_command("Measure")
def verify(
    maps: Store = None,
    teacher: Annotated[
        bool, _option("--teacher", "Also run the teacher again on some images and compare.")
    ] = False,
    run_dir: Annotated[
        Path | None, _option("--run-dir FOLDER", "The teacher's run.", "that of the store")
    ] = None,
    sample: Annotated[int, _option("--sample N", "Images for the teacher.", min=1)] = 256,
) -> None:
    """Check that every chunk of a store is present and intact.

    The exit code is 0 only then.

    Example: `gaupipe verify runs/digits/maps.zarr --teacher`
    """
    if maps is None:
        run_dir = _run(run_dir)
        maps = _stored(run_dir)
    check_paths(maps=maps, run_dir=run_dir if teacher else None)
    with _begins(f"verify: {maps}"):
        from stages import verify as stage

    problems: Sequence[object] = stage.run(maps)
    if teacher and not problems:
        problems = stage.against_teacher(maps, run_dir, sample)
    for problem in problems:
        print(problem)
    if problems:
        print(
            f"gaupipe: {maps}: {len(problems)} problem{'s' if len(problems) > 1 else ''}",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    print(f"{maps}: complete and intact" + (", as the teacher says" if teacher else ""))


@_command("Measure")
def plan(
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    images: Annotated[
        int | None, _option("--images N", "Training images of a set that is not here.", min=1)
    ] = None,
    classes: Annotated[int | None, _option("--classes C", "Classes of that set.", min=2)] = None,
    world_size: Annotated[
        int, _option("--world-size W", "Plan for W processes (torchrun).", min=1, max=100_000)
    ] = 1,
    plain: Annotated[bool, _option("--train", "Plan 'gaupipe train' alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Parameters, steps, memory and disk of a run, before it starts.

    Example: `gaupipe plan --data photos`
    """
    settings, folder = _settings(config, overrides, run_dir, data)
    if plain and world_size > 1:
        raise UserError("--train plans for one process: leave --world-size out")
    with _starts("plan", settings, folder):
        from stages import plan as stage

    described: dict[str, Any] = {"images": images, "classes": classes, "world_size": world_size}
    planned = stage.run(settings, folder, plain=plain, **described)
    _show(planned, as_json, stage.tables)
    if planned["problem"] and not as_json:
        print(f"does not fit: {planned['problem']}")


def main() -> None:
    """The ``gaupipe`` command. Exit codes: 0 done, 2 the user's mistake in one line, 130 and 143
    ended by Ctrl-C and SIGTERM, 1 anything else."""
    # a thread of torch that waits lets other processes work: between them it would wait for long
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # a terminal that cannot show a character shows a question mark
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    here = distributed.launch()
    if here.rank:  # results are rank 0's
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (open until the process ends)
    try:
        with distributed.process_group():
            code = app(standalone_mode=False)  # typer answers Ctrl-C with 130
        if code == 130 and here.rank == 0:
            again = f"; to go on: {_again()}" if sys.argv[1] in CONTINUE else ""
            print(f"gaupipe: interrupted{again}", file=sys.stderr)
        _end(code)
    except UsageError as error:
        _fail(
            f"{error.format_message().replace('Value error, ', '')} "
            f"({error.ctx.command_path if error.ctx else 'gaupipe'} -h shows how)",
            all_ranks=True,
        )
    except Stopped as stopped:
        if here.rank == 0:
            print(_how_to_go_on(stopped, here.world_size > 1), file=sys.stderr)
        _end(128 + stopped.number)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except distributed.ErrorOnAllRanks as error:
        _fail(str(error), all_ranks=True)
    except Exception as error:
        if distributed.is_lost(error):
            reason = str(error).splitlines()[0]
            print(f"gaupipe: rank {here.rank}: another rank has ended: {reason}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)  # threads of torch may still wait for that rank
        if (mistake := mistake_of(error)) is None:
            raise
        _fail(f"rank {here.rank}: {mistake}" if here.world_size > 1 else mistake)


def _how_to_go_on(stopped: Stopped, in_a_world: bool) -> str:
    """The line about a training that was stopped: how far it is, and the command that continues."""
    launched = " (with torchrun, as before)" if in_a_world else ""
    return (
        f"gaupipe: stopped by {stopped.number.name} {stopped.where}, where the checkpoint is; "
        f"to go on{launched}: {_again()}"
    )


def _again() -> str:
    """The command that continues this one."""
    arguments = sys.argv[1:]
    if arguments[0] in WITH_RESUME and "--resume" not in arguments:
        arguments = [*arguments, "--resume"]
    return shlex.join(["gaupipe", *arguments])


def _fail(mistake: str, all_ranks: bool = False) -> None:
    """Ends with exit code 2. What ``all_ranks`` have met is said by the first alone."""
    if not all_ranks or distributed.launch().rank == 0:
        print(f"gaupipe: {' '.join(mistake.split())}", file=sys.stderr)
    _end(2)


def _end(code: int | None) -> NoReturn:
    """Ends this process; None is success.

    In a world it ends at once: while Python takes its objects apart, torch may wait for ever for a
    thread of a group of processes, or abort because of one.
    """
    if distributed.launch().world_size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


def _run(run_dir: Path | None) -> Path:
    """The folder of the run that a command continues: the one named, else the one used last,
    which is then said."""
    if run_dir is None:
        from stages.runs.directory import last_used

        run_dir = distributed.broadcast(distributed.on_main(lambda: last_used().path))
        _say(f"{run_dir} (the run used last; --run-dir names another)")
    check_paths(run_dir=run_dir)
    return run_dir


def _stored(run_dir: Path) -> str:
    """The store of a run. Raises UserError for one whose teacher has none."""
    from stages.runs.directory import RunDirectory

    return str(RunDirectory(run_dir).stored())


def _names_model(model: str | None, files: list[Path] | None, image_size: int | None) -> bool:
    """True with --model and --images, which belong together."""
    if (model is None) != (not files):
        raise UserError("--model NAME and --images PATH belong together")
    if model is None and image_size is not None:
        raise UserError(f"--image-size {image_size}: belongs to --model NAME")
    return model is not None


def _say(line: str) -> None:
    if distributed.launch().rank == 0:
        print(f"gaupipe: {line}", file=sys.stderr)


@contextlib.contextmanager
def _begins(what: str) -> Iterator[None]:
    """Says what a command is about to do, and then imports torch, which takes seconds."""
    _say(f"{what} ...")
    with importing():
        yield


def _starts(
    what: str, settings: Any, folder: Path, attention: str | None = None, model: str = ""
) -> contextlib.AbstractContextManager[None]:
    """:func:`_begins`, of a job with these settings."""
    attention, data = attention or settings.model.attention, settings.data
    model = model or f"{settings.model.name}, attention {attention}"
    return _begins(f"{what}: {data.root or data.name}, {model}, into {folder}")


def _say_next(*commands: list[Any]) -> None:
    """Says what may follow."""
    _say("next: " + ", or: ".join(shlex.join(map(str, ["gaupipe", *each])) for each in commands))


def _with_model(
    overrides: list[str] | None, setting: str, name: str | None, download: bool
) -> list[str]:
    """An option that names a model and --download as settings."""
    check_paths(model=name)
    named = [] if name is None else [f"{setting}={json.dumps(name)}"]
    return [*(overrides or []), *named, *(["download=true"] if download else [])]


def _names(overrides: list[str]) -> list[str]:
    """The "a.b" of each ``a.b=value``."""
    return [override.partition("=")[0] for override in overrides]


def _with_options(
    overrides: list[str] | None,
    section: str,
    epochs: int | None,
    lr: float | None,
    batch_size: int | None,
    seed: int | None,
) -> list[str]:
    """The options by which a training is told most as settings, those of its ``section``. Raises
    UserError where --set says the same."""
    options = {
        "--epochs": ("phase_a.max_epochs" if section == "phase_a" else "train.epochs", epochs),
        "--lr": (f"{section}.optim.lr", lr),
        "--batch-size": ("data.batch_size", batch_size),
        "--seed": ("seed", seed),
    }
    together = list(overrides or [])
    for option, (setting, value) in options.items():
        if value is None:
            continue
        for name in _names(overrides or []):
            if f"{setting}.".startswith(f"{name}."):
                raise UserError(
                    f"{option} {value}: is {setting}, which --set {name} sets too: give one"
                )
        together.append(f"{setting}={value}")
    return together


def _settings(
    config: str | None,
    overrides: list[str] | None,
    run_dir: Path | None,
    data: Path | None = None,
    student: Any = None,
    *,
    plain: bool = False,
) -> tuple[Any, Path]:
    """The settings of a configuration, or those chosen for a folder of images, which are then
    said, with ``plain`` without those of a teacher; and the folder of the run. ``student`` is the
    attention that is to be trained, None that of the settings. A run on a folder of images that
    has begun has its own."""
    if data is None:
        from gaupipe.settings.load import load

        config = "digits" if config is None else config
        named = [] if student is None else [f"model.attention={student}"]
        settings = distributed.main_first(lambda: load(config, [*(overrides or []), *named]))
        return settings, run_dir or Path("runs") / Path(config).stem
    if config is not None:
        raise UserError(
            f"--data {data}: takes the place of a configuration: leave {config} out, or keep "
            f"it and name the folder with --set data.name=folder --set data.root={data}"
        )
    check_paths(data=data)
    with _begins(f"looks at the images in {data}"):
        from stages.runs.chosen_settings import settings_for

    folder = run_dir or Path("runs") / (os.path.basename(os.path.abspath(data)) or "images")
    choose = partial(settings_for, data, overrides or [], folder, student, plain=plain)
    settings, lines = distributed.broadcast(distributed.on_main(choose))
    if distributed.is_main():
        print("\n".join(lines), file=sys.stderr)
    return settings, folder


def _listed(option: str, text: str, kind: Any) -> list[Any]:
    """The values of an option that takes several, separated by commas, each once."""
    from pydantic import TypeAdapter, ValidationError

    try:
        values = TypeAdapter(list[kind]).validate_python(text.replace(" ", "").split(","))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{option} {text!r}: {first['input']!r}: {first['msg']}") from None
    return list(dict.fromkeys(values))


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _print_rich(*renderables: Any) -> None:
    from rich.console import Console

    for renderable in renderables:
        Console().print(renderable)


def _show(values: dict[str, Any], as_json: bool, tables: Callable[[Any], Iterable]) -> None:
    """Prints named values as JSON or as ``tables``."""
    if as_json:
        print(json.dumps(values))
    else:
        _print_rich(*tables(values))


def _report(values: dict[str, Any], as_json: bool) -> None:
    """Prints named values as JSON, or as a line each, with at most four decimals."""
    text = json.dumps(values)
    if as_json:
        print(text)
        return
    width = max(map(len, values))
    rounded = json.loads(text, parse_float=lambda number: round(float(number), 4))
    for name, value in rounded.items():
        print(f"{name:<{width}} {value}")


if __name__ == "__main__":
    main()
