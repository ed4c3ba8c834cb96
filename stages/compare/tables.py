"""The results of a comparison as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from rich.table import Table


def tables(results: dict[str, Any]) -> list[Table]:
    """Accuracy over cost; differences from the plain ViT; first passages; how the runs ended; and
    the trials of the tuned cells. With a single seed no differences."""
    return [
        _front_table(results),
        *([_difference_table(results)] if len(results["seeds"]) > 1 else []),
        _passage_table(results),
        _final_table(results),
        *(_trials_table(cell) for cell in results["rows"] if cell["trials"]),
    ]


def _front_table(results: dict[str, Any]) -> Table:
    """Accuracy over cost, cheapest first."""
    rows = []
    cells = [cell for cell in results["rows"] if not cell["failed"]]
    for cell in sorted(cells, key=lambda cell: cell["final"]["multiply_adds"]["mean"]):
        final, above = cell["final"], cell["above_front"] or {}
        rows.append(
            [
                cell["row"],
                _mean(final["multiply_adds"], "{:.3g}", scale=1e-12),
                _mean(final["processor_seconds"], "{:.0f}"),
                _with_std(final["val_acc"], "{:.2f}", scale=100),
                _mean(above, "{:+.2f}", scale=100),
                _interval(above),
            ]
        )
    return _table(
        f"Accuracy over cost, {_seeds(results)}",
        ["10^12 m-adds", "proc. s", "accuracy", "above", "95 % interval"],
        rows,
        "m-adds: multiply-adds of the training, phase A and export counted; above: points above "
        "what plain ViTs of standard attention reach for as many",
    )


def _difference_table(results: dict[str, Any]) -> Table:
    """Which differences from the reference the seeds decide."""
    rows = []
    for cell in results["rows"]:
        if difference := cell["difference"]:
            tested = (difference[name] for name in ("p", "holm"))
            ps = ["-" if p is None else f"{p:.3f}" for p in tested]
            points = _mean(difference, "{:+.2f}", scale=100)
            rows.append([cell["row"], points, _interval(difference), *ps, difference["verdict"]])
    title = f"Accuracy minus that of the {results['reference']}, paired by seed"
    return _table(title, ["points", "95 % interval", "p", "Holm's p", ""], rows)


def _passage_table(results: dict[str, Any]) -> Table:
    """Epochs until each cell first reaches the accuracies that are compared at."""
    goals = next(cell["at"] for cell in results["rows"] if cell["at"])
    seeds, rows = len(results["seeds"]), []
    for cell in results["rows"]:
        row = [_epochs(at, seeds) for at in cell["at"]] or ["failed"] * len(goals)
        last = cell["at"][-1] if cell["at"] else {}
        row.append(_mean(last.get("speedup"), "{:.2f}"))
        if not cell["plain"]:
            row.append(_mean(last.get("epochs_with_phase_a"), "{:.1f}"))
            row.append(_mean(last.get("speedup_with_phase_a"), "{:.2f}"))
        rows.append([cell["row"], *row])
    names = [f"to {100 * goal.get('share', goal.get('target')):.0f} %" for goal in goals]
    of = f" of the final accuracy of the {results['reference']}" * ("share" in goals[0])
    return _table(
        "Epochs until an accuracy is first reached",
        [*names, "speed-up", "with A", "speed-up"],
        rows,
        f"{names[-1]}{of}: speed-up over the first passage of the {results['reference']} itself"
        + "; with A: phase A counted" * (not all(cell["plain"] for cell in results["rows"])),
    )


def _epochs(at: dict[str, Any], seeds: int) -> str:
    """Epochs to an accuracy, or how many seeds reached it."""
    if at["reached"] == seeds:
        return _with_std(at["epochs"], "{:.1f}")
    return f"{at['reached']} of {seeds}" if at["reached"] else "never"


def _final_table(results: dict[str, Any]) -> Table:
    """How the runs of every cell ended."""
    rows = []
    for cell in results["rows"]:
        final = cell["final"]
        values = [
            _mean(final["parameters"], "{:,.0f}"),
            _mean(final["epochs"], "{:.0f}"),
            "-" if cell["plain"] else _mean(final["phase_a_epochs"], "{:.1f}"),
            _with_std(final["test_acc"], "{:.2f}", scale=100),
            _mean(final["val_loss"], "{:.3f}"),
        ]
        rows.append([cell["row"], *(["failed"] if cell["failed"] else values)])
    columns = ["parameters", "epochs", "phase A", "test acc.", "validation loss"]
    return _table(f"At the end, {_seeds(results)}", columns, rows)


def _trials_table(cell: dict[str, Any]) -> Table:
    """The grid that a cell was tuned over, one setting a column; * marks the best trial."""
    trials = cell["trials"]
    names = list(dict.fromkeys(name for trial in trials for name in trial["settings"]))
    table = Table(title=f"Trials of {cell['row']}, on the first seed", title_justify="left")
    for name in names:
        table.add_column(name.split(".")[-1])
    table.add_column("validation acc.", justify="right", no_wrap=True)
    for trial in trials:
        values = [trial["settings"].get(name) for name in names]
        score = "failed" if trial["val_acc"] is None else f"{100 * trial['val_acc']:.2f}"
        shown = ["default" if value is None else str(value) for value in values]
        table.add_row(*shown, score + (" *" if trial["taken"] else "  "))
    return table


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None
) -> Table:
    """A table whose rows begin with the name of a cell, without columns that say nothing."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("")
    filled = [[*row, *["-"] * (1 + len(columns) - len(row))] for row in rows]
    said = [number for number, *values in zip(count(), *filled) if {*values} != {"-"}]
    for number in said[1:]:
        table.add_column(columns[number - 1], justify="right", no_wrap=True)
    for row in filled:
        table.add_row(*(row[number] for number in said))
    return table


def _seeds(results: dict[str, Any]) -> str:
    seeds = len(results["seeds"])
    return "one seed" if seeds == 1 else f"mean ± std of {seeds} seeds"


def _interval(difference: dict[str, Any]) -> str:
    if difference.get("low") is None:
        return "-"
    return f"{100 * difference['low']:+.2f} to {100 * difference['high']:+.2f}"


def _mean(spread: dict[str, Any] | None, form: str, *, scale: float = 1) -> str:
    return "-" if not spread or spread["mean"] is None else form.format(scale * spread["mean"])


def _with_std(spread: dict[str, Any], form: str, *, scale: float = 1) -> str:
    mean = _mean(spread, form, scale=scale)
    return mean if spread["std"] is None else f"{mean} ±{form.format(scale * spread['std'])}"
