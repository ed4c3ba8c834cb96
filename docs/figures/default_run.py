"""Draws default_run.png: what the four commands made of one image of the digits, for
how-it-works.md, and prints its numbers.

    gaupipe phase-a
    gaupipe export-maps
    gaupipe phase-b --student belief2
    gaupipe inspect
    python docs/figures/default_run.py runs/digits

The teacher before its training is made afresh from the run's settings: its seed fixes the
decoder's weights and the embeddings that images start with.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Rectangle

from gaupipe import open_run
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.models import forward_with_maps
from gaupipe.teachers.gaussian import GaussianTeacher

INK, RED, BLUE, GREY = "#222222", "#c0392b", "#2b6cb0", "#b5b5b5"
OUTSIDE = 2.0
"""A mean beyond it lies half a grid outside."""


@dataclass
class Query:
    """What a run holds of one query of one training image. Gaussians are mean_x, mean_y, std_x,
    std_y in normalised coordinates."""

    place: tuple[int, int, int, int]
    """Image id, block, head and query."""
    grid: tuple[int, int]
    """(h, w) in tokens."""
    label: int
    image: np.ndarray  # [height, width]
    embedding_before: np.ndarray  # [E], of the image and the block
    embedding: np.ndarray  # [E]
    gaussians_before: np.ndarray  # [T, 4], of all queries of the head
    gaussians: np.ndarray  # [T, 4]
    teacher_map: np.ndarray  # [T], of the query
    student_map: np.ndarray  # [T]
    share_outside: float
    """Of the Gaussians of all training images, blocks, heads and queries."""

    @property
    def divergence(self) -> float:
        """KL(teacher's map, student's map) in nats."""
        seen = self.teacher_map > 0
        teacher, student = self.teacher_map[seen], self.student_map[seen]
        return float((teacher * np.log(teacher / student)).sum())


@torch.no_grad()
def read(folder: Path, image: int, block: int, head: int, query: int) -> Query:
    """Everything that the figure shows, from a finished run with embeddings."""
    run = open_run(folder)
    stored = run.store.gather(np.arange(run.store.schema.num_images))
    decode = MAP_KINDS["embedding"].reader(run.store, torch.device("cpu"))
    gaussians = decode(stored).gaussians  # [N, L, H, T, 4]
    is_outside = (gaussians[..., :2].abs() > OUTSIDE).any(-1)
    start = GaussianTeacher.build(run.settings, run.data, folder / "no rows", to_read=True)
    embeddings = start.parameters(torch.tensor([image]))  # [1, L, E]
    _logits, log_maps = forward_with_maps(run.student(), run.images([image]))
    return Query(
        place=(image, block, head, query),
        grid=run.store.schema.grid,
        label=int(run.data.train.labels[image]),
        image=run.images([image])[0].mean(0).numpy(),
        embedding_before=embeddings[0, block].numpy(),
        embedding=np.asarray(stored["embeddings"][image, block], dtype=np.float32),
        gaussians_before=start.network.gaussians(embeddings)[0, block, head].numpy(),
        gaussians=gaussians[image, block, head].numpy(),
        teacher_map=run.maps([image])[block][0, head, query].numpy(),
        student_map=log_maps[block][0, head, query].exp().numpy(),
        share_outside=float(is_outside.float().mean()),
    )


def say(seen: Query) -> None:
    """Prints the numbers of the figure."""
    query = seen.place[3]
    for moment, gaussians in (("before", seen.gaussians_before), ("after", seen.gaussians)):
        numbers = " ".join(f"{number:.2f}" for number in gaussians[query])
        print(f"Gaussian of the query {moment} training: {numbers}")
    print("embedding: " + " ".join(f"{number:.2f}" for number in seen.embedding[:8]) + " ...")
    for model, weights in (("teacher", seen.teacher_map), ("student", seen.student_map)):
        print(f"{model}'s strongest key: {weights.argmax()} ({weights.max():.3f})")
    print(f"KL(teacher, student) of the query: {seen.divergence:.3f}")
    print(f"Gaussians with a mean beyond {OUTSIDE}: {seen.share_outside:.1%}")


def in_tokens(values: np.ndarray, n: int) -> np.ndarray:
    """Normalised coordinates as token coordinates of an axis of ``n`` tokens."""
    return (values + 1) / 2 * (n - 1)


def show_image(axes: Axes, seen: Query) -> None:
    """The image behind its token grid, the query's token red."""
    h, w = seen.grid
    border = (-0.5, w - 0.5, h - 0.5, -0.5)
    axes.imshow(seen.image, cmap="Greys", extent=border, alpha=0.45)
    axes.set_xticks(np.arange(w))
    axes.set_yticks(np.arange(h))
    axes.set_xticks(np.arange(-0.5, w), minor=True)
    axes.set_yticks(np.arange(-0.5, h), minor=True)
    axes.grid(which="minor", color=GREY, linewidth=0.6)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    mark_query(axes, seen)


def mark_query(axes: Axes, seen: Query) -> None:
    y, x = divmod(seen.place[3], seen.grid[1])
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=RED, linewidth=2))


def show_gaussians(axes: Axes, seen: Query, gaussians: np.ndarray) -> None:
    """An ellipse at one standard deviation for each query of the head, the query's own red."""
    show_image(axes, seen)
    h, w = seen.grid
    for query, (mean_x, mean_y, std_x, std_y) in enumerate(gaussians):
        is_shown = query == seen.place[3]
        axes.add_patch(
            Ellipse(
                (in_tokens(mean_x, w), in_tokens(mean_y, h)),
                std_x * (w - 1),
                std_y * (h - 1),
                fill=False,
                edgecolor=RED if is_shown else BLUE,
                linewidth=2.2 if is_shown else 0.9,
                alpha=1.0 if is_shown else 0.6,
                zorder=3 if is_shown else 2,
            )
        )
    axes.set(xlim=(-1.5, w + 0.5), ylim=(h + 0.5, -1.5))


def show_embedding(axes: Axes, seen: Query) -> None:
    """The numbers of the embedding as bars, its start as grey marks."""
    numbers = np.arange(len(seen.embedding))
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.bar(numbers, seen.embedding, color=BLUE, width=0.75, label="after training")
    axes.plot(numbers, seen.embedding_before, "_", color=INK, markersize=7, label="before")
    axes.legend(fontsize=8, frameon=False, loc="lower right", ncols=2)
    low = min(seen.embedding.min(), seen.embedding_before.min())
    high = max(seen.embedding.max(), seen.embedding_before.max())
    axes.set_ylim(low - 0.25 * (high - low), high + 0.05 * (high - low))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def show_map(axes: Axes, seen: Query, weights: np.ndarray) -> None:
    """The attention of the query to each key, in percent."""
    h, w = seen.grid
    top = max(seen.teacher_map.max(), seen.student_map.max())
    axes.imshow(weights.reshape(h, w), cmap="Blues", vmin=0, vmax=top)
    axes.set_xticks([])
    axes.set_yticks([])
    for key, weight in enumerate(weights):
        y, x = divmod(key, w)
        color = "white" if weight > 0.6 * top else INK
        axes.text(x, y, f"{100 * weight:.0f}", ha="center", va="center", color=color, fontsize=10)
    mark_query(axes, seen)


def note(axes: Axes, title: str, *lines: str) -> None:
    """A panel's title, and what to see in it below."""
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel("\n".join(lines), fontsize=9)


def draw(seen: Query) -> Figure:
    """Six panels in the order of reading: image, embedding, Gaussians before training and after,
    the teacher's map and the student's."""
    figure = Figure(figsize=(11, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    (image, embedding, before), (after, teacher, student) = figure.subplots(2, 3)
    image_id, block, head, query = seen.place
    h, w = seen.grid

    show_image(image, seen)
    note(
        image,
        f"1  Image {image_id}, a {seen.label}",
        f"{h} x {w} tokens. The red one is query {query},",
        "which the other panels follow.",
    )

    show_embedding(embedding, seen)
    moved = np.abs(seen.embedding - seen.embedding_before).max()
    note(
        embedding,
        f"2  The image's embedding in block {block}",
        f"{len(seen.embedding)} numbers. None has moved by more than {moved:.2f}:",
        "what has learned is the decoder.",
    )

    show_gaussians(before, seen, seen.gaussians_before)
    note(
        before,
        "3  Decoded before training",
        f"Gaussians of head {head}, one std: red query {query}, blue the",
        f"other {h * w - 1}. All are near the middle, std about 1.",
    )

    show_gaussians(after, seen, seen.gaussians)
    mean_x, mean_y, std_x, std_y = seen.gaussians[query]
    note(
        after,
        "4  Decoded after training",
        "Each query has a place of its own. Red:",
        f"mean ({mean_x:.2f}, {mean_y:.2f}), std ({std_x:.2f}, {std_y:.2f}).",
    )

    show_map(teacher, seen, seen.teacher_map)
    note(
        teacher,
        f"5  The teacher's map of query {query}",
        "The mean over all points of the red Gaussian:",
        "attention to each key, in percent.",
    )

    show_map(student, seen, seen.student_map)
    note(
        student,
        f"6  The student's map of query {query}",
        "A softmax over all keys.",
        f"KL(teacher, student) of the two maps: {seen.divergence:.2f}.",
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--image", type=int, default=3)
    parser.add_argument("--block", type=int, default=1)
    parser.add_argument("--head", type=int, default=0)
    parser.add_argument("--query", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    options = parser.parse_args()
    seen = read(options.run, options.image, options.block, options.head, options.query)
    say(seen)
    draw(seen).savefig(options.out)


if __name__ == "__main__":
    main()
