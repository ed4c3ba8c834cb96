"""The choice of a store: its kind, encoding, k and views, from what is asked and what the teacher
can give."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError
from torch import nn

import store
from gaupipe.distillation.kinds import MAP_KINDS
from gaupipe.settings import ExportSettings, PhaseBSettings, Settings
from gaupipe.settings.sections import problem
from gaupipe.system.errors import UserError
from gaupipe.teachers.base import MapShape
from gaupipe.teachers.gaussian_vit import Teacher
from gaupipe.vit.slicing import evenly_spaced

SHARE_OF_KEYS = 4
"""One key in so many is stored. Of DeiT-Ti's maps on photos the mean total variation to the whole
map is then 0.09 on 64 tokens, 0.07 on 196, and with 8 keys 0.17 and 0.28."""
MOST_KEYS = 255


def default_kind(settings: Settings, encoding: str | None = None) -> str:
    """The smallest kind that loses nothing of a Gaussian teacher: what it learned of an image, or
    ``gaussian`` where 8-bit codes are asked for, which only that kind has. ``topk`` for a trained
    ViT."""
    phase = settings.phase_a
    if not phase.learns_gaussians:
        return "topk"
    if encoding == "uint8":
        return "gaussian"
    return {"none": "prior", "embedding": "embedding", "table": "gaussian"}[phase.per_image]


def chosen(
    settings: Settings,
    stored: ExportSettings | None = None,
    given: dict[str, Any] | None = None,
    teacher: MapShape | None = None,
    student: MapShape | None = None,
) -> ExportSettings:
    """The request for a store: from ``given``, else from the ``stored`` one, else from the
    settings, with the defaults of its kind, for the maps of a ``teacher`` and, where there is one,
    for what its ``student`` compares with them."""
    export = stored or settings.export
    asked = {name: value for name, value in (given or {}).items() if value is not None}
    usual = export.kind or default_kind(settings, asked.get("encoding", export.encoding))
    if asked.get("kind", usual) != usual and "k" not in asked:
        asked["k"] = None  # another kind has another k
    try:
        export = ExportSettings.model_validate({**export.model_dump(), **asked})
    except ValidationError as error:
        raise UserError(f"--{problem(error, ExportSettings)}") from None
    name = export.kind or default_kind(settings, export.encoding)
    kind = store.KINDS[name]
    has_rows = kind.has_maps and not settings.phase_a.learns_gaussians
    if teacher and student and stored is None and has_rows:
        export = compared(export, settings.phase_b, teacher, student)
    k = export.k
    if k is None and kind.default_k is not None:
        k = kind.default_k
        if teacher is not None:
            tokens = math.prod(export.grid or teacher.grid)
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


def planned_export(
    settings: Settings, teacher: nn.Module, shape: MapShape, student: MapShape
) -> ExportSettings:
    """The store that the settings ask for of a teacher with maps of this ``shape``, for a student.
    Raises UserError as :func:`check_export`."""
    export = chosen(settings, teacher=shape, student=student)
    check_export(export, settings, teacher, shape.grid, shape.layers, prefix="export.")
    return export


def check_export(
    export: ExportSettings,
    settings: Settings,
    teacher: nn.Module,
    grid: tuple[int, int],
    layers: int,
    prefix: str = "--",
) -> None:
    """Raises UserError for a store that cannot hold what a teacher shows.

    export     from :func:`chosen`
    teacher    a Gaussian one; anything else counts as a trained ViT
    grid       (h, w) of the teacher's maps
    layers     the number of its blocks
    prefix     of ``kind``, ``k`` and ``views`` in messages
    """
    name = str(export.kind)
    k = export.k
    refusal = MAP_KINDS[name].refusal(teacher, settings.phase_a.learns_of_images)
    if refusal is not None:
        raise UserError(f"{prefix}kind {name}: {refusal}")
    if k is not None and store.KINDS[name].default_k is None:
        raise UserError(f"{prefix}k {k}: a store of the kind {name} has no k")
    has_rows = store.KINDS[name].has_maps and not isinstance(teacher, Teacher)
    if not has_rows and (export.grid or export.layers):
        raise UserError(
            "export.grid and export.layers are for the maps of a trained ViT: leave them out"
        )
    blocks = export.layers or []
    if len({*blocks}) < len(blocks):
        raise UserError(f"export.layers: has a block twice: {blocks}")
    if max(blocks, default=0) >= layers:
        raise UserError(
            f"export.layers: should be blocks from 0 to {layers - 1} of the teacher, got "
            f"{export.layers}"
        )
    if export.grid is not None:
        if export.grid[0] > grid[0] or export.grid[1] > grid[1]:
            raise UserError(
                f"export.grid: should be at most the teacher's, {grid[0]} x {grid[1]}, got "
                f"{export.grid[0]} x {export.grid[1]}"
            )
        grid = export.grid
    if k is not None and k > grid[0] * grid[1]:
        raise UserError(f"{prefix}k {k}: a query has {grid[0] * grid[1]} keys to choose from")
    if export.views is not None and isinstance(teacher, Teacher):
        raise UserError(
            f"{prefix}views {export.views}: Gaussians of images move with their views by "
            "themselves; views are for a teacher that sees them: a trained ViT"
        )
    if export.views is not None and not settings.augment.draws_views:
        raise UserError(
            f"{prefix}views {export.views}: the section augment draws nothing, so every view would "
            "be the image itself: set augment, or leave out the views"
        )
