"""Draws phases.svg: phase A, the store and phase B of the configuration ``digits``, for
how-it-works.md.

    python docs/figures/phases.py

The Gaussian is an example on 8 x 8 tokens, which show more than the 4 x 4 of a digit; the map is
what it gives, and the numbers are those of the configuration.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, FancyBboxPatch, Rectangle

from gaupipe.maps.gaussians import expected_map
from gaupipe.settings.load import load

GRID = (8, 8)
QUERY = (5, 1)
"""Token row and column of the query whose Gaussian is drawn."""
GAUSSIAN = torch.tensor([0.24, -0.24, 0.32, 0.22])
"""Its mean_x, mean_y, std_x, std_y in normalised coordinates."""

INK, RED, ORANGE = "#222222", "#c0392b", "#d9730d"
COLORS = ("#dbe7f6", "#dff0df", "#fbe6d0")
WIDTH, GAP = 27, 9
"""Of a box, and between two."""


def box(axes: Axes, number: int, title: str, command: str, lines: list[str]) -> None:
    """One of three boxes: its title, what it holds, and the command that makes it."""
    left = number * (WIDTH + GAP)
    axes.add_patch(
        FancyBboxPatch(
            (left, 6),
            WIDTH,
            46,
            boxstyle="round,pad=0,rounding_size=1",
            facecolor=COLORS[number],
            edgecolor=INK,
        )
    )
    middle = left + WIDTH / 2
    axes.text(middle, 49, title, ha="center", va="center", fontsize=13, weight="bold")
    axes.text(middle, 45.5, command, ha="center", va="center", fontsize=11, family="monospace")
    for row, line in enumerate(lines):
        axes.text(middle, 22 - 3.2 * row, line, ha="center", va="center", fontsize=11)


def grid(axes: Axes, number: int) -> Axes:
    """The picture of a box: a grid of tokens with the query in red."""
    picture = axes.inset_axes(
        (number * (WIDTH + GAP) + 5, 25, WIDTH - 10, 18), transform=axes.transData
    )
    rows, columns = GRID
    picture.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), aspect="equal")
    picture.set_xticks([i - 0.5 for i in range(1, columns)])
    picture.set_yticks([i - 0.5 for i in range(1, rows)])
    picture.grid(color="#999999", linewidth=0.5)
    picture.tick_params(length=0, labelbottom=False, labelleft=False)
    row, column = QUERY
    corner = (column - 0.5, row - 0.5)
    picture.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=RED, linewidth=2, zorder=3))
    return picture


def ellipses(picture: Axes) -> None:
    """The Gaussian at one and two standard deviations."""
    rows, columns = GRID
    mean_x, mean_y, std_x, std_y = GAUSSIAN.tolist()
    middle = ((mean_x + 1) / 2 * (columns - 1), (mean_y + 1) / 2 * (rows - 1))
    for deviations in (1, 2):
        width = deviations * std_x * (columns - 1)
        height = deviations * std_y * (rows - 1)
        picture.add_patch(
            Ellipse(middle, width, height, fill=False, edgecolor=ORANGE, linewidth=2, zorder=3)
        )


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.5})


def draw() -> Figure:
    settings = load("digits")
    figure = Figure(figsize=(11, 5.9), facecolor="white")
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    axes.set(xlim=(-1, 3 * WIDTH + 2 * GAP + 1), ylim=(-1, 53))
    axes.set_axis_off()

    phase_a, phase_b = settings.phase_a, settings.phase_b
    box(
        axes,
        0,
        "Phase A: the teacher",
        "gaupipe phase-a",
        [
            "learns a Gaussian for each image,",
            "block, head and query (red), from",
            "the labels, until it classifies",
            f"{phase_a.stop_accuracy:.0%} of the training images",
            "correctly",
        ],
    )
    box(
        axes,
        1,
        "The store",
        "gaupipe export-maps",
        [
            f"{phase_a.compression.embedding} numbers for each image and",
            "block, and a decoder, which makes",
            "of them this map, the mean over",
            "the Gaussian's points;",
            "predictions and labels",
        ],
    )
    box(
        axes,
        2,
        "Phase B: the student",
        "gaupipe phase-b",
        [
            "learns from the labels (beta",
            f"{phase_b.beta}), the teacher's predictions",
            f"(alpha {phase_b.alpha}) and, in the first",
            f"{phase_b.gamma_epochs} of {phase_b.epochs} epochs, its maps",
            f"(gamma {phase_b.gamma})",
        ],
    )
    ellipses(grid(axes, 0))
    row, column = QUERY
    looks = expected_map(GAUSSIAN.expand(GRID[0] * GRID[1], 4), GRID)[row * GRID[1] + column]
    grid(axes, 1).imshow(looks.view(GRID), cmap="Blues", vmin=0)
    middle = 2 * (WIDTH + GAP) + WIDTH / 2
    axes.text(middle, 37, "S = softmax(Q K')", ha="center", va="center", fontsize=13)
    axes.text(middle, 32.5, "L_feat = Σ P log(P / S)", ha="center", va="center", fontsize=13)

    for number in (0, 1):
        end = (number + 1) * (WIDTH + GAP)
        arrow(axes, (end - GAP, 34), (end, 34))
    axes.text(WIDTH + GAP / 2, 36, "once", ha="center", fontsize=11)
    axes.text(2 * WIDTH + 1.5 * GAP, 36, "maps P", ha="center", fontsize=11)
    for number in (0, 2):
        x = number * (WIDTH + GAP) + WIDTH / 2
        arrow(axes, (x, 1), (x, 6))
    axes.plot([WIDTH / 2, middle], [1, 1], color=INK, linewidth=1.5)
    axes.text((WIDTH / 2 + middle) / 2, 2, "images and labels", ha="center", fontsize=11)
    return figure


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "gaupipe"
    path = Path(__file__).with_suffix(".svg")
    FigureCanvasSVG(draw()).print_svg(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
