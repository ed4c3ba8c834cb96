"""What a sceptic would use: histograms of oriented gradients and a support vector machine.

    pip install scikit-image
    python benchmarks/hog_svm.py cifar10_small --set data.root=CIFAR-10-images
    python benchmarks/hog_svm.py --data photos

The images, and which of them are training, validation and test images, are those of
``gaupipe train`` with the same arguments, without augmentation. C is chosen by cross-validation on
the training images. Prints one training in the form of docs/results/data, as JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import torch
from skimage.feature import hog
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from gaupipe.data.batches import Batches
from gaupipe.data.load import load_data
from gaupipe.data.splits import ImageData, Split
from gaupipe.settings.load import load
from gaupipe.training.scores import packed
from stages.runs.chosen_settings import settings_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default="digits")
    parser.add_argument("--data", type=Path, help="a folder, as for gaupipe train --data")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--cell", type=int, default=8, help="pixels a side of a cell")
    parser.add_argument("--test", action="store_true", help="also score the test images")
    parser.add_argument("--name", default="hog_svm")
    parser.add_argument("--data-name", help="of the data set, in the row; default: data.name")
    arguments = parser.parse_args()
    if arguments.data:
        nowhere = Path("runs") / "hog_svm"
        settings, _ = settings_for(arguments.data, arguments.overrides, nowhere, plain=True)
    else:
        settings = load(arguments.config, arguments.overrides)
    data = load_data(settings.data, settings.download)

    started = time.process_time()
    features, labels = describe(data, data.train, arguments.cell)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), SVC()), {"svc__C": [1.0, 10.0, 100.0]}, cv=3
    )
    search.fit(features, labels)
    val = search.score(*describe(data, data.val, arguments.cell))
    spent = time.process_time() - started
    row = {
        "name": arguments.name,
        "command": shlex.join(["python", "benchmarks/hog_svm.py", *sys.argv[1:]]),
        "data": arguments.data_name or settings.data.name,
        "images": len(data.train),
        "epochs": 0,
        "seed": 0,
        "val": round(val, 4),
        "core_seconds": round(spent),
    }
    if arguments.test:
        if data.test is None:
            parser.error(f"--test: {settings.data.name} has no test images")
        features, labels = describe(data, data.test, arguments.cell)
        right = search.predict(features) == labels
        row["test"] = round(float(right.mean()), 4)
        row["test_images"] = len(right)
        row["right"] = packed(right)
    print(json.dumps(row))


def describe(data: ImageData, split: Split, cell: int) -> tuple[np.ndarray, np.ndarray]:
    """Features [N, F] and labels [N] of a split: of each pixel the colour channel with the largest
    gradient, 9 directions, blocks of 2 x 2 cells."""
    batches = Batches(split, data, torch.device("cpu"), 256, 0)
    mean = torch.tensor(data.mean).view(-1, 1, 1)
    std = torch.tensor(data.std).view(-1, 1, 1)
    features = []
    labels = []
    for batch in batches.in_order():
        pixels = (batch.images * std + mean).permute(0, 2, 3, 1).numpy()  # [B, h, w, channels]
        features += [
            hog(image, 9, (cell, cell), (2, 2), transform_sqrt=True, channel_axis=-1)
            for image in pixels
        ]
        labels.append(batch.labels.numpy())
    return np.stack(features), np.concatenate(labels)


if __name__ == "__main__":
    main()
