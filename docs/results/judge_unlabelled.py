"""The judge set for images without labels (docs/results/judge.md), as folders of classes, from a
clone of a repository that holds it.

    git clone https://github.com/pkkulk/Week-1-task-AICTE-Internship- waste-clone
    git -C waste-clone checkout a49f66dc8d11b2f4a1410f65da141b794266b5ba
    python docs/results/judge_unlabelled.py waste-clone waste

Left out are files that are neither JPEG nor PNG, all but the first of byte-identical files (all of
them if they have different labels), and training images that look like a test image: thumbnails
of 16 x 16 pixels in RGB, mean removed, correlate by more than .98, mirrored or not. The authors'
own splits share images, so the test images are drawn anew. Written are

    waste/{train,unlabelled,test}    a tenth of the training images with labels, the others without
    waste-labelled/{train,test}      the images with labels alone
    waste-all/{train,test}           all labels
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import numpy as np
from judge import digest
from PIL import Image

CLASSES = {"O": "organic", "R": "recyclable"}
TEST = 4_000
LABELLED = 0.1
"""The share of the training images that keep their labels."""
ALIKE = 0.98
STARTS = (b"\xff\xd8\xff", b"\x89PNG")
SIDE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("clone", type=Path)
    parser.add_argument("out", type=Path, help="the new folder; two others lie beside it")
    arguments = parser.parse_args()
    out: Path = arguments.out
    dataset = arguments.clone / "Dataset"
    if not dataset.is_dir():
        parser.error(f"{arguments.clone} has no folder Dataset: clone the repository again")
    beside = [out.with_name(f"{out.name}-{name}") for name in ("labelled", "all")]
    for folder in (out, *beside):
        if folder.exists():
            parser.error(f"{folder} exists: name a new folder")

    files, labels = distinct_images(dataset)
    print(f"{len(files):,} distinct images")
    order = np.random.default_rng(0).permutation(len(files))
    test, training = order[:TEST], order[TEST:]
    training = unlike(files, training, test)
    labelled = stratified(training, labels, LABELLED)
    others = np.setdiff1d(training, labelled)
    print(f"{len(labelled):,} with labels, {len(others):,} without, {len(test):,} test images")

    for folder, names in ((out, labelled), (beside[0], labelled), (beside[1], training)):
        link(files, labels, names, folder / "train")
        link(files, labels, test, folder / "test")
    link(files, None, others, out / "unlabelled")
    written = {str(file.relative_to(out)): file for file in out.rglob("*.*")}
    for split in ("train", "unlabelled", "test"):
        print(f"{out / split}: SHA-256 {digest(written, split)}")


def distinct_images(dataset: Path) -> tuple[list[Path], np.ndarray]:
    """The files of images, in the order of their names, and the class of each."""
    found: dict[str, list[tuple[Path, int]]] = {}
    for label, folder in enumerate(CLASSES):
        for file in sorted(dataset.glob(f"*/{folder}/*")):
            content = file.read_bytes()
            if content.startswith(STARTS):
                found.setdefault(hashlib.sha256(content).hexdigest(), []).append((file, label))
    one_label = [copies for copies in found.values() if len({label for _, label in copies}) == 1]
    files = [copies[0][0] for copies in one_label]
    return files, np.array([copies[0][1] for copies in one_label])


def unlike(files: list[Path], training: np.ndarray, test: np.ndarray) -> np.ndarray:
    """The ``training`` images that look like no ``test`` image."""
    of_test = thumbnails(files, test)
    of_training = thumbnails(files, training)
    alike = np.zeros(len(training), bool)
    for seen in (of_test, of_test[:, :, ::-1]):
        others = seen.reshape(len(test), -1)
        for start in range(0, len(training), 1_000):
            some = of_training[start : start + 1_000].reshape(-1, others.shape[1])
            alike[start : start + 1_000] |= (some @ others.T).max(1) > ALIKE
    print(f"{alike.sum():,} training images look like a test image and are left out")
    return training[~alike]


def thumbnails(files: list[Path], images: np.ndarray) -> np.ndarray:
    """float32 [N, 16, 16, 3] with mean 0 and norm 1."""
    small = np.empty((len(images), SIDE, SIDE, 3), np.float32)
    for row, image in enumerate(images):
        with Image.open(files[image]) as opened:
            small[row] = np.asarray(
                opened.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
            )
    small -= small.mean((1, 2, 3), keepdims=True)
    norms = np.sqrt((small**2).sum((1, 2, 3), keepdims=True))
    return small / np.maximum(norms, 1e-6)


def stratified(images: np.ndarray, labels: np.ndarray, share: float) -> np.ndarray:
    """The first ``share`` of each class."""
    kept = []
    for label in range(len(CLASSES)):
        of_class = images[labels[images] == label]
        kept.append(of_class[: round(share * len(of_class))])
    return np.concatenate(kept)


def link(files: list[Path], labels: np.ndarray | None, images: np.ndarray, folder: Path) -> None:
    """Hard links to ``images`` in a folder for each class, or without ``labels`` in one folder."""
    for image in images:
        place = folder
        if labels is not None:
            place = folder / list(CLASSES.values())[labels[image]]
        place.mkdir(parents=True, exist_ok=True)
        suffix = ".png" if files[image].read_bytes().startswith(STARTS[1]) else ".jpg"
        os.link(files[image], place / f"{image:05}{suffix}")


if __name__ == "__main__":
    main()
