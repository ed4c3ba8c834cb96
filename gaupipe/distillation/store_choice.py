"""The choice of a store: its kind, encoding, k and views, from what is asked and what the teacher
can give."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

import store
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.settings import ExportSettings, PhaseBSettings
from gaupipe.settings.sections import problem
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import MapShape, Teacher
from gaupipe.vit.slicing import evenly_spaced

SHARE_OF_KEYS = 4
"""One key in so many is stored. Of DeiT-Ti's maps on photos the mean total variation to the whole
map is then 0.09 on 64 tokens, 0.07 on 196, and with 8 keys 0.17 and 0.28."""
MOST_KEYS = 255


KIND_OF_FORM = {
    "prior": "prior",
    "embeddings": "embedding",
    "gaussians": "gaussian",
    "maps": "topk",
}
"""The kind of store for each form of attention, the smallest first."""


def default_kind(teacher: Teacher, encoding: str | None = None) -> str:
    """The smallest kind that loses nothing of Gaussians: what the teacher learned of an image, or
    ``gaussian`` where 8-bit codes are asked for, which only that kind has. ``topk`` for a trained
    ViT, ``predictions`` for a teacher without attention maps."""
    if encoding == "uint8" and "gaussians" in teacher.forms:
        return "gaussian"
    for form, kind in KIND_OF_FORM.items():
        if form in teacher.forms:
            return kind
    return "predictions"


def choose_store(
    teacher: Teacher,
    stored: ExportSettings | None = None,
    given: dict[str, Any] | None = None,
) -> ExportSettings:
    """The request for a store of what a ``teacher`` shows: from ``given``, else from the ``stored``
    one, else from the settings, with the defaults of its kind and for what its student, if there is
    one, compares."""
    export = stored or teacher.settings.export
    asked = {name: value for name, value in (given or {}).items() if value is not None}
    usual = export.kind or default_kind(teacher, asked.get("encoding", export.encoding))
    if asked.get("kind", usual) != usual and "k" not in asked:
        asked["k"] = None  # another kind has another k
    try:
        export = ExportSettings.model_validate({**export.model_dump(), **asked})
    except ValidationError as error:
        raise UserError(f"--{problem(error, ExportSettings)}") from None
    name = export.kind or default_kind(teacher, export.encoding)
    kind = store.KINDS[name]
    student = teacher.student_shape
    if teacher.shows_rows and student is not None and stored is None and kind.has_maps:
        export = compared(export, teacher.settings.phase_b, teacher.shape, student)
    k = export.k
    if k is None and kind.default_k is not None and teacher.forms:
        tokens = math.prod(export.grid or teacher.shape.grid)
        k = kind.default_k
        if student is not None:  # nobody learns from the maps of a model on image files
            k = min(max(k, -(-tokens // SHARE_OF_KEYS)), MOST_KEYS)
        k = min(k, tokens)
    encoding = export.encoding or kind.default_encoding
    return export.model_copy(update={"kind": name, "encoding": encoding, "k": k})


def compared(
    export: ExportSettings, phase: PhaseBSettings, teacher: MapShape, student: MapShape
) -> ExportSettings:
    """The request for a store with the ``grid`` and ``layers`` of the maps that a student compares,
    where it leaves them open and the teacher's are finer and more."""
    layers = export.layers
    if layers is None and student.layers < teacher.layers and phase.layer_map is None:
        layers = evenly_spaced(student.layers, teacher.layers)
    grid = export.grid
    coarser = all(few <= many for few, many in zip(student.grid, teacher.grid, strict=True))
    if grid is None and coarser and student.grid != teacher.grid:
        grid = student.grid
    return export.model_copy(update={"layers": layers, "grid": grid})


def plan_export(teacher: Teacher) -> ExportSettings:
    """The store that the settings ask for of a teacher. Raises UserError as
    :func:`check_export`."""
    export = choose_store(teacher)
    check_export(export, teacher, prefix="export.")
    return export


def check_export(export: ExportSettings, teacher: Teacher, prefix: str = "--") -> None:
    """Raises UserError for a store that cannot hold what a teacher shows. ``export`` is from
    :func:`choose_store`; the ``prefix`` is that of ``kind``, ``k`` and ``views`` in messages."""
    name = str(export.kind)
    k = export.k
    refusal = MAP_KINDS[name].refusal(teacher.forms)
    if refusal is not None:
        raise UserError(f"{prefix}kind {name}: {refusal}")
    has_maps = store.KINDS[name].has_maps
    if name == "predictions" and not teacher.kind.predicts:
        raise UserError(f"{prefix}kind {name}: the teacher predicts no classes: choose another")
    if export.features and teacher.features is None:
        raise UserError(f"{prefix}features: the teacher has no pooled features: leave it out")
    if k is not None and store.KINDS[name].default_k is None:
        raise UserError(f"{prefix}k {k}: a store of the kind {name} has no k")
    if not (has_maps and teacher.shows_rows) and (export.grid or export.layers):
        raise UserError(
            "export.grid and export.layers are for stored maps that are no Gaussians: "
            "leave them out"
        )
    if has_maps:
        check_shape(export, teacher.shape, prefix)
    if export.views is not None and "gaussians" in teacher.forms:
        raise UserError(
            f"{prefix}views {export.views}: Gaussians of images move with their views by "
            "themselves; views are for a teacher that sees them"
        )
    if export.views is not None and not teacher.settings.augment.draws_views:
        raise UserError(
            f"{prefix}views {export.views}: the section augment draws nothing, so every view would "
            "be the image itself: set augment, or leave out the views"
        )


def check_shape(export: ExportSettings, maps: MapShape, prefix: str) -> None:
    """Raises UserError for a part of ``maps`` that there is not."""
    grid = maps.grid
    blocks = export.layers or []
    if len({*blocks}) < len(blocks):
        raise UserError(f"export.layers: has a block twice: {blocks}")
    if max(blocks, default=0) >= maps.layers:
        raise UserError(
            f"export.layers: should be blocks from 0 to {maps.layers - 1} of the teacher, got "
            f"{export.layers}"
        )
    if export.grid is not None:
        if export.grid[0] > grid[0] or export.grid[1] > grid[1]:
            raise UserError(
                f"export.grid: should be at most the teacher's, {grid[0]} x {grid[1]}, got "
                f"{export.grid[0]} x {export.grid[1]}"
            )
        grid = export.grid
    k = export.k
    if k is not None and k > grid[0] * grid[1]:
        raise UserError(f"{prefix}k {k}: a query has {grid[0] * grid[1]} keys to choose from")
