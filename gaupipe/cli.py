"""The command line: parses, loads the settings and calls one function of ``stages``. Heavy
imports wait for a command."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from gaupipe import __version__
from gaupipe.attention import STUDENTS
from gaupipe.system import distributed
from gaupipe.system.errors import Stopped, UserError, mistake_of

# typer brings its own copy of click or uses the installed one
UsageError: Any = typer.BadParameter.__base__

IN_A_WORLD = ("run", "phase-a", "export-maps", "phase-b", "train", "evaluate")
"""Commands that several processes, started by torchrun, share."""

WITH_RESUME = ("phase-a", "phase-b", "train")
"""Commands that continue only with --resume; the others do so by themselves."""

app = typer.Typer(
    name="gaupipe",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train small vision transformers in fewer epochs: find attention maps, store them, "
    "distil them.",
)

if TYPE_CHECKING:
    Student = str  # a checker does not run what lists the attentions
else:
    Student = Literal[STUDENTS]


def _option(help: str, default: str, *names: str, **more: Any) -> Any:
    """An option that may be left out; ``default`` is what the help says then holds."""
    return typer.Option(*names, help=help, show_default=default, **more)


def complete_config() -> list[str]:
    """For the shell's completion: the shipped configurations. The shell adds files by itself."""
    from gaupipe.settings.load import shipped

    return shipped()


def complete_student(context: typer.Context) -> list[str]:
    """For the shell's completion: the students of the run that the line names, or of the run that
    was used last."""
    from stages.runs.directory import RunDirectory, last_used

    folder = context.params.get("run_dir")
    try:
        run = last_used() if folder is None else RunDirectory(Path(folder))
    except UserError:
        return []
    return run.students(run.is_distilled() and not context.params.get("plain"))


ConfigArgument = Annotated[
    str | None,
    typer.Argument(
        autocompletion=complete_config,
        metavar="[CONFIG]",
        help="A YAML file, or the name of a shipped configuration.",
        show_default="digits",
    ),
]
DataFolder = Annotated[
    Path | None,
    _option(
        "A folder of your images in place of CONFIG; the settings are chosen from the images.",
        "the data set of CONFIG",
        "--data",
        metavar="FOLDER",
    ),
]
RunDir = Annotated[
    Path | None, _option("Folder of the run.", "the run in runs/ that was used last", "--run-dir")
]
StudentName = Annotated[
    str | None,
    _option(
        "The student: its attention, or the --name it was trained under.",
        "the one trained last",
        "--student",
        autocompletion=complete_student,
        metavar="NAME",
    ),
]
Attention = Annotated[
    Student | None,
    _option("Attention of the student.", "phase_b.student of the settings", "--student"),
]
Plain = Annotated[bool, typer.Option("--plain", help="The student trained without distillation.")]
NewRunDir = Annotated[
    Path | None,
    _option(
        "Folder of the run.", "runs/NAME of the configuration or of the images' folder", "--run-dir"
    ),
]
Overrides = Annotated[
    list[str] | None, _option("Change one setting; repeatable.", "none", "--set", metavar="A.B=C")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")]
Force = Annotated[
    bool, typer.Option("--force", help="Start even if memory or disk look too small.")
]
Teacher = Annotated[
    str | None,
    _option(
        "gaussian, vit, local-dir:FOLDER, or a timm name with published weights.",
        "phase_a.teacher of the settings",
        "--teacher",
        metavar="NAME",
    ),
]
Download = Annotated[
    bool, typer.Option("--download", help="Fetch published weights that are not on this machine.")
]
ImagePaths = Annotated[
    list[Path] | None,
    _option(
        "Images for --model: files, or folders of images; repeatable.",
        "none",
        "--images",
        metavar="PATH",
    ),
]
Store = Annotated[
    str | None,
    typer.Argument(
        metavar="[STORE]",
        help="Path or URL of an attention-map store.",
        show_default="that of the run",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
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


@app.command()
def run(
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    student: Attention = None,
    teacher: Teacher = None,
    download: Download = False,
) -> None:
    """All stages, then a table of what was gained. Stages that have finished are not run again."""
    overrides = _with_teacher(overrides, teacher, download)
    settings, folder = _settings(config, overrides, run_dir, data, student)
    from stages import run as stage

    lines = stage.run(settings, folder, student)
    _print_rich(stage.table(lines, f"{settings.data.name}: {folder}"))


@app.command("phase-a")
def phase_a(
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    resume: Resume = False,
    force: Force = False,
    teacher: Teacher = None,
    download: Download = False,
) -> None:
    """Make the teacher: train it, or take a trained ViT."""
    overrides = _with_teacher(overrides, teacher, download)
    settings, folder = _settings(config, overrides, run_dir, data)
    from stages.phase_a import gaussian as stage

    stage.run(settings, folder, resume=resume, force=force)
    print(folder)


@app.command("export-maps")
def export_maps(
    run_dir: RunDir = None,
    kind: Annotated[
        str | None,
        _option(
            "What is stored for each query, such as gaussian, topk or dense.",
            "export.kind of the settings, or what fits the teacher",
        ),
    ] = None,
    encoding: Annotated[
        Literal["float16", "uint8"] | None,
        _option(
            "Format of the stored numbers.",
            "export.encoding of the settings, or what fits the kind",
        ),
    ] = None,
    k: Annotated[
        int | None,
        _option(
            "Keys that topk stores for each query.",
            "export.k of the settings",
            "--k",
            min=1,
            max=255,
        ),
    ] = None,
    views: Annotated[
        int | None,
        _option(
            "Store the maps of this many augmented views of each image.",
            "the images themselves",
            min=2,
            max=10000,
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        _option(
            "A trained ViT in place of the run's teacher: local-dir:FOLDER or a timm name.",
            "the run's teacher",
            metavar="NAME",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        _option(
            "Keywords of timm.create_model for --teacher, such as {num_classes: 0}.",
            "none",
            "--set",
            metavar="PHASE_A.TEACHER_ARGS=Y",
        ),
    ] = None,
    model: Annotated[
        str | None,
        _option(
            "Store this model's maps of --images, without a run: a timm name, hf-hub:NAME, "
            "local-dir:FOLDER or a student's folder.",
            "none",
            metavar="NAME",
        ),
    ] = None,
    files: ImagePaths = None,
    download: Download = False,
    out: Annotated[
        str | None,
        _option("Where the store goes.", "maps.zarr in the run directory", metavar="PATH-OR-URL"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a store that is there.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Rewrite what 'gaupipe verify' finds damaged, and nothing else."
        ),
    ] = False,
    shard_mb: Annotated[
        float,
        typer.Option("--shard-mb", min=0.001, help="Size of a shard in MB, before compression."),
    ] = 32,
    force: Force = False,
) -> None:
    """Write the attention maps and predictions of a run's teacher, or of any ViT, to a zarr store.

    An export that was interrupted goes on where it stopped when the same command is given again.

    Example: gaupipe export-maps --model vit_small_patch16_224 --images photos --out maps.zarr
    """
    from stages import export_maps as stage

    options: dict[str, Any] = {
        "overwrite": overwrite,
        "repair": repair,
        "shard_mb": shard_mb,
        "force": force,
        "encoding": encoding,
        "k": k,
        "download": download,
    }
    if _names_model(model, files) and model:
        of_run = {"run-dir": run_dir, "views": views, "teacher": teacher, "set": overrides}
        for name, value in of_run.items():
            if value:
                raise UserError(f"--{name}: belongs to a run: leave it out with --model")
        if out is None:
            raise UserError(f"--model {model}: name the store with --out PATH-OR-URL")
        print(stage.run_model(model, files or (), out, kind, **options))
        return
    url = stage.run(
        _run(run_dir),
        kind,
        out=out,
        views=views,
        teacher=teacher,
        overrides=overrides or [],
        **options,
    )
    print(url)


@app.command("phase-b")
def phase_b(
    run_dir: RunDir = None,
    student: Attention = None,
    name: Annotated[
        str | None,
        _option(
            "Name of the student's folder, to train several from the same maps.",
            "the attention",
            "--name",
            metavar="NAME",
        ),
    ] = None,
    overrides: Overrides = None,
    maps: Annotated[
        str | None,
        _option(
            "The attention-map store.", "maps.zarr in the run directory", metavar="PATH-OR-URL"
        ),
    ] = None,
    distill: Annotated[bool, typer.Option(help="--no-distill trains on the labels alone.")] = True,
    resume: Resume = False,
) -> None:
    """Distil the stored maps into an ordinary ViT, saved as a folder that timm loads."""
    run_dir = _run(run_dir)
    from stages import phase_b as stage
    from stages.runs.directory import RunDirectory

    attention = student
    stage.run(
        run_dir,
        attention,
        name=name,
        overrides=overrides or [],
        maps_url=maps,
        resume=resume,
        distilled=distill,
    )
    run = RunDirectory(run_dir)
    print(run.student(name or attention or run.settings().phase_b.student, distill) / "student")


@app.command()
def train(
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    student: Attention = None,
    resume: Resume = False,
) -> None:
    """Train a ViT with one of the attentions on the labels alone: no teacher, no store.

    The ViT, its optimizer and its epochs are those of phase_b and baseline in the settings.
    """
    settings, folder = _settings(config, overrides, run_dir, data, student, plain=True)
    from gaupipe.settings.load import check_used
    from stages import train as stage
    from stages.runs.directory import RunDirectory

    distributed.main_first(lambda: check_used(overrides or [], settings))
    attention = student or settings.phase_b.student
    stage.run(settings, folder, attention, resume=resume)
    print(RunDirectory(folder).student(attention, distilled=False) / "student")


@app.command()
def evaluate(
    run_dir: RunDir = None,
    student: StudentName = None,
    test: Annotated[
        bool, typer.Option("--test", help="The test split in place of the validation split.")
    ] = False,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Accuracy and loss of a trained student."""
    run_dir = _run(run_dir)
    from stages import evaluate as stage

    split = "test" if test else "val"
    _report(stage.run(run_dir, student, split=split, distilled=False if plain else None), as_json)


@app.command()
def predict(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A student's folder, local-dir:FOLDER, or a timm name with weights.",
        ),
    ],
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATHS...", help="Images, and folders of images.")
    ],
    top: Annotated[int, typer.Option(min=1, help="Classes for each image.")] = 1,
    out: Annotated[
        Path | None,
        _option("Write CSV, or JSON where the name ends in .json.", "printed", metavar="FILE"),
    ] = None,
    download: Download = False,
) -> None:
    """The classes of images, by the folder of a student alone. CSV, or a table on a terminal."""
    from gaupipe.system.files import check_file
    from stages import predict as stage

    if out is not None:
        check_file("--out", out)
    predictions = stage.run(stage.resolve(source, paths, download=download), top=top)
    if out is not None:
        stage.write(predictions, out)
        print(out)
    elif _on_terminal():
        _print_rich(stage.table(predictions))
    else:
        print(stage.as_csv(predictions), end="")
    stage.check_readable(predictions)


@app.command("settings")
def settings_page(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A section, a setting, or a shipped configuration.",
            show_default="all settings",
        ),
    ] = None,
) -> None:
    """Every setting with its default, type and meaning, or the text of a shipped configuration."""
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


@app.command("export-student")
def export_student(
    run_dir: RunDir = None,
    student: StudentName = None,
    format: Annotated[
        Literal["onnx", "pt2"],
        typer.Option(help="pt2 is the program that torch.export makes."),
    ] = "onnx",
    out: Annotated[
        Path | None,
        _option(
            "Where the model goes.",
            "student.onnx or student.pt2 beside the student",
            metavar="FILE",
        ),
    ] = None,
    plain: Plain = False,
) -> None:
    """Write a student as ONNX (pip install 'gaupipe\\[onnx]') or by torch.export, and check that
    what was written computes the student's outputs."""
    run_dir = _run(run_dir)
    from stages.publish import export_student as stage

    path, difference = stage.run(
        run_dir, student, format=format, out=out, distilled=False if plain else None
    )
    print(f"{path}: logits agree with the student's to {difference:.1e}")


@app.command()
def publish(
    student: Annotated[
        str | None,
        typer.Argument(
            autocompletion=complete_student,
            metavar="[STUDENT]",
            help="The student: its attention, or the --name it was trained under.",
            show_default="the one trained last",
        ),
    ] = None,
    run_dir: RunDir = None,
    out: Annotated[
        Path | None,
        _option(
            "Write model, settings and model card to this new folder.", "none", metavar="FOLDER"
        ),
    ] = None,
    repo: Annotated[
        str | None,
        _option(
            "Upload them to this repository of the Hugging Face Hub, with the token that "
            "'hf auth login' keeps or HF_TOKEN holds.",
            "nothing is uploaded",
            metavar="NAME",
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private, if it is new.")
    ] = False,
    plain: Plain = False,
) -> None:
    """Give a student to others: a folder or a repository that timm loads, with a model card that
    the run fills in. Its licence is left to you."""
    run_dir = _run(run_dir)
    from stages.publish import folder as stage

    distilled = False if plain else None
    print(stage.run(run_dir, student, out=out, repo=repo, private=private, distilled=distilled))


@app.command()
def compare(
    config: ConfigArgument = None,
    run_dir: Annotated[
        Path | None,
        _option("Folder of the comparison.", "runs/compare-NAME of the configuration", "--run-dir"),
    ] = None,
    overrides: Overrides = None,
    students: Annotated[
        str | None,
        _option("Attentions of the students.", "phase_b.student of the settings", metavar="A,B"),
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(
            metavar="0,1,2",
            help="Seeds. Every cell, that is every line of the tables, is run with each seed.",
        ),
    ] = "0,1,2",
    sweep: Annotated[
        str | None,
        _option(
            "Further cells: a YAML list of settings, or the name of a shipped sweep.",
            "none",
            metavar="SWEEP",
        ),
    ] = None,
    cells: Annotated[
        list[str] | None,
        _option(
            "Run only this cell, the plain ViT, and the cells whose settings this cell takes "
            "over; repeatable.",
            "all cells",
            "--row",
            metavar="NAME",
        ),
    ] = None,
    targets: Annotated[
        str | None,
        _option(
            "Validation accuracies; epochs are counted until each of them is reached.",
            "95, 98 and 100 % of the plain ViT's final accuracy",
            metavar="0.8,0.84",
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            help="Choose learning rates and initialisations in small grid searches, or take those "
            "of the settings."
        ),
    ] = True,
    jobs: Annotated[
        int, typer.Option(min=1, help="Trainings at the same time, each in a process of its own.")
    ] = 1,
    test: Annotated[
        bool, typer.Option("--test", help="Also score the finished runs on the test split.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train baselines (plain ViT), distilled students and controls with several seeds: accuracy
    over cost, which differences the seeds decide, and the epochs to an accuracy.

    Runs that have finished are not made again. Tables go to the terminal and JSON, curves to PNG
    and SVG.
    """
    settings, _ = _settings(config, overrides, None)
    folder = run_dir or Path("runs") / f"compare-{Path(config or 'digits').stem}"
    named = settings.phase_b.student if students is None else students
    attentions = _listed(
        "--students", named, str, lambda name: name in STUDENTS, ", ".join(STUDENTS)
    )
    numbers = _listed(
        "--seeds", seeds, int, lambda seed: 0 <= seed < 2**31, "whole numbers such as 0,1,2"
    )
    goals = []
    if targets is not None:
        goals = _listed(
            "--targets", targets, float, lambda goal: 0 < goal <= 1, "shares from 0 to 1"
        )
    from stages import compare as stage

    results = stage.run(
        settings,
        folder,
        students=attentions,
        seeds=numbers,
        targets=goals,
        sweep=sweep,
        only=cells or [],
        tune=tune,
        jobs=jobs,
        test=test,
    )
    if as_json:
        print(json.dumps(results))
        return
    _print_rich(*stage.tables(results))
    print(folder)


@app.command()
def inspect(
    maps: Store = None,
    run_dir: RunDir = None,
    student: Annotated[
        str | None,
        _option(
            "This student's own maps, beside the stored ones.",
            "the store",
            "--student",
            metavar="NAME",
        ),
    ] = None,
    image: Annotated[int | None, _option("Image id; without it a summary.", "none")] = None,
    layer: Annotated[int | None, _option("Encoder block, from 0.", "0")] = None,
    head: Annotated[
        str | None, _option("Head, from 0, or their mean.", "mean", metavar="H|mean")
    ] = None,
    query: Annotated[
        str | None,
        _option(
            "Query: a patch, from 0 in row-major order; class or 'register 1', where the store has "
            "these; or the mean of all patches.",
            "mean",
            metavar="Q|mean",
        ),
    ] = None,
    view: Annotated[
        int | None, _option("View of the image, from 0, in a store of views.", "0")
    ] = None,
    png: Annotated[
        str | None, _option("Draw the image with the map over it.", "none", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The contents of a store: a summary, or the map of one image. With --student, the maps of a
    student."""
    if student is not None and maps is not None:
        raise UserError("inspect: give a STORE or a --student (of --run-dir), not both")
    run_dir = _run(run_dir) if maps is None else run_dir
    from stages import inspect_maps as stage

    if image is None:
        options = {"layer": layer, "head": head, "query": query, "view": view, "png": png}
        for option, value in options.items():
            if value is not None:
                raise UserError(
                    f"--{option} {value}: shows one image's map: name the image with --image ID"
                )
        _report(stage.summary(maps, run_dir, student), as_json)
        return
    seen = stage.attention(
        image,
        url=maps,
        run_dir=run_dir,
        student=student,
        layer=layer or 0,
        head="mean" if head is None else head,
        query="mean" if query is None else query,
        view=view or 0,
        png=png,
    )
    if as_json:
        print(json.dumps(seen))
    else:
        _print_rich(stage.heat_map(seen, _draws_blocks()))


@app.command()
def view(
    maps: Store = None,
    run_dir: Annotated[
        Path | None,
        _option(
            "Folder of the run.",
            "the folder the store is in, or the run in runs/ that was used last",
            "--run-dir",
        ),
    ] = None,
    students: Annotated[
        list[str] | None,
        _option(
            "A student to show beside the stored maps; repeatable.",
            "all that have finished",
            "--student",
            metavar="NAME",
        ),
    ] = None,
    images: Annotated[
        list[int] | None,
        _option(
            "The image to open with; with --html an image of the page, repeatable.",
            "0",
            "--image",
            metavar="ID",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        _option(
            "Write a page of the images, which needs no server, and stop.", "none", metavar="FILE"
        ),
    ] = None,
    model: Annotated[
        str | None,
        _option(
            "Look at this model's attention in place of a store: a timm name, hf-hub:NAME, "
            "local-dir:FOLDER or a student's folder.",
            "none",
            metavar="NAME",
        ),
    ] = None,
    files: ImagePaths = None,
    download: Download = False,
    split: Annotated[
        Literal["train", "val", "test"] | None,
        _option("Images of the run to open with.", "those of the store, else val"),
    ] = None,
    image_size: Annotated[
        int | None,
        _option("Pixels of the images for --model.", "the model's, at most 20 patches", min=1),
    ] = None,
    port: Annotated[int | None, _option("Port of this machine.", "8642", min=1, max=65535)] = None,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Look at attention maps in a browser: of a store, or of any ViT (pip install
    'gaupipe\\[view]').

    Example: gaupipe view --model vit_small_patch14_dinov2.lvd142m --images photos --download
    """
    if not _names_model(model, files):
        run_dir = _run(run_dir) if maps is None else run_dir
    from stages import view as stage

    stage.run(
        maps,
        run_dir,
        students=students,
        port=port,
        open_browser=open_browser,
        html=html,
        images=images,
        model=model,
        files=files or (),
        download=download,
        image_size=image_size,
        split=split,
    )


@app.command()
def verify(
    maps: Store = None,
    teacher: Annotated[
        bool,
        typer.Option(
            "--teacher", help="Also run the teacher again on a sample of the images and compare."
        ),
    ] = False,
    run_dir: Annotated[
        Path | None,
        _option("Folder of the teacher's run.", "the folder the store is in", "--run-dir"),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, help="Images the teacher runs on, rounded up to whole batches.")
    ] = 256,
) -> None:
    """Check that every chunk of a store is present and intact; exit code 0 only then."""
    if maps is None:
        run_dir = _run(run_dir)
        maps = str(run_dir / "maps.zarr")
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


@app.command()
def plan(
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Training steps to measure; 0 leaves the times out.")
    ] = 4,
    images: Annotated[
        int | None,
        _option("Training images of a data set that is not here.", "read from the data set", min=1),
    ] = None,
    classes: Annotated[int | None, _option("Its classes.", "read from the data set", min=2)] = None,
    world_size: Annotated[
        int, typer.Option(min=1, max=100_000, help="Plan for this many processes (torchrun).")
    ] = 1,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plan 'gaupipe train' alone: no teacher, no store.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Parameters, memory, disk, store sizes and, from a few steps, time of a run, before it
    starts."""
    settings, folder = _settings(config, overrides, run_dir, data)
    if plain and world_size > 1:
        raise UserError("--plain plans for one process: leave --world-size out")
    from stages import plan as stage

    planned = stage.run(
        settings,
        folder,
        plain=plain,
        steps=steps,
        images=images,
        classes=classes,
        world_size=world_size,
    )
    if as_json:
        print(json.dumps(planned))
        return
    _print_rich(stage.table(planned))
    if planned["problem"]:
        print(f"does not fit: {planned['problem']}")


def main() -> None:
    """The ``gaupipe`` command. Exit codes: 0 done, 2 the user's mistake in one line, 130 and 143
    ended by Ctrl-C and SIGTERM, 1 anything else."""
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
            print(
                "gaupipe: interrupted; 'run', 'export-maps' or 'compare' again, "
                "or a phase or 'train' with --resume, continues",
                file=sys.stderr,
            )
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
    arguments = sys.argv[1:]
    if arguments[0] == "plan":  # whose few steps are in a folder that is gone
        return "gaupipe: interrupted"
    if arguments[0] in WITH_RESUME and "--resume" not in arguments:
        arguments = [*arguments, "--resume"]
    launched = " (with torchrun, as before)" if in_a_world else ""
    return (
        f"gaupipe: stopped by {stopped.number.name} {stopped.where}, where the checkpoint is; "
        f"to go on{launched}: {shlex.join(['gaupipe', *arguments])}"
    )


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
        if distributed.is_main():
            print(
                f"gaupipe: {run_dir} (the run used last; --run-dir names another)", file=sys.stderr
            )
    return run_dir


def _names_model(model: str | None, files: list[Path] | None) -> bool:
    """True with --model and --images, which belong together."""
    if (model is None) != (not files):
        raise UserError("--model NAME and --images PATH belong together")
    return model is not None


def _draws_blocks() -> bool:
    """True if the terminal can show the characters that maps are drawn with."""
    try:
        "░█".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _with_teacher(overrides: list[str] | None, teacher: str | None, download: bool) -> list[str]:
    """The options --teacher and --download as settings."""
    named = [] if teacher is None else [f"phase_a.teacher={json.dumps(teacher)}"]
    return [*(overrides or []), *named, *(["download=true"] if download else [])]


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
    said, with ``plain`` without those of a teacher; and the folder of the run. The attention
    ``student`` counts in these choices alone."""
    if data is not None:
        if config is not None:
            raise UserError(
                f"--data {data}: takes the place of a configuration: leave {config} out, or keep "
                f"it and name the folder with --set data.name=folder --set data.root={data}"
            )
        return _chosen_settings(data, overrides or [], run_dir, student, plain)
    from gaupipe.settings.load import load

    config = "digits" if config is None else config
    settings = distributed.main_first(lambda: load(config, overrides or []))
    return settings, run_dir or Path("runs") / Path(config).stem


def _chosen_settings(
    data: Path, overrides: list[str], run_dir: Path | None, student: Any, plain: bool
) -> tuple[Any, Path]:
    from stages.runs.chosen_settings import settings_for

    folder = run_dir or Path("runs") / (os.path.basename(os.path.abspath(data)) or "images")
    settings, lines = distributed.broadcast(
        distributed.on_main(lambda: settings_for(data, overrides, folder, student, plain=plain))
    )
    if distributed.is_main():
        print("\n".join(lines), file=sys.stderr)
    return settings, folder


def _listed(option: str, text: str, kind: Any, right: Any, known: str) -> list[Any]:
    """The values of an option that takes several, separated by commas, each once."""
    values = []
    for part in text.split(","):
        try:
            value = kind(part.strip())
        except ValueError:
            value = None
        if value is None or not right(value):
            raise UserError(f"{option} {text!r}: {part.strip()!r} is not right; {known}")
        values.append(value)
    return list(dict.fromkeys(values))


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _print_rich(*renderables: Any) -> None:
    from rich.console import Console

    for renderable in renderables:
        Console().print(renderable)


def _report(values: dict[str, Any], as_json: bool) -> None:
    """Prints named values as JSON or as a line each."""
    if as_json:
        print(json.dumps(values))
        return
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}} {_in_words(value)}")


def _in_words(value: Any) -> str:
    """A value as Python has it, but without quotes, and numbers with four decimals."""
    if isinstance(value, float):
        return f"{round(value, 4) + 0.0:.4f}"  # no -0.0000
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_in_words, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_in_words(of)}' for name, of in value.items())}}}"
    return str(value)


if __name__ == "__main__":
    main()
