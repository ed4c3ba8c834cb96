"""The model card of a published student: model_card.md, filled in with what its run says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from gaupipe.attention import ATTENTION
from gaupipe.attention.options import count_parameters
from gaupipe.data.splits import ImageData
from gaupipe.settings import Settings
from gaupipe.settings.teachers import TEACHERS
from gaupipe.system.files import utf8
from gaupipe.system.progress import EpochMetrics, epochs_in, read_metrics, total_seconds
from gaupipe.system.version import __version__
from gaupipe.vit.fine_tuning import fine_tunes
from gaupipe.vit.saving import STOCK_ARCHITECTURE
from stages.runs import kept_epochs
from stages.runs.trained import TrainedStudent


def write(
    student: TrainedStudent,
    data: ImageData,
    scores: dict[str, dict[str, Any]],
    settings: Settings,
    title: str,
) -> str:
    """The text of README.md. What a run cannot know is left to its reader, in marked places.

    ``scores`` has by split what :func:`gaupipe.training.scores.classification_metrics` returns;
    ``settings`` are those that are published, ``title`` is the name of the model.
    """
    split = "test" if "test" in scores else "validation"
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
        model_name=title,
        eval_results=[result],
    )
    train = settings.student_training if student.distilled else settings.train
    config = json.loads((student.folder / "student" / "config.json").read_bytes())
    metrics = metrics_in(student.folder)
    attention = settings.model.attention
    equation = " ".join((ATTENTION[attention].__doc__ or "").split("\n\n")[0].split())
    card = ModelCard.from_template(
        head,
        template_path=str(Path(__file__).with_suffix(".md")),
        title=title,
        version=__version__,
        needs_gaupipe=config["architecture"] != STOCK_ARCHITECTURE,
        data=data,
        class_names=getattr(data.train.source, "class_names", ()),
        scores=scores,
        model=student.model,
        parameters=count_parameters(student.model),
        equation=equation.replace("``", "`"),
        epochs=len(metrics),
        seconds=total_seconds(metrics),
        epoch=kept_epochs.entry(student.folder)["epoch"],
        settings=settings,
        train=train,
        started_from=settings.model.name if fine_tunes(settings.model.name) else None,
        teacher=teacher_of(student, settings) if student.distilled else None,
        code=code,
    )
    content: str = card.content
    return content + "\n"


def code(text: str) -> str:
    """Any text as code in Markdown, on one line, without characters that a terminal obeys."""
    text = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in utf8(text)
    )
    fence = "`" * (1 + max(map(len, re.findall("`*", text))))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def metrics_in(folder: Path) -> list[EpochMetrics]:
    """The epochs of a stage; none where it had no training to do."""
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.is_file() else []


def named_teacher(name: str) -> str:
    """A teacher in words, or the name of its weights."""
    if name in TEACHERS:
        return TEACHERS[name].words
    return code(name)


def teacher_of(student: TrainedStudent, settings: Settings) -> str:
    """The teacher of a student, and how far it was trained."""
    name = settings.phase_a.teacher
    teacher = named_teacher(name)
    if student.has_other_teacher:
        if name in TEACHERS:
            teacher = "another one than the run's"
    elif epochs := metrics_in(student.run.phase_a):
        last = [epochs[-1]["train_acc"], epochs[-1]["val_acc"]]
        reached = " / ".join("-" if one is None else f"{100 * one:.2f} %" for one in last)
        teacher += f"; epochs: {epochs_in(epochs)}; training / validation accuracy: {reached}"
    if student.has_other_predictions:
        teacher += "; predictions of another teacher (`gaupipe phase-b --predictions`)"
    return teacher
