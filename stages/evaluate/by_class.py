"""Predictions of labelled images: how good they are for each class, and where they fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from gaupipe.data.splits import Split
from gaupipe.system.files import from_here
from gaupipe.system.terminal import aligned
from gaupipe.vit.heads import probabilities
from stages.predict import Prediction, PredictionRow, as_row, most_probable

MISTAKES = 10
"""Mistakes in the scores."""

SHOWN_CLASSES = 20
"""Classes in their table on a terminal."""

IN_TABLES = ("classes", "confusion", "mistakes")


def labelled(
    logits: Tensor, labels: Tensor, images: Split, names: Sequence[str]
) -> list[Prediction]:
    """The prediction for each image of a split, from logits [N, C], beside its label of [N]."""
    predicted = most_probable(probabilities(logits), names, top=1)
    pairs = zip(predicted, labels.tolist(), strict=True)
    return [
        Prediction(images.path(image), classes, label=names[label])
        for image, (classes, label) in enumerate(pairs)
    ]


ClassScore = TypedDict("ClassScore", {"class": str, "images": int, "top1": float | None})
"""The images of a class and their accuracy, None without images."""


class Mistake(PredictionRow):
    """An image whose class was not predicted: its number in the split, and what was."""

    image: int


class ByClass(TypedDict):
    classes: list[ClassScore]
    confusion: list[list[int]]
    """A row for each class, a column for each prediction."""
    mistakes: list[Mistake]
    """The most confident ones first."""


def by_class(rows: Sequence[Prediction], names: Sequence[str]) -> ByClass:
    """The accuracy of each class, the confusion matrix and the mistakes."""
    from sklearn.metrics import confusion_matrix

    predicted = [row.classes[0][0] for row in rows]
    matrix = confusion_matrix([row.label for row in rows], predicted, labels=names)
    counts = zip(names, matrix.sum(1).tolist(), matrix.diagonal().tolist(), strict=True)
    wrong = [(image, row) for image, row in enumerate(rows) if row.classes[0][0] != row.label]
    wrong.sort(key=lambda pair: pair[1].classes[0][1], reverse=True)
    return {
        "classes": [
            {"class": name, "images": images, "top1": right / images if images else None}
            for name, images, right in counts
        ],
        "confusion": matrix.tolist(),
        "mistakes": [{"image": image, **as_row(row)} for image, row in wrong[:MISTAKES]],
    }


def summary(scores: Mapping[str, Any]) -> dict[str, object]:
    """The scores of :func:`run` that take a line each."""
    lines = {name: score for name, score in scores.items() if name not in IN_TABLES}
    low, high = lines.pop("top1_interval")
    return lines | {"top1": f"{scores['top1']:.4f} (95 % interval {low:.4f} to {high:.4f})"}


def tables(scores: ByClass) -> Iterator[Table | Text | str]:
    """The accuracy of each class, the worst first, and the most confident mistakes."""
    yield ""
    yield class_table(scores)
    unseen = [entry["class"] for entry in scores["classes"] if not entry["images"]]
    more = len(scores["classes"]) - len(unseen) - SHOWN_CLASSES
    if more > 0:
        yield f"and {more:,} classes with higher accuracy"
    if unseen:
        names = ", ".join(unseen[:5])
        if len(unseen) > 5:
            names += f" and {len(unseen) - 5:,} more classes"
        yield f"no images of {names}"
    if scores["mistakes"]:
        yield ""
        yield from map(Text, mistake_lines(scores["mistakes"]))


def class_table(scores: ByClass) -> Table:
    """Classes with images, of which the worst, and the class that each is most often taken for."""
    numbers = (Column(name, justify="right") for name in ("images", "top1"))
    shown = Table("label", *numbers, "most often taken for", box=None, pad_edge=False)
    names = [entry["class"] for entry in scores["classes"]]
    rows = zip(scores["classes"], scores["confusion"], strict=True)
    seen = [(entry, row) for entry, row in rows if entry["images"]]
    for entry, row in sorted(seen, key=lambda pair: pair[0]["top1"] or 0.0)[:SHOWN_CLASSES]:
        counts = zip(row, names, strict=True)
        most, other = max((count, name) for count, name in counts if name != entry["class"])
        taken = f"{other} ({most:,})" if most else ""
        shown.add_row(entry["class"], f"{entry['images']:,}", f"{entry['top1']:.4f}", taken)
    return shown


def mistake_lines(mistakes: list[Mistake]) -> list[str]:
    """Images with their label, and the class that was predicted with its probability."""
    rows = [("label", "predicted", "probability", "most confident mistakes")]
    for mistake in mistakes:
        [best, *_] = mistake["classes"]
        probability = f"{best['probability']:.4f}"
        path = from_here(mistake["path"])
        rows.append((mistake["label"], best["class"], probability, path))
    return aligned(rows, sys.stdout)
