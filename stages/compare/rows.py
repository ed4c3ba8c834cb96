"""Rows of a comparison, and the settings of each.

A row is one way to train. It is run with every seed and is one line of every table.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from gaupipe.settings import (
    ExportSettings,
    PhaseASettings,
    PhaseBSettings,
    Settings,
)
from gaupipe.settings.load import ByName, check_plain, parse, set_value
from gaupipe.settings.sections import Section, problem
from gaupipe.settings.teachers import TEACHERS
from gaupipe.system.errors import UserError
from stages.runs.choices import WITH_A_TEACHER

BASELINE = "plain ViT"
"""The reference of every comparison: standard attention, trained on the labels alone."""
DISTILLED = "distilled"
CONTROLS = (
    "maps of other images",
    "predictions of other images",
    *(name for kind in TEACHERS.values() for name in kind.controls),
    "no soft labels",
)
"""Rows without that in the teacher which is claimed to help."""


class Row(Section):
    """A way to train."""

    name: str
    """As the tables print it."""
    settings: ByName = {}
    """Changes of the configuration."""
    plain: bool = False
    """Train on the labels alone: a baseline."""


def default_rows(base: Settings, students: Sequence[str]) -> list[Row]:
    """Rows that a comparison has without a sweep: baselines, distilled students, and the controls,
    up to three, that differ from them.

    ``students`` are attentions. The controls belong to the first of them.
    """
    model = base.model
    first = students[0]

    def student(attention: str) -> ByName:
        options: dict[str, Any] = {}
        if attention == model.attention:  # another attention would refuse them
            options = model.attention_options
        return {
            "model.attention": attention,
            "model.attention_options": options,
            "model.match_params": model.match_params,
        }

    normalised = {key: value for key, value in model.student_args.items() if key != "rezero"}
    args: ByName = {"model.student_args": normalised}
    plain = {BASELINE: args | student("standard") | {"model.match_params": False}}
    for name in students:
        if name != "standard":
            plain[f"{BASELINE}, {name}"] = args | student(name)
    distilled = {f"{DISTILLED} {name}": student(name) for name in students}
    if list(students) == ["standard"]:
        distilled = {DISTILLED: student(first)}
    controls: dict[str, ByName] = {}
    kind = base.phase_a.kind
    if not base.phase_a.shares_gaussians:  # else these would be the student itself
        if base.phase_b.gamma and kind.stored:
            controls["maps of other images"] = {"phase_b.shuffle_maps": True}
        controls |= kind.controls
    if base.export.kind == "predictions":
        controls["predictions of other images"] = {"phase_b.shuffle_predictions": True}
    elif base.phase_b.alpha and kind.predicts:
        labels = round(base.phase_b.beta + base.phase_b.alpha, 6)
        controls["no soft labels"] = {"phase_b.alpha": 0.0, "phase_b.beta": labels}
    for name, changes in controls.items():
        distilled[name] = student(first) | changes
    return [
        *(Row(name=name, settings=changes, plain=True) for name, changes in plain.items()),
        *(Row(name=name, settings=changes) for name, changes in distilled.items()),
    ]


def sweep_rows(entries: Any, where: str, rows: Sequence[Row]) -> list[Row]:
    """``rows`` and those of a sweep file with these ``entries``.

    An entry holds settings by dotted name, and may have a ``name``, ``plain`` and ``like``: the
    name of the row whose settings it changes. Without ``like`` this is the first distilled row, or
    the plain ViT if it is ``plain``. With ``like: null`` it is the configuration. An entry that
    says nothing else inherits ``plain`` from the row named in ``like``.

    A sweep of plain entries alone trains no teacher: of ``rows`` only the plain ones stay.

    Raises UserError, naming ``where``, for an entry that is no row. Whether its settings exist
    shows when they are resolved.
    """
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not is_list or not entries:
        raise UserError(f"{where}: a sweep is a list of settings, such as '- {{phase_b.gamma: 1}}'")
    by_name = {row.name: row for row in rows}
    distilled = next((row.name for row in rows if not row.plain), BASELINE)
    for entry in entries:
        row = _parse(entry, where, by_name, distilled)
        by_name[row.name] = row
    swept = list(by_name.values())
    needs_teacher = any(not row.plain for row in swept[len(rows) :])
    return [row for row in swept if row.plain or needs_teacher]


def _parse(entry: dict[str, Any], where: str, by_name: dict[str, Row], distilled: str) -> Row:
    """Reads the row of one entry of a sweep. ``by_name`` holds the rows before it."""
    fields = {key: entry[key] for key in ("name", "plain", "like") if key in entry}
    changes = {key: value for key, value in entry.items() if key not in fields}
    described = (f"{str(name).split('.')[-1]} {value}" for name, value in changes.items())
    name = fields.setdefault("name", ", ".join(described))
    if fields.get("plain") is True:
        fields.setdefault("like", BASELINE)
    like = fields.pop("like", distilled)
    if like not in (None, *by_name):
        names = [*by_name]
        raise UserError(f"{where}: {name}: like {like!r}: no such row before it; there are {names}")
    if "seed" in changes:
        raise UserError(f"{where}: {name}: seed: every row is run with each of --seeds")
    parent = by_name[like] if like else Row(name="")
    fields.setdefault("plain", parent.plain)
    _check_is_read(changes, bool(fields["plain"]), f"{where}: {name}: ")
    settings = {key: value for key, value in parent.settings.items() if key not in changes}
    try:
        row = Row(**fields, settings=settings | changes)
    except ValidationError as error:
        raise UserError(f"{where}: {name}: {problem(error, Row)}") from None
    if row.name in by_name:
        raise UserError(f"{where}: two rows are called {name!r}: give one another name")
    return row


def _check_is_read(changes: ByName, plain: bool, where: str) -> None:
    """Raises UserError for a change that leaves a row as it was, because its training does not read
    such settings."""
    if not plain:
        return
    check_plain(changes, where)
    for name in changes:
        if f"{name}.".startswith(WITH_A_TEACHER):
            raise UserError(f"{where}{name}: a plain row has no teacher: leave it out")


def select_rows(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Keeps the plain ViT and the rows of these names. Raises UserError for an unknown name."""
    known = [row.name for row in rows]
    for name in names:
        if name not in known:
            raise UserError(f"--row {name!r}: no such row; there are {known}")
    return [row for row in rows if row.name in (BASELINE, *names)]


def resolve(row: Row, base: Settings) -> Settings:
    """Settings of a row's training. What the configuration sets for this sort of training alone is
    moved into ``train`` first, where the row's changes meet it; settings that the training does not
    read get their defaults, so that they do not name another training. Raises UserError for a name
    that is no setting."""
    if row.plain:
        check_plain(row.settings, f"{row.name}: ")
    tree = base.with_training(distilled=not row.plain).model_dump(mode="json")
    for name, value in row.settings.items():
        # a copy, because another setting of the row may change a part of the value
        set_value(tree, name, copy.deepcopy(value), row.name)
    settings = parse(tree, row.name).with_training(distilled=not row.plain)
    settings = settings.with_section("train", keep="last")  # the epoch of the tables
    if row.plain:
        unused = {
            "phase_a": PhaseASettings(),
            "export": ExportSettings(),
            "phase_b": PhaseBSettings(),
        }
        return settings.model_copy(update=unused)
    phase_a = settings.phase_a
    if phase_a.shares_gaussians:
        settings = settings.with_section("phase_b", shuffle_maps=False)
    if not phase_a.kind.predicts:
        settings = settings.with_section("phase_b", alpha=0.0, alpha_epochs=None)
    if not phase_a.kind.stored:  # no map of a single image
        settings = settings.with_section("phase_b", shuffle_maps=False)
        return settings.model_copy(update={"export": ExportSettings()})
    return settings  # its store is chosen when its teacher is known
