"""Inspect: what an attention-map store holds, and where the queries of one image look."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

import store
from gaupipe.system.errors import UserError
from gaupipe.system.files import check_file
from gaupipe.teachers.notes import StoreNotes
from stages.look import picture
from stages.look.colours import colours
from stages.look.image_maps import ImageMaps, StoredMaps, photo
from stages.look.live_maps import StudentMaps
from stages.look.measures import divergence
from stages.runs.directory import RunDirectory

NAMES_IMAGES = ("root", "unlabelled", "train_images", "image_size")
"""Settings of the data set by which one knows the images of a store, besides its name."""

SHADES = " .:+#"
"""From no attention to the most of the map, where a terminal has no colours."""


def summary(url: str) -> dict[str, object]:
    """Kind, shapes, size on disk, bytes an image and whether the store is complete."""
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
    if schema.has_maps:
        grid, layers, heads = schema.maps
        blocks = StoreNotes.of(schema).layers or list(range(layers))
        shown |= {"layers": layers, "blocks": blocks, "heads": heads, "grid": list(grid)}
    if schema.prefix_tokens:
        shown["extra_tokens"] = schema.prefix_tokens
    notes = {name: value for name, value in schema.extra.items() if name != "layers"}
    data = notes.get("data")
    if isinstance(data, dict):  # settings that do not say which images these are would only puzzle
        notes["data"] = {name: data.get(name) for name in NAMES_IMAGES}
    return shown | {
        "classes": schema.num_classes,
        "arrays": {
            name: f"{list(spec.shape)} {schema.stored_dtype(name)}"
            for name, spec in schema.arrays.items()
        },
        "bytes_on_disk": size,
        "bytes_per_image": round(size / schema.images, 1),
        "teacher_sha256": schema.teacher_sha256,
        "parametrisation": schema.parametrisation,
        **notes,
    }


@dataclass(frozen=True)
class ImageMap:
    """Where one image is looked at, in plain numbers, by one block, head and query."""

    image: int
    file: str | None
    """Its path, of an image in a file where the data set can be read."""
    label: int | None
    predicted: int | None
    probability: float | None
    by: str
    """Whose map this is."""
    layer: int
    """Its place among the stored blocks."""
    block: int
    """The number of the block in its model, of which a store may hold some."""
    head: int | str
    """A number or ``mean``."""
    query: int | str
    """A number, ``mean``, or the name of a class or register token."""
    grid: list[int]
    """Its height h and its width w."""
    gaussian: list[float] | None
    """(mean_x, mean_y, std_x, std_y) in normalised coordinates, of one head and one query where the
    store holds Gaussians or embeddings."""
    map: list[list[float]]
    """h lists of w weights. All sum to 1, with those of ``extra``."""
    teacher: list[list[float]] | None
    """The stored map that a student's is compared with, in the same form."""
    kl: float | None
    """The divergence of the two, mean over the queries and heads that were asked for."""
    extra: dict[str, float]
    """The weights of the class and register tokens."""
    no_teacher: str | None
    """Why a student's map has no teacher's beside it."""

    def to_json(self) -> dict[str, Any]:
        """The values by name. ``file``, ``extra`` and ``no_teacher`` are left out where unknown."""
        absent = [name for name in ("file", "extra", "no_teacher") if not getattr(self, name)]
        return {name: value for name, value in asdict(self).items() if name not in absent}


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
    png: Path | None = None,
) -> ImageMap:
    """The map of one training image, block (None is the last), head (or ``mean``) and query (or
    ``mean``; None is the patch in the middle, as a mean over queries looks everywhere), from the
    store at a ``url`` or from a ``student`` of the run in ``run_dir``, beside the teacher's where
    its store is there and fits it. ``view`` counts the views that a store may have of an image.
    ``png`` is a file that the map is drawn to, over the image. Raises UserError where that cannot
    be read."""
    target = None
    if png is not None:
        target = check_file("--png", png, ".png")

    maps: StoredMaps | StudentMaps
    if student is None:
        assert url is not None
        where = "the store"
        maps = StoredMaps(store.open(url))
    else:
        assert run_dir is not None
        where = "the student"
        maps = StudentMaps(RunDirectory(run_dir), student)

    views = 1
    if maps.store is not None:
        views = maps.store.schema.views
    if layer is None:
        layer = maps.layers - 1
    _check("--image", image, maps.images, where)
    _check("--layer", layer, maps.layers, where)
    _check("--view", view, views, where)

    seen = maps.see(image, view)
    shown = chosen_map(image, seen, layer, maps.blocks[layer], head, query)
    if target is not None:
        patch = shown.query if isinstance(shown.query, int) else None
        taken = photo(maps.data, image, maps.views, view)
        picture.draw(np.array(shown.map), patch, taken, target)
    return shown


def chosen_map(
    image: int, seen: ImageMaps, layer: int, block: int, head: str, query: str | None
) -> ImageMap:
    """One map of an image, as :func:`attention` returns it, without a file."""
    if query is None:
        height, width = seen.grid
        query = str(height // 2 * width + width // 2)
    rows = seen.map(layer)  # [H, P + T, P + T]
    extra = len(seen.extra)
    heads = _choice("--head", head, rows.shape[0])
    queries = _choice("--query", query, rows.shape[1] - extra, seen.extra)

    def mean(values: Tensor) -> Tensor:
        return values[heads][:, queries].mean((0, 1))

    whole = mean(rows)  # [P + T]
    gaussian = None
    if seen.gaussians is not None and "mean" not in (head, query):
        gaussian = seen.gaussians[layer, heads[0], queries[0]].tolist()
    teacher = seen.teacher[layer] if seen.teacher else None
    teacher_map = kl = None
    if teacher is not None:
        teacher_map = mean(teacher).reshape(seen.grid).tolist()
        kl = mean(divergence(teacher, rows)).item()
    prediction = seen.prediction()
    return ImageMap(
        image=image,
        file=seen.file,
        label=seen.label,
        predicted=prediction.predicted,
        probability=prediction.probability,
        by=seen.by,
        layer=layer,
        block=block,
        head=int(head) if head.isdecimal() else head,
        query=int(query) if query.isdecimal() else query,
        grid=list(seen.grid),
        gaussian=gaussian,
        map=whole[extra:].reshape(seen.grid).tolist(),
        teacher=teacher_map,
        kl=kl,
        extra=dict(zip(seen.extra, whole.tolist(), strict=False)),
        no_teacher=seen.no_teacher,
    )


def heat_map(shown: ImageMap) -> Group:
    """The map of :func:`attention` for a terminal: two characters a token, the query's token in
    brackets; of a student with the teacher's map on its right."""
    model = model_name(shown)
    weights = np.array(shown.map)
    most = float(weights.max())
    if shown.teacher is not None:  # one scale for both, or the eye compares nothing
        most = max(most, float(np.max(shown.teacher)))

    rows = shaded(weights, shown.query, most)
    lines: list[Text | Table] = [Text(title(shown))]
    largest = "the largest weight"
    if shown.teacher is None:
        lines += rows
        if shown.no_teacher:
            lines.append(Text(f"  no teacher beside it: {shown.no_teacher}"))
    else:
        teacher = shaded(np.array(shown.teacher), shown.query, most)
        beside = Table(model, "teacher", box=None, pad_edge=False, padding=(0, 2))
        for pair in zip(rows, teacher, strict=True):
            beside.add_row(*pair)
        lines.append(beside)
        lines.append(Text(f"  KL of {model} from the teacher: {shown.kl:.4f}"))
        largest += f" of both maps; {model} has {weights.max():.4f}"

    if shown.extra:
        extra = ", ".join(f"{name} {weight:.3f}" for name, weight in shown.extra.items())
        lines.append(Text(f"  beside the grid: {extra}"))

    token = int(weights.argmax())
    y, x = divmod(token, weights.shape[1])
    at = f"at token {token} (row {y}, column {x})"
    lines.append(Text(f"  {SHADES[-1] * 2} = {most:.4f}, {largest}, {at}"))

    if shown.gaussian:
        mean_x, mean_y, std_x, std_y = shown.gaussian
        gaussian = f"mean ({mean_x:.3f}, {mean_y:.3f}), std ({std_x:.3f}, {std_y:.3f})"
        lines.append(Text(f"  Gaussian: {gaussian} in (x, y), -1 and +1 the first and last token"))
    return Group(*lines)


def title(shown: ImageMap) -> str:
    """The image, what is known of it, and which of its maps is shown."""
    line = f"image {shown.image}"
    if shown.file:
        line += f" ({shown.file})"
    if shown.label is not None:
        line += f", label {shown.label}"
    if shown.predicted is not None:
        line += f", {model_name(shown)} says {shown.predicted} with {shown.probability:.2f}"
    return f"{line}: block {shown.block}, head {shown.head}, query {shown.query}"


def model_name(shown: ImageMap) -> str:
    """The name of the model whose map it is, without its folder."""
    return shown.by.rsplit("/", 1)[-1]


def shaded(weights: np.ndarray, query: object, most: float) -> list[Text]:
    """A line for each row of a map [h, w]; the last of :data:`SHADES` is for ``most``."""
    lines = []
    for y, row in enumerate(weights):
        line = Text("  ")
        for x, weight in enumerate(row):
            level = weight / most if most else 0.0
            shade = SHADES[min(int(level * len(SHADES)), len(SHADES) - 1)]
            red, green, blue, _ = colours()[round(255 * level)]
            colour = f"rgb({red},{green},{blue})"
            if query == y * len(row) + x:
                line.append("[]", f"white on {colour}")
            else:  # the shade is seen only where a terminal has no colours
                line.append(shade * 2, f"{colour} on {colour}")
        lines.append(line)
    return lines


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
