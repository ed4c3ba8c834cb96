"""Inspect: what an attention-map store holds, and where the queries of one image look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import store
import torch
from rich.console import Group
from rich.text import Text

from gaupipe.errors import UserError
from gaupipe.gaussians import expected_map
from stages.export_maps import gaussians_reader

SHADES = " ░▒▓█"


def summary(url: str) -> dict[str, Any]:
    """Kind, shapes, size on disk, bytes an image and whether the store is complete."""
    maps = store.open(url, allow_incomplete=True)
    schema, size = maps.schema, maps.size_on_disk()
    return {"store": url, "kind": schema.kind, "complete": maps.complete, "dataset": schema.dataset,
            "images": schema.num_images, "layers": schema.layers, "heads": schema.heads, "grid": list(schema.grid),
            "classes": schema.num_classes,
            "arrays": {name: f"{list(shape)} {dtype}" for name, (shape, dtype, _) in schema.arrays().items()},
            "bytes_on_disk": size, "bytes_per_image": round(size / schema.num_images, 1),
            "teacher_sha256": schema.teacher_sha256, "parametrisation": schema.parametrisation, **schema.extra}


def attention(url: str, image: int, layer: int, head: str, query: str) -> dict[str, Any]:
    """The map of one image, block, head (or ``mean``) and query (or ``mean``), as plain numbers for JSON.

    ``map`` is a list of h rows of w weights that sum to 1. ``gaussian`` is (mean_x, mean_y, std_x, std_y) in normalised
    coordinates where one head and one query are asked for and the store holds Gaussians or embeddings.
    """
    maps = store.open(url)
    schema = maps.schema
    tokens = schema.grid[0] * schema.grid[1]
    _check("--image", image, schema.num_images)
    _check("--layer", layer, schema.layers)
    heads = _choice("--head", head, schema.heads)
    queries = _choice("--query", query, tokens)
    stored = maps.gather([image])
    if schema.kind == "dense":
        gaussians, rows = None, torch.from_numpy(stored["maps"][0, layer]).float()
    else:
        gaussians = gaussians_reader(maps, torch.device("cpu"))(stored)[0, layer]
        rows = expected_map(gaussians, schema.grid)
    weights = rows[heads][:, queries].mean((0, 1)).reshape(schema.grid)
    probabilities = torch.from_numpy(stored["logits"][0]).float().softmax(-1)
    one = gaussians is not None and "mean" not in (head, query)
    return {"image": image, "label": int(stored["labels"][0]), "predicted": int(probabilities.argmax()),
            "probability": round(probabilities.max().item(), 6), "layer": layer, "head": head, "query": query,
            "grid": list(schema.grid), "gaussian": gaussians[heads[0], queries[0]].tolist() if one else None,
            "map": weights.tolist()}


def heat_map(seen: dict[str, Any]) -> Group:
    """The map of :func:`attention` for a terminal: two characters a token, the query's token in brackets."""
    weights = np.array(seen["map"])
    top = weights.max()
    query = None if seen["query"] == "mean" else divmod(int(seen["query"]), seen["grid"][1])
    lines = [Text(f"image {seen['image']} (label {seen['label']}, teacher says {seen['predicted']} with "
                  f"{seen['probability']:.2f}), layer {seen['layer']}, head {seen['head']}, query {seen['query']}")]
    for y, row in enumerate(weights):
        line = Text("  ")
        for x, weight in enumerate(row):
            level = weight / top if top else 0.0
            shade = SHADES[min(int(level * len(SHADES)), len(SHADES) - 1)] * 2
            line.append("[]" if (y, x) == query else shade, style=f"rgb({int(68 + 187 * level)},{int(1 + 230 * level)},84)")
        lines.append(line)
    y, x = np.unravel_index(weights.argmax(), weights.shape)
    lines.append(Text(f"  {SHADES[-1] * 2} = {top:.4f}, the largest weight, at token {y * weights.shape[1] + x} "
                      f"(row {y}, column {x})"))
    if seen["gaussian"]:
        mean_x, mean_y, std_x, std_y = seen["gaussian"]
        lines.append(Text(f"  Gaussian: mean ({mean_x:.3f}, {mean_y:.3f}), std ({std_x:.3f}, {std_y:.3f}) in (x, y), "
                          "-1 and +1 the first and last token"))
    return Group(*lines)


def draw(url: str, seen: dict[str, Any], path: Path) -> None:
    """A PNG of the image, and beside it the image with the map over it. Raises UserError if the images are not there."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    from gaupipe import data as datasets
    from gaupipe.config import DataSettings

    if not path.parent.is_dir():
        raise UserError(f"--png {path}: there is no folder {path.parent}")
    schema = store.open(url).schema
    data = datasets.load(DataSettings.model_validate(schema.extra["data"]))
    if data.sha256 != schema.dataset_sha256:
        raise UserError(f"{url}: the images of {data.name} are not those the maps were made from")
    pixels = data.train.image(seen["image"])
    height, width = pixels.shape[:2]
    h, w = seen["grid"]
    weights = np.array(seen["map"])
    figure = Figure(figsize=(7, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, over in zip(figure.subplots(1, 2), (False, True), strict=True):
        grey = {"cmap": "gray", "vmin": 0, "vmax": 255} if pixels.shape[2] == 1 else {}
        axes.imshow(pixels.squeeze(), extent=(0, width, height, 0), **grey)
        if over:
            shown = axes.imshow(weights, extent=(0, width, height, 0), cmap="viridis", vmin=0, alpha=0.65,
                                interpolation="nearest")
            figure.colorbar(shown, ax=axes, fraction=0.046, label="attention")
        if seen["query"] != "mean":
            y, x = divmod(int(seen["query"]), w)
            axes.add_patch(Rectangle((x * width / w, y * height / h), width / w, height / h, fill=False,
                                     edgecolor="red", linewidth=2))
        axes.set_axis_off()
    query = "mean over queries" if seen["query"] == "mean" else f"query {seen['query']} (red)"
    figure.suptitle(f"image {seen['image']}, label {seen['label']}: layer {seen['layer']}, head {seen['head']}, {query}",
                    fontsize=10)
    figure.savefig(path)


def _choice(option: str, value: str, size: int) -> list[int]:
    """Indices that an ``N|mean`` option stands for."""
    if value == "mean":
        return list(range(size))
    if not value.lstrip("-").isdigit():
        raise UserError(f"{option} {value!r}: should be a number from 0 to {size - 1}, or mean")
    _check(option, int(value), size)
    return [int(value)]


def _check(option: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise UserError(f"{option} {value}: the store has 0 to {size - 1}")
