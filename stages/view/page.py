"""The page as one file that needs no server: some images of a store with all that is shown of
them."""

from __future__ import annotations

import base64
import functools
import json
import re
from pathlib import Path
from typing import Any

from gaupipe.system.files import write_whole
from gaupipe.system.progress import EpochProgress
from stages.view.viewer import Viewer

STATIC = Path(__file__).parent / "static"
MODULES = (
    "dom", "wire", "rows", "state", "source", "draw", "numbers", "gallery", "grid", "charts",
    "stage", "facts", "keys", "main",
)  # fmt: skip
"""In an order in which no module needs a later one."""


@functools.cache
def colours() -> str:
    """The 256 colours of matplotlib's viridis, which is perceptually uniform, six hexadecimal
    digits each."""
    from matplotlib import colormaps

    return (colormaps["viridis"](range(256), bytes=True)[:, :3]).tobytes().hex()


def write_page(
    viewer: Viewer, path: Path, images: list[int], split: str, start: dict[str, Any]
) -> None:
    """Writes the page of some images, with the maps of those students that the viewer has."""
    viewer.load_images()
    chosen = list(dict.fromkeys(images))
    embedded = {}
    with EpochProgress(path.name, len(chosen) * len(views_of(viewer, split)), 1) as progress:
        for image in chosen:
            embedded[str(image)] = embedded_image(viewer, image, split, progress)
    status = viewer.status(split)
    status["labels"]["reading"] = False
    status["splits"] = {split: len(embedded)}
    page = {
        "about": {**viewer.about(), "colours": colours(), "split": split},
        "status": status,
        "images": embedded,
        "start": start,
    }
    text = json.dumps(page).replace("<", "\\u003c")  # nothing in it ends the element
    html = (STATIC / "index.html").read_text()
    style = (STATIC / "style.css").read_text()
    html = html.replace(
        '<link rel="stylesheet" href="style.css">', f"<style>\n{style}</style>"
    ).replace(
        '<script type="module" src="main.js"></script>',
        f'<script type="application/json" id="embedded">{text}</script>\n'
        f'<script type="module">\n{bundle()}</script>',
    )
    write_whole(path, html)


def bundle() -> str:
    """All modules as one, in which names that they export are names."""
    parts = []
    for name in MODULES:
        text = (STATIC / f"{name}.js").read_text()
        text = re.sub(r"^import [^;]*;\n", "", text, flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "\n".join(parts)


def views_of(viewer: Viewer, split: str) -> range:
    """The numbers of an image's views: those of the store where the split is its own."""
    return range(viewer.schema.views if viewer.schema and has_stored(viewer, split) else 1)


def has_stored(viewer: Viewer, split: str) -> bool:
    return viewer.stored is not None and split == "train"


def embedded_image(
    viewer: Viewer, image: int, split: str, progress: EpochProgress
) -> dict[str, object]:
    """Everything that the page shows of an image, binary messages as base64; of the relevance for
    classes that for the predicted one. ``progress`` counts the views."""
    stored: list[str] = []
    pixels: list[str] = []
    students: dict[str, list[str]] = {name: [] for name in viewer.models}
    explained = [name for name in viewer.models if viewer.model(name).explains]
    relevance: dict[str, list[str]] = {name: [] for name in explained}
    for view in views_of(viewer, split):
        if has_stored(viewer, split):
            stored.append(encoded(viewer.image(image, view)))
        pixels.append(encoded(viewer.pixels(image, view, split)))
        for name, messages in students.items():
            messages.append(encoded(viewer.student(name, image, view, split)))
        for name, messages in relevance.items():
            messages.append(encoded(viewer.relevance(name, image, None, view, split)))
        progress.advance(1)
    return {"views": stored, "pixels": pixels, "students": students, "relevance": relevance}


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()
