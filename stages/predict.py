"""Predict: the classes of image files, by a model of which nothing but its folder is needed."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from timm.data import resolve_model_data_config
from torch import Tensor

from gaupipe.data.prepared import image_files, reader
from gaupipe.system.device import prepare_device
from gaupipe.system.errors import UserError
from gaupipe.system.files import utf8, write_whole
from gaupipe.system.progress import EpochProgress
from gaupipe.system.terminal import aligned
from gaupipe.vit.heads import classifies, probabilities
from gaupipe.vit.pretrained import load_model
from gaupipe.vit.saving import class_names

Classes = tuple[tuple[str, float], ...]
"""(name of a class, its probability)."""


@dataclass(frozen=True)
class Prediction:
    """An image with its most probable classes, the best first.

    path     the image file; the image id where a data set has no files
    classes  (name of the class, probability), at most as many as were asked for; empty where the
             image could not be read
    problem  why the image could not be read; None where it was
    label    the name of the image's class; None where it is not known
    """

    path: str
    classes: Classes = ()
    problem: str | None = None
    label: str | None = None


def run(
    source: str,
    paths: Sequence[Path],
    *,
    top: int = 1,
    batch_size: int = 64,
    download: bool = False,
) -> list[Prediction]:
    """Predicts the classes of images with a model, with progress on stderr. An image that cannot be
    read has a ``problem`` in place of classes.

    source    a student's folder or the training folder around it, ``local-dir:FOLDER``, or a timm
              name such as ``vit_tiny_patch16_224.augreg_in21k``
    paths     image files, and folders of which every image file is taken
    download  fetch the weights of a timm name that are not on this machine

    Raises UserError for a source that is no model with classes, and where there are no images.
    """
    images = list(image_files(paths))
    device = prepare_device("auto")
    model = load_model(source, download).to(device)
    count = getattr(model, "num_classes", 0)
    if not classifies(model):
        raise UserError(f"{source}: predicts no classes: take a model with a head")
    names = class_names(model, count)
    read_input = reader(resolve_model_data_config(model))

    def read(path: Path) -> Tensor | str:
        try:
            return read_input(path)
        except UserError as error:
            return str(error)

    @torch.inference_mode()
    def classify(inputs: list[Tensor]) -> Iterator[Classes]:
        if inputs:
            logits = model(torch.stack(inputs).to(device)).cpu()  # [B, C]
            yield from most_probable(probabilities(logits), names, top)

    predictions = []
    with ThreadPoolExecutor() as pool, EpochProgress("predict", len(images), 1) as progress:
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            inputs = list(pool.map(read, batch))
            # images that could not be read take no place in the model's batch
            classes = classify([tensor for tensor in inputs if isinstance(tensor, Tensor)])
            for path, tensor in zip(batch, inputs, strict=True):
                if isinstance(tensor, str):
                    prediction = Prediction(str(path), problem=tensor)
                else:
                    prediction = Prediction(str(path), next(classes))
                predictions.append(prediction)
            progress.advance(len(batch))
    return predictions


def most_probable(probabilities: Tensor, class_names: Sequence[str], top: int) -> list[Classes]:
    """For each row of ``probabilities`` [B, C] its ``top`` classes, the most probable first."""
    values, numbers = probabilities.topk(min(top, probabilities.shape[-1]))
    images = []
    for best, shares in zip(numbers.tolist(), values.tolist(), strict=True):
        names = [class_names[number] for number in best]
        images.append(tuple(zip(names, shares, strict=True)))
    return images


Probability = TypedDict("Probability", {"class": str, "probability": float})
"""A class that was predicted."""


class PredictionRow(TypedDict):
    """A prediction as JSON: the image's ``label`` where it is known, otherwise its ``problem``."""

    path: str
    classes: list[Probability]
    label: NotRequired[str]
    problem: NotRequired[str | None]


def as_row(prediction: Prediction) -> PredictionRow:
    classes: list[Probability] = [
        {"class": name, "probability": round(p, 6)} for name, p in prediction.classes
    ]
    row: PredictionRow = {"path": utf8(prediction.path), "classes": classes}
    if prediction.label is None:
        row["problem"] = prediction.problem and utf8(prediction.problem)
    else:
        row["label"] = prediction.label
    return row


def as_csv(predictions: Sequence[Prediction]) -> str:
    """A line for each image: path, label, class and probability of each of the most probable
    classes, and problem."""
    rows = []
    for row in map(as_row, predictions):
        line = {name: value for name, value in row.items() if name != "classes"}
        for rank, best in enumerate(row["classes"], 1):
            suffix = "" if rank == 1 else str(rank)
            line |= {f"{name}{suffix}": value for name, value in best.items()}
        rows.append(line)
    columns = dict.fromkeys(name for row in rows for name in row)
    ordered = sorted(columns, key=lambda name: name == "problem")  # the problem last
    text = io.StringIO()
    writer = csv.DictWriter(text, ordered, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def lines(predictions: Sequence[Prediction]) -> list[str]:
    """The predictions for a terminal; a file that is no readable image says why."""
    rows = [("classes", "image")]
    for prediction in predictions:
        if prediction.problem:
            rows.append(("-", prediction.problem))  # which begins with the path
        else:
            classes = ", ".join(f"{name} {p:.1%}" for name, p in prediction.classes)
            rows.append((classes, prediction.path))
    return aligned(rows, sys.stdout)


def write(predictions: Sequence[Prediction], out: Path) -> None:
    """Writes predictions as CSV, or where the name ends in ``.json`` as JSON. In both a byte of a
    file's name that is not UTF-8 becomes ``\\xe9``."""
    if out.suffix.lower() == ".json":
        text = json.dumps([as_row(prediction) for prediction in predictions], indent=2) + "\n"
    else:
        text = as_csv(predictions)
    write_whole(out, text.encode())


def check_readable(predictions: Sequence[Prediction]) -> None:
    """Raises UserError where images could not be read, after all others were."""
    problems = [prediction.problem for prediction in predictions if prediction.problem]
    if problems:
        raise UserError(
            f"{len(problems)} of {len(predictions)} images could not be read: {problems[0]}"
        )
