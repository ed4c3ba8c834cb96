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

from gaupipe import config
from gaupipe.config import BaselineSettings, PhaseASettings, PhaseBSettings, Settings
from gaupipe.errors import UserError

IRRELEVANT = ("device", "threads", "key_snapshots", "data.workers", "data.eval_batch_size", "data.root", "data.download")
"""Settings that do not make another run of it."""

LEARNED_FROM = ("alpha", "beta", "gamma", "gamma_schedule", "gamma_epochs", "layer_map", "layer_weights", "mean_heads",
                "shuffle_maps", "match_grid", "warm_start", "temperature", "direction", "preload_gb")
"""Settings of phase B that mean nothing without a teacher."""

PLAIN, REZERO = "plain ViT", "plain ViT, ReZero"
DISTILLED = "distilled"


@dataclass(frozen=True)
class Cell:
    """A way to train.

    name      as the tables print it
    settings  changes {"a.b": value} from what it starts with
    like      the cell whose settings, with those of its best try, it starts with; None starts with the configuration
    plain     on the labels alone
    tries     further changes, of which the best by validation accuracy on the first seed is taken; none tries nothing
    kind      of the store
    encoding  of the store
    """

    name: str
    settings: dict[str, Any]
    like: str | None = None
    plain: bool = False
    tries: tuple[dict[str, Any], ...] = ()
    kind: Literal["gaussian", "embedding", "dense"] = "gaussian"
    encoding: Literal["float16", "uint8"] = "float16"


def default_cells(base: Settings, students: Sequence[str], tune: bool = True) -> list[Cell]:
    """The comparison every table starts with: the plain ViT, the plain ViT with ReZero, distilled students and, for the
    first student, three controls.

    The plain ViT is tuned over starts (timm's, timm's with a position embedding from std 0.5, the configuration's,
    mimetic) and two rates, the distilled student over as many tries, ReZero over half of them. Controls and further students take what was best
    for the distilled one, except for their name's difference.
    """
    lr, gamma = base.phase_b.optim.lr, base.phase_b.gamma
    plain_lr = (base.baseline.optim or base.phase_b.optim).lr
    starts = [{"model.init": "normal", "model.init_std": None, "model.pos_embed_std": None},
              {"model.init": "normal", "model.init_std": None, "model.pos_embed_std": 0.5},
              {f"model.{name}": getattr(base.model, name) for name in ("init", "init_std", "pos_embed_std")},
              {"model.init": "mimetic", "model.init_std": None, "model.pos_embed_std": None}]

    def tries(rates: Sequence[float], others: Sequence[dict]) -> tuple[dict, ...]:
        every = [{**other, "phase_b.optim.lr": rate} for other in others for rate in rates]
        return tuple(entry for number, entry in enumerate(every) if entry not in every[:number]) if tune else ()

    distilled_starts = [{**start, "phase_b.gamma": weight} for start in starts[2:] for weight in (gamma, 3 * gamma)]
    first, *further = students
    cells = [Cell(PLAIN, {"phase_b.student": "standard"}, plain=True, tries=tries((plain_lr, plain_lr / 2), starts)),
             Cell(REZERO, {"phase_b.student": "standard", "phase_b.rezero": True}, plain=True,
                  tries=tries((plain_lr, plain_lr / 2), [starts[0], starts[2]]))]
    cells += [Cell(f"{PLAIN}, {key}", {"phase_b.student": key}, PLAIN, plain=True)
              for key in students if key != "standard"]
    named = DISTILLED if students == ["standard"] else f"{DISTILLED} {first}"
    cells.append(Cell(named, {"phase_b.student": first}, tries=tries((lr, lr / 2), distilled_starts)))
    cells += [Cell(f"{DISTILLED} {key}", {"phase_b.student": key}, named) for key in further]
    soft = base.phase_b.alpha
    cells += [Cell("  prior alone", {"phase_a.residual": False, "phase_a.compression": None}, named),
              Cell("  no soft labels", {"phase_b.alpha": 0.0, "phase_b.beta": round(base.phase_b.beta + soft, 6)}, named),
              Cell("  shuffled maps", {"phase_b.shuffle_maps": True}, named)]
    return cells


RESERVED = {"name", "like", "plain", "tries", "kind", "encoding"}


def sweep_cells(entries: Any, where: str, base: Settings, like: str) -> list[Cell]:
    """The cells of a sweep: a list of settings by dotted name, each with what :class:`Cell` names besides.

    An entry without ``like`` starts with the settings of ``like``, a plain one with those of the plain ViT; ``like:
    null`` starts with the configuration. Raises UserError for what cannot be run.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries) or not entries:
        raise UserError(f"{where}: a sweep is a list of settings, such as '- {{phase_b.gamma: 0.5, phase_b.alpha: 0.1}}'")
    cells = []
    for entry in entries:
        settings = {key: value for key, value in entry.items() if key not in RESERVED}
        named = {key: entry[key] for key in RESERVED & entry.keys()}
        plain = named.get("plain", False)
        cell = Cell(**{"name": ", ".join(f"{key.split('.')[-1]} {value}" for key, value in settings.items()),
                       "like": PLAIN if plain else like, **named,
                       "settings": settings, "tries": tuple(named.get("tries", ()))})
        for allowed, given in ((("gaussian", "embedding", "dense"), cell.kind), (("float16", "uint8"), cell.encoding)):
            if given not in allowed:
                raise UserError(f"{where}: {cell.name}: {given!r} should be one of {', '.join(allowed)}")
        for changes in cell.tries or [{}]:
            apply(base, {**cell.settings, **changes}, f"{where}: {cell.name}")
        cells.append(cell)
    return cells


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
    """Names a run: the same for the same settings, whatever settings a later version adds."""
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
        seconds = sum(row["seconds"] for row in self.metrics[:epochs])
        return Reach(epochs, epochs + len(self.phase_a), seconds,
                     seconds + sum(row["seconds"] for row in self.phase_a), self.curve[epochs - 1])


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


def resolved(cell: Cell, cells: dict[str, Cell], chosen: dict[str, dict[str, Any]], base: Settings) -> Settings:
    """The settings of a cell, without its own tries; ``chosen`` holds the changes of the best try of the cells it is like.

    Raises UserError for a cell that is like one that is not there or comes after it."""
    if cell.like is None:
        return apply(base, cell.settings, cell.name)
    if cell.like not in cells:
        raise UserError(f"{cell.name}: like {cell.like!r}: no such cell before it; there are "
                        f"{', '.join(map(repr, cells))}")
    before = {name: other for name, other in cells.items() if name != cell.name}
    start = resolved(cells[cell.like], before, chosen, base)
    return apply(start, {**chosen.get(cell.like, {}), **cell.settings}, cell.name)
