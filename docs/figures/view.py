"""The screenshots of README.md and docs/view.md:

    python docs/figures/view.py MODEL FOLDER

MODEL is a ViT with weights, as `gaupipe view --model` takes it; the pictures in the repository are
of deit_tiny_patch16_224.fb_in1k. FOLDER gets the photos, or has them. Needs the extra `test` and a
chromium.
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
from photos import make_photos
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from sklearn.cluster import KMeans

FIGURES = Path(__file__).parent
WIDTH, HEIGHT = 1280, 800
CENTRE = (256, 60, 906, 606)
"""The part of the page that has the photo, its classes and its captions."""
SHOTS = {
    "classes": "image=cat_and_coffee.jpg&explain=285&beside=967",  # Egyptian cat, espresso
    "view": "image=china.png",
    "view_tested": "image=china.png&style=squares",
    "view_patch": "image=china.png&layer=6&head=2&query=90",
}
DARK = {"view_patch"}


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


def screenshot(browser: Browser, address: str, name: str) -> None:
    scheme: Literal["light", "dark"] = "dark" if name in DARK else "light"
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector("#thumbs img")
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(500)
    if name == "view_tested":
        page.click("#test")
        page.wait_for_selector("#tested:not(:empty)")
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    if name == "classes":
        picture = picture.crop(CENTRE)
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
    if not folder.exists():
        make_photos(folder)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with served("--model", model, "--images", folder) as address:
            for name, state in SHOTS.items():
                screenshot(browser, f"{address}#{state}", name)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
