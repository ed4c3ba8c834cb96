"""A linear probe: predictions of a data set's classes from the features of a ViT that knows others.

Axis letters: N training images, B images of a batch, D features, C classes, F folds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gaupipe.data.splits import ImageData, Split
from gaupipe.system import digests, distributed
from gaupipe.system.errors import UserError, one_line
from gaupipe.system.files import whole_file
from gaupipe.system.progress import EpochProgress

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

    from gaupipe.teachers.base import Teacher

FOLDS = 5
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""scikit-learn's ``C``, of which cross-validation takes one: the smaller, the more regular."""
MOST_ITERATIONS = 300


@dataclass(frozen=True)
class Probe:
    """Multinomial logistic regressions on the pooled features of a ViT: one of all training images,
    and for each fold one of the training images outside.

    Attributes: ``weights`` [F + 1, C, D] and ``biases`` [F + 1, C] float32, the regression of all
    images last; ``folds`` [N] int64, of each training image; ``accuracy`` on the validation images;
    ``strength``, one of :data:`STRENGTHS`.
    """

    weights: Tensor
    biases: Tensor
    folds: Tensor
    accuracy: float
    strength: float

    def logits(self, features: Tensor) -> Tensor:
        """Logits [B, C] float32 of images that are no training images, by ``features`` [B, D]."""
        return self._all_logits(features)[:, -1]

    def logits_out_of_fold(self, features: Tensor, image_ids: Tensor) -> Tensor:
        """Logits [B, C] float32 of training images, or views of them, by the regression that has
        not seen them."""
        logits = self._all_logits(features)
        folds = self.folds[image_ids.cpu()].to(features.device)
        return logits[torch.arange(len(features), device=features.device), folds]

    def save(self, path: Path, source: Mapping[str, object]) -> None:
        """Writes the probe whole or not at all, with the ``source`` that it was fitted to."""
        with whole_file(path) as partial:
            digests.save({"source": dict(source), "probe": vars(self)}, partial)

    def _all_logits(self, features: Tensor) -> Tensor:
        """[B, F + 1, C] of every regression."""
        weights = self.weights.to(features.device)
        biases = self.biases.to(features.device)
        with torch.autocast(features.device.type, enabled=False):
            return torch.einsum("bd,fcd->bfc", features.float(), weights) + biases


def check_probe(data: ImageData) -> None:
    """Raises UserError for training images that folds cannot share out."""
    counts = np.bincount(data.train.labels, minlength=data.num_classes)
    start = f"a linear probe on {data.name}"
    if len(data.train) < FOLDS:
        raise UserError(
            f"{start}: {len(data.train)} training images are fewer than its {FOLDS} folds"
        )
    if counts.min() < 2:
        number = int(counts.argmin())
        name = str(number)
        if data.class_names:
            name = data.class_names[number]
        raise UserError(
            f"{start}: the class {name} has {counts[number]} training images, and whichever fold "
            "has one of a class, another must have one too: give it at least 2"
        )


def load_probe(path: Path, source: Mapping[str, object]) -> Probe | None:
    """The probe that :meth:`Probe.save` wrote; None where there is none, and for one of another
    ``source``. Raises UserError for a damaged file."""
    if not path.is_file():
        return None
    try:
        digests.check(path)
        saved = torch.load(path, weights_only=True)
        if saved["source"] != dict(source):
            return None
        return Probe(**saved["probe"])
    except OSError:
        raise
    except Exception as error:  # whatever torch makes of a foreign file
        raise UserError(
            f"{path} is damaged ({one_line(error)}): remove it, and the probe is fitted again"
        ) from None


def fit_probe(teacher: Teacher) -> Probe:
    """The probe of a trained model on the data of its run. Collective. Raises UserError as
    :func:`check_probe`."""
    data = teacher.data
    check_probe(data)

    probe: Probe | None = None
    if distributed.is_main():  # alone: the solver may end elsewhere on another machine
        train, labels = features_of(teacher, data.train)
        val, val_labels = features_of(teacher, data.val)
        seed = teacher.settings.seed
        probe = fit(train, labels, val, val_labels, data.num_classes, seed)
    return distributed.from_main(probe)


def features_of(teacher: Teacher, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """(features [N, D] float64, labels [N]) of a split, as it is."""
    features = []
    labels = []
    with EpochProgress("features for a linear probe", len(split), 1) as progress:
        for batch in teacher.batches(split).in_order():
            features.append(teacher.network.pooled(batch.images).double().cpu())
            labels.append(batch.labels.cpu())
            progress.advance(len(batch))
    return torch.cat(features).numpy(), torch.cat(labels).numpy()


def fit(
    features: np.ndarray,
    labels: np.ndarray,
    val_features: np.ndarray,
    val_labels: np.ndarray,
    num_classes: int,
    seed: int,
) -> Probe:
    """The probe of training images by their ``features`` [N, D] and ``labels`` [N]. The
    regularisation is that with the least cross-entropy out of fold."""
    # only where a probe is fitted: scikit-learn takes most of a second of every start
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    folds = stratified(labels, seed)
    mean = features.mean(0)
    std = features.std(0)
    rounding = 1e-6 * np.abs(features).mean(0)  # of features that were computed in float32
    std[std <= rounding] = 1  # a feature that is the same for all images
    scaled = (features - mean) / std

    def fitted(which: np.ndarray, strength: float) -> LogisticRegression:
        model = LogisticRegression(C=strength, max_iter=MOST_ITERATIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # close enough to compare strengths
            model.fit(scaled[which], labels[which])
        progress.advance(len(labels))
        return model

    def regressions(strength: float) -> list[LogisticRegression]:
        return [fitted(folds != fold, strength) for fold in range(FOLDS)]

    def loss(models: list[LogisticRegression]) -> float:
        probabilities = np.empty((len(labels), num_classes))
        for fold, model in enumerate(models):
            probabilities[folds == fold] = model.predict_proba(scaled[folds == fold])
        return float(log_loss(labels, probabilities, labels=range(num_classes)))

    # minutes for 100,000 images of 200 classes
    with EpochProgress("linear probe", len(labels), FOLDS * len(STRENGTHS) + 1) as progress:
        candidates = {strength: regressions(strength) for strength in STRENGTHS}
        strength = min(STRENGTHS, key=lambda one: loss(candidates[one]))
        models = [*candidates[strength], fitted(folds >= 0, strength)]
    weights = np.stack([class_rows(model.coef_) / std for model in models])  # [F + 1, C, D]
    biases = np.stack([class_rows(model.intercept_[:, None])[:, 0] for model in models])
    biases = biases - weights @ mean
    predicted = (val_features @ weights[-1].T + biases[-1]).argmax(-1)
    return Probe(
        torch.from_numpy(weights).float(),
        torch.from_numpy(biases).float(),
        torch.from_numpy(folds),
        float((predicted == val_labels).mean()),
        strength,
    )


def stratified(labels: np.ndarray, seed: int) -> np.ndarray:
    """The fold [N] of each image, drawn so that the images of a class are spread evenly."""
    order = np.random.default_rng(seed).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    folds = np.empty(len(labels), dtype=np.int64)
    folds[order] = np.arange(len(labels)) % FOLDS
    return folds


def class_rows(rows: np.ndarray) -> np.ndarray:
    """A row for each class. Of two classes scikit-learn has one, the second's less the first's."""
    if len(rows) == 1:
        rows = np.concatenate([np.zeros_like(rows), rows])
    return rows
