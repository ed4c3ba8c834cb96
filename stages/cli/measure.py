"""Commands that measure: students, comparisons, stores, and what a run would need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gaupipe.settings.places import check_data, check_model
from gaupipe.system.errors import UserError
from gaupipe.system.files import check_file, from_here
from stages.begin import begins, check_store, say, starts
from stages.cli.app import command
from stages.cli.hints import say_next
from stages.cli.options import (
    AsJson,
    ConfigArgument,
    DataFolder,
    Download,
    NewRunDir,
    Overrides,
    Plain,
    Predictions,
    RunDir,
    Store,
    StudentName,
    Teacher,
    Unlabelled,
    option,
    parse_name,
    parse_path,
    setting,
)
from stages.cli.output import lines_of, show
from stages.request import (
    find_run,
    parse_list,
    read_settings,
    refuse_with_model,
    student_folder,
    with_model,
    with_unlabelled,
)
from stages.runs.directory import RunDirectory, store_of_unlabelled


@command("Measure")
def evaluate(
    run_dir: RunDir = None,
    student: StudentName = None,
    test: Annotated[bool, option("--test", "The test images, not the validation images.")] = False,
    data: Annotated[
        Path | None,
        option(
            "--data FOLDER",
            "Images in a folder for each class; of several splits those of test.",
            "validation",
            parser=parse_path,
        ),
    ] = None,
    plain: Plain = False,
    out: Predictions = None,
    confusion: Annotated[
        Path | None, option("--confusion FILE.png", "Draw the confusion matrix.")
    ] = None,
    alone: Annotated[
        bool, option("--alone", "Without its teacher, which sees the images too otherwise.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Accuracy of a trained student, for each class too, and its most confident mistakes.

    Example: `gaupipe evaluate --test --out predictions.csv --confusion confusion.png`
    """
    if test and data is not None:
        raise UserError(f"--test and --data {data}: choose one")
    run_dir = find_run(run_dir)
    if data is not None:
        check_data(data)
    if out is not None:
        check_file("--out", out, ".csv", ".json")
    if confusion is not None:
        check_file("--confusion", confusion, ".png")
    with begins(f"evaluate: {student or 'the student trained last'} of {run_dir}"):
        from stages import evaluate as stage
        from stages.evaluate.by_class import summary, tables

    split = "test" if test else "val"
    options: dict[str, Any] = {"folder": data, "out": out, "confusion": confusion, "alone": alone}
    scores = stage.run(run_dir, student, split=split, plain=plain, **options)
    show(scores, as_json, [*lines_of(summary(scores)), *tables(scores)])
    if as_json:
        return
    mistakes = scores["mistakes"]
    if data is None and not plain:  # a run's page shows of two students of a name phase B's
        look = ["view", "--run-dir", run_dir, "--student", scores["student"]]
        if mistakes:  # the page opens with the most confident one
            look += ["--split", scores["split"], "--image", mistakes[0]["image"]]
        say_next(look)
        return
    # of all ten mistakes the command would be long, and a built-in image is no file
    files = [each["path"] for each in mistakes[:5] if Path(each["path"]).is_file()]
    if files:
        look = ["view", "--model", student_folder(run_dir, scores["student"], plain)]
        for path in files:
            look += ["--images", from_here(path)]
        say_next(look)


@command("Measure")
def compare(
    context: typer.Context,
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: Annotated[
        Path | None,
        option(
            "--run-dir FOLDER", "The comparison.", "runs/compare- and the name of CONFIG or FOLDER"
        ),
    ] = None,
    overrides: Overrides = None,
    students: Annotated[
        str | None, setting("--students A,B", "Attentions of the students", "model.attention")
    ] = None,
    seeds: Annotated[str, option("--seeds A,B", "Seeds of every row of the tables.")] = "0,1,2",
    sweep: Annotated[
        str | None,
        option("--sweep SWEEP", "Further rows: a YAML list of settings, or a shipped sweep."),
    ] = None,
    rows: Annotated[
        list[str] | None,
        option("--row NAME", "Run only this row and the plain ViT; repeatable.", "all"),
    ] = None,
    jobs: Annotated[int, option("--jobs N", "Trainings at the same time.", min=1)] = 1,
    test: Annotated[bool, option("--test", "Also score finished runs on the test split.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train baselines, distilled students and controls with several seeds.

    Says accuracy over cost, which differences the seeds decide, and the epochs to an accuracy.
    Runs that have finished are not made again. The short table goes to the terminal, all tables to
    report.md and JSON, curves to PNG and SVG.

    Example: `gaupipe compare --students standard,belief2 --seeds 0,1,2`
    """
    if sweep is not None:  # refused before torch is imported
        from gaupipe.settings.load import read_yaml

        read_yaml(sweep, "sweeps")
    name = Path(config or "digits").stem if data is None else data.absolute().name
    folder = run_dir or Path("runs") / f"compare-{name}"
    settings, _ = read_settings(config, overrides, folder, data)
    from pydantic import Field

    from gaupipe.settings import StudentKey

    students = settings.model.attention if students is None else students
    attentions = parse_list("--students", students, StudentKey)
    seed = Annotated[int, Field(ge=0, lt=2**31)]
    numbers = parse_list("--seeds", seeds, seed)
    with starts("comparison", settings, folder, ", ".join(attentions)):
        from stages import compare as stage

    options: dict[str, Any] = {"sweep": sweep, "only": rows or [], "jobs": jobs, "test": test}
    options["imports"] = context.obj
    options |= {"students": attentions, "seeds": numbers}
    results = stage.compare(settings, folder, **options)
    show(asdict(results), as_json, [stage.summary(results, stage.report_in(folder, sweep))])


@command("Measure")
def verify(
    maps: Store = None,
    teacher: Annotated[
        bool, option("--teacher", "Also run the teacher again on some images and compare.")
    ] = False,
    run_dir: Annotated[
        Path | None, option("--run-dir FOLDER", "The teacher's run.", "that of the store")
    ] = None,
    sample: Annotated[
        int | None, option("--sample N", "Images for the teacher.", "256", min=1)
    ] = None,
) -> None:
    """Check that every chunk of a store is present and intact.

    The exit code is 0 only then.

    Example: `gaupipe verify runs/digits/maps.zarr --teacher`
    """
    if sample is not None and not teacher:
        raise UserError(f"--sample {sample}: is for --teacher")
    if maps is not None:
        urls = [maps]
        if run_dir is not None and not teacher:
            raise UserError(f"--run-dir {run_dir}: is for --teacher")
    else:
        run_dir = find_run(run_dir)
        urls = [RunDirectory(run_dir).stored()]
        unlabelled = store_of_unlabelled(urls[0])
        if Path(unlabelled).exists():
            urls.append(unlabelled)
    for url in urls:
        check_store(url)
    if teacher and run_dir is not None:
        RunDirectory(run_dir).settings()  # refuses a folder that is no run
    with begins(f"verify: {' and '.join(urls)}"):
        from stages import verify as stage

    sound = True
    for url in urls:
        problems: Sequence[object] = stage.find_problems(url)
        if teacher and not problems:
            problems = stage.against_teacher(url, run_dir, sample or 256)
        for problem in problems:
            print(problem)
        if problems:
            sound = False
            noun = "problems" if len(problems) > 1 else "problem"
            say(f"{url}: {len(problems)} {noun}")
            continue
        line = f"{url}: complete and intact"
        if teacher:
            line += ", as the teacher says"
        print(line)
    if not sound:
        raise typer.Exit(1)


@command("Measure")
def plan(
    config: ConfigArgument = None,
    data: DataFolder = None,
    unlabelled: Unlabelled = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    images: Annotated[
        int | None, option("--images N", "Training images of a set that is not here.", min=1)
    ] = None,
    classes: Annotated[int | None, option("--classes C", "Classes of that set.", min=2)] = None,
    model: Annotated[
        str | None,
        option(
            "--model NAME",
            "With --data: should a training begin with this ViT, or from random weights? With "
            "--images: plan the export of its maps.",
            parser=parse_name,
        ),
    ] = None,
    teacher: Teacher = None,
    download: Download = False,
    world_size: Annotated[
        int, option("--world-size W", "Plan for W processes (torchrun).", min=1, max=100_000)
    ] = 1,
    plain: Annotated[bool, option("--train", "Plan 'gaupipe train' alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Parameters, steps, memory, disk and time of a run, before it starts.

    Example: `gaupipe plan --data photos`
    """
    if unlabelled is not None and (plain or images is not None):
        other = "--train" if plain else "--images"
        raise UserError(f"--unlabelled {unlabelled}: leave it out with {other}")
    if teacher is not None and plain:
        raise UserError(f"--teacher {teacher}: leave it out with --train")
    if model is not None:
        if (data is None) == (images is None):
            raise UserError(f"--model {model}: give --data FOLDER or --images N with it")
        others: dict[str, Any] = {"CONFIG": config, "--run-dir": run_dir, "--classes": classes}
        others |= {"--world-size": world_size > 1, "--train": plain, "--teacher": teacher}
        others |= {"--unlabelled": unlabelled}
        if images is not None:  # no training, and no weights
            others |= {"--set": overrides, "--download": download}
        refuse_with_model(model, others)
        if data is not None:
            compare_beginnings(data, model, overrides, download, as_json)
        elif images is not None:
            plan_export(model, images, as_json)
        return
    changes = with_model(overrides, "phase_a.teacher", teacher, download)
    changes = with_unlabelled(changes, unlabelled)
    settings, folder = read_settings(config, changes, run_dir, data, teacher=teacher, plain=plain)
    if plain and world_size > 1:
        raise UserError("--train plans for one process: leave --world-size out")
    with starts("plan", settings, folder):
        from stages import plan as stage

    described: dict[str, Any] = {"images": images, "classes": classes, "world_size": world_size}
    planned = stage.plan_run(settings, folder, plain=plain, timed=True, **described)
    show_plan(planned, as_json)


def show_plan(planned: Any, as_json: bool) -> None:
    """Prints a plan, and what does not fit."""
    from stages.plan import tables

    show(planned, as_json, tables(planned))
    if planned["problem"] and not as_json:
        print(f"does not fit: {planned['problem']}")


def plan_export(model: str, images: int, as_json: bool) -> None:
    """Prints the plan of 'export-maps --model'."""
    check_model(model)
    with begins(f"plan: export of the maps of {model}"):
        from stages import plan as stage

    show_plan(stage.plan_model(model, images), as_json)


def compare_beginnings(
    data: Path, model: str, overrides: list[str] | None, download: bool, as_json: bool
) -> None:
    """Prints whether a training on a folder of images should begin with a model."""
    check_data(data)
    small_overrides = with_model(overrides, "model.name", None, download)
    tuned_overrides = with_model(overrides, "model.name", model, download)
    with begins(f"plan: looks at some images in {data}, and at what {model} sees of them"):
        from stages import which_way as stage
        from stages.runs.chosen_settings import settings_for

    nowhere = Path("runs")  # no run goes on here
    small, _ = settings_for(data, small_overrides, nowhere, plain=True)
    tuned, _ = settings_for(data, tuned_overrides, nowhere, plain=True)
    way = stage.decide(small, tuned)
    if as_json:
        print(json.dumps(vars(way) | {"pretrained": way.pretrained}))
        return
    print("\n".join(stage.lines(way, model)))
    training = ["gaupipe", "train", "--data", data]
    if way.pretrained:
        told = f"what {model} sees tells these images apart better than gradients do"
        training += ["--model", model, *["--download"] * download]
    else:
        told = f"gradients tell these images apart as well as what {model} sees"
    say(f"{told}: begin with", training)
