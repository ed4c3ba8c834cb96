"""The data card of a store: store_card.md, filled in with what its schema says."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData

import store
from gaupipe.system.version import __version__
from gaupipe.teachers.notes import StoreNotes
from stages.publish.model_card import code, named_teacher


def text(schema: store.Schema, license: str | None = None) -> str:
    """The text of README.md. The ``license`` of the images, where it is not given, is left to those
    who publish the store, in a marked place."""
    notes = StoreNotes.of(schema)
    images = notes.data or {}
    known = []
    if schema.has_maps:
        known.append("attention maps")
    if notes.has_predictions:
        known.append("predictions")
    if schema.features_dim is not None:
        known.append("features")
    head = DatasetCardData(
        license=license,
        task_categories=["image-classification"],
        tags=[known[0].replace(" ", "-"), "knowledge-distillation", "zarr", "gaupipe"],
        pretty_name=f"{known[0].capitalize()} of {schema.dataset}",
    )
    card = DatasetCard.from_template(
        head,
        template_path=str(Path(__file__).with_suffix(".md")),
        schema=schema,
        version=__version__,
        license=license,
        teacher=named_teacher(str(notes.teacher)),
        known=known,
        blocks=notes.layers,
        image_size=images.get("image_size"),
        arrays=schema.arrays,
        stored_dtypes={name: schema.stored_dtype(name) for name in schema.arrays},
        code=code,
    )
    content: str = card.content
    return content + "\n"
