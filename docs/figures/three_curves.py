"""The figure of README.md: validation accuracy over the processor seconds of training, of standard
attention, of ``belief``, and of a student with a trained ViT's maps whose phase A counts. All are
trained with Muon:

    muon="--set train.optim.name=muon --set train.optim.lr=4e-3 --set threads=1
          --set phase_a.optim.name=muon --set phase_a.optim.lr=4e-3"
    for seed in 0 1 2; do
        gaupipe run fashion_mnist_vit --run-dir runs/maps-$seed --set seed=$seed $muon
        gaupipe train fashion_mnist_vit --student belief --run-dir runs/belief-$seed \
            --set seed=$seed $muon
    done
    python docs/figures/three_curves.py runs

About 20 minutes on one core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CURVES = {  # label: (runs, folder of the student, whether phase A counts, colour)
    "standard attention": ("maps-*", "plain/standard", False, "black"),
    "belief": ("belief-*", "plain/belief", False, "tab:blue"),
    "standard, from a teacher's maps (phase A counted)": (
        "maps-*",
        "phase_b/standard",
        True,
        "tab:orange",
    ),
}


def curve(run: Path, student: str, with_phase_a: bool) -> tuple[np.ndarray, np.ndarray]:
    """(processor seconds [E] since all training began, validation accuracy [E] in percent)."""
    entries = read(run / student)
    seconds = np.cumsum([entry["processor_seconds"] for entry in entries])
    if with_phase_a:
        seconds += sum(entry["processor_seconds"] for entry in read(run / "phase_a"))
    return seconds, np.array([100 * entry["val_acc"] for entry in entries])


def read(folder: Path) -> list[dict]:
    """The metrics of a training, an entry for each epoch."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def draw(root: Path) -> Figure:
    """A line is the mean over runs, its band goes from the lowest run to the highest."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for label, (runs, student, with_phase_a, colour) in CURVES.items():
        curves = [curve(run, student, with_phase_a) for run in sorted(root.glob(runs))]
        seconds, accuracies = (np.array(values) for values in zip(*curves, strict=True))
        x = seconds.mean(0)
        panel.plot(x, accuracies.mean(0), color=colour, label=label)
        panel.fill_between(x, accuracies.min(0), accuracies.max(0), color=colour, alpha=0.15)
    panel.set_xlabel("processor seconds of training")
    panel.set_ylabel("validation accuracy, %")
    panel.set_ylim(75, None)
    panel.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside upper center", ncols=3, fontsize=9)
    return figure


if __name__ == "__main__":
    draw(Path(sys.argv[1])).savefig(Path(__file__).with_suffix(".png"), dpi=150)
