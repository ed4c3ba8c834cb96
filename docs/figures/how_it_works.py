"""Draws how_it_works.png: the stages of gaupipe, and how one query reads its values.

python docs/figures/how_it_works.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, FancyBboxPatch, Rectangle

from gaupipe.maps.gaussians import expected_axes, outer, point_axes

GRID = (8, 8)
QUERY = (5, 1)
"""Token row and column of the query that the lower panels show."""
GAUSSIAN = torch.tensor([0.24, -0.24, 0.32, 0.22])
"""Its mean_x, mean_y, std_x, std_y in normalised coordinates."""
POINT = torch.tensor([0.52, -0.08])
"""One point sampled from it."""

INK, RED = "#222222", "#c0392b"
BLUE, GREEN, ORANGE, GREY = "#dbe7f6", "#dff0df", "#fbe6d0", "#f1f1f1"


def box(
    axes: Axes, left: float, color: str, title: str, lines: list[str], command: str = ""
) -> None:
    """A stage, 18 units wide: its title, what it holds, and the command that makes it."""
    axes.add_patch(
        FancyBboxPatch(
            (left, 9),
            18,
            24,
            boxstyle="round,pad=0,rounding_size=1",
            facecolor=color,
            edgecolor=INK,
            linewidth=1,
        )
    )
    middle = left + 9
    axes.text(middle, 30.4, title, ha="center", va="center", fontsize=11, weight="bold")
    for number, line in enumerate(lines):
        axes.text(middle, 26.8 - 2.5 * number, line, ha="center", va="center", fontsize=8.5)
    axes.text(middle, 10.9, command, ha="center", va="center", fontsize=8.5, family="monospace")


def arrow(axes: Axes, corners: list[tuple], text: str, at: tuple, linestyle: str = "-") -> None:
    """A line through ``corners`` that ends in an arrow head, and its text."""
    axes.plot(*zip(*corners[:-1], strict=True), color=INK, linewidth=1.2, linestyle=linestyle)
    axes.annotate(
        "",
        corners[-1],
        corners[-2],
        arrowprops={
            "arrowstyle": "-|>",
            "color": INK,
            "linewidth": 1.2,
            "linestyle": linestyle,
            "shrinkA": 0,
            "shrinkB": 0,
            "mutation_scale": 13,
        },
    )
    axes.text(*at, text, ha="center", va="center", fontsize=8.5)


def stages(axes: Axes) -> None:
    axes.set(xlim=(0, 100), ylim=(0, 41))
    axes.set_axis_off()
    images = ["image, label, image id", "", "a folder of your own,", "digits, Fashion-MNIST, ..."]
    teacher = [
        "ViT with GauAttention.",
        "Phase A learns weights, a",
        "decoder for all images,",
        "and an embedding for",
        "each image.",
    ]
    store = [
        "The decoder, once.",
        "For each image: an",
        "embedding of each block,",
        "label, and the teacher's",
        "prediction.",
    ]
    student = [
        "A ViT that timm loads.",
        "Attention: standard,",
        "belief, belief_star, xsa,",
        "belief2 or attentionx.",
    ]
    box(axes, 0.5, GREY, "Training images", images)
    box(axes, 27.5, BLUE, "Teacher: phase A", teacher, "gaupipe phase-a")
    box(axes, 54.5, GREEN, "Store: zarr", store, "gaupipe export-maps")
    box(axes, 81.5, ORANGE, "Student: phase B", student, "gaupipe phase-b")
    arrow(axes, [(18.9, 21), (27.1, 21)], "cross-\nentropy", (23, 24))
    arrow(axes, [(45.9, 21), (54.1, 21)], "maps,\npredictions", (50, 24))
    arrow(axes, [(72.9, 21), (81.1, 21)], "L_feat\nand L_soft", (77, 24))
    arrow(
        axes,
        [(9.5, 8.6), (9.5, 4.5), (90.5, 4.5), (90.5, 8.6)],
        "images and labels: L_hard",
        (50, 6.3),
    )
    arrow(
        axes,
        [(36.5, 33.4), (36.5, 37.5), (90.5, 37.5), (90.5, 33.4)],
        "warm start, if asked for: the student starts with the teacher's weights",
        (63.5, 39.3),
        "--",
    )


def tokens(axes: Axes, weights: np.ndarray, title: str, note: str) -> None:
    """Attention of one query over the token grid."""
    h, w = GRID
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=max(weights.max(), 1e-9) * 1.15)
    axes.set_xticks(np.arange(-0.5, w), minor=True)
    axes.set_yticks(np.arange(-0.5, h), minor=True)
    axes.grid(which="minor", color="#bbbbbb", linewidth=0.6)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    y, x = QUERY
    place = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=RED, linewidth=2, zorder=3)
    axes.add_patch(place)
    axes.set_title(title, fontsize=9.5)
    axes.set_xlabel(note, fontsize=8.5)


def pixels(values: torch.Tensor) -> tuple[float, float]:
    """Token coordinates of a normalised (x, y)."""
    return tuple(
        (float(value) + 1) / 2 * (n - 1) for value, n in zip(values, reversed(GRID), strict=True)
    )


def show_gaussian(axes: Axes) -> None:
    """Ellipses at one and two standard deviations."""
    x, y = pixels(GAUSSIAN[:2])
    std_x, std_y = (
        float(std) * (n - 1) / 2 for std, n in zip(GAUSSIAN[2:], reversed(GRID), strict=True)
    )
    for times in (1, 2):
        width, height = 2 * times * std_x, 2 * times * std_y
        ellipse = Ellipse((x, y), width, height, fill=False, edgecolor="#e67e22", linewidth=1.4)
        axes.add_patch(ellipse)


def main() -> None:
    figure = Figure(figsize=(11, 7.8), dpi=130)
    FigureCanvasAgg(figure)
    stages(figure.add_axes((0.01, 0.52, 0.98, 0.47)))
    sampled, expected, student = (
        figure.add_axes((left, 0.1, 0.22, 0.31)) for left in (0.06, 0.395, 0.73)
    )
    heading = "Where one query of one head looks"
    figure.text(0.5, 0.468, heading, ha="center", fontsize=11, weight="bold")

    weights = outer(*point_axes(POINT, GRID))  # [h * w]
    note = "The query (red) reads V at one sampled\npoint (x): 4 keys with bilinear weights."
    tokens(sampled, weights.view(GRID).numpy(), "Teacher, mode stochastic", note)
    show_gaussian(sampled)
    sampled.plot(*pixels(POINT), "x", color=RED, markersize=8, markeredgewidth=2)

    weights = outer(*expected_axes(GAUSSIAN, GRID))  # [h * w]
    note = "The mean over all points of the Gaussian\nis an attention map, in closed form."
    tokens(expected, weights.view(GRID).numpy(), "The map: mode expected, and the store", note)
    show_gaussian(expected)

    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
    weights = ((weights + 0.01).log() + 0.5 * noise).softmax(-1)  # [h * w]
    note = (
        "The student's map is a softmax over all keys;\nL_feat compares it with the teacher's map."
    )
    tokens(student, weights.view(GRID).numpy(), "Student (an example)", note)
    figure.savefig(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
