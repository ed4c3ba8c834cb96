"""The screenshots of docs/view.md, of a run with a trained ViT as the teacher and of one with
Gaussians:

    gaupipe run cifar10_vit --run-dir runs/cifar10 --set data.root=CIFAR-10-images \
        --set data.train_images=6000 --set key_snapshots=12 --set baseline.epochs=1 \
        --set model.args.depth=6 --set model.args.num_heads=3 --set model.args.embed_dim=96 \
        --set model.args.mlp_ratio=2 --set phase_a.max_epochs=10 --set phase_b.epochs=5 \
        --set phase_b.gamma_schedule=constant --set phase_b.beta=1.0
    gaupipe run digits --run-dir runs/digits
    python docs/figures/view.py runs/cifar10 runs/digits

Needs the extra `test` and a chromium; a minute.
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

FOLDER = Path(__file__).parent
DESKTOP, PHONE = (1280, 800), (390, 844)
OF_VIT = {
    "view": (DESKTOP, "image=2726&layer=4&head=2&query=27"),
    "view_student": (
        DESKTOP,
        "image=2726&layer=4&head=1&query=27&student=standard&order=wrong&theme=dark",
    ),
    "view_phone": (PHONE, "image=2726&layer=4&head=2&query=27"),
}
OF_GAUSSIANS = {"view_gaussian": (DESKTOP, "image=3&layer=1&head=1&query=27&order=unsure")}


@contextmanager
def served(run: str) -> Iterator[str]:
    """The address of a view of a run."""
    command = [sys.executable, "-m", "gaupipe", "view", "--run-dir", run, "--no-open"]
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
    path = FOLDER / f"{name}.png"
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


def main(of_vit: str, of_gaussians: str) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for run, shots in ((of_vit, OF_VIT), (of_gaussians, OF_GAUSSIANS)):
            with served(run) as address:
                for name, (size, state) in shots.items():
                    screenshot(browser, f"{address}#{state}", name, size)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
