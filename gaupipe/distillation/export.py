"""What a teacher's store holds: its schema, and the arrays of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import store
from gaupipe.data.batches import Batches
from gaupipe.distillation.kinds import MAP_KINDS, Attention
from gaupipe.distillation.store_choice import check_export
from gaupipe.settings import ExportSettings
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import TeacherJob
from gaupipe.teachers.gaussian_vit import Teacher
from gaupipe.teachers.notes import Drawing, StoreNotes
from gaupipe.teachers.readable_vit import VitMaps
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
            "grid": None if notes.pooled_from is None else schema.grid,
        }
    )


def make_schema(
    job: TeacherJob[Any], export: ExportSettings, sha256: str | None = None
) -> store.Schema:
    """The schema of a store of this teacher; ``sha256`` is the teacher's where it is known.
    Raises UserError for a kind that this teacher does not have, StoreError for an encoding that the
    kind does not have."""
    kind = export.kind
    data = job.data
    shape = job.shape
    assert kind is not None and export.encoding is not None  # chosen() names both
    check_export(export, job.settings, job.teacher, shape.grid, shape.layers)
    has_maps = store.KINDS[kind].has_maps
    if not has_maps and job.notes().predicts is False:
        raise UserError(f"--kind {kind}: the teacher predicts no classes: choose topk or dense")
    network = job.teacher.decoder if isinstance(job.teacher, Teacher) else None
    notes = replace(
        job.notes(),
        teacher_args=job.settings.phase_a.teacher_args or None,
        views=None if export.views is None else Drawing.of(job.settings, data.image_size),
        layers=export.layers,
        precision=export.precision,
        pooled_from=None if export.grid is None else list(shape.grid),
    )
    return store.Schema(
        **shape.in_store(export),
        kind=kind,
        encoding=export.encoding,
        k=export.k,
        views=export.views or 1,
        num_images=len(data.train) * (export.views or 1),
        num_classes=data.num_classes,
        dataset=data.name,
        dataset_sha256=data.sha256,
        teacher_sha256=sha256 or job.sha256,
        parametrisation=job.settings.phase_a.parametrisation,
        embedding_dim=network.embedding if network and kind == "embedding" else None,
        prefix_tokens=getattr(job.teacher, "kept_prefix", 0) if has_maps else 0,
        labelled=notes.files is None,
        name_bytes=data.train.name_bytes,
        extra=notes.to_json(),
    )


def decoder(job: TeacherJob[Any], kind: str) -> dict[str, np.ndarray] | None:
    """The arrays that a store of this kind holds once for all images; None for no arrays."""
    shared = MAP_KINDS[kind].decoder(job.teacher)
    return {name: tensor.float().cpu().numpy() for name, tensor in shared.items()} or None


def outputs(
    job: TeacherJob[Any],
    schema: store.Schema,
    batches: Batches,
    entries: np.ndarray,
    seed: int | None = None,
    losses: list[Tensor] | None = None,
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """(entries, {name: array}) of every batch of ``entries`` (image ids, or ids * views + view):
    what a store of this schema holds for them.

    The draws of ``stochastic`` mode depend on ``seed`` (the run's) and the first image id of a
    batch alone, so that any batch can be made again. ``losses`` gets what is :func:`lost`.
    """
    seed = job.settings.seed if seed is None else seed
    notes = StoreNotes.of(schema)
    dtype = getattr(torch, notes.precision or "float32")
    generator = torch.Generator(job.device)
    if notes.views is None:
        loaded = batches.in_order(entries)
    else:
        # as the store says: in a comparison the teacher itself may have been trained without views
        loaded = batches.views(entries, notes.views.augmentation(), schema.views)
    for batch in loaded:
        generator.manual_seed(seed * 1_000_003 + int(batch.ids[0]))
        with torch.autocast(job.device.type, dtype, enabled=dtype != torch.float32):
            logits, attention = job.forward_with_maps(batch, generator, notes.layers)
        if isinstance(attention, VitMaps) and schema.has_maps:
            attention = attention.on_grid(schema.maps.grid)
        if job.probe is not None and isinstance(attention, VitMaps):
            assert attention.pooled is not None  # of a teacher without predictions
            image_ids = batch.ids // schema.views
            logits = job.probe.logits_out_of_fold(attention.pooled, image_ids).log_softmax(-1)
        with torch.no_grad():
            stored = torch.float32 if schema.encoding == "uint8" else torch.float16
            named = {**MAP_KINDS[schema.kind].arrays(attention, schema.k, stored), "logits": logits}
        if losses is not None:
            loss = lost(schema, attention, named)
            if loss is not None:
                losses.append(loss.double().cpu() * len(batch))
        arrays = {}
        for name, tensor in named.items():
            if tensor.is_floating_point():
                tensor = tensor.float() if schema.has_codes(name) else tensor.half()
                arrays[name] = tensor.cpu().numpy()
            else:  # keys of 8 bytes, of shards that wait to be written, would fill the memory
                arrays[name] = tensor.cpu().numpy().astype(schema.stored_dtype(name))
        del attention, named  # or they would lie in memory beside those of the next batch
        if schema.labelled:
            arrays["labels"] = batch.labels.cpu().numpy()
        ids = batch.ids.numpy()
        if schema.name_bytes is not None:
            names = batches.split.file_names(ids // schema.views)
            arrays["names"] = store.pack_names(names, schema.name_bytes)
        yield ids, arrays


def lost(schema: store.Schema, attention: Attention, arrays: dict[str, Tensor]) -> Tensor | None:
    """The shares [L, H] of a batch that its stored maps leave out: of a ViT's attention that on
    class and register tokens, of Gaussians in 8 bits those whose means the codes clip."""
    if not schema.has_maps:
        return None
    if isinstance(attention, VitMaps):
        return attention.dropped
    if schema.kind != "gaussian" or schema.encoding != "uint8":
        return None
    beyond = arrays["gaussians"][..., :2].abs() > LARGEST_MEAN + MEAN_STEP / 2
    return beyond.any(-1).double().mean((0, 3))  # of [B, L, H, T]
