"""The cells of a comparison, and the settings of each.

A cell is one way to train. It is run with every seed and is one line of every table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from gaupipe.settings import BaselineSettings, Settings
from gaupipe.settings import load as config
from gaupipe.settings.sections import Section, problem
from gaupipe.system.errors import UserError

BASELINE = "plain ViT"
"""The reference of every comparison: standard attention, trained on the labels alone."""
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
    trials: tuple[dict[str, Any], ...] = ()
    """Further changes to choose from. The trial with the best validation accuracy on the first
    seed is taken."""


def default_cells(base: Settings, students: Sequence[str], *, tune: bool = True) -> list[Cell]:
    """The cells of every comparison: baselines, distilled students, and three controls.

    ``students`` are attentions. The controls belong to the first of them.

    The plain ViT is tuned over four starts (timm's, timm's with a position embedding from std
    0.5, the configuration's, mimetic) and two rates. The distilled student has as many trials.
    Further students and controls take what was best for the first student. Without ``tune`` no
    cell has trials.
    """
    standard = _student(base, "standard")
    model_args = {key: arg for key, arg in base.phase_b.model_args.items() if key != "rezero"}
    standard |= {"phase_b.match_params": False, "phase_b.model_args": model_args}
    starts, gamma = _starts(base), base.phase_b.gamma
    weights = [{"phase_b.gamma": gamma}, {"phase_b.gamma": round(3 * gamma, 6)}]
    weighted = [start | weight for start in starts[2:] for weight in weights]
    trials = _grid(starts, base.baseline_optim.lr) if tune else ()
    cells = [Cell(name=BASELINE, settings=standard, plain=True, trials=trials)]
    for attention in students:
        if attention != "standard":
            name, settings = f"{BASELINE}, {attention}", _student(base, attention)
            cells.append(Cell(name=name, settings=settings, like=BASELINE, plain=True))
    distilled = DISTILLED if list(students) == ["standard"] else f"{DISTILLED} {students[0]}"
    trials = _grid(weighted, base.phase_b.optim.lr) if tune else ()
    cells.append(Cell(name=distilled, settings=_student(base, students[0]), trials=trials))
    for attention in students[1:]:
        name, settings = f"{DISTILLED} {attention}", _student(base, attention)
        cells.append(Cell(name=name, settings=settings, like=distilled))
    return cells + _controls(base, distilled)


def _student(base: Settings, attention: str) -> dict[str, Any]:
    """An attention, with the options of the settings if they are meant for it."""
    phase = base.phase_b
    return {
        "phase_b.student": attention,
        "phase_b.attention_options": phase.attention_options if attention == phase.student else {},
        "phase_b.match_params": phase.match_params,
    }


def _starts(base: Settings) -> list[dict[str, Any]]:
    """How the weights of a ViT may start: timm's way, timm's with a position embedding from std
    0.5, the configuration's way, mimetic."""
    timm = {"model.init": "normal", "model.init_std": None, "model.pos_embed_std": None}
    configured = {name: getattr(base.model, name.removeprefix("model.")) for name in timm}
    return [
        timm,
        {**timm, "model.pos_embed_std": 0.5},
        configured,
        {**timm, "model.init": "mimetic"},
    ]


def _grid(starts: Sequence[dict], rate: float) -> tuple[dict[str, Any], ...]:
    """Every start with the rate and with half of it. Trials that come out the same count once."""
    trials = [{**start, "phase_b.optim.lr": lr} for start in starts for lr in (rate, rate / 2)]
    return tuple(trial for number, trial in enumerate(trials) if trial not in trials[:number])


def _controls(base: Settings, distilled: str) -> list[Cell]:
    """Distilled students without one of the things that may help them."""
    changes: dict[str, dict[str, Any]] = {"shuffled maps": {"phase_b.shuffle_maps": True}}
    if base.phase_a.learns_gaussians:
        changes["prior alone"] = {"phase_a.prior": True, "phase_a.per_image": "none"}
    if base.phase_b.alpha:
        labels = round(base.phase_b.beta + base.phase_b.alpha, 6)
        changes["no soft labels"] = {"phase_b.alpha": 0.0, "phase_b.beta": labels}
    return [
        Cell(name=name, settings=settings, like=distilled) for name, settings in changes.items()
    ]


def sweep_cells(entries: Any, where: str, cells: Sequence[Cell]) -> list[Cell]:
    """``cells`` and those of a sweep file with these ``entries``.

    An entry holds settings by dotted name and the other keys of :class:`Cell`. Without ``like``
    it starts with the settings of the first distilled cell, or with those of the plain ViT if it
    is ``plain``. With ``like: null`` it starts with the configuration. An entry that says nothing
    else inherits ``plain`` from the cell named in ``like``.

    A sweep of plain entries alone trains no teacher: of ``cells`` only the plain ones stay.

    Raises UserError, naming ``where``, for an entry that is no cell. Whether its settings exist
    shows when they are resolved.
    """
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not is_list or not entries:
        raise UserError(f"{where}: a sweep is a list of settings, such as '- {{phase_b.gamma: 1}}'")
    by_name = {cell.name: cell for cell in cells}
    distilled = next((cell.name for cell in cells if not cell.plain), BASELINE)
    for entry in entries:
        cell = _parse_cell(entry, where, by_name, distilled)
        by_name[cell.name] = cell
    swept = list(by_name.values())
    alone = all(cell.plain for cell in swept[len(cells) :])
    return [cell for cell in swept if cell.plain or not alone]


def _parse_cell(entry: dict, where: str, by_name: dict[str, Cell], distilled: str) -> Cell:
    """The cell of one entry of a sweep. ``by_name`` holds the cells before it."""
    keys = Cell.model_fields.keys() - {"settings"}
    fields = {key: value for key, value in entry.items() if key in keys}
    settings = {key: value for key, value in entry.items() if key not in keys}
    fields.setdefault("like", BASELINE if fields.get("plain") is True else distilled)
    like = by_name.get(fields["like"]) if isinstance(fields["like"], str) else None
    fields.setdefault("plain", like is not None and like.plain)
    changes = (f"{str(name).split('.')[-1]} {value}" for name, value in settings.items())
    fields.setdefault("name", ", ".join(changes))
    try:
        cell = Cell(settings=settings, **fields)
    except ValidationError as error:
        raise UserError(f"{where}: {fields['name']}: {problem(error, Cell)}") from None
    here = f"{where}: {cell.name}"
    if cell.like is not None and like is None:
        names = [*by_name]
        raise UserError(f"{here}: like {cell.like!r}: no such row before it; there are {names}")
    if any("seed" in changes for changes in (settings, *cell.trials)):
        raise UserError(f"{here}: seed: every row is run with each of --seeds")
    if cell.name in by_name:
        raise UserError(f"{where}: two rows are called {cell.name!r}: give one another name")
    return cell


def select_cells(cells: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """The cells of these names, the cells whose settings they start with, and the plain ViT.
    Raises UserError for a name that no cell has."""
    by_name = {cell.name: cell for cell in cells}
    selected = {BASELINE, *names}
    for name in names:
        if name not in by_name:
            raise UserError(f"--row {name!r}: no such row; there are {[*by_name]}")
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
    """The settings of a cell, without its own trials, but with the ``best_trials`` of the cells
    that it starts from. Optimizer and epochs of a plain cell are the baseline's, as settings of
    phase B, which the cell can change. Raises UserError for what is not a setting."""
    settings = of_baseline(base) if cell.plain else base
    for name in reversed(ancestors(cell, by_name)):
        settings = apply(settings, by_name[name].settings | best_trials.get(name, {}), name)
    return apply(settings, cell.settings, cell.name)


def of_baseline(base: Settings) -> Settings:
    """Settings whose phase B has the optimizer and the epochs of the baseline."""
    epochs = base.baseline.epochs or base.phase_b.epochs
    phase_b = base.phase_b.model_copy(update={"optim": base.baseline_optim, "epochs": epochs})
    return base.model_copy(update={"phase_b": phase_b, "baseline": BaselineSettings()})


def apply(settings: Settings, changes: dict[str, Any], where: str) -> Settings:
    """Settings with changes {"a.b": value}. Raises UserError, naming ``where``, for an unknown
    one."""
    tree = settings.model_dump(mode="json")
    for name, value in changes.items():
        config.set_value(tree, name, value, where)
    return config.parse(tree, where)
