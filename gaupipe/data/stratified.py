"""Stratified splits: the images of every class are divided in the same proportion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gaupipe.system.errors import UserError


def check_pairs(labels: np.ndarray, class_names: Sequence[str], setting: str) -> None:
    """Raises UserError where :func:`stratified_split` could not divide a class, which has one
    image. ``setting`` is what asks for the split."""
    classes, counts = np.unique(labels, return_counts=True)
    if counts.min() > 1:
        return
    single = int(classes[counts.argmin()])
    name = class_names[single] if class_names else single
    remedy = "add a second image, or leave the class out"
    if setting == "data.val_fraction":
        remedy += ", or put validation images of your own into a folder 'val' beside 'train'"
    raise UserError(
        f"{setting}: {(counts == 1).sum()} of {len(counts)} classes have one image alone, such as "
        f"{str(name)!r}, and cannot be split: {remedy}"
    )


def stratified_split(labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(rest, taken): the positions [N - count] and [count] of two parts of ``labels`` [N], each
    ascending, always the same ones. Every class has two images or more, and each part has as many
    images as there are classes.

    Bit for bit ``train_test_split(..., test_size=count, stratify=labels, random_state=0)`` of
    scikit-learn, whose import takes longer than to read a small data set.
    """
    _, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    generator = np.random.RandomState(0)
    left = _sizes(counts, len(labels) - count, generator)
    held_out = _sizes(counts - left, count, generator)  # all of these, but it draws too
    members = np.split(np.argsort(places, kind="stable"), np.cumsum(counts)[:-1])
    rest = []
    taken = []
    for positions, first, second in zip(members, left, held_out, strict=True):
        drawn = generator.permutation(len(positions))
        rest.append(positions[drawn[:first]])
        taken.append(positions[drawn[first : first + second]])
    return np.sort(np.concatenate(rest)), np.sort(np.concatenate(taken))


def _sizes(counts: np.ndarray, total: int, generator: np.random.RandomState) -> np.ndarray:
    """How many of ``total`` images are of each class, int64 [C], in proportion to ``counts``: the
    largest remainders are rounded up, and among equal ones the generator draws."""
    exact = counts / counts.sum() * total
    sizes = np.floor(exact)
    remainders = exact - sizes
    missing = int(total - sizes.sum())
    for remainder in np.unique(remainders)[::-1]:
        if missing == 0:
            break
        (equal,) = np.where(remainders == remainder)
        raised = generator.choice(equal, size=min(len(equal), missing), replace=False)
        sizes[raised] += 1
        missing -= len(raised)
    return sizes.astype(int)
