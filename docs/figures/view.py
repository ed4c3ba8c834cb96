"""The screenshots of README.md and docs/view.md:

    python docs/figures/view.py FOLDER

The photos are the two that scikit-learn ships. The model of them is a small ViT, trained here for
three minutes to tell crops of one from crops of the other. The other pictures are of a run on
the digits. FOLDER gets all of that, or has it. Needs the extra `test` and a chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from sklearn.cluster import KMeans
from sklearn.datasets import load_sample_image

FIGURES = Path(__file__).parent
DESKTOP = (1280, 800)
OF_PHOTOS = {
    "view": (DESKTOP, "image=1&layer=1&head=2&query=210"),
    "view_gradient": (DESKTOP, "image=0&layer=1&head=gradient&smooth=1&theme=dark"),
}
OF_DIGITS = {
    "view_student": (DESKTOP, "image=3&layer=1&head=1&query=6&student=standard&order=wrong"),
    "view_gaussian": (DESKTOP, "image=3&layer=1&head=1&query=6&order=unsure"),
}
TRAINING = (
    "data.image_size=96",
    "model.args={patch_size: 8, embed_dim: 96, depth: 4, num_heads: 4}",
    "train.epochs=8",
    "data.batch_size=32",
)


def gaupipe(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "gaupipe", *map(str, arguments)], check=True)


def make_photos(folder: Path, crops: int = 300) -> None:
    """The two photos, and square crops of each in a folder of its own."""
    generator = np.random.default_rng(0)
    for name in ("china", "flower"):
        photo = Image.fromarray(load_sample_image(f"{name}.jpg"))
        (folder / "crops" / name).mkdir(parents=True)
        (folder / "photos").mkdir(exist_ok=True)
        photo.save(folder / "photos" / f"{name}.png")
        for number in range(crops):
            side = int(generator.integers(80, photo.height))
            x = int(generator.integers(photo.width - side + 1))
            y = int(generator.integers(photo.height - side + 1))
            crop = photo.resize((96, 96), Image.Resampling.BILINEAR, (x, y, x + side, y + side))
            crop.save(folder / "crops" / name / f"{number:03}.png")


@contextmanager
def served(*arguments: str | Path) -> Iterator[str]:
    """The address of a view."""
    command = [sys.executable, "-m", "gaupipe", "view", *map(str, arguments), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split("#")[0].split()[0]
    finally:
        process.terminate()
        process.wait()


def screenshot(browser: Browser, address: str, name: str, size: tuple[int, int]) -> None:
    width, height = size
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector("#thumbs img")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(500)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    path = FIGURES / f"{name}.png"
    small(picture).save(path, optimize=True)
    print(path, path.stat().st_size)
    page.close()


def small(picture: Image.Image) -> Image.Image:
    """A picture in 256 colours, 40 of them viridis, so that colour bars stay smooth."""
    colours, counts = np.unique(np.array(picture).reshape(-1, 3), axis=0, return_counts=True)
    means = KMeans(216, n_init=1, max_iter=20, random_state=0)
    means.fit(colours.astype(float), sample_weight=counts**0.5)
    viridis = colormaps["viridis"](np.linspace(0, 1, 40), bytes=True)[:, :3]
    palette = Image.new("P", (1, 1))
    both = np.concatenate([viridis, means.cluster_centers_.round()]).astype(np.uint8)
    palette.putpalette(both.flatten().tolist())
    return picture.quantize(palette=palette, dither=Image.Dither.NONE)


def main(folder: Path) -> None:
    if not (folder / "of_digits").exists():
        make_photos(folder)
        settings = [part for setting in TRAINING for part in ("--set", setting)]
        gaupipe("train", "--data", folder / "crops", "--run-dir", folder / "of_photos", *settings)
        gaupipe("run", "digits", "--run-dir", folder / "of_digits")
    (student,) = (folder / "of_photos" / "plain").glob("*/student")
    of_photos = "--model", student, "--images", folder / "photos", "--image-size", "160"
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = (of_photos, OF_PHOTOS), (("--run-dir", folder / "of_digits"), OF_DIGITS)
        for arguments, shots in pages:
            with served(*arguments) as address:
                for name, (size, state) in shots.items():
                    screenshot(browser, f"{address}#{state}", name, size)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
