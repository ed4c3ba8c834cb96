"""The model card of a published student: model_card.md, filled in with what its run says."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

import store
from gaupipe import __version__
from gaupipe.attention import ATTENTION
from gaupipe.attention.options import count_parameters
from gaupipe.data.splits import ImageData, utf8
from gaupipe.settings import Settings
from gaupipe.system.progress import epochs_in, read_metrics, total_seconds
from gaupipe.teachers.pretrained import LOCAL
from gaupipe.vit.saving import STOCK_ARCHITECTURE
from stages.runs import kept_epochs
from stages.students import TrainedStudent, stores_of

SETTINGS = "settings.yaml"
"""The file of a published folder with the student's settings."""

TEACHERS = {
    "gaussian": "a ViT with GauAttention, trained in phase A",
    "vit": "a ViT, trained in phase A",
}


def write(student: TrainedStudent, data: ImageData, scores: dict[str, dict], title: str) -> str:
    """The text of README.md. What a run cannot know is left to its reader, in marked places.

    ``scores`` are those of :func:`stages.evaluate.metrics` by split; ``title`` is the name of the
    model, perhaps after that of its owner (OWNER/NAME).
    """
    name, split = title.split("/")[-1], "test" if "test" in scores else "validation"
    result = EvalResult(
        task_type="image-classification",
        dataset_type=data.name,
        dataset_name=data.name,
        dataset_split=split,
        metric_type="accuracy",
        metric_value=round(scores[split]["top1"], 4),
    )
    head = ModelCardData(
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "gaupipe"],
        model_name=name,
        eval_results=[result],
    )
    config = json.loads((student.folder / "student" / "config.json").read_bytes())
    card = ModelCard.from_template(
        head,
        template_path=str(Path(__file__).with_suffix(".md")),
        title=name,
        attention=student.settings.phase_b.student,
        version=__version__,
        needs_gaupipe=config["architecture"] != STOCK_ARCHITECTURE,
        repo=title if "/" in title else f"OWNER/{title}",
        image_mode="L" if data.channels == 1 else "RGB",
        num_classes=data.num_classes,
        scores=scores,
        data_lines=data_lines(data, student.settings),
        training_lines=training_lines(student),
        commands=commands(student, tested="test" in scores),
    )
    return card.content + "\n"


def code(text: str) -> str:
    """Any text as code in Markdown, on one line, without characters that a terminal obeys."""
    text = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in utf8(text)
    )
    fence = "`" * (1 + max(map(len, re.findall("`*", text))))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def data_lines(data: ImageData, settings: Settings) -> list[str]:
    """The images, as items of a list."""
    root = settings.data.root
    folder = "" if root is None else f", {code(root.name + '/')}"
    tested = "" if data.test is None else f", {len(data.test):,} test images"
    names = getattr(data.train.source, "class_names", ())
    shown = ", ".join(map(code, names[:20])) + (", ..." if len(names) > 20 else "")
    colours = "grey" if data.channels == 1 else "RGB"
    return [
        f"data set: {data.name}{folder}",
        f"{len(data.train):,} training images, {len(data.val):,} validation images{tested}",
        f"{data.num_classes} classes" + (f": {shown}" if names else ""),
        f"images of {data.image_size} x {data.image_size} pixels, {colours}",
        f"sha256 of the training images, their order and labels: `{data.sha256}`",
    ]


def training_lines(student: TrainedStudent) -> list[str]:
    """The model, its training and its teacher, as items of a list."""
    settings, phase, model = student.settings, student.settings.phase_b, student.model
    optim = phase.optim if student.distilled else settings.baseline_optim
    epochs = metrics_in(student.folder)
    equation = (ATTENTION[phase.student].__doc__ or "").split("\n\n")[0]
    lines = [
        f"model: {count_parameters(model):,} parameters, width {model.embed_dim}, blocks: "
        f"{len(model.blocks)}",
        f"attention: `{phase.student}`. {' '.join(equation.split()).replace('``', '`')}",
        f"epochs: {len(epochs)}, in {total_seconds(epochs):.0f} s; {optim.name}, learning rate "
        f"{optim.lr:g}, batches of {settings.data.batch_size}, seed {settings.seed}",
    ]
    if phase.keep == "best":
        lines.append(
            f"weights: of epoch {kept_epochs.entry(student.folder)['epoch']}, the best by "
            "val_acc, so they were chosen on the validation images"
        )
    if not student.distilled:
        return [*lines, "teacher: none; the model learned from the labels alone"]
    return [*lines, *teacher_lines(student)]


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    """The epochs of a stage; none where it had no training to do."""
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.is_file() else []


def teacher_lines(student: TrainedStudent) -> list[str]:
    """The teacher, what was stored of it, and the losses."""
    phase, schema = student.settings.phase_b, schema_of(student)
    if student.has_other_teacher:
        named = teacher_in(schema)
        teacher = code(named) if named else "another one than the run's"
    else:
        named = without_folders(student.settings.phase_a.teacher)
        teacher = TEACHERS.get(named, code(named))
        if epochs := metrics_in(student.run.phase_a):
            last = [epochs[-1].get(key) for key in ("train_acc", "val_acc")]
            reached = " / ".join("-" if one is None else f"{100 * one:.2f} %" for one in last)
            teacher += f"; epochs: {epochs_in(epochs)}; training / validation accuracy: {reached}"
    return [
        f"teacher: {teacher}",
        *([f"stored attention: {schema.kind}, {schema.encoding}"] if schema else []),
        f"loss: {phase.alpha:g} x teacher's predictions + {phase.beta:g} x labels + "
        f"{phase.gamma:g} x attention maps (gamma {phase.gamma_schedule}); "
        f"warm start: {phase.warm_start}",
    ]


def commands(student: TrainedStudent, tested: bool) -> list[str]:
    """The commands that train and score the model again from the published settings."""
    evaluate = f"gaupipe evaluate --run-dir run{' --test' if tested else ''}"
    if not student.distilled:
        return [f"gaupipe train {SETTINGS} --run-dir run", evaluate]
    export, maps, run = "", "", student.run
    if schema := schema_of(student):
        export = f" --kind {schema.kind} --encoding {schema.encoding}"
        export += f" --k {schema.k}" if schema.k else ""
        export += f" --views {schema.views}" if schema.views > 1 else ""
    if student.has_other_teacher:
        if arguments := schema and schema.extra.get("teacher_args"):
            given = shlex.quote(f"phase_a.teacher_args={json.dumps(arguments)}")
            export = f" --set {given}{export}"
        teacher = shlex.quote(teacher_in(schema) or "TEACHER")
        export, maps = f" --teacher {teacher} --out maps.zarr{export}", " --maps maps.zarr"
    attention = student.settings.phase_b.student
    changes = "" if attention == run.settings().phase_b.student else f" --student {attention}"
    changes += "" if student.name == attention else f" --name {student.name}"
    for name, value in run.differences(student.name).items():
        if name != "phase_b.student":
            changes += f" --set {shlex.quote(f'{name}={json.dumps(value)}')}"
    return [
        f"gaupipe phase-a {SETTINGS} --run-dir run",
        f"gaupipe export-maps --run-dir run{export}",
        f"gaupipe phase-b --run-dir run{maps}{changes}",
        evaluate,
    ]


def schema_of(student: TrainedStudent) -> store.Schema | None:
    """The schema of the store that a student learned from; None where the store is gone."""
    for url, teacher_sha256 in stores_of(student):
        with contextlib.suppress(store.StoreError):
            return store.open(url, teacher_sha256=teacher_sha256).schema
    return None


def teacher_in(schema: store.Schema | None) -> str | None:
    """The name of the teacher that a store notes."""
    named = schema and schema.extra.get("teacher")
    return without_folders(named) if named else None


def without_folders(teacher: str) -> str:
    """The name of a teacher, without the folders above that of a ``local-dir:`` teacher."""
    return LOCAL + Path(teacher).name if teacher.startswith(LOCAL) else teacher
