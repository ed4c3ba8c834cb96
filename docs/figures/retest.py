"""Draws docs/figures/retest.png, two fits of the Gaussians of three digits:

python benchmarks/retest.py "table, sampled" --seed 1 --epochs 12 --maps retest.npz
python docs/figures/retest.py retest.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLOCK = 3
QUERY = 5  # of 4 x 4


def main() -> None:
    saved = np.load(sys.argv[1])
    labels = saved["labels"]
    first, second = np.flatnonzero(labels == labels[0])[:2]
    other = np.flatnonzero(labels != labels[0])[0]
    maps = saved["maps"][:, :, BLOCK, :, QUERY]  # [fits, images, heads, keys]
    fits, _, heads, keys = maps.shape
    side = round(keys**0.5)
    widths = [1.3, *([0.25] + [1] * heads) * fits]
    figure, panels = plt.subplots(
        3, len(widths), figsize=(10, 3.4), layout="constrained", width_ratios=widths
    )
    for panel in panels.flat:
        panel.axis("off")
    for row, image in zip(panels, (first, second, other), strict=True):
        row[0].imshow(saved["images"][image, 0], cmap="gray")
        for fit in range(fits):
            for head in range(heads):
                panel = row[2 + fit * (heads + 1) + head]
                panel.imshow(maps[fit, image, head].reshape(side, side), cmap="Blues", vmin=0)
    panels[0, 0].set_title("image", fontsize=10)
    for fit in range(fits):
        panels[0, 2 + fit * (heads + 1)].set_title(
            f"fit {fit + 1}, heads 1 to {heads}", fontsize=10, loc="left"
        )
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    main()
