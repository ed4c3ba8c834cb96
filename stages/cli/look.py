"""Commands that show: classes, settings, stored maps, and the page in a browser."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

from gaupipe.settings.places import check_images, check_model
from gaupipe.system.errors import UserError
from gaupipe.system.files import check_file
from stages.begin import begins, check_store
from stages.cli.app import command
from stages.cli.options import (
    AnyModel,
    AsJson,
    Download,
    ImagePaths,
    ImageSize,
    Predictions,
    RunDir,
    Store,
    argument,
    option,
    parse_path,
)
from stages.cli.output import lines_of, on_terminal, show
from stages.request import (
    check_classifier,
    check_with_images,
    find_run,
    is_run,
    names_classifier,
    refuse_with_model,
    trained_last,
)
from stages.runs.directory import RunDirectory


@command("Look")
def predict(
    source: Annotated[
        str | None,
        argument(
            "SOURCE",
            "A run, a student's folder, local-dir:FOLDER, or a timm name with weights.",
            "the run used last",
        ),
    ] = None,
    paths: Annotated[
        list[Path] | None, argument("PATHS", "Images, and folders of images.", parser=parse_path)
    ] = None,
    top: Annotated[int, option("--top N", "Classes for each image.", min=1)] = 1,
    out: Predictions = None,
    download: Download = False,
) -> None:
    """The classes of images, by a student or any other classifier.

    Prints CSV, and a table on a terminal.

    Example: `gaupipe predict photo.jpg`, or `gaupipe predict runs/digits photos`
    """
    paths = paths or []
    if source is not None and not names_classifier(source, bool(paths)):
        paths = [parse_path(source), *paths]
        source = None
    if not paths:
        raise UserError("predict: name images, or folders of images: 'gaupipe predict photo.jpg'")
    check_images(paths)
    if out is not None:
        check_file("--out", out, ".csv", ".json")
    if source is None:
        source = trained_last(find_run(None, "a run before the images names another"))
    elif is_run(Path(source)):
        source = trained_last(Path(source))
    check_classifier(source)
    with begins(f"predict: {source}"):
        from stages import predict as stage

    predictions = stage.run(source, paths, top=top, download=download)
    if out is not None:
        stage.write(predictions, out)
        print(out)
    elif on_terminal():
        print("\n".join(stage.lines(predictions)))
    else:
        print(stage.as_csv(predictions), end="")
    stage.check_readable(predictions)


@command("Look", "settings")
def settings_page(
    name: Annotated[
        str | None,
        argument("NAME", "A section, a setting, or a shipped configuration.", "all settings"),
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


@command("Look", "curves")
def curves_of(
    runs: Annotated[
        list[Path] | None,
        argument(
            "RUN...", "Runs, or folders of trainings.", "the run used last", parser=parse_path
        ),
    ] = None,
    out: Annotated[
        Path | None, option("--out FILE.png", "The figure.", "curves.png in the first RUN")
    ] = None,
) -> None:
    """Learning curves of all trainings in some runs, as PNG and SVG.

    Example: `gaupipe curves runs/digits runs/longer --out both.png`
    """
    runs = runs or [find_run(None, "a name after 'curves' is another")]
    for run in runs:
        if not run.is_dir():
            raise UserError(f"{run}: no such folder; name a run, or the folder of a training")
    if out is None:
        out = runs[0] / "curves.png"
    check_file("--out", out, ".png")
    from stages import curves as stage

    for path in stage.draw_runs(runs, out):
        print(path)


@command("Look")
def inspect(
    maps: Store = None,
    run_dir: RunDir = None,
    student: Annotated[
        str | None, option("--student NAME", "The maps of this student, beside the stored ones.")
    ] = None,
    image: Annotated[int | None, option("--image ID", "The image whose map is shown.")] = None,
    layer: Annotated[int | None, option("--layer L", "Encoder block, from 0.", "the last")] = None,
    head: Annotated[str | None, option("--head H|mean", "Head, from 0.", "mean")] = None,
    query: Annotated[
        str | None,
        option(
            "--query Q|mean",
            "A patch, from 0 in row-major order; class or 'register 1' where the store has these.",
            "the patch in the middle",
        ),
    ] = None,
    view: Annotated[int | None, option("--view V", "Stored view, from 0.", "0")] = None,
    png: Annotated[
        Path | None, option("--png FILE", "Draw the map over the image, the query's patch framed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The contents of a store: a summary, or the map of one image.

    Example: `gaupipe inspect --image 7 --layer 1 --png map.png`
    """
    if student is not None and maps is not None:
        raise UserError("inspect: give a STORE or a --student (of --run-dir), not both")
    if run_dir is not None and maps is not None:
        raise UserError(f"--run-dir {run_dir}: leave it out with a STORE")
    run_dir = find_run(run_dir) if maps is None else run_dir
    if maps is None and student is None and run_dir is not None:
        maps = RunDirectory(run_dir).stored()
    if maps is not None:
        check_store(maps)
    if png is not None:
        check_file("--png", png, ".png")
    with begins(f"inspect: {maps or run_dir}"):
        from stages.look import inspect as stage

    shown = {"layer": layer, "head": head, "query": query, "view": view, "png": png}
    options: dict[str, Any] = {key: value for key, value in shown.items() if value is not None}
    if image is None:
        for name, value in ({"student": student} | options).items():
            if value is not None:
                raise UserError(
                    f"--{name} {value}: shows one image's map: name the image with --image ID"
                )
        assert maps is not None  # a --student needs an --image
        summary = stage.summary(maps)
        digest = summary["teacher_sha256"]
        if not as_json:  # 64 digits are longer than a line
            summary["teacher_sha256"] = f"{digest!s:.16} ..." if digest else None
        show(summary, as_json, lines_of(summary))
        return
    seen = stage.attention(image, url=maps, run_dir=run_dir, student=student, **options)
    show(seen.to_json(), as_json, [stage.heat_map(seen)])


@command("Look")
def view(
    maps: Store = None,
    run_dir: RunDir = None,
    students: Annotated[
        list[str] | None,
        option("--student NAME", "Students beside the store; repeatable.", "all that finished"),
    ] = None,
    images: Annotated[
        list[int] | None,
        option("--image ID", "The first image; with --html the images, repeatable.", "0"),
    ] = None,
    html: Annotated[
        Path | None, option("--html FILE", "Write a page that needs no server, and stop.")
    ] = None,
    model: AnyModel = None,
    files: ImagePaths = None,
    download: Download = False,
    split: Annotated[
        Literal["train", "val", "test"] | None,
        option(
            "--split SPLIT",
            "train, val or test: the images to open with.",
            "those of the store, else val",
        ),
    ] = None,
    random_weights: Annotated[
        bool, option("--random-weights", "Do without the weights of the --model: initialise it.")
    ] = False,
    image_size: ImageSize = None,
    port: Annotated[int | None, option("--port N", "Port.", "8642", min=1, max=65535)] = None,
    open_browser: Annotated[bool, option("--open/--no-open", "Open a browser.")] = True,
) -> None:
    """Look at attention maps in a browser: of a store, or of any ViT.

    Needs `pip install -e '.[view]'` in the folder of gaupipe's clone.

    Example: `gaupipe view --model vit_small_patch14_dinov2.lvd142m --images photos --download`
    """
    check_with_images(model, files, image_size)
    if model is not None:
        others = {"STORE": maps, "--run-dir": run_dir, "--student": students, "--split": split}
        refuse_with_model(model, others)
    else:
        for name, value in {"--random-weights": random_weights, "--download": download}.items():
            if value:
                raise UserError(f"{name}: belongs to --model NAME")
        run_dir = find_run(run_dir) if maps is None else run_dir
    if maps is not None:
        check_store(maps)
    check_images(files or ())
    check_model(model)
    if html is not None:
        check_file("--html", html, ".html", ".htm")
        if port is not None:
            raise UserError(f"--port {port}: leave it out with --html, which starts no server")
    with begins(f"view: {model or maps or run_dir}"):
        from stages import view as stage

    options: dict[str, Any] = {"students": students, "split": split, "images": images, "html": html}
    options |= {"model": model, "files": files or (), "image_size": image_size}
    options |= {"download": download, "random_weights": random_weights}
    options |= {"port": port, "open_browser": open_browser}
    stage.run(maps, run_dir, **options)
