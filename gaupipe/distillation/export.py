"""What a teacher's store holds: its schema, and the arrays of each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import store
from gaupipe.data.batches import Batches
from gaupipe.data.splits import ImageData, Split
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.distillation.store_choice import check_export
from gaupipe.settings import ExportSettings
from gaupipe.teachers.base import Outputs, Teacher, Wanted
from gaupipe.teachers.notes import Drawing, StoreNotes
from store.encoding import LARGEST_MEAN, MEAN_STEP


def is_complete(url: str, teacher_sha256: str | None = None) -> bool:
    """True for a complete store (of this teacher); one with damaged metadata counts as none."""
    try:
        store.open(url, teacher_sha256=teacher_sha256)
    except store.StoreError:
        return False
    return True


def stored_export(url: str) -> ExportSettings | None:
    """Options of the store at ``url``, finished or not; None without readable metadata."""
    try:
        schema = store.open(url, allow_incomplete=True).schema
    except store.StoreError:
        return None
    notes = StoreNotes.of(schema)
    return ExportSettings.model_validate(
        {
            "kind": schema.kind,
            "encoding": schema.encoding,
            "k": schema.k,
            "views": None if notes.views is None else schema.views,
            "layers": notes.layers,
            "precision": notes.precision,
            "features": schema.features_dim is not None,
            "grid": None if notes.pooled_from is None else schema.grid,
        }
    )


@dataclass(frozen=True)
class Exported:
    """The images of a run that a store is of: those with labels, on which a teacher may have been
    trained, or those without."""

    split: Split
    sha256: str
    labelled: bool = True

    @classmethod
    def train(cls, data: ImageData) -> Exported:
        return cls(data.train, data.sha256)

    @classmethod
    def unlabelled(cls, data: ImageData) -> Exported:
        assert data.unlabelled is not None and data.unlabelled_sha256
        return cls(data.unlabelled, data.unlabelled_sha256, labelled=False)

    @classmethod
    def of(cls, schema: store.Schema, data: ImageData) -> Exported:
        """Those of ``data`` that a store of this schema is of."""
        if data.unlabelled is not None and schema.dataset_sha256 == data.unlabelled_sha256:
            return cls.unlabelled(data)
        return cls.train(data)


UNKNOWN = "0" * 64
"""In place of the digest of a teacher that is not there yet."""


def make_schema(
    teacher: Teacher,
    export: ExportSettings,
    images: Exported | None = None,
    sha256: str | None = None,
) -> store.Schema:
    """The schema of a store of what this teacher shows of the ``images``, by default the training
    images; ``sha256`` is the teacher's where it is known. Raises UserError for a kind that this
    teacher does not have, StoreError for an encoding that the kind does not have."""
    kind = export.kind
    data = teacher.data
    images = images or Exported.train(data)
    assert kind is not None and export.encoding is not None  # choose_store() names both
    check_export(export, teacher)
    shape = teacher.shape.stored(export) if store.KINDS[kind].has_maps else None
    notes = replace(
        teacher.notes(),
        teacher_args=teacher.settings.phase_a.teacher_args or None,
        views=None if export.views is None else Drawing.of(teacher.settings, data.image_size),
        layers=export.layers,
        precision=export.precision,
        pooled_from=None if export.grid is None else list(teacher.shape.grid),
    )
    return store.Schema(
        **(shape._asdict() if shape else {}),
        kind=kind,
        encoding=export.encoding,
        k=export.k,
        views=export.views or 1,
        num_images=len(images.split) * (export.views or 1),
        num_classes=data.num_classes,
        dataset=data.name,
        dataset_sha256=images.sha256,
        teacher_sha256=sha256 or teacher.sha256,
        parametrisation=teacher.settings.phase_a.parametrisation,
        embedding_dim=teacher.embedding if kind == "embedding" else None,
        features_dim=teacher.features if export.features else None,
        prefix_tokens=teacher.kept_prefix if shape else 0,
        labelled=images.labelled and notes.files is None,
        name_bytes=images.split.name_bytes,
        extra=notes.to_json(),
    )


def decoder(teacher: Teacher, kind: str) -> dict[str, np.ndarray] | None:
    """The arrays that a store of this kind holds once for all images; None for no arrays."""
    shared = MAP_KINDS[kind].decoder(teacher.network)
    return {name: tensor.float().cpu().numpy() for name, tensor in shared.items()} or None


@dataclass
class Entries:
    """What a store holds for a batch of its ``ids``."""

    ids: np.ndarray
    arrays: dict[str, np.ndarray]
    lost: Tensor | None
    """:func:`lost`, summed over the batch, float64 on the CPU."""


def outputs(
    teacher: Teacher,
    schema: store.Schema,
    batches: Batches,
    entries: np.ndarray,
    seed: int | None = None,
) -> Iterator[Entries]:
    """What a store of this schema holds for ``entries`` (image ids, or ids * views + view), batch
    by batch.

    The draws of ``stochastic`` mode depend on ``seed`` (the run's) and the first image id of a
    batch alone, so that any batch can be made again.
    """
    seed = teacher.settings.seed if seed is None else seed
    notes = StoreNotes.of(schema)
    dtype = getattr(torch, notes.precision or "float32")
    generator = torch.Generator(teacher.device)
    if notes.views is None:
        loaded = batches.in_order(entries)
    else:
        # as the store says: in a comparison the teacher itself may have been trained without views
        loaded = batches.views(entries, notes.views.augmentation(), schema.views)
    layers: Sequence[int] = ()
    if schema.has_maps:
        layers = notes.layers or range(schema.maps.layers)
    for batch in loaded:
        generator.manual_seed(seed * 1_000_003 + int(batch.ids[0]))
        image_ids = None
        if schema.labelled:  # a teacher may know the training images
            image_ids = batch.ids // schema.views
        with torch.autocast(teacher.device.type, dtype, enabled=dtype != torch.float32):
            made = teacher.outputs(batch, Wanted(generator, layers, image_ids))
        with torch.no_grad():
            if notes.pooled_from is not None:
                made.attention = made.attention.on_grid(schema.maps.grid)
            dtype_of_maps = torch.float32 if schema.encoding == "uint8" else torch.float16
            tensors = MAP_KINDS[schema.kind].arrays(made.attention, schema.k, dtype_of_maps)
        loss = lost(schema, made.attention, tensors)
        if loss is not None:
            loss = loss.double().cpu() * len(batch)
        tensors |= said_of_images(made, schema, teacher.predicts, len(batch))
        arrays = {name: to_numpy(name, tensor, schema) for name, tensor in tensors.items()}
        del made, tensors  # or they would lie in memory beside those of the next batch

        ids = batch.ids.numpy()
        if schema.labelled:
            arrays["labels"] = batch.labels.cpu().numpy()
        if schema.name_bytes is not None:
            names = batches.split.file_names(ids // schema.views)
            arrays["names"] = store.pack_names(names, schema.name_bytes)
        yield Entries(ids, arrays, loss)


def said_of_images(
    made: Outputs, schema: store.Schema, predicts: bool, count: int
) -> dict[str, Tensor]:
    """The predictions and features of ``count`` images, by the names of their arrays; zeros of a
    teacher that does not predict."""
    logits = made.logits
    if logits is None:
        assert not predicts  # or zeros would count as predictions
        logits = torch.zeros(count, schema.num_classes)
    if schema.features_dim is None:
        return {"logits": logits}
    assert made.features is not None  # the teacher has some
    return {"logits": logits, "features": made.features}


def to_numpy(name: str, tensor: Tensor, schema: store.Schema) -> np.ndarray:
    """An array as it waits to be written: what becomes codes in float32."""
    if not tensor.is_floating_point():
        # keys of 8 bytes, of shards that wait to be written, would fill the memory
        return tensor.cpu().numpy().astype(schema.stored_dtype(name))
    return (tensor.float() if schema.has_codes(name) else tensor.half()).cpu().numpy()


def lost(schema: store.Schema, attention: Any, arrays: dict[str, Tensor]) -> Tensor | None:
    """The shares [L, H] of a batch that its stored maps leave out: of a ViT's attention that on
    class and register tokens, of Gaussians in 8 bits those whose means the codes clip."""
    if not schema.has_maps:
        return None
    if schema.kind != "gaussian":
        dropped: Tensor | None = attention.dropped
        return dropped
    if schema.encoding != "uint8":
        return None
    beyond = arrays["gaussians"][..., :2].abs() > LARGEST_MEAN + MEAN_STEP / 2
    return beyond.any(-1).double().mean((0, 3))  # of [B, L, H, T]
