"""Writes a data set in which every image has to be searched: Fashion-MNIST's images at random
places among scraps of others.

    python benchmarks/scattered.py FOLDER
    gaupipe run fashion_mnist --set data.root=FOLDER --set model.args.patch_size=7

Every image is 56 x 56 pixels: one of 28 x 28 at a random place and six scraps of 10 x 10 from
others, the brighter pixel where they overlap. Labels and order are Fashion-MNIST's, and the files
have its format. The same bytes every time.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np

from gaupipe.data.splits import load_data
from gaupipe.settings import DataSettings

SIZE, SCRAPS, SCRAP = 56, 6, 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--root", type=Path, help="folder of Fashion-MNIST's files, if not that of Debian's package"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    source = load_data(DataSettings(name="fashion_mnist", root=arguments.root))
    for seed, (prefix, images) in enumerate(
        (("train", source.train.source), ("t10k", source.test.source))
    ):
        write(
            arguments.folder / f"{prefix}-images-idx3-ubyte.gz",
            scattered(images.images[:, 0].numpy(), seed),
        )
        write(arguments.folder / f"{prefix}-labels-idx1-ubyte.gz", images.labels.astype(np.uint8))


def scattered(images: np.ndarray, seed: int) -> np.ndarray:
    """Images uint8 [N, h, w] on larger canvases: uint8 [N, SIZE, SIZE]."""
    random = np.random.default_rng(seed)
    canvases = np.zeros((len(images), SIZE, SIZE), dtype=np.uint8)
    for canvas, image in zip(canvases, images, strict=True):
        paste(canvas, image, random)
        for other in images[random.integers(len(images), size=SCRAPS)]:
            y, x = random.integers(other.shape[0] - SCRAP + 1, size=2)
            paste(canvas, other[y : y + SCRAP, x : x + SCRAP], random)
    return canvases


def paste(canvas: np.ndarray, image: np.ndarray, random: np.random.Generator) -> None:
    """Puts an image at a random place of a canvas, the brighter pixel winning."""
    y, x = (random.integers(room + 1) for room in np.subtract(canvas.shape, image.shape))
    place = canvas[y : y + image.shape[0], x : x + image.shape[1]]
    np.maximum(place, image, out=place)


def write(path: Path, array: np.ndarray) -> None:
    """An array uint8 in the IDX format, compressed."""
    header = np.array([0x0800 + array.ndim, *array.shape], dtype=">i4").tobytes()
    with (
        path.open("wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed,
    ):
        packed.write(header + array.tobytes())


if __name__ == "__main__":
    main()
