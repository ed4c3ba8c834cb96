"""What a comparison consists of: its cells, and the settings of each.

A cell is one way to train. It is run with every seed and is one line of every table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import AliasChoices, Field, ValidationError

from gaupipe.settings import Settings, StoreKind
from gaupipe.settings import load as config
from gaupipe.settings.sections import Section
from gaupipe.system.errors import UserError

BASELINE = "plain ViT"
"""The reference of every comparison: standard attention, trained on the labels alone."""
REZERO = "plain ViT, ReZero"
DISTILLED = "distilled"


class Cell(Section):
    """A way to train. An entry of a sweep file has the same keys, with its settings beside them."""

    name: str
    """As the tables print it."""
    settings: dict[str, Any] = {}
    """Changes {"a.b": value} of the settings that the cell starts with."""
    like: str | None = None
    """The cell whose settings, with those of its best trial, this one starts with. None starts
    with the configuration."""
    plain: bool = False
    """Train on the labels alone: a baseline."""
    trials: tuple[dict[str, Any], ...] = Field(
        default=(), validation_alias=AliasChoices("trials", "tries")
    )
    """Further changes to choose from. The trial with the best validation accuracy on the first
    seed is taken. ``tries`` is an older name of this key."""
    kind: StoreKind | None = None
    """Kind of the store that the student reads: ``export.kind``."""
    encoding: Literal["float16", "uint8"] | None = None
    """Encoding of that store: ``export.encoding``."""


def default_cells(base: Settings, students: Sequence[str], *, tune: bool = True) -> list[Cell]:
    """The cells of every comparison: baselines, distilled students, and three controls.

    ``students`` are attentions. The controls belong to the first of them.

    The plain ViT is tuned over four starts (timm's, timm's with a position embedding from std
    0.5, the configuration's, mimetic) and two rates. The distilled student has as many trials,
    ReZero half as many. Further students and controls take what was best for the first student.
    Without ``tune`` no cell has trials.
    """
    standard = {
        **_student(base, "standard"),
        "phase_b.match_params": False,
        "phase_b.rezero": False,
    }
    starts = _starts(base)
    rates = _rates(base.baseline_optim.lr)
    weights = [base.phase_b.gamma, round(3 * base.phase_b.gamma, 6)]
    distilled_starts = [
        {**start, "phase_b.gamma": weight} for start in starts[2:] for weight in weights
    ]
    first, *further = students
    distilled = DISTILLED if list(students) == ["standard"] else f"{DISTILLED} {first}"
    cells = [
        Cell(name=BASELINE, settings=standard, plain=True, trials=_grid(starts, rates)),
        Cell(
            name=REZERO,
            settings={**standard, "phase_b.rezero": True},
            plain=True,
            trials=_grid([starts[0], starts[2]], rates),
        ),
        *(_other_baseline(base, attention) for attention in students if attention != "standard"),
        Cell(
            name=distilled,
            settings=_student(base, first),
            trials=_grid(distilled_starts, _rates(base.phase_b.optim.lr)),
        ),
        *(
            Cell(
                name=f"{DISTILLED} {attention}",
                settings=_student(base, attention),
                like=distilled,
            )
            for attention in further
        ),
        *_controls(base, distilled),
    ]
    return cells if tune else [cell.model_copy(update={"trials": ()}) for cell in cells]


def _student(base: Settings, attention: str) -> dict[str, Any]:
    """An attention, with the options of the settings if they are meant for it."""
    options = base.phase_b.attention_options if attention == base.phase_b.student else {}
    return {"phase_b.student": attention, "phase_b.attention_options": options}


def _starts(base: Settings) -> list[dict[str, Any]]:
    """How the weights of a ViT may start: timm's way, timm's with a position embedding from std
    0.5, the configuration's way, mimetic."""
    normal = {"model.init": "normal", "model.init_std": None, "model.pos_embed_std": None}
    names = ("init", "init_std", "pos_embed_std")
    return [
        normal,
        {**normal, "model.pos_embed_std": 0.5},
        {f"model.{name}": getattr(base.model, name) for name in names},
        {**normal, "model.init": "mimetic"},
    ]


def _rates(rate: float) -> list[float]:
    return [rate, rate / 2]


def _grid(starts: Sequence[dict], rates: Sequence[float]) -> tuple[dict[str, Any], ...]:
    """Every start with every rate. Trials that come out the same count once."""
    trials = [{**start, "phase_b.optim.lr": rate} for start in starts for rate in rates]
    return tuple(trial for number, trial in enumerate(trials) if trial not in trials[:number])


def _other_baseline(base: Settings, attention: str) -> Cell:
    """A student's attention without distillation."""
    settings = {**_student(base, attention), "phase_b.match_params": base.phase_b.match_params}
    return Cell(name=f"{BASELINE}, {attention}", settings=settings, like=BASELINE, plain=True)


def _controls(base: Settings, distilled: str) -> list[Cell]:
    """What a distilled student is worth without one of the things that may help it."""
    labels = round(base.phase_b.beta + base.phase_b.alpha, 6)
    no_soft_labels = {"phase_b.alpha": 0.0, "phase_b.beta": labels}
    changes: dict[str, dict[str, Any]] = {
        "prior alone": {
            "phase_a.prior": True,
            "phase_a.per_image": "none",
        },
        "no soft labels": no_soft_labels,
        "shuffled maps": {"phase_b.shuffle_maps": True},
    }
    if not base.phase_a.learns_gaussians:
        changes = {"shuffled maps": {"phase_b.shuffle_maps": True}}
        if base.phase_b.alpha:
            changes["no soft labels"] = no_soft_labels
    return [
        Cell(name=name, settings=settings, like=distilled) for name, settings in changes.items()
    ]


def sweep_cells(content: Any, where: str, cells: Sequence[Cell]) -> list[Cell]:
    """``cells`` and those of a sweep file with this ``content``, a list of entries.

    An entry holds settings by dotted name and the other keys of :class:`Cell`. Without ``like``
    it starts with the settings of the first distilled cell, or with those of the plain ViT if it
    is ``plain``. With ``like: null`` it starts with the configuration. An entry that says nothing
    else inherits ``plain`` from the cell named in ``like``.

    A file that holds ``plain: true`` and the list under ``cells`` is a sweep without teachers: its
    entries are plain, and of ``cells`` only the plain ones stay, without ReZero.

    Raises UserError, naming ``where``, for an entry that is no cell. Whether its settings exist
    shows when they are resolved.
    """
    entries, alone = content, False
    if isinstance(content, dict) and content.keys() == {"plain", "cells"}:
        entries, alone = content["cells"], content["plain"]
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not is_list or not entries or not isinstance(alone, bool):
        raise UserError(
            f"{where}: a sweep is a list of settings, such as "
            "'- {phase_b.gamma: 0.5, phase_b.alpha: 0.1}', or has 'plain: true' and such a list "
            "under 'cells'"
        )
    if alone:
        cells = [cell for cell in cells if cell.plain and cell.name != REZERO]
    by_name = {cell.name: cell for cell in cells}
    distilled = next((cell.name for cell in cells if not cell.plain), BASELINE)
    for entry in entries:
        plain = {"plain": True} if alone else {}
        cell = _parse_cell({**plain, **entry}, where, by_name, distilled)
        if alone and not cell.plain:
            raise UserError(
                f"{where}: {cell.name}: plain: the sweep has 'plain: true': no cell has a teacher"
            )
        by_name[cell.name] = cell
    return list(by_name.values())


def _parse_cell(entry: dict, where: str, by_name: dict[str, Cell], distilled: str) -> Cell:
    """The cell of one entry of a sweep. ``by_name`` holds the cells before it."""
    keys = (Cell.model_fields.keys() | {"tries"}) - {"settings"}
    fields = {key: value for key, value in entry.items() if key in keys}
    settings = {key: value for key, value in entry.items() if key not in keys}
    fields.setdefault("like", BASELINE if fields.get("plain") is True else distilled)
    like = by_name.get(fields["like"]) if isinstance(fields["like"], str) else None
    fields.setdefault("plain", like is not None and like.plain)
    fields.setdefault("name", _default_name(entry, settings))
    try:
        cell = Cell(settings=settings, **fields)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        message = f"{place}: {problem['msg'].lower()}, got {problem['input']!r}"
        raise UserError(f"{where}: {fields['name']}: {message}") from None
    here = f"{where}: {cell.name}"
    if cell.like is not None and like is None:
        known = ", ".join(map(repr, by_name))
        raise UserError(f"{here}: like {cell.like!r}: no such cell before it; there are {known}")
    if any("seed" in changes for changes in (settings, *cell.trials)):
        raise UserError(f"{here}: seed: every cell is run with each of --seeds")
    if cell.name in by_name:
        raise UserError(f"{where}: two cells are called {cell.name!r}: give one another name")
    return cell


def _default_name(entry: dict, settings: dict) -> str:
    """A name made of what an entry changes, such as ``gamma 0.5, encoding uint8``."""
    store = {key: entry[key] for key in ("kind", "encoding") if key in entry}
    changes = {**settings, **store}
    return ", ".join(f"{str(name).split('.')[-1]} {value}" for name, value in changes.items())


def select_cells(cells: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """The cells of these names, the cells whose settings they start with, and the plain ViT.

    Raises UserError for a name that no cell has.
    """
    by_name = {cell.name: cell for cell in cells}
    selected = {BASELINE, *names}
    for name in names:
        if name not in by_name:
            known = ", ".join(map(repr, by_name))
            raise UserError(f"--row {name!r}: no such cell; there are {known}")
        selected.update(ancestors(by_name[name], by_name))
    return [cell for cell in cells if cell.name in selected]


def ancestors(cell: Cell, by_name: dict[str, Cell]) -> list[str]:
    """Names of the cells whose settings a cell starts with, nearest first."""
    names = []
    while cell.like:
        names.append(cell.like)
        cell = by_name[cell.like]
    return names


def resolve(
    cell: Cell,
    by_name: dict[str, Cell],
    best_trials: dict[str, dict[str, Any]],
    base: Settings,
) -> Settings:
    """The settings of a cell, without its own trials.

    ``best_trials`` holds, by name of cell, the changes of the best trial of the cells that it
    starts from; ``base`` is the configuration. Of a plain cell optimizer and epochs are the
    baseline's, as settings of phase B, which the cell can change. Raises UserError for what is not
    a setting.
    """
    settings = of_baseline(base) if cell.plain else base
    for name in reversed(ancestors(cell, by_name)):
        settings = apply(settings, by_name[name].settings | best_trials.get(name, {}), name)
    return apply(settings, cell.settings, cell.name)


def of_baseline(base: Settings) -> Settings:
    """Settings whose phase B has the optimizer and the epochs of the baseline."""
    own = {"optim": base.baseline_optim, "epochs": base.baseline.epochs or base.phase_b.epochs}
    rest: dict[str, Any] = {"optim": {}, "epochs": None}
    return base.model_copy(
        update={
            "phase_b": base.phase_b.model_copy(update=own),
            "baseline": base.baseline.model_copy(update=rest),
        }
    )


def apply(settings: Settings, changes: dict[str, Any], where: str) -> Settings:
    """Settings with changes {"a.b": value}.

    Raises UserError, naming ``where``, for what is not a setting.
    """
    tree = settings.model_dump(mode="json")
    for name, value in changes.items():
        config.set_value(tree, name, value, where)
    return config.parse(tree, where)
