"""What a stage is asked for, of the options of a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaupipe.settings import Settings
from gaupipe.settings.load import ByName, Overrides, load, load_merged, read_overrides
from gaupipe.settings.places import check_data, check_model
from gaupipe.settings.sections import LOCAL
from gaupipe.settings.teachers import TEACHERS
from gaupipe.system import distributed
from gaupipe.system.errors import UserError
from gaupipe.system.messages import LOG
from stages.begin import begins, say
from stages.runs.directory import RunDirectory, folder_for, last_used


def find_run(run_dir: Path | None, how: str = "--run-dir names another") -> Path:
    """The folder of the run that a command continues: the one named, else the one used last, which
    is then said, with how to name another. Raises UserError for a folder that is no run."""
    if run_dir is None:
        run_dir = last_used().path
        say(f"{run_dir} (the run used last; {how})")
    RunDirectory(run_dir).settings()
    return run_dir


def student_folder(run_dir: Path, name: str, plain: bool) -> Path:
    """The folder of a student; of two with one name that of phase B, unless ``plain``."""
    run = RunDirectory(run_dir)
    return run.student(name, not plain and run.is_distilled(name))


def is_run(folder: Path) -> bool:
    """True for the folder of a run; that of a student has a config.yaml too, and the model."""
    return (folder / "config.yaml").is_file() and not (folder / "student").is_dir()


def names_classifier(source: str, before_images: bool) -> bool:
    """True if the first argument of predict names what predicts, and not an image or a folder of
    images. What is not there is a model of timm's where images follow."""
    from gaupipe.data.decoding import is_image

    folder = Path(source)
    if folder.exists():
        holds_model = (folder / "student").is_dir() or (folder / "config.json").is_file()
        return is_run(folder) or holds_model
    return source.startswith(LOCAL) or (before_images and not is_image(source))


def check_classifier(source: str) -> None:
    """Raises UserError for a path that leads nowhere; any other name may be one of timm's."""
    if "/" in source and ":" not in source and not Path(source).exists():
        raise UserError(f"{source}: there is no run, and no student's folder")
    check_model(source)


def trained_last(run_dir: Path) -> str:
    """The folder of the student that a run trained last."""
    run = RunDirectory(run_dir)
    distilled = run.is_distilled()
    names = run.students(distilled)
    if not names:
        raise UserError(f"{run_dir} has no student yet: name a model before the images")
    return str(run.student(names[-1], distilled))


def check_with_images(model: str | None, files: list[Path] | None, image_size: int | None) -> None:
    """Raises UserError for --model without --images, which belong together, and for the reverse."""
    if (model is None) != (not files):
        raise UserError("--model NAME and --images PATH belong together")
    if model is None and image_size is not None:
        raise UserError(f"--image-size {image_size}: belongs to --model NAME")


def refuse_with_model(model: str, options: Mapping[str, object]) -> None:
    """Raises UserError for the first of some named ``options`` that is given beside --model."""
    for name, value in options.items():
        if value:
            raise UserError(f"{name}: leave it out with --model {model}")


def with_model(
    overrides: Overrides | None, setting: str, name: str | None, download: bool
) -> ByName:
    """An option that names a model, --teacher or --model, and --download as settings. Raises
    UserError where --set says the same."""
    check_model(name)
    changes = read_overrides(overrides or ())
    if name is not None:
        option = "--teacher" if setting == "phase_a.teacher" else "--model"
        check_once(option, name, setting, changes)
        changes[setting] = name
    if download:
        changes["download"] = True
    return changes


def with_unlabelled(overrides: Overrides | None, place: str | None) -> ByName:
    """--unlabelled as a setting. Raises UserError for a place that is not there."""
    changes = read_overrides(overrides or ())
    if place is None:
        return changes
    from gaupipe.data.folder import whole_place

    check_data(Path(place), "--unlabelled", "images")
    check_once("--unlabelled", place, "data.unlabelled", changes)
    changes["data.unlabelled"] = whole_place(place)
    return changes


def with_options(
    overrides: Overrides | None,
    section: str,
    epochs: int | None,
    lr: float | None,
    batch_size: int | None,
    seed: int | None,
    device: str | None,
) -> ByName:
    """The options by which a training is told most as settings, those of its ``section``. Raises
    UserError where --set says the same."""
    setting_of_epochs = "phase_a.max_epochs" if section == "phase_a" else "train.epochs"
    options = {
        "--epochs": (setting_of_epochs, epochs),
        "--lr": (f"{section}.optim.lr", lr),
        "--batch-size": ("data.batch_size", batch_size),
        "--seed": ("seed", seed),
        "--device": ("device", device),
    }
    given = read_overrides(overrides or ())
    changes = dict(given)
    for option, (setting, value) in options.items():
        if value is not None:
            check_once(option, value, setting, given)
            changes[setting] = value
    return changes


def check_once(option: str, value: object, setting: str, given: ByName) -> None:
    """Raises UserError for an option whose ``setting`` is ``given`` with --set, too."""
    for name in given:
        if f"{setting}.".startswith(f"{name}."):
            raise UserError(
                f"{option} {value}: is {setting}, and the setting {name} is given too: give one"
            )


def read_settings(
    config: str | None,
    overrides: Overrides | None,
    run_dir: Path | None,
    data: Path | None = None,
    student: str | None = None,
    teacher: str | None = None,
    *,
    plain: bool = False,
    paper: bool = False,
) -> tuple[Settings, Path]:
    """The settings that a command is asked for, and the folder of its run: those for a folder of
    images; else, without a configuration, those of a run that has begun; else a configuration's.
    ``student`` is the attention that is to be trained, if another one than that of the settings.
    The other options are for the functions below. Collective."""
    changes = read_overrides(overrides or ())
    if student is not None:
        check_once("--student", student, "model.attention", changes)
        changes["model.attention"] = student
    if data is not None:
        if config is not None:
            raise UserError(
                f"--data {data}: takes the place of a configuration: leave {config} out, or keep "
                f"it and set data.name=folder and data.root={data}"
            )
        return settings_of_folder(data, changes, run_dir, plain=plain, paper=paper)
    # read by each rank: what they were told otherwise is refused by check_same, not hidden here
    if config is None and run_dir is not None and RunDirectory(run_dir).begun():
        return load_merged(RunDirectory(run_dir).config, changes), run_dir
    config = "digits" if config is None else config
    folder = run_dir or Path("runs") / Path(config).stem
    return settings_of_config(config, changes, teacher), folder


def settings_of_folder(
    data: Path, changes: ByName, run_dir: Path | None, *, plain: bool, paper: bool
) -> tuple[Settings, Path]:
    """The settings chosen for the images in a folder, which are then said, with ``plain`` without
    those of a teacher; and the folder of the run. ``paper`` chooses the GauTransformer paper's
    teacher where nothing speaks for another one, in place of the one that evidence speaks for."""
    check_data(data)
    with begins(f"looks at the images in {data}"):
        from stages.runs.chosen_settings import settings_for, takes_the_papers
    chosen = None
    if distributed.is_main():
        paper = paper and takes_the_papers(data, changes)
        folder = run_dir or folder_for(data, changes, "gaussian" if paper else None)
        settings, lines = settings_for(data, changes, folder, plain=plain, paper=paper)
        say_choices(lines)
        chosen = settings, folder
    return distributed.from_main(chosen)


def settings_of_config(config: str, changes: ByName, teacher: str | None) -> Settings:
    """The settings of a configuration. With a trained ``teacher`` what they leave open follows from
    it, and is then said."""
    settings = load(config, changes)
    if teacher is None or settings.phase_a.teacher in TEACHERS:
        return settings
    with begins(f"looks at {settings.phase_a.teacher}"):
        from stages.runs.trained_teacher import with_trained_teacher
    if distributed.is_main():
        settings, lines = with_trained_teacher(config, changes, settings)
        say_choices(lines)
    return distributed.from_main(settings)


def say_choices(lines: list[str]) -> None:
    """Prints the lines of :func:`settings_for`. On a terminal a long reason goes on below its
    beginning, and a command stays in one piece."""
    for line in lines:
        setting = re.match(r"  \S+  +", line)
        if line.startswith("  gaupipe "):
            LOG.info("", extra={"command": shlex.split(line)})
        else:
            indent = len(setting[0]) if setting else 2
            LOG.info(line, extra={"indent": indent})


def parse_list(option: str, text: str, kind: Any) -> list[Any]:
    """The values of an option that takes several, separated by commas, each once."""
    from pydantic import TypeAdapter, ValidationError

    try:
        values = TypeAdapter(list[kind]).validate_python(text.replace(" ", "").split(","))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{option} {text!r}: {first['input']!r}: {first['msg']}") from None
    return list(dict.fromkeys(values))
