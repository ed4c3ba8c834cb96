"""The page as one file that needs no server: some images of a store with all that is shown of
them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gaupipe.system.files import write_whole
from gaupipe.system.progress import EpochProgress
from stages.view.messages import pack_small
from stages.view.viewer import Viewer

STATIC = Path(__file__).parent / "static"
MODULES = (
    "dom", "maps", "state", "source", "draw", "numbers", "facts", "gallery", "grid", "charts",
    "card", "stage", "keys", "main",
)  # fmt: skip
"""In an order in which no module needs a later one."""
SIDE = 900
"""Pixels a side of the largest picture in a page."""


def write_page(
    viewer: Viewer, path: Path, images: list[int], split: str, start: dict[str, Any]
) -> None:
    """Writes the page of some images, with the maps of those models that the viewer has."""
    chosen = list(dict.fromkeys(images))
    with EpochProgress(path.name, len(chosen), 1) as progress:
        text = page_text(viewer, chosen, split, start, lambda: progress.advance(1))
    write_whole(path, text)


def page_text(
    viewer: Viewer,
    images: list[int],
    split: str,
    start: dict[str, Any],
    done: Callable[[], None] = lambda: None,
) -> str:
    """The page of some images as HTML. ``done`` is called after each."""
    viewer.load_images()
    embedded = {}
    for image in images:
        embedded[str(image)] = embedded_image(viewer, image, split)
        done()
    status = viewer.status(split)
    labels = replace(status.labels, reading=False)
    page = {
        "about": asdict(replace(viewer.about(), adds=False, split=split)),
        "status": asdict(replace(status, labels=labels, splits={split: len(embedded)})),
        "images": embedded,
        "start": start,
    }
    text = json.dumps(page).replace("<", "\\u003c")  # nothing in it ends the element
    html = (STATIC / "index.html").read_text()
    style = (STATIC / "style.css").read_text()
    return html.replace(
        '<link rel="stylesheet" href="style.css">', f"<style>\n{style}</style>"
    ).replace(
        '<script type="module" src="main.js"></script>',
        f'<script type="application/json" id="embedded">{text}</script>\n'
        f'<script type="module">\n{bundle()}</script>',
    )


def bundle() -> str:
    """All modules as one, in which names that they export are names."""
    parts = []
    for name in MODULES:
        text = (STATIC / f"{name}.js").read_text()
        text = re.sub(r"^import [^;]*;\n", "", text, flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "\n".join(parts)


def embedded_image(viewer: Viewer, image: int, split: str) -> dict[str, Any]:
    """Everything that the page shows of an image, each for every view; messages are base64.

    maps       of each model, under "" the stored ones
    relevance  of each model for the classes that it finds likeliest, as the query reads them that
               the page opens with; under None for the features of a model without classes
    pixels     URLs of the pictures
    file       the image's name in links
    """
    stored = viewer.schema if split == "train" else None
    views = range(stored.views if stored else 1)
    names = [*([""] if stored else []), *viewer.models]
    explained = [name for name in viewer.models if viewer.model(name).explains]

    def url(content: bytes, kind: str) -> str:
        return f"data:{kind};base64,{encoded(content)}"

    return {
        "maps": {
            name: [encoded(viewer.image(image, view, split, name, pack_small)) for view in views]
            for name in names
        },
        "relevance": {
            name: [explanations(viewer, name, image, view, split) for view in views]
            for name in explained
        },
        "pixels": [url(*viewer.pixels(image, view, split, SIDE)) for view in views],
        "file": viewer.names.unique(split)[image],
    }


def explanations(
    viewer: Viewer, name: str, image: int, view: int, split: str
) -> dict[int | None, str]:
    """What speaks for each of the likeliest classes, or moves the features."""
    likely = viewer.likely(name, image, view, split)
    return {
        label: encoded(viewer.relevance(name, image, label, view, split, pack_small, whole=False))
        for label in likely
    }


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()
