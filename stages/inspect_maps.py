"""Inspect: what an attention-map store holds, and where the queries of one image look."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

import store
from gaupipe.data.augment import Augment
from gaupipe.data.loader import view_of
from gaupipe.data.splits import ImageData, load_data
from gaupipe.distillation.kinds import KINDS, StoredGaussians
from gaupipe.settings import DataSettings
from gaupipe.settings.augment import AugmentSettings
from gaupipe.system.errors import UserError
from gaupipe.system.files import whole_file
from gaupipe.system.progress import read_metrics
from stages.runs.directory import RunDirectory
from stages.student_maps import StudentMaps
from stages.students import load_student

TINY = torch.finfo(torch.float32).tiny
BLOCKS, LETTERS = " ░▒▓█", " .:+#"
"""From no attention to the most of the map."""


def summary(
    url: str | None, run_dir: Path | None = None, student: str | None = None
) -> dict[str, Any]:
    """Kind, shapes, size on disk, bytes an image and whether the store is complete; of a
    ``student`` its attention, its settings and its last metrics. Without a ``url`` the store is
    that of the run."""
    if student is not None:
        return student_summary(_run(run_dir), student)
    url = _store(url, run_dir)
    maps = store.open(url, allow_incomplete=True)
    schema, size = maps.schema, maps.size_on_disk()
    views = {} if schema.views == 1 else {"views_per_image": schema.views}
    return {
        "store": url,
        "kind": schema.kind,
        "complete": maps.complete,
        "dataset": schema.dataset,
        "encoding": schema.encoding,
        **({} if schema.k is None else {"k": schema.k}),
        "images": schema.images,
        **views,
        "layers": schema.layers,
        "heads": schema.heads,
        "grid": list(schema.grid),
        "classes": schema.num_classes,
        "arrays": {
            name: f"{list(shape)} {schema.stored_dtype(name)}"
            for name, (shape, *_) in schema.arrays().items()
        },
        "bytes_on_disk": size,
        "bytes_per_image": round(size / schema.images, 1),
        "teacher_sha256": schema.teacher_sha256,
        "parametrisation": schema.parametrisation,
        **schema.extra,
    }


def student_summary(run: RunDirectory, name: str) -> dict[str, Any]:
    """A student's model, the settings in which it differs from the run, and the metrics of its
    last epoch."""
    student = load_student(run.path, name)
    model: Any = student.model
    return {
        "student": student.name,
        "attention": student.settings.phase_b.student,
        "layers": len(model.blocks),
        "heads": model.blocks[0].attn.num_heads,
        "grid": list(model.patch_embed.grid_size),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "differs_from_run": run.differences(student.name, student.distilled),
        **read_metrics(student.folder / "metrics.jsonl")[-1],
    }


def attention(
    image: int,
    *,
    url: str | None = None,
    run_dir: Path | None = None,
    student: str | None = None,
    layer: int = 0,
    head: str = "mean",
    query: str = "mean",
    view: int = 0,
    png: str | None = None,
) -> dict[str, Any]:
    """The map of one training image, block, head (or ``mean``) and query (or ``mean``), as plain
    numbers for JSON, from a store (that of the run without a ``url``) or, where one is named, from
    a ``student``. ``view`` counts the views that a store may have of an image. ``png`` is drawn as
    well.

    ``map`` is a list of h lists of w weights, which all sum to 1. ``gaussian`` is (mean_x, mean_y,
    std_x, std_y) in normalised coordinates where one head and one query are asked for and the store
    holds Gaussians or embeddings. For a student that the run's store fits ``teacher`` is the stored
    map that this one is compared with, in the same form, and ``kl`` the divergence of the two, mean
    over the queries and heads that were asked for; both are None otherwise. ``no_teacher`` is there
    only for a student without a teacher's map, and says why.
    """
    if png is not None:
        check_output("--png", Path(png), ".png")
    if student is not None:
        maps = student_maps(_run(run_dir), student, image, layer, view)
    else:
        maps = stored_maps(_store(url, run_dir), image, layer, view)
    heads = _choice("--head", head, maps.maps.shape[0])
    queries = _choice("--query", query, maps.maps.shape[1])

    def mean(of_all: Tensor) -> list[list[float]]:
        return of_all[heads][:, queries].mean((0, 1)).reshape(maps.grid).tolist()

    gaussian = None
    if maps.gaussians is not None and "mean" not in (head, query):
        gaussian = maps.gaussians[heads[0], queries[0]].tolist()
    seen = {
        "image": image,
        "label": maps.label,
        "predicted": int(maps.probabilities.argmax()),
        "probability": round(maps.probabilities.max().item(), 6),
        "by": student or "teacher",
        "layer": layer,
        "head": head,
        "query": query,
        "grid": list(maps.grid),
        "gaussian": gaussian,
        "map": mean(maps.maps),
        "teacher": None,
        "kl": None,
    }
    if maps.teacher is not None:
        teacher = maps.teacher.expand_as(maps.maps)  # [H, T, T]
        kl = torch.xlogy(teacher, teacher / maps.maps.clamp_min(TINY)).sum(-1, keepdim=True)
        seen |= {"teacher": mean(teacher), "kl": kl[heads][:, queries].mean().item()}
    elif maps.no_teacher is not None:
        seen["no_teacher"] = maps.no_teacher
    if png is not None:
        draw(maps.pixels(), seen, Path(png))
    return seen


@dataclass
class ImageMaps:
    """One image and where one block looks.

    maps           [H, T, T] float32, probabilities over keys
    gaussians      [H, T, 4] where the maps are those of Gaussians
    probabilities  [C], of the classes
    pixels         gives the image, uint8 [height, width, C]; raises UserError if it is not there
    teacher        [H or 1, T, T], the stored maps that a student's are compared with
    no_teacher     why a student's maps have none
    """

    grid: tuple[int, int]
    maps: Tensor
    gaussians: Tensor | None
    label: int
    probabilities: Tensor
    pixels: Callable[[], np.ndarray]
    teacher: Tensor | None = None
    no_teacher: str | None = None


def stored_maps(url: str, image: int, layer: int, view: int = 0) -> ImageMaps:
    """The maps of an image, or of one of its views, as a store has them."""
    maps = store.open(url)
    schema = maps.schema
    _check("--image", image, schema.images, "the store")
    _check("--layer", layer, schema.layers, "the store")
    _check("--view", view, schema.views, "the store")
    entry = image * schema.views + view
    stored = maps.read(entry, entry + 1)
    attention = KINDS[schema.kind].reader(maps, torch.device("cpu"))(stored)
    gaussians = attention.gaussians if isinstance(attention, StoredGaussians) else None
    return ImageMaps(
        schema.grid,
        attention.map(layer)[0],  # [H, T, T]
        None if gaussians is None else gaussians[0, layer].float(),  # [H, T, 4]
        int(stored["labels"][0]),
        torch.from_numpy(stored["logits"][0]).float().softmax(-1),
        lambda: image_pixels(images_of(maps), image, schema.extra.get("views"), view),
    )


def images_of(maps: store.Store) -> ImageData:
    """The data set that a store's maps were made from. Raises UserError where the store does not
    name it, or where it is not there or another one."""
    schema = maps.schema
    try:
        settings = DataSettings.model_validate(schema.extra.get("data"))
    except ValidationError:
        raise UserError(
            f"{maps.url}: does not say which images its maps were made from, as stores that "
            "export-maps writes do: they cannot be drawn"
        ) from None
    data = load_data(settings)
    if data.sha256 != schema.dataset_sha256:
        raise UserError(
            f"{maps.url}: the images of {data.name} are not those the maps were made from"
        )
    return data


def image_pixels(data: ImageData, image: int, views: dict[str, Any] | None, view: int = 0) -> Any:
    """A training image, or the view of it that ``views``, a store's extra["views"], describes:
    uint8 [height, width, C]."""
    if views is None:
        return data.train.image(image)
    augment = Augment(AugmentSettings.model_validate(views["augment"]), views["seed"])
    return view_of(data.train, image, augment, view)


def student_maps(run: RunDirectory, name: str, image: int, layer: int, view: int = 0) -> ImageMaps:
    """The maps of a training image as a student makes them, from patches to patches; of a view of
    the image where the store that the student learned from holds views."""
    student = StudentMaps(run, name)
    schema = student.store.schema if student.store else None
    views = schema.extra.get("views") if schema else None
    _check("--image", image, len(student.data.train), "the training split")
    _check("--layer", layer, student.layers, "the student")
    _check("--view", view, schema.views if schema else 1, "the student's store")
    seen = student.see(image, views, view)
    return ImageMaps(
        student.grid,
        seen.maps[layer],
        None,
        seen.label,
        seen.logits.softmax(-1),
        lambda: image_pixels(student.data, image, views, view),
        seen.teacher[layer],
        seen.no_teacher,
    )


def check_output(option: str, path: Path, *suffixes: str) -> None:
    """Raises UserError for a file that cannot be written to."""
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{option} {path}: should be a file whose name ends in {suffixes[0]}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise UserError(f"{option} {path}: is there and is not a file")


def heat_map(seen: dict[str, Any], blocks: bool = True) -> Group:
    """The map of :func:`attention` for a terminal: two characters a token, the query's token in
    brackets; of a student with the teacher's map on its right. ``blocks`` shades with block
    characters, which not every terminal has."""
    shades, by, of_teacher = BLOCKS if blocks else LETTERS, seen["by"], seen["teacher"]
    weights, top = np.array(seen["map"]), most_of(seen)
    title = (
        f"image {seen['image']} (label {seen['label']}, {by} says {seen['predicted']} with "
        f"{seen['probability']:.2f}), layer {seen['layer']}, head {seen['head']}, query "
        f"{seen['query']}"
    )
    rows = shaded(weights, seen, shades, top)
    largest = "the largest weight"
    lines: list[Text | Table] = [Text(title), *rows]
    if of_teacher is not None:
        beside = Table(box=None, pad_edge=False, padding=(0, 2))
        beside.add_column(by)
        beside.add_column("teacher")
        for pair in zip(rows, shaded(np.array(of_teacher), seen, shades, top), strict=True):
            beside.add_row(*pair)
        lines = [Text(title), beside, Text(f"  KL of {by} from the teacher: {seen['kl']:.4f}")]
        largest += f" of both maps; {by} has {weights.max():.4f}"
    elif "no_teacher" in seen:
        lines.append(Text(f"  no teacher beside it: {seen['no_teacher']}"))
    token = weights.argmax()
    y, x = divmod(int(token), weights.shape[1])
    at = f"at token {token} (row {y}, column {x})"
    lines.append(Text(f"  {shades[-1] * 2} = {top:.4f}, {largest}, {at}"))
    if seen["gaussian"]:
        mean_x, mean_y, std_x, std_y = seen["gaussian"]
        gaussian = f"mean ({mean_x:.3f}, {mean_y:.3f}), std ({std_x:.3f}, {std_y:.3f})"
        lines.append(Text(f"  Gaussian: {gaussian} in (x, y), -1 and +1 the first and last token"))
    return Group(*lines)


def most_of(seen: dict[str, Any]) -> float:
    """The largest weight of the map of :func:`attention` and of the teacher's beside it, which are
    drawn on one scale."""
    return float(max(np.max(seen[name]) for name in ("map", "teacher") if seen[name] is not None))


def shaded(weights: np.ndarray, seen: dict[str, Any], shades: str, top: float) -> list[Text]:
    """A line for each row of a map [h, w]; the last of the ``shades`` is for ``top``."""
    query = None if seen["query"] == "mean" else divmod(int(seen["query"]), seen["grid"][1])
    lines = []
    for y, row in enumerate(weights):
        line = Text("  ")
        for x, weight in enumerate(row):
            level = weight / top if top else 0.0
            shade = shades[min(int(level * len(shades)), len(shades) - 1)] * 2
            line.append(
                "[]" if (y, x) == query else shade,
                style=f"rgb({int(68 + 187 * level)},{int(1 + 230 * level)},84)",
            )
        lines.append(line)
    return lines


def draw(pixels: np.ndarray, seen: dict[str, Any], path: Path) -> None:
    """A PNG of the image, uint8 [height, width, C], and beside it the image with the map over it;
    of a student also with the teacher's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    height, width = pixels.shape[:2]
    h, w = seen["grid"]
    panels = [("", None), (seen["by"], seen["map"])]
    if seen["teacher"] is not None:
        panels.append(("teacher", seen["teacher"]))
    figure = Figure(figsize=(3.5 * len(panels), 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, weights) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        grey = {"cmap": "gray", "vmin": 0, "vmax": 255} if pixels.shape[2] == 1 else {}
        axes.imshow(pixels.squeeze(), extent=(0, width, height, 0), **grey)
        if weights is not None:
            drawn = axes.imshow(
                np.array(weights),
                extent=(0, width, height, 0),
                cmap="viridis",
                vmin=0,
                vmax=most_of(seen),
                alpha=0.65,
                interpolation="nearest",
            )
            figure.colorbar(drawn, ax=axes, fraction=0.046, label="attention")
            axes.set_title(name, fontsize=9)
        if seen["query"] != "mean":
            y, x = divmod(int(seen["query"]), w)
            corner, size = (x * width / w, y * height / h), (width / w, height / h)
            axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="red", linewidth=2))
        axes.set_axis_off()
    query = "mean over queries" if seen["query"] == "mean" else f"query {seen['query']} (red)"
    figure.suptitle(
        f"image {seen['image']}, label {seen['label']}: layer {seen['layer']}, "
        f"head {seen['head']}, {query}",
        fontsize=10,
    )
    with whole_file(path) as partial:
        figure.savefig(partial)


def _run(run_dir: Path | None) -> RunDirectory:
    if run_dir is None:
        raise UserError("inspect: name a store or a run directory")
    return RunDirectory(run_dir)


def _store(url: str | None, run_dir: Path | None) -> str:
    """The store that is named, else that of the run."""
    return str(_run(run_dir).maps) if url is None else url


def _choice(option: str, value: str, size: int) -> list[int]:
    """Indices that an ``N|mean`` option stands for."""
    if value == "mean":
        return list(range(size))
    # int would also take '1_0' and digits of other scripts, and not take thousands of digits
    if not re.fullmatch("-?[0-9]{1,9}", value):
        right = f"a number from 0 to {size - 1}, or mean"
        raise UserError(f"{option} {value[:30]!r}: should be {right}")
    _check(option, int(value), size, "the map")
    return [int(value)]


def _check(option: str, value: int, size: int, where: str) -> None:
    if not 0 <= value < size:
        raise UserError(f"{option} {value}: {where} has 0 to {size - 1}")
