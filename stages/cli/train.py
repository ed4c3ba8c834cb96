"""Commands that train: all stages, and each by itself."""

from __future__ import annotations

from typing import Annotated, Literal

from stages import functions
from stages.begin import check_store, starts
from stages.cli.app import command
from stages.cli.hints import say_if_overfitted, say_next, say_other_epoch
from stages.cli.options import (
    AnyModel,
    Attention,
    BatchSize,
    ConfigArgument,
    DataFolder,
    Device,
    Download,
    Epochs,
    Force,
    ImagePaths,
    ImageSize,
    LearningRate,
    NewRunDir,
    Overrides,
    Resume,
    RunDir,
    Seed,
    Teacher,
    TeacherEpochs,
    TeacherLearningRate,
    Unlabelled,
    option,
    parse_name,
    parse_part,
)
from stages.cli.output import print_rich
from stages.request import (
    find_run,
    read_settings,
    with_model,
    with_options,
    with_unlabelled,
)
from stages.runs import students
from stages.runs.directory import RunDirectory


@command("Train")
def run(
    config: ConfigArgument = None,
    data: DataFolder = None,
    unlabelled: Unlabelled = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    device: Device = None,
    student: Attention = None,
    teacher: Teacher = None,
    download: Download = False,
    baseline: Annotated[
        bool,
        option("--baseline/--no-baseline", "Also train the same ViT on the labels alone."),
    ] = True,
) -> None:
    """All stages, then a table of what was gained.

    Stages that have finished are not run again.

    Example: `gaupipe run --data photos --unlabelled more --teacher deit_tiny_patch16_224.fb_in1k`
    """
    changes = with_options(overrides, "train", epochs, lr, batch_size, seed, device)
    ran = functions.run(
        config,
        data=data,
        unlabelled=unlabelled,
        teacher=teacher,
        student=student,
        run_dir=run_dir,
        download=download,
        baseline=baseline,
        overrides=changes,
    )
    from stages.run import table

    folder = ran.folder
    print_rich(table(ran.lines, f"{ran.student.settings.data.title}: {folder}"))
    say_next(["evaluate", "--run-dir", folder], ["view", "--run-dir", folder])


@command("Train", "phase-a")
def phase_a(
    config: ConfigArgument = None,
    data: DataFolder = None,
    unlabelled: Unlabelled = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    epochs: TeacherEpochs = None,
    lr: TeacherLearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    device: Device = None,
    resume: Resume = False,
    force: Force = False,
    teacher: Teacher = None,
    download: Download = False,
) -> None:
    """Make the teacher: train it, or take a trained ViT.

    With --data and no --teacher it is the GauTransformer paper's, with Gaussians for each image;
    with images without labels a ResNet. 'run' is phase-a, export-maps and phase-b in turn.

    Example: `gaupipe phase-a --data photos`
    """
    changes = with_options(overrides, "phase_a", epochs, lr, batch_size, seed, device)
    changes = with_model(changes, "phase_a.teacher", teacher, download)
    changes = with_unlabelled(changes, unlabelled)
    settings, folder = read_settings(config, changes, run_dir, data, teacher=teacher, paper=True)
    RunDirectory(folder).check_place()
    with starts("phase A", settings, folder, model=f"teacher {settings.phase_a.teacher}"):
        from stages import phase_a as stage

    stage.run(settings, folder, resume=resume, force=force)
    following = "export-maps" if settings.phase_a.kind.stored else "phase-b"
    say_next([following, "--run-dir", folder])
    print(folder)


@command("Train", "export-maps")
def export_maps(
    run_dir: RunDir = None,
    kind: Annotated[
        str | None,
        option("--kind KIND", "Such as gaussian, topk or predictions.", "what fits the teacher"),
    ] = None,
    encoding: Annotated[
        Literal["float16", "uint8"] | None,
        option("--encoding TYPE", "float16 or uint8.", "what fits the kind"),
    ] = None,
    k: Annotated[
        int | None,
        option(
            "--k N",
            "Keys of a query that topk stores.",
            "a quarter, with --model 8",
            min=1,
            max=255,
        ),
    ] = None,
    views: Annotated[
        int | None, option("--views N", "Augmented views of each image.", min=2, max=10000)
    ] = None,
    teacher: Annotated[
        str | None,
        option("--teacher NAME", "A ViT: local-dir:FOLDER or a timm name.", "the run's teacher"),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        option(
            "--set A.B=C",
            "Such as threads=1, or phase_a.teacher_args={num_classes: 0} for --teacher.",
        ),
    ] = None,
    model: AnyModel = None,
    files: ImagePaths = None,
    image_size: ImageSize = None,
    download: Download = False,
    out: Annotated[
        str | None,
        option("--out PATH-OR-URL", "Where the store goes.", "maps.zarr in the run directory"),
    ] = None,
    overwrite: Annotated[bool, option("--overwrite", "Replace a store that is there.")] = False,
    repair: Annotated[bool, option("--repair", "Rewrite only what verify finds damaged.")] = False,
    shard_mb: Annotated[float, option("--shard-mb MB", "Shard, uncompressed.", min=0.001)] = 32,
    part: Annotated[
        tuple | None,  # type: ignore[type-arg]  # tuple[int, int] would be two words to typer
        option("--part I/N", "Only the I-th of N parts, such as 3/16.", "all", parser=parse_part),
    ] = None,
    license: Annotated[
        str | None,
        option("--license NAME", "Of the images, such as cc-by-4.0, for the store's README.md."),
    ] = None,
    force: Force = False,
) -> None:
    """Write the attention maps and predictions of a run's teacher, or of any ViT, to a zarr store.

    An export that was interrupted goes on where it stopped when the same command is given again.
    Parts may be written at once, on any machines, and the last one completes the store.

    Example: `gaupipe export-maps --model vit_small_patch16_224 --images photos --out maps.zarr`
    """
    url = functions.export(
        run_dir,
        model=model,
        images=files or (),
        out=out,
        kind=kind,
        encoding=encoding,
        k=k,
        views=views,
        teacher=teacher,
        overrides=overrides or (),
        image_size=image_size,
        download=download,
        overwrite=overwrite,
        repair=repair,
        shard_mb=shard_mb,
        part=part,
        license=license,
        force=force,
    )
    if url is not None:
        print(url)


@command("Train", "phase-b")
def phase_b(
    run_dir: RunDir = None,
    student: Attention = None,
    name: Annotated[
        str | None,
        option("--name NAME", "The student's folder.", "the attention"),
    ] = None,
    overrides: Overrides = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    device: Device = None,
    maps: Annotated[
        str | None, option("--maps PATH-OR-URL", "The store.", "maps.zarr in the run directory")
    ] = None,
    predictions: Annotated[
        str | None,
        option("--predictions PATH-OR-URL", "A second store, of the predictions.", "the store"),
    ] = None,
    distill: Annotated[
        bool, option("--distill/--no-distill", "--no-distill trains on the labels alone.")
    ] = True,
    resume: Resume = False,
) -> None:
    """Train a student from the store: an ordinary ViT, which timm loads.

    Example: `gaupipe phase-b --student belief2 --epochs 40`
    """
    changes = with_options(overrides, "train", epochs, lr, batch_size, seed, device)
    run_dir = find_run(run_dir)
    request = students.resolve(
        run_dir,
        student,
        name=name,
        overrides=changes,
        maps_url=maps,
        predictions_url=predictions,
        resume=resume,
        distilled=distill,
    )
    for url in (request.store_url, request.predictions_url):
        if url is not None:
            check_store(url)
    with starts("phase B", request.settings, request.folder):
        from stages import phase_b as stage

    metrics = stage.run_request(request)
    say_other_epoch(request.folder, metrics)
    named = ["--run-dir", run_dir, "--student", request.folder.name]
    evaluation = ["evaluate", *named]
    if not distill:
        evaluation.append("--plain")
    say_next(evaluation, ["view", "--run-dir", run_dir])
    print(request.folder / "student")


@command("Train")
def train(
    config: ConfigArgument = None,
    data: DataFolder = None,
    run_dir: NewRunDir = None,
    overrides: Overrides = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    device: Device = None,
    student: Attention = None,
    model: Annotated[
        str | None,
        option(
            "--model NAME",
            "Fine-tune these weights: a timm name, or local-dir:FOLDER.",
            "none, a training from random weights",
            parser=parse_name,
        ),
    ] = None,
    download: Download = False,
    resume: Resume = False,
) -> None:
    """Train a ViT on the labels alone: no teacher, no store.

    Example: `gaupipe train --data photos --epochs 30`
    """
    changes = with_options(overrides, "train", epochs, lr, batch_size, seed, device)
    trained = functions.train(
        config,
        data=data,
        model=model,
        student=student,
        run_dir=run_dir,
        resume=resume,
        download=download,
        overrides=changes,
    )
    attention = trained.folder.name
    run_directory = RunDirectory(trained.folder.parents[1])
    say_other_epoch(trained.folder, trained.metrics)
    say_if_overfitted(trained.metrics, trained.settings)
    named = ["--run-dir", run_directory.path, "--student", attention]
    evaluation = ["evaluate", *named]
    if run_directory.is_distilled(attention):  # phase B has one of this name, too
        evaluation.append("--plain")
    say_next(evaluation, ["view", *named])
    print(trained.folder / "student")
