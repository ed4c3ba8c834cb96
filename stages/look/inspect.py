"""Inspect: what an attention-map store holds, and where the queries of one image look."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import torch
from PIL import Image
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

import store
from gaupipe.system.errors import UserError
from gaupipe.system.files import check_file, whole_file
from stages.look import picture
from stages.look.image_maps import Crop, ImageMaps, StoredMaps, StudentMaps, images_of, photo
from stages.runs.directory import RunDirectory

TINY = torch.finfo(torch.float32).tiny
SHADES = " .:+#"
"""From no attention to the most of the map, where a terminal has no colours."""


def summary(url: str | None, run_dir: Path | None = None) -> dict[str, object]:
    """Kind, shapes, size on disk, bytes an image and whether the store is complete. Without a
    ``url`` the store is that of the run."""
    url = _store(url, run_dir)
    maps = store.open(url, allow_incomplete=True)
    schema = maps.schema
    size = maps.size_on_disk()
    shown = {
        "store": url,
        "kind": schema.kind,
        "complete": maps.complete,
        "dataset": schema.dataset,
        "encoding": schema.encoding,
    }
    if schema.k is not None:
        shown["k"] = schema.k
    shown["images"] = schema.images
    if schema.views > 1:
        shown["views_per_image"] = schema.views
    shown |= {"layers": schema.layers, "heads": schema.heads, "grid": list(schema.grid)}
    if schema.prefix_tokens:
        shown["extra_tokens"] = schema.prefix_tokens
    return shown | {
        "classes": schema.num_classes,
        "arrays": {
            name: f"{list(spec.shape)} {schema.stored_dtype(name)}"
            for name, spec in schema.arrays().items()
        },
        "bytes_on_disk": size,
        "bytes_per_image": round(size / schema.images, 1),
        "teacher_sha256": schema.teacher_sha256,
        "parametrisation": schema.parametrisation,
        **schema.extra,
    }


class Seen(TypedDict):
    """The map of one image as plain numbers for JSON: lists of h lists of w weights."""

    image: int
    label: int | None
    predicted: int | None
    probability: float | None
    by: str
    layer: int
    head: str | int
    query: str | int
    grid: list[int]
    gaussian: list[float] | None
    map: list[list[float]]
    teacher: list[list[float]] | None
    kl: float | None
    extra: NotRequired[dict[str, float]]
    no_teacher: NotRequired[str]


def attention(
    image: int,
    *,
    url: str | None = None,
    run_dir: Path | None = None,
    student: str | None = None,
    layer: int | None = None,
    head: str = "mean",
    query: str | None = None,
    view: int = 0,
    png: str | None = None,
) -> Seen:
    """The map of one training image, block (None is the last), head (or ``mean``) and query (or
    ``mean``; None is the patch in the middle, as a mean over queries looks everywhere), as plain
    numbers for JSON, from a store (that of the run without a ``url``) or, where one is named, from
    a ``student``. ``view`` counts the views that a store may have of an image. ``png`` is drawn as
    well.

    ``map`` is a list of h lists of w weights, which all sum to 1. ``gaussian`` is (mean_x, mean_y,
    std_x, std_y) in normalised coordinates where one head and one query are asked for and the store
    holds Gaussians or embeddings. For a student that the run's store fits ``teacher`` is the stored
    map that this one is compared with, in the same form, and ``kl`` the divergence of the two, mean
    over the queries and heads that were asked for; both are None otherwise. ``extra`` is there for
    maps with class and register tokens, and has their weights. ``no_teacher`` is there only for a
    student without a teacher's map, and says why.
    """
    if png is not None:
        check_file("--png", Path(png), ".png")
    seen, taken, layer = look(url, run_dir, student, image, layer, view)
    if query is None:
        height, width = seen.grid
        query = str(height // 2 * width + width // 2)
    rows = seen.map(layer)  # [H, P + T, P + T]
    extra = len(seen.extra)
    heads = _choice("--head", head, rows.shape[0])
    queries = _choice("--query", query, rows.shape[1] - extra, seen.extra)

    def mean(values: Tensor) -> Tensor:
        return values[heads][:, queries].mean((0, 1))

    gaussian = None
    if seen.gaussians is not None and "mean" not in (head, query):
        gaussian = seen.gaussians[layer, heads[0], queries[0]].tolist()
    whole = mean(rows)  # [P + T]
    predicted = seen.prediction()
    numbered = query != "mean" and query not in seen.extra
    shown: Seen = {
        "image": image,
        "label": seen.label,
        "predicted": predicted["predicted"],
        "probability": predicted["probability"],
        "by": seen.by,
        "layer": layer,
        "head": head if head == "mean" else int(head),
        "query": int(query) if numbered else query,
        "grid": list(seen.grid),
        "gaussian": gaussian,
        "map": whole[extra:].reshape(seen.grid).tolist(),
        "teacher": None,
        "kl": None,
    }
    teacher = None
    if seen.teacher:
        teacher = seen.teacher[layer]
    if teacher is not None:
        kl = torch.xlogy(teacher, teacher / rows.clamp_min(TINY)).sum(-1, keepdim=True)
        shown["teacher"] = mean(teacher).reshape(seen.grid).tolist()
        shown["kl"] = mean(kl).item()
    if extra:
        shown["extra"] = dict(zip(seen.extra, whole.tolist(), strict=False))
    if seen.no_teacher is not None:
        shown["no_teacher"] = seen.no_teacher
    if png is not None:
        draw(taken(), shown, Path(png))
    return shown


def look(
    url: str | None,
    run_dir: Path | None,
    student: str | None,
    image: int,
    layer: int | None,
    view: int,
) -> tuple[ImageMaps, Callable[[], tuple[Image.Image, Crop]], int]:
    """The maps of an image, a function that gives the photo, and the block. Raises UserError for
    an image, a block or a view that there is not."""

    def check(where: str, images: int, layers: int, count: int) -> int:
        block = layers - 1 if layer is None else layer
        _check("--image", image, images, where)
        _check("--layer", block, layers, where)
        _check("--view", view, count, where)
        return block

    if student is None:
        stored = StoredMaps(store.open(_store(url, run_dir)))
        schema = stored.maps.schema
        block = check("the store", schema.images, schema.layers, schema.views)
        seen = stored.see(image, view)
        return seen, lambda: photo(images_of(stored.maps), image, stored.views, view), block
    assert run_dir is not None
    live = StudentMaps(RunDirectory(run_dir), student)
    views = None
    count = 1
    if live.store is not None:
        views = live.store.schema.extra.get("views")
        count = live.store.schema.views
    block = check("the student", len(live.data.train), live.layers, count)
    seen = live.see(image, views, view)
    return seen, lambda: photo(live.data, image, views, view), block


def heat_map(seen: Seen) -> Group:
    """The map of :func:`attention` for a terminal: two characters a token, the query's token in
    brackets; of a student with the teacher's map on its right."""
    model = seen["by"].rsplit("/", 1)[-1]
    weights = np.array(seen["map"])
    top = most_of(seen)
    classes = []
    if seen["label"] is not None:
        classes.append(f"label {seen['label']}")
    if seen["predicted"] is not None:
        classes.append(f"{model} says {seen['predicted']} with {seen['probability']:.2f}")
    title = f"image {seen['image']}"
    if classes:
        title += f" ({', '.join(classes)})"
    title += f", layer {seen['layer']}, head {seen['head']}, query {seen['query']}"
    rows = shaded(weights, seen, top)
    largest = "the largest weight"
    lines: list[Text | Table] = [Text(title), *rows]
    if seen["teacher"] is not None:
        teacher_rows = shaded(np.array(seen["teacher"]), seen, top)
        beside = Table(model, "teacher", box=None, pad_edge=False, padding=(0, 2))
        for pair in zip(rows, teacher_rows, strict=True):
            beside.add_row(*pair)
        kl = Text(f"  KL of {model} from the teacher: {seen['kl']:.4f}")
        lines = [Text(title), beside, kl]
        largest += f" of both maps; {model} has {weights.max():.4f}"
    elif "no_teacher" in seen:
        lines.append(Text(f"  no teacher beside it: {seen['no_teacher']}"))
    if "extra" in seen:
        extra = ", ".join(f"{name} {weight:.3f}" for name, weight in seen["extra"].items())
        lines.append(Text(f"  beside the grid: {extra}"))
    token = weights.argmax()
    y, x = divmod(int(token), weights.shape[1])
    at = f"at token {token} (row {y}, column {x})"
    lines.append(Text(f"  {SHADES[-1] * 2} = {top:.4f}, {largest}, {at}"))
    if seen["gaussian"]:
        mean_x, mean_y, std_x, std_y = seen["gaussian"]
        gaussian = f"mean ({mean_x:.3f}, {mean_y:.3f}), std ({std_x:.3f}, {std_y:.3f})"
        lines.append(Text(f"  Gaussian: {gaussian} in (x, y), -1 and +1 the first and last token"))
    return Group(*lines)


def most_of(seen: Seen) -> float:
    """The largest weight of the map of :func:`attention` and of the teacher's beside it, which are
    drawn on one scale."""
    most = float(np.max(seen["map"]))
    if seen["teacher"] is not None:
        most = max(most, float(np.max(seen["teacher"])))
    return most


def shaded(weights: np.ndarray, seen: Seen, top: float) -> list[Text]:
    """A line for each row of a map [h, w]; the last of :data:`SHADES` is for ``top``."""
    query = None
    if isinstance(seen["query"], int):  # not the mean, nor a class token
        query = divmod(seen["query"], seen["grid"][1])
    lines = []
    for y, row in enumerate(weights):
        line = Text("  ")
        for x, weight in enumerate(row):
            level = weight / top if top else 0.0
            shade = SHADES[min(int(level * len(SHADES)), len(SHADES) - 1)]
            colour = f"rgb({int(68 + 187 * level)},{int(1 + 230 * level)},84)"
            if (y, x) == query:
                line.append("[]", f"white on {colour}")
            else:  # the shade is seen only where a terminal has no colours
                line.append(shade * 2, f"{colour} on {colour}")
        lines.append(line)
    return lines


def draw(taken: tuple[Image.Image, Crop], seen: Seen, path: Path) -> None:
    """A PNG of the photo, and beside it the photo with the map over it; of a student also with the
    teacher's."""
    maps = {seen["by"].rsplit("/", 1)[-1]: np.array(seen["map"])}
    if seen["teacher"] is not None:
        maps["teacher"] = np.array(seen["teacher"])
    title = f"image {seen['image']}"
    if seen["label"] is not None:
        title += f", label {seen['label']}"
    title += f": layer {seen['layer']}, head {seen['head']}, query {seen['query']}"
    query = seen["query"]
    patch = query if isinstance(query, int) else None
    with whole_file(path) as partial:
        picture.draw(*taken, maps, patch, title).save(partial, "PNG")


def _store(url: str | None, run_dir: Path | None) -> str:
    """The store that is named, else that of the run."""
    if url is None:
        assert run_dir is not None  # the command names one of the two
        return str(RunDirectory(run_dir).stored())
    return url


def _choice(option: str, value: str, size: int, extra: Sequence[str] = ()) -> list[int]:
    """Indices that an ``N|mean`` option stands for, where tokens named in ``extra`` come first."""
    if value in extra:
        return [extra.index(value)]
    if value == "mean":
        return list(range(len(extra), len(extra) + size))
    # int would also take '1_0' and digits of other scripts, and not take thousands of digits
    if not re.fullmatch("-?[0-9]{1,9}", value):
        right = ", ".join([f"a number from 0 to {size - 1}", *extra, "mean"])
        raise UserError(f"{option} {value[:30]!r}: should be {right}")
    _check(option, int(value), size, "the map")
    return [len(extra) + int(value)]


def _check(option: str, value: int, size: int, where: str) -> None:
    if not 0 <= value < size:
        raise UserError(f"{option} {value}: {where} has 0 to {size - 1}")
