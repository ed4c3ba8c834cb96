"""Draws unlabelled.svg: test accuracy over the student's own core seconds of the rows of
docs/results/data/unlabelled.json with 3,000 labels, for results/distillation.md.

    python docs/figures/unlabelled.py

The line is the front of the ViTs with several seeds: no cheaper one has a higher accuracy than a
row on it.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

ROWS = Path(__file__).parent.parent / "results" / "data" / "unlabelled.json"
LEFT_OUT = (
    "shuffled predictions",
    "residual stem, 2 blocks, a slice of the teacher",
    "narrow ResNet's predictions of the labelled images",
)
"""A control, whose accuracy lies far below all others, a single seed, and a row whose teacher costs
seven trainings; the page tells them."""
NARROW_RESNET = ("narrow ResNet, labels", "narrow ResNet, predictions")
"""Rows that train no ViT."""
NAMED_ON_THE_RIGHT = ("narrow ResNet's predictions", "narrow ResNet, predictions")
"""Another row lies to the left."""

GREY, BLUE = "#777777", "#2b6cb0"


@dataclass
class Row:
    """Means over seeds."""

    name: str
    unlabelled: bool
    """Whether it learned from images without labels."""
    seeds: int
    core_seconds: float
    """Of its training; a teacher's pass is made once for any number of them."""
    accuracy: float
    """Percent of the test images."""


def read(path: Path = ROWS) -> list[Row]:
    """The rows in order of their costs."""
    trainings: dict[str, list[dict]] = {}
    for training in json.loads(path.read_text()):
        is_a_choice = "set" in training  # one change at a time to a row that is shown
        if training["images"] == 3000 and training["name"] not in LEFT_OUT and not is_a_choice:
            trainings.setdefault(training["name"], []).append(training)
    rows = [
        Row(
            name,
            unlabelled=runs[0]["unlabelled"] > 0,
            seeds=len(runs),
            core_seconds=statistics.fmean(
                run["core_seconds"] - run["teacher_seconds"] for run in runs
            ),
            accuracy=100 * statistics.fmean(run["test"] for run in runs),
        )
        for name, runs in trainings.items()
    ]
    return sorted(rows, key=lambda row: row.core_seconds)


def front(rows: list[Row]) -> list[Row]:
    """Those rows, in order of their costs, above which no cheaper one lies."""
    chosen: list[Row] = []
    for row in rows:
        if not chosen or row.accuracy > chosen[-1].accuracy:
            chosen.append(row)
    return chosen


def draw(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(9, 5.5), facecolor="white", layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="core seconds of the training", ylabel="test images classified, %")
    axes.set(xscale="log", xlim=(45, 2600))
    axes.set_xticks([150, 300, 600, 1200, 2400], ["150", "300", "600", "1,200", "2,400"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)

    several_seeds = [row for row in rows if row.seeds > 1]
    best = front([row for row in several_seeds if row.name not in NARROW_RESNET])
    axes.step(
        [*(row.core_seconds for row in best), 2600],
        [*(row.accuracy for row in best), best[-1].accuracy],
        where="post",
        color="#cccccc",
    )
    for row in rows:
        color = BLUE if row.unlabelled else GREY
        marker = "s" if row.name in NARROW_RESNET else "o"
        filling = "white" if row.seeds == 1 else color
        axes.plot(row.core_seconds, row.accuracy, marker, color=color, markerfacecolor=filling)
        on_the_left = row in best or row.name in NARROW_RESNET  # below the line is less room
        on_the_left = on_the_left and row.name not in NAMED_ON_THE_RIGHT
        axes.annotate(
            row.name,
            (row.core_seconds, row.accuracy),
            xytext=(-6, 1) if on_the_left else (6, -1),
            textcoords="offset points",
            ha="right" if on_the_left else "left",
            va="bottom" if on_the_left else "center",
            color=color,
        )
    axes.plot([], [], "o", color=BLUE, label="images without labels too")
    axes.plot([], [], "o", color=GREY, label="labelled images alone")
    axes.plot([], [], "s", color="black", label="narrow ResNet in place of a ViT")
    axes.plot([], [], "o", color="black", markerfacecolor="white", label="one seed")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.85))
    return figure


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "gaupipe"
    path = Path(__file__).with_suffix(".svg")
    FigureCanvasSVG(draw(read())).print_svg(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
