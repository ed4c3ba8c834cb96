"""The photos of the screenshots, and of a page of `gaupipe view` that needs no installation:

    python docs/figures/photos.py MODEL PAGE

writes the page, which holds the photos and what MODEL (as `gaupipe view --model` takes it) sees in
them. Who took the photos, and their licences: docs/figures/photos/LICENCES.txt.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_image

PHOTOS = Path(__file__).parent / "photos"


def make_photos(folder: Path) -> int:
    """How many photos lie in ``folder`` afterwards."""
    folder.mkdir(parents=True)
    for photo in PHOTOS.glob("*.jpg"):
        shutil.copy(photo, folder)
    Image.fromarray(load_sample_image("china.jpg")).save(folder / "china.png")
    return len(list(folder.iterdir()))


def main(model: str, page: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        images = [
            word for number in range(make_photos(photos)) for word in ("--image", str(number))
        ]
        command = [sys.executable, "-m", "gaupipe", "view", "--model", model, "--download"]
        subprocess.run([*command, "--images", photos, *images, "--html", page], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
