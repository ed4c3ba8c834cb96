"""The results of a comparison as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
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
        *(_trials_table(cell) for cell in results["cells"] if cell["trials"]),
    ]


def _front_table(results: dict[str, Any]) -> Table:
    """Accuracy over cost, cheapest first."""
    distilled = not all(cell["plain"] for cell in results["cells"])
    table = _table(
        f"Accuracy over cost, {_seeds(results)}",
        ["10^12 m-adds", "proc. s", "accuracy", "above", "95 % interval"],
        f"m-adds: multiply-adds of the training{', phase A and export counted' * distilled}; "
        "above: points above what plain ViTs of standard attention reach for as many",
    )
    cells = [cell for cell in results["cells"] if not cell["failed"]]
    for cell in sorted(cells, key=lambda cell: cell["final"]["multiply_adds"]["mean"]):
        final, above = cell["final"], cell["above_front"]
        table.add_row(
            cell["cell"],
            _mean(final["multiply_adds"], "{:.3g}", scale=1e-12),
            _mean(final["processor_seconds"], "{:.0f}"),
            _with_std(final["val_acc"], "{:.2f}", scale=100),
            f"{100 * above['mean']:+.2f}" if above else "-",
            _interval(above),
        )
    return table


def _difference_table(results: dict[str, Any]) -> Table:
    """Which differences from the reference the seeds decide."""
    table = _table(
        f"Accuracy minus that of the {results['reference']}, paired by {len(results['seeds'])} "
        "seeds",
        ["points", "95 % interval", "p", "Holm's p", ""],
    )
    for cell in results["cells"]:
        if difference := cell["difference"]:
            table.add_row(
                cell["cell"],
                f"{100 * difference['mean']:+.2f}",
                _interval(difference),
                *("-" if p is None else f"{p:.3f}" for p in (difference["p"], difference["holm"])),
                difference["verdict"],
            )
    return table


def _passage_table(results: dict[str, Any]) -> Table:
    """Epochs until each cell first reaches the accuracies that are compared at."""
    goals = next(cell["at"] for cell in results["cells"] if cell["at"])
    distilled = not all(cell["plain"] for cell in results["cells"])
    target = "target" in goals[0]
    named = [f"to {100 * (goal['target'] if target else goal['share']):.0f} %" for goal in goals]
    of = "" if target else f" of the final accuracy of the {results['reference']}"
    table = _table(
        f"Epochs until a share{of} is first reached" if not target else "Epochs to accuracies",
        [*named, "speed-up", *(["with A", "speed-up"] if distilled else [])],
        f"speed-up: {named[-1]}, over the first passage of the {results['reference']} itself"
        + ("; with A: phase A counted" if distilled else ""),
    )
    seeds = len(results["seeds"])
    for cell in results["cells"]:
        if cell["failed"]:
            table.add_row(cell["cell"], "failed")
            continue
        last = cell["at"][-1]
        values = [_epochs(at, seeds) for at in cell["at"]]
        values.append(_mean(last["speedup"], "{:.2f}"))
        if distilled:
            values.append(_mean(last["epochs_with_phase_a"], "{:.1f}"))
            values.append(_mean(last["speedup_with_phase_a"], "{:.2f}"))
        table.add_row(cell["cell"], *values)
    return table


def _epochs(at: dict[str, Any], seeds: int) -> str:
    """Epochs to an accuracy, or how many seeds reached it."""
    if at["reached"] == seeds:
        return _with_std(at["epochs"], "{:.1f}")
    return f"{at['reached']} of {seeds}" if at["reached"] else "never"


def _final_table(results: dict[str, Any]) -> Table:
    """How the runs of every cell ended."""
    tested = any(cell["final"]["test_acc"]["mean"] is not None for cell in results["cells"])
    distilled = not all(cell["plain"] for cell in results["cells"])
    columns = {
        "parameters": lambda final: _mean(final["parameters"], "{:,.0f}"),
        "epochs": lambda final: _mean(final["epochs"], "{:.0f}"),
        "phase A": lambda final: _mean(final["phase_a_epochs"], "{:.1f}"),
        "test acc.": lambda final: _with_std(final["test_acc"], "{:.2f}", scale=100),
        "validation loss": lambda final: _mean(final["val_loss"], "{:.3f}"),
    }
    if not distilled:
        del columns["phase A"]
    if not tested:
        del columns["test acc."]
    table = _table(f"At the end, {_seeds(results)}", list(columns))
    for cell in results["cells"]:
        values = [show(cell["final"]) for show in columns.values()]
        table.add_row(cell["cell"], *(["failed"] if cell["failed"] else values))
    return table


def _trials_table(cell: dict[str, Any]) -> Table:
    """The grid that a cell was tuned over, one setting a column; * marks the best trial."""
    trials = cell["trials"]
    names = list(dict.fromkeys(name for trial in trials for name in trial["settings"]))
    table = Table(title=f"Trials of {cell['cell']}, on the first seed", title_justify="left")
    for name in names:
        table.add_column(name.split(".")[-1])
    table.add_column("validation acc.", justify="right", no_wrap=True)
    for trial in trials:
        values = [trial["settings"].get(name) for name in names]
        score = "failed" if trial["val_acc"] is None else f"{100 * trial['val_acc']:.2f}"
        mark = " *" if trial["taken"] else "  "
        shown = ["default" if value is None else str(value) for value in values]
        table.add_row(*shown, score + mark)
    return table


def _table(title: str, columns: Sequence[str], caption: str | None = None) -> Table:
    """An empty table with a column for the name of the cell, and those of its values."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _seeds(results: dict[str, Any]) -> str:
    count = len(results["seeds"])
    return "one seed" if count == 1 else f"mean ± std of {count} seeds"


def _interval(difference: dict[str, Any] | None) -> str:
    if difference is None or difference["low"] is None:
        return "-"
    return f"{100 * difference['low']:+.2f} to {100 * difference['high']:+.2f}"


def _mean(spread: dict[str, float | None], form: str, *, scale: float = 1) -> str:
    return "-" if spread["mean"] is None else form.format(scale * spread["mean"])


def _with_std(spread: dict[str, float | None], form: str, *, scale: float = 1) -> str:
    mean = _mean(spread, form, scale=scale)
    return mean if spread["std"] is None else f"{mean} ±{form.format(scale * spread['std'])}"
