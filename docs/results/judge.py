"""The judge set of docs/results/judge.md, as folders of classes, from a clone of its repository.

    git clone https://github.com/marcusklasson/GroceryStoreDataset
    git -C GroceryStoreDataset checkout fc80ba9
    python docs/results/judge.py GroceryStoreDataset groceries

Splits are the authors' own: the lines ``path, class, coarse class`` of train.txt, val.txt and
test.txt. A class is a coarse class of classes.csv. No image is left out or changed, and every byte
is checked before anything is written.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import shutil
from pathlib import Path

# SHA-256 of a split's list, which ``find SPLIT -type f | LC_ALL=C sort | xargs sha256sum`` prints
LISTS = {
    "train": "4dc1381b12e96277adf51dcc2c5f5ab828d5681da859616f9248d14449d890e8",
    "val": "540cc91a22ec44ed5a9d856a7963b36d9716b93d916956b44782b6d8ee6eec38",
    "test": "9450932c109e55057be6520d5a5b0e9d2f3dc844bdcb0a4aa76173a8733d7784",
}


def images_of(dataset: Path) -> dict[str, Path]:
    """Each image's file in the clone, by its path SPLIT/CLASS/NAME in the new folder."""
    with (dataset / "classes.csv").open(newline="") as lines:
        class_names = {
            int(row["Coarse Class ID (int)"]): row["Coarse Class Name (str)"]
            for row in csv.DictReader(lines)
        }
    images = {}
    for split in LISTS:
        for line in (dataset / f"{split}.txt").read_text().splitlines():
            path, _, coarse_class = line.split(", ")
            name = f"{split}/{class_names[int(coarse_class)]}/{Path(path).name}"
            images[name] = dataset / path
    return images


def digest(images: dict[str, Path], split: str) -> str:
    """SHA-256 of the lines ``SHA-256 of the file, two spaces, path`` in the order of the paths."""
    lines = ""
    for name in sorted(images):
        if name.startswith(f"{split}/"):
            lines += f"{hashlib.sha256(images[name].read_bytes()).hexdigest()}  {name}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("clone", type=Path, help="of marcusklasson/GroceryStoreDataset")
    parser.add_argument("out", type=Path, help="the new folder")
    arguments = parser.parse_args()
    dataset = arguments.clone / "dataset"
    if not (dataset / "classes.csv").is_file():
        parser.error(f"{dataset} has no classes.csv: clone marcusklasson/GroceryStoreDataset")
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists: name a new folder")
    try:
        images = images_of(dataset)
        digests = {split: digest(images, split) for split in LISTS}
    except OSError as error:
        parser.error(f"{error.filename} cannot be read: clone the repository again")
    for split, right in LISTS.items():
        if digests[split] != right:
            parser.error(f"{dataset}/{split} has other images: check out commit fc80ba9")

    partial = arguments.out.with_name(f"{arguments.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an interrupted run
    for name, image in images.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image, partial / name)
    partial.rename(arguments.out)
    for split in LISTS:
        count = sum(name.startswith(f"{split}/") for name in images)
        print(f"{arguments.out / split}: {count:,} images")


if __name__ == "__main__":
    main()
