"""Which keys get attention while a ViT and a teacher with Gaussians train (*GauTransformer, figure
4*): the figure of results.md, and the numbers by which its claim is judged.

Each training is done with more and more epochs. The schedule of the learning rate does not depend
on how many there are, so their results are the checkpoints of one training.

    all="--set data.train_images=5000 --set threads=1"
    gaussian="--set phase_a.mode=stochastic --set phase_a.per_image=table --set phase_a.prior=false
              --set phase_a.rows.lr=0.1 --set phase_a.stop_accuracy=1
              --set phase_a.optim.schedule_args.num_epochs=11"
    for epochs in 1 2 4 8 12; do
        gaupipe train fashion_mnist --student standard --run-dir runs/vit-$epochs $all \
            --set train.epochs=$epochs --set train.optim.schedule_args.num_epochs=11
        gaupipe phase-a fashion_mnist --run-dir runs/gaussian-$epochs $all $gaussian \
            --set phase_a.max_epochs=$epochs
        gaupipe export-maps --run-dir runs/gaussian-$epochs
    done
    python docs/figures/attended_keys.py runs

About 15 minutes on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gaupipe import open_run
from gaupipe.models import forward_with_maps

IMAGES = (0, 1, 2)
"""Ids of training images: I, II and III of the figure."""
MODELS = {"vit": "ViT", "gaussian": "teacher with Gaussians"}


def attention_to_keys(run_folder: Path) -> np.ndarray:
    """[images, T]: the attention that each key gets in the first block, mean over heads and
    queries, so that it sums to 1."""
    run = open_run(run_folder)
    if run.directory.maps.exists():
        first_block = run.maps(IMAGES)[0]  # [images, H, T, T]
    else:
        _logits, log_maps = forward_with_maps(
            run.student("standard", plain=True), run.images(IMAGES)
        )
        first_block = log_maps[0].detach().exp()
    return first_block.mean((1, 2)).numpy()


def number_of_epochs(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def read(root: Path, model: str) -> tuple[list[int], np.ndarray]:
    """Epochs [E], and the attention that keys got after each, [E, images, T]."""
    folders = sorted(root.glob(f"{model}-*"), key=number_of_epochs)
    return [number_of_epochs(folder) for folder in folders], np.stack(
        [attention_to_keys(folder) for folder in folders]
    )


def say(label: str, epochs: list[int], keys: np.ndarray) -> None:
    """Prints what the claim is judged by."""
    for image in range(len(IMAGES)):
        strongest = ", ".join(
            f"{epoch}: {weights.argmax()} ({weights.max():.3f})"
            for epoch, weights in zip(epochs, keys[:, image], strict=True)
        )
        print(f"{label}, image {image + 1}, strongest key after epoch {strongest}")
    to_the_end = [np.mean([correlation(now, last) for now, last in zip(at, keys[-1], strict=True)])
                  for at in keys]  # fmt: skip
    among_images = np.mean(
        [correlation(keys[-1, i], keys[-1, j]) for i in range(len(IMAGES)) for j in range(i)]
    )
    print(f"{label}: correlation with the last epoch {np.round(to_the_end, 2)}")
    print(f"{label}: correlation of two images at the end {among_images:.2f}")


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Of the attention of all keys, Pearson's."""
    return float(np.corrcoef(one, other)[0, 1])


def draw(root: Path) -> Figure:
    """A panel for each model and image: keys from left to right, epochs from top to bottom."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(MODELS), len(IMAGES), sharex=True, squeeze=False)
    for row, (model, label) in zip(panels, MODELS.items(), strict=True):
        epochs, keys = read(root, model)
        say(label, epochs, keys)
        uniform = 1 / keys.shape[-1]
        for image, panel in enumerate(row):
            picture = panel.imshow(
                keys[:, image] / uniform,
                aspect="auto",
                cmap="Greys",
                vmin=0,
                vmax=keys.max() / uniform,
                interpolation="nearest",
            )
            panel.set_yticks(range(len(epochs)), [str(epoch) for epoch in epochs])
            panel.set_title(f"{label}, image {'I' * (image + 1)}", fontsize=9)
        row[0].set_ylabel("epoch")
        figure.colorbar(picture, ax=list(row), label="times uniform")
    for panel in panels[-1]:
        panel.set_xlabel("key")
    return figure


if __name__ == "__main__":
    draw(Path(sys.argv[1])).savefig(Path(__file__).with_suffix(".png"), dpi=150)
