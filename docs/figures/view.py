"""The screenshots of README.md and docs/view.md:

    python docs/figures/view.py MODEL FOLDER

MODEL is a ViT with weights, as `gaupipe view --model` takes it; the pictures in the repository are
of deit_tiny_patch16_224.fb_in1k. The photo is one that scikit-learn ships. The other pictures are
of a run on the digits. FOLDER gets the photos and the run, or has them. Needs the extra `test`
and a chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib import colormaps
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from sklearn.cluster import KMeans
from sklearn.datasets import load_sample_image

FIGURES = Path(__file__).parent
DESKTOP = (1280, 800)
OF_PHOTOS = {
    "view": (DESKTOP, "image=china.png"),
    "view_tested": (DESKTOP, "image=china.png&style=squares"),
    "view_patch": (DESKTOP, "image=china.png&layer=6&head=2&query=90"),
}
DARK = {"view_patch"}
OF_DIGITS = {
    "view_student": (DESKTOP, "image=3&layer=1&head=1&query=6&style=squares"),
    "view_gaussian": (DESKTOP, "image=3&layer=1&head=1&query=6&style=squares&student="),
}


def gaupipe(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "gaupipe", *map(str, arguments)], check=True)


def make_photos(folder: Path) -> None:
    folder.mkdir(parents=True)
    Image.fromarray(load_sample_image("china.jpg")).save(folder / "china.png")


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
    scheme: Literal["light", "dark"] = "dark" if name in DARK else "light"
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector("#thumbs img")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(500)
    if name == "view_tested":
        page.click("#test")
        page.wait_for_selector("#tested:not(:empty)")
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


def main(model: str, folder: Path) -> None:
    if not (folder / "digits").exists():
        make_photos(folder / "photos")
        gaupipe("run", "digits", "--run-dir", folder / "digits")
    photos_options = "--model", model, "--images", folder / "photos"
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        pages = (photos_options, OF_PHOTOS), (("--run-dir", folder / "digits"), OF_DIGITS)
        for arguments, shots in pages:
            with served(*arguments) as address:
                for name, (size, state) in shots.items():
                    screenshot(browser, f"{address}#{state}", name, size)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
