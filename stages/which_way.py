"""Which way to begin on one's own images: with a pretrained ViT, or with a small one from random
weights. What tells some of the images apart says it: the pretrained ViT's features, or gradients.

Axis letters: B images, C channels, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData, Split
from gaupipe.settings import Settings
from gaupipe.settings.places import REMEDY
from gaupipe.system.device import prepare_device
from gaupipe.system.errors import UserError
from gaupipe.system.progress import duration
from gaupipe.teachers.loading import load_network
from gaupipe.teachers.model import ModelTeacher
from gaupipe.teachers.probe import check_probe, features_of, stratified
from gaupipe.training.scores import percent
from gaupipe.training.settle import settle
from stages.runs.timing import student_seconds

MOST_IMAGES = 200
MARGIN = 0.0
"""By how much more of the images, as a share, the features of the pretrained ViT have to tell apart
for it to be the way to begin."""

CELL = 8  # pixels a side
DIRECTIONS = 9
CLIPPED = 0.2
"""As the histograms of oriented gradients (Dalal and Triggs, 2005) have them."""


@dataclass(frozen=True)
class Way:
    """Which way to begin, and why. Accuracies are those on held-out folds of some images."""

    images: int
    probe_acc: float
    """Of a linear probe on the features of the pretrained ViT."""
    hog_acc: float
    """Of an SVM on histograms of oriented gradients."""
    small_seconds: float
    """Of the steps of the small ViT's training, as some of them take it."""
    tuned_seconds: float
    """Of the pretrained ViT's."""

    @property
    def pretrained(self) -> bool:
        return self.probe_acc - self.hog_acc > MARGIN


def decide(small: Settings, tuned: Settings) -> Way:
    """Compares on the same images a training from random weights, with the settings ``small``, and
    one from trained weights, with the settings ``tuned``. Writes nothing. Raises UserError for
    weights that are not there, and for images that are too few or too small."""
    small = settle(small)
    tuned = settle(tuned)
    data = load_data(small.data, small.download)
    if data.image_size < 2 * CELL:
        raise UserError(
            f"data.image_size: should be at least {2 * CELL} to look at gradients, these images "
            f"have {data.image_size}"
        )
    check_probe(data)
    order = np.random.default_rng(small.seed).permutation(len(data.train))
    ids = np.sort(order[:MOST_IMAGES])
    labels = data.train.labels[ids]

    own = load_data(tuned.data, tuned.download)  # of the size that the trained weights expect
    network = load_network(
        tuned.model.name, own, {}, download=tuned.download, remedy=REMEDY, asked_by="--model"
    )
    device = prepare_device(tuned.device, tuned.threads)
    teacher = ModelTeacher(tuned, own, device, network.to(device).eval())
    sample = Split(own.train.source, own.train.positions[ids])
    features, _ = features_of(teacher, sample)

    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import SVC

    probe = LogisticRegression(C=0.01, max_iter=1000)
    return Way(
        images=len(ids),
        probe_acc=out_of_fold(probe, features, labels, small.seed),
        hog_acc=out_of_fold(SVC(C=10.0), gradients_of(data, ids), labels, small.seed),
        small_seconds=student_seconds(small, data, small.train, len(data.train)),
        tuned_seconds=student_seconds(tuned, own, tuned.train, len(own.train)),
    )


def out_of_fold(classifier: Any, features: np.ndarray, labels: np.ndarray, seed: int) -> float:
    """The share of images that a classifier of scaled ``features`` [B, F] has right, each in a fold
    that it has not seen."""
    from sklearn.model_selection import PredefinedSplit, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scaled = make_pipeline(StandardScaler(), classifier)
    folds = PredefinedSplit(stratified(labels, seed))
    return float((cross_val_predict(scaled, features, labels, cv=folds) == labels).mean())


def gradients_of(data: ImageData, ids: np.ndarray) -> np.ndarray:
    """:func:`histograms` of some training images, [B, F]."""
    batches = Batches(data.train, data, torch.device("cpu"), MOST_IMAGES)
    (batch,) = batches.in_order(ids)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    return histograms((batch.images * std + mean).clamp(0, 1)).numpy()


def histograms(images: Tensor) -> Tensor:
    """Histograms of oriented gradients [B, F] of images [B, C, height, width] from 0 to 1: of each
    pixel the channel with the largest gradient, :data:`DIRECTIONS` in cells of :data:`CELL` pixels,
    blocks of 2 x 2 cells, each normalised, clipped and normalised again."""
    roots = images.sqrt()
    across = torch.zeros_like(roots)
    down = torch.zeros_like(roots)
    across[..., 1:-1] = roots[..., 2:] - roots[..., :-2]
    down[..., 1:-1, :] = roots[..., 2:, :] - roots[..., :-2, :]
    size, channel = torch.hypot(across, down).max(1, keepdim=True)  # [B, 1, height, width]
    angle = torch.atan2(down.gather(1, channel), across.gather(1, channel)) % torch.pi
    direction = (angle / torch.pi * DIRECTIONS).long().clamp(max=DIRECTIONS - 1)
    votes = torch.zeros(len(images), DIRECTIONS, *images.shape[2:]).scatter_(1, direction, size)
    cells = torch.nn.functional.avg_pool2d(votes, CELL)  # [B, directions, rows, columns]
    blocks = cells.unfold(2, 2, 1).unfold(3, 2, 1)  # [B, directions, rows, columns, 2, 2]
    blocks = blocks.permute(0, 2, 3, 4, 5, 1).flatten(3)  # [B, rows, columns, 4 x directions]
    blocks = torch.nn.functional.normalize(blocks, dim=-1, eps=1e-5).clamp(max=CLIPPED)
    return torch.nn.functional.normalize(blocks, dim=-1, eps=1e-5).flatten(1)


def lines(way: Way, model: str) -> list[str]:
    """The accuracies and times, for people."""
    probe, hog = (percent(acc, way.images) for acc in (way.probe_acc, way.hog_acc))
    small, tuned = map(duration, (way.small_seconds, way.tuned_seconds))
    return [
        f"linear probe on {model}: {probe} of {way.images} images",
        f"SVM on gradients (HOG): {hog} of them",
        f"training: {small} for the small ViT, {tuned} for {model}, measured here in some steps",
    ]
