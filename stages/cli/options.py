"""Arguments and options that several commands share, and how each is written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gaupipe.attention import ATTENTION, STUDENTS
from gaupipe.settings.load import flatten, load
from gaupipe.settings.teachers import TEACHERS

DIGITS = flatten(load("digits"))


def untyped(kind: Any) -> Any:
    """A kind of typer's commands whose help shows no type for a flag or an argument."""

    class Untyped(kind):
        def get_params(self, context: Any) -> list[Any]:
            params: list[Any] = super().get_params(context)
            for param in params:
                if getattr(param, "is_flag", param.param_type_name == "argument"):
                    param.display_type_rich = lambda ctx: None
            return params

    return Untyped


def option(usage: str, help: str, default: str | bool = True, **more: Any) -> Any:
    """An option, written as in the help: ``--set A.B=C``; a name without a value is a flag.
    ``default`` is what the help says holds without the option, if not the default itself."""
    name, _, metavar = usage.partition(" ")
    return typer.Option(name, metavar=metavar, help=help, show_default=default, **more)


def setting(usage: str, help: str, name: str, **more: Any) -> Any:
    """An option for the setting of this ``name``, whose default is that of the configuration: of
    ``digits`` the help says it."""
    return option(usage, f"{help} ({name}).", f"{DIGITS[name]} in digits", **more)


def student_setting(usage: str, help: str, name: str, **more: Any) -> Any:
    """As :func:`setting`, for one of ``train``, which may differ in ``phase_b``."""
    distilled = DIGITS[f"phase_b.{name}"]
    default = f"{distilled} in digits, {DIGITS[f'train.{name}']} without a teacher"
    return option(usage, f"{help} (train.{name}).", default, **more)


def argument(metavar: str, help: str, default: str | bool = True, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=default, **more)


def parse_path(text: str) -> Path:
    """A path of the command line, which an unset variable of a script may have left empty."""
    if not text:
        raise typer.BadParameter("is empty; the current folder is '.'")
    return Path(text)


def parse_name(text: str) -> str:
    """A name of the command line, which a script may have left empty as well."""
    if not text:
        raise typer.BadParameter("is empty")
    return text


def parse_part(text: str) -> tuple[int, int]:
    """The numbers of 3/16."""
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal()):
        raise typer.BadParameter(f"{text!r} should be a part and the number of parts: 3/16")
    return int(number), int(parts)


def complete_config() -> list[str]:
    """For the shell's completion: the shipped configurations. The shell adds files by itself."""
    from gaupipe.settings.load import shipped

    return shipped()


def parse_attention(text: str) -> str:
    """The key of an attention, in any case; --import may have added some."""
    if text.lower() not in ATTENTION:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(ATTENTION)}")
    return text.lower()


def complete_attention() -> list[str]:
    """For the shell's completion."""
    return list(ATTENTION)


ConfigArgument = Annotated[
    str | None,
    argument(
        "CONFIG",
        "A YAML file, or the name of a shipped configuration.",
        "digits",
        autocompletion=complete_config,
    ),
]
DataFolder = Annotated[
    Path | None,
    option(
        "--data FOLDER",
        "A folder of your images in place of CONFIG; the settings are chosen from the images.",
        parser=parse_path,
    ),
]
Unlabelled = Annotated[
    str | None,
    option(
        "--unlabelled FOLDER",
        "Images without labels, too: a folder, a .tar or hfds/NAME.",
        "unlabelled/ beside train/",
        parser=parse_name,
    ),
]
RunDir = Annotated[
    Path | None,
    option("--run-dir FOLDER", "The run's folder.", "the run used last", parser=parse_path),
]
NewRunDir = Annotated[
    Path | None,
    option(
        "--run-dir FOLDER",
        "The run's folder.",
        "runs/ and the name of CONFIG, or of FOLDER and MODEL or TEACHER",
        parser=parse_path,
    ),
]
STUDENT = {
    "help": "The student: its attention, or the --name it was trained under.",
    "default": "the one trained last",
}
StudentName = Annotated[str | None, option("--student NAME", **STUDENT)]
StudentArgument = Annotated[str | None, argument("STUDENT", **STUDENT)]
Attention = Annotated[
    str | None,
    setting(
        "--student ATTENTION",
        f"One of {', '.join(STUDENTS)}",
        "model.attention",
        parser=parse_attention,
        autocompletion=complete_attention,
    ),
]
Plain = Annotated[bool, option("--plain", "The ViT trained without a teacher.")]
Overrides = Annotated[list[str] | None, option("--set A.B=C", "Change one setting; repeatable.")]
Epochs = Annotated[int | None, student_setting("--epochs N", "Epochs", "epochs", min=1)]
LearningRate = Annotated[
    float | None, student_setting("--lr RATE", "Learning rate after the warm-up", "optim.lr")
]
TeacherEpochs = Annotated[
    int | None, setting("--epochs N", "Most epochs", "phase_a.max_epochs", min=1)
]
TeacherLearningRate = Annotated[
    float | None, setting("--lr RATE", "Learning rate after the warm-up", "phase_a.optim.lr")
]
BatchSize = Annotated[
    int | None, setting("--batch-size N", "Images in a step", "data.batch_size", min=1)
]
Seed = Annotated[int | None, setting("--seed N", "Seed of all random numbers", "seed", min=0)]
Device = Annotated[
    str | None, option("--device NAME", "cpu, cuda or cuda:1 (device).", "a GPU where there is one")
]
Resume = Annotated[bool, option("--resume", "Continue from the last checkpoint.")]
Force = Annotated[bool, option("--force", "Start even if memory or disk look too small.")]
Teacher = Annotated[
    str | None,
    setting(
        "--teacher NAME",
        f"{', '.join(TEACHERS)}, local-dir:FOLDER, or a timm name with published weights",
        "phase_a.teacher",
        parser=parse_name,
    ),
]
Download = Annotated[
    bool, option("--download", "Fetch published weights that are not on this machine.")
]
AnyModel = Annotated[
    str | None,
    option(
        "--model NAME",
        "In place of a run: a timm name, hf-hub:NAME, local-dir:FOLDER, a student's folder.",
        parser=parse_name,
    ),
]
ImagePaths = Annotated[
    list[Path] | None,
    option(
        "--images PATH",
        "Images for --model: files, or folders of images; repeatable.",
        parser=parse_path,
    ),
]
ImageSize = Annotated[
    int | None,
    option("--image-size N", "Pixels for --model.", "the model's; view: fewer", min=1),
]
Store = Annotated[
    str | None,
    argument("STORE", "Path or URL of an attention-map store.", "that of the run"),
]
Predictions = Annotated[
    Path | None, option("--out FILE", "Write all predictions: CSV, or JSON by its name.")
]
AsJson = Annotated[bool, option("--json", "Print JSON.")]
