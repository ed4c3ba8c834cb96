"""Norms and angles of the orthogonal projection while a student is trained (*BeliefFormer, figures
4 and 8*)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from gaupipe.data.batches import Batches
from gaupipe.data.splits import ImageData
from gaupipe.system.files import whole_file
from gaupipe.training.epochs import Epoch
from gaupipe.vit.diagnostics import mean_geometry

IMAGES = 64
"""Training images, evenly spaced, on which norms and angles are measured."""

PANELS = {
    "|MH|": "mh_norm",
    "|D|": "d_norm",
    "angle of MH W and X (degrees)": "mh_update_angle",
    "angle of D W and X (degrees)": "d_update_angle",
}


class Geometry:
    """Measures a student every so many steps, always on the same images; never where ``every`` is
    0."""

    def __init__(self, data: ImageData, device: torch.device, every: int) -> None:
        self.every = every
        self.images: Tensor | None = None
        if every:
            batches = Batches(data.train, data, device, IMAGES)
            ids = data.train.evenly_spaced(IMAGES)
            self.images = torch.cat([batch.images for batch in batches.in_order(ids)])

    def measure(self, student: VisionTransformer, step: int, epoch: Epoch) -> None:
        """``step`` counts the batches of the training so far. The norms and angles go into
        the metrics of the epoch. The student stays in its mode."""
        if self.images is None or step % self.every:
            return
        training = student.training
        measured = mean_geometry(student.eval(), self.images)
        student.train(training)
        epoch.lists.setdefault("geometry", []).append({"step": step, **measured})


def draw(metrics: list[dict[str, Any]], folder: Path) -> None:
    """Writes ``folder``/geometry.png, a line for each block; nothing where nothing was measured."""
    measured = [entry for row in metrics for entry in row.get("geometry", [])]
    if not measured:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    steps = [entry["step"] for entry in measured]
    for axes, (label, name) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for block in range(len(measured[0][name])):
            axes.plot(steps, [entry[name][block] for entry in measured], label=f"block {block}")
        axes.set_xlabel("step")
        axes.set_ylabel(label)
    axes.legend(fontsize=8)
    with whole_file(folder / "geometry.png") as partial:
        figure.savefig(partial, dpi=150)
