"""What a comparison consists of, and its arithmetic: cells, the default ones, epochs to accuracy, speed-up.

A cell is a way to train, run once for every seed. A curve is the validation accuracy after each epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from pydantic import ValidationError

from gaupipe import config
from gaupipe.config import IRRELEVANT, BaselineSettings, PhaseASettings, PhaseBSettings, Settings
from gaupipe.errors import UserError
from gaupipe.sections import Section

LEARNED_FROM = ("alpha", "beta", "gamma", "gamma_schedule", "gamma_epochs", "layer_map", "layer_weights", "mean_heads",
                "shuffle_maps", "match_grid", "warm_start", "temperature", "direction", "preload_gb")
"""Settings of phase B that mean nothing without a teacher."""

PLAIN, REZERO = "plain ViT", "plain ViT, ReZero"
DISTILLED = "distilled"


class Cell(Section):
    """A way to train. Controls of the default comparison are cells like any other."""

    name: str
    """As the tables print it."""
    settings: dict[str, Any] = {}
    """Changes {"a.b": value} from what it starts with."""
    like: str | None = None
    """The cell whose settings, with those of its best try, it starts with; None starts with the configuration."""
    plain: bool = False
    """On the labels alone."""
    tries: tuple[dict[str, Any], ...] = ()
    """Further changes, of which the best by validation accuracy on the first seed is taken; none tries nothing."""
    kind: Literal["gaussian", "embedding", "dense", "prior"] | None = None
    encoding: Literal["float16", "uint8"] = "float16"
    """Of the store that it reads; no kind means the usual one of its teacher."""


def default_cells(base: Settings, students: Sequence[str], tune: bool = True) -> list[Cell]:
    """The comparison every table starts with: the plain ViT, the plain ViT with ReZero, distilled students and, for the
    first student, three controls.

    The plain ViT is tuned over starts (timm's, timm's with a position embedding from std 0.5, the configuration's,
    mimetic) and two rates, the distilled student over as many tries, ReZero over half of them; tries that come out the
    same count once. Controls and further students take what was best for the distilled one.
    """
    plain_optim = (base.baseline.optim or base.phase_b.optim).model_dump(mode="json")
    rates, plain_rates = ([rate, rate / 2] for rate in (base.phase_b.optim.lr, plain_optim["lr"]))
    starts = [{"model.init": "normal", "model.init_std": None, "model.pos_embed_std": None},
              {"model.init": "normal", "model.init_std": None, "model.pos_embed_std": 0.5},
              {f"model.{name}": getattr(base.model, name) for name in ("init", "init_std", "pos_embed_std")},
              {"model.init": "mimetic", "model.init_std": None, "model.pos_embed_std": None}]

    def tries(rates: Sequence[float], others: Sequence[dict]) -> tuple[dict, ...]:
        every = [{**other, "phase_b.optim.lr": rate} for other in others for rate in rates]
        return tuple(entry for number, entry in enumerate(every) if entry not in every[:number]) if tune else ()

    weights = [base.phase_b.gamma, round(3 * base.phase_b.gamma, 6)]
    distilled_starts = [{**start, "phase_b.gamma": weight} for start in starts[2:] for weight in weights]

    def student(key: str) -> dict[str, Any]:
        """An attention, with the options of the settings if they are meant for it."""
        options = base.phase_b.attention_options if key == base.phase_b.student else {}
        return {"phase_b.student": key, "phase_b.attention_options": options}

    standard = {**student("standard"), "phase_b.match_params": False, "phase_b.rezero": False,
                "phase_b.optim": plain_optim, "baseline.optim": None}
    named = DISTILLED if list(students) == ["standard"] else f"{DISTILLED} {students[0]}"
    cells = [Cell(name=PLAIN, settings=standard, plain=True, tries=tries(plain_rates, starts)),
             Cell(name=REZERO, settings={**standard, "phase_b.rezero": True}, plain=True,
                  tries=tries(plain_rates, [starts[0], starts[2]]))]
    cells += [Cell(name=f"{PLAIN}, {key}", settings={**student(key), "phase_b.match_params": base.phase_b.match_params},
                   like=PLAIN, plain=True) for key in students if key != "standard"]
    cells.append(Cell(name=named, settings=student(students[0]), tries=tries(rates, distilled_starts)))
    cells += [Cell(name=f"{DISTILLED} {key}", settings=student(key), like=named) for key in students[1:]]
    hard = round(base.phase_b.beta + base.phase_b.alpha, 6)
    controls = {"prior alone": {"phase_a.prior": True, "phase_a.residual": False, "phase_a.compression": None},
                "no soft labels": {"phase_b.alpha": 0.0, "phase_b.beta": hard},
                "shuffled maps": {"phase_b.shuffle_maps": True}}
    return cells + [Cell(name=name, settings=settings, like=named) for name, settings in controls.items()]


def sweep_cells(entries: Any, where: str, cells: Sequence[Cell]) -> list[Cell]:
    """``cells`` and those of a sweep: a list of settings by dotted name, each with what :class:`Cell` has besides.

    An entry without ``like`` starts with the settings of the first distilled cell, a plain one with those of the plain
    ViT; ``like: null`` starts with the configuration. It is plain if what it is like is. Raises UserError for entries that
    are no cells; their settings are for the caller to try.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries) or not entries:
        raise UserError(f"{where}: a sweep is a list of settings, such as '- {{phase_b.gamma: 0.5, phase_b.alpha: 0.1}}'")
    by_name = {cell.name: cell for cell in cells}
    distilled = next(cell.name for cell in cells if not cell.plain)
    for entry in entries:
        own = {name: entry[name] for name in Cell.model_fields.keys() & entry.keys() - {"settings"}}
        settings = {name: value for name, value in entry.items() if name not in own}
        own.setdefault("like", PLAIN if own.get("plain") is True else distilled)
        like = by_name.get(own["like"]) if isinstance(own["like"], str) else None
        own.setdefault("plain", like is not None and like.plain)
        shown = {**settings, **{name: entry[name] for name in ("kind", "encoding") if name in entry}}
        own.setdefault("name", ", ".join(f"{str(name).split('.')[-1]} {value}" for name, value in shown.items()))
        try:
            cell = Cell(settings=settings, **own)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise UserError(f"{where}: {own['name']}: {place}: {problem['msg'].lower()}, got {problem['input']!r}") from None
        if cell.like is not None and like is None:
            raise UserError(f"{where}: {cell.name}: like {cell.like!r}: no such cell before it; there are "
                            f"{', '.join(map(repr, by_name))}")
        if any("seed" in changes for changes in (settings, *cell.tries)):
            raise UserError(f"{where}: {cell.name}: seed: every cell is run with each of --seeds")
        if cell.name in by_name:
            raise UserError(f"{where}: two cells are called {cell.name!r}: give one of them another name")
        by_name[cell.name] = cell
    return list(by_name.values())


def chosen_rows(cells: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """The cells of these names, those whose settings they start with, and the plain ViT. Raises UserError for a name that no
    cell has."""
    by_name = {cell.name: cell for cell in cells}
    for name in names:
        if name not in by_name:
            raise UserError(f"--row {name!r}: no such row; there are {', '.join(map(repr, by_name))}")
    kept = {PLAIN, *names}.union(*(ancestors(by_name[name], by_name) for name in names))
    return [cell for cell in cells if cell.name in kept]


def apply(settings: Settings, changes: dict[str, Any], where: str) -> Settings:
    """Settings with changes {"a.b": value}. Raises UserError, naming ``where``, for what is not a setting."""
    tree = settings.model_dump(mode="json")
    for name, value in changes.items():
        config.place(tree, name, value, where)
    return config.parse(tree, where)


def as_run(settings: Settings, seed: int, plain: bool) -> Settings:
    """The settings of one run, those that mean nothing to it put back to their defaults."""
    optim = (settings.baseline.optim or settings.phase_b.optim) if plain else settings.phase_b.optim
    phase_b = settings.phase_b.model_copy(update={"optim": optim})
    if not settings.phase_a.residual:  # the maps of all images are the same
        phase_b = phase_b.model_copy(update={"shuffle_maps": False})
    common = {"seed": seed, "baseline": BaselineSettings(), "phase_b": phase_b}
    if plain:
        defaults = PhaseBSettings()
        common["phase_b"] = phase_b.model_copy(update={name: getattr(defaults, name) for name in LEARNED_FROM})
        common["phase_a"] = PhaseASettings()
    return settings.model_copy(update=common)


def as_teacher(settings: Settings) -> Settings:
    """The settings of the phase A of a run."""
    return settings.model_copy(update={"phase_b": PhaseBSettings(), "baseline": BaselineSettings()})


def digest(settings: Settings, *more: Any) -> str:
    """Names a run on a data set: the same for the same settings, whatever settings a later version adds. ``more`` is what
    counts besides, the data set's sha256 first of all."""
    defaults = config.flatten(Settings())
    told = {name: value for name, value in config.flatten(settings).items()
            if name not in IRRELEVANT and (name not in defaults or value != defaults[name])}
    return hashlib.sha256(json.dumps([told, *more], sort_keys=True).encode()).hexdigest()[:12]


def epochs_to(curve: Sequence[float], target: float) -> int | None:
    """The first epoch, counted from 1, after which the accuracy is at least ``target``; None if it never is."""
    return next((epoch for epoch, accuracy in enumerate(curve, 1) if accuracy >= target), None)


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; both None where a seed never got there."""

    mean: float | None
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        """A single value has no spread: its std is None."""
        if not values or None in values:
            return cls(None, None)
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)


def total_seconds(metrics: Sequence[dict[str, Any]]) -> float:
    """Seconds of training steps over all epochs of a metrics file."""
    return sum(row["seconds"] for row in metrics)


@dataclass(frozen=True)
class Run:
    """One finished training: metrics per epoch of phase B and of the phase A before it (empty for a plain one)."""

    seed: int
    metrics: list[dict[str, Any]]
    phase_a: list[dict[str, Any]]
    test_acc: float | None = None

    @property
    def curve(self) -> list[float]:
        return [row["val_acc"] for row in self.metrics]

    def reach(self, target: float) -> Reach:
        """How long the run took to reach an accuracy."""
        epochs = epochs_to(self.curve, target)
        if epochs is None:
            return Reach()
        seconds = total_seconds(self.metrics[:epochs])
        return Reach(epochs, epochs + len(self.phase_a), seconds, seconds + total_seconds(self.phase_a), self.curve[epochs - 1])


@dataclass(frozen=True)
class Reach:
    """Epochs and seconds of training to an accuracy, with and without phase A, and the accuracy then; None: never."""

    epochs: int | None = None
    epochs_with_phase_a: int | None = None
    seconds: float | None = None
    seconds_with_phase_a: float | None = None
    accuracy: float | None = None


COSTS = ("epochs", "epochs_with_phase_a", "seconds", "seconds_with_phase_a")


def compare_at(runs: list[Run], reference: list[Run], target: float | None = None, share: float | None = None
               ) -> dict[str, Any]:
    """A cell next to the reference at one accuracy: ``target``, or for a ``share`` that share of the final accuracy of
    the reference's run with the same seed.

    {"reached": seeds that got there, cost: Spread, "speedup_" + cost: Spread of the reference's cost over the cell's, seed
    by seed, "accuracy": Spread}, the costs being :data:`COSTS`. A mean over seeds is given only where all got there.
    """
    others = {run.seed: run for run in reference}
    pairs = []
    for run in runs:
        goal = target if share is None else share * others[run.seed].curve[-1]
        pairs.append((run.reach(goal), others[run.seed].reach(goal)))
    row: dict[str, Any] = {"reached": sum(own.epochs is not None for own, _ in pairs)}
    for name in (*COSTS, "accuracy"):
        row[name] = Spread.of([getattr(own, name) for own, _ in pairs])
    for name in COSTS:
        row[f"speedup_{name}"] = Spread.of([
            getattr(other, name) / getattr(own, name) if own.epochs and other.epochs and getattr(own, name) else None
            for own, other in pairs])
    return row


def ancestors(cell: Cell, by_name: dict[str, Cell]) -> list[str]:
    """The names of the cells whose settings a cell starts with, nearest first."""
    names = []
    while cell.like:
        names.append(cell.like)
        cell = by_name[cell.like]
    return names


def resolved(cell: Cell, by_name: dict[str, Cell], chosen: dict[str, dict[str, Any]], base: Settings) -> Settings:
    """The settings of a cell, without its own tries; ``chosen`` holds the changes of the best try of the cells it is like.

    Raises UserError for what is not a setting."""
    settings = base
    for name in reversed(ancestors(cell, by_name)):
        settings = apply(settings, {**by_name[name].settings, **chosen.get(name, {})}, name)
    return apply(settings, cell.settings, cell.name)
