"""Results of a comparison: a short table for a terminal of 80 columns, and all tables as
Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.table import Column, Table

from stages.compare.measures import Difference, Passages, Spread, Verdict
from stages.compare.report import Comparison, RowResult

ROWS_SHOWN = 7
"""In the short table, which has ten lines with its title, its head and its caption."""
VERDICTS = (
    "confirmed: Holm's p, which is corrected for all rows of this table, is below .05; supported: "
    "only the row's own interval excludes zero"
)
"""What the last column of a table of differences says."""


def summary(results: Comparison, report: Path) -> Table:
    """The plain ViT and the best other rows, the best one first; the caption names the file that
    has the rest."""
    rows = sorted(results.rows, key=lambda row: -(row.final.val_acc.mean or 0.0))
    others = [row.row for row in rows if row.row != results.reference]
    shown = {results.reference, *others[: ROWS_SHOWN - 1]}
    table = Table(
        Column("", no_wrap=True),  # a long name is cut off, because it would take another line
        *(Column(name, justify="right") for name in ("accuracy", "above plain", "", "core s")),
        title=f"{results.data}: validation accuracy, {_over_seeds(results)}",
        caption=f"{len(shown)} of {len(rows)} rows; all of them and further tables: {report}",
        box=None,
        pad_edge=False,
    )
    table.title_justify = table.caption_justify = "left"
    for row in rows:
        if row.row not in shown:
            continue
        accuracy = "failed" if row.failed else _with_std(row.final.val_acc, "{:.2f}", scale=100)
        verdict = ""
        if row.difference is not None and len(results.seeds) > 1:
            verdict = row.difference.verdict
        above = _mean(row.difference, "{:+.2f}", scale=100)
        seconds = _mean(row.final.processor_seconds, "{:,.0f}")
        table.add_row(row.row, accuracy, above, verdict, seconds)
    return table


def tables(results: Comparison) -> Iterator[str]:
    """Accuracy over cost; with more than one seed the differences from the plain ViT, and those of
    the student from its controls; first passages; and how the runs ended. Markdown."""
    rows = results.rows
    reference = results.reference
    seeds = len(results.seeds)
    over = _over_seeds(results)
    cheapest_first = sorted(
        (row for row in rows if not row.failed),
        key=lambda row: row.final.multiply_adds.mean or 0.0,
    )
    yield _table(
        f"Accuracy over cost, {over}",
        ["10^12 m-adds", "core s", "accuracy", "above", "95 % interval"],
        map(_over_cost, cheapest_first),
        "m-adds: multiply-adds of the training, phase A and export counted; above: points above "
        "what plain ViTs of standard attention reach for as many; a row dearer than all of these "
        "is compared with the best of them, although more training might have made it better",
    )
    if seeds > 1:
        yield from _differences(
            f"Accuracy minus that of the {reference}, paired by seed",
            {row.row: row.difference for row in rows},
        )
        yield from _differences(
            f"Test accuracy minus that of the {reference}, paired by seed and image",
            {row.row: row.test_difference for row in rows},
        )
        yield from _differences(
            "Accuracy of the student minus that of its controls, paired by seed",
            results.over_controls,
        )
    goals = next(row.at for row in rows if row.at)
    names = [f"to {100 * passages.share:.0f} %" for passages in goals]
    caption = (
        f"{names[-1]} of what the {reference} reaches over its last five epochs; speed-up: over it"
    )
    if not all(row.plain for row in rows):
        caption += "; with A: phase A counted, as in the speed-up"
    caption += f"; core s: seconds of the processor {names[-1]}"
    if not all(row.plain for row in rows):
        caption += ", phase A and export counted; shared: among all rows that need them"
    yield _table(
        "Epochs until the mean of the last five accuracies reaches a goal",
        [*names, "with A", "speed-up", "core s", "shared"],
        (_passages(row, seeds, len(goals)) for row in rows),
        caption,
    )
    saved = {row.row: row.at[-1].saved for row in rows if row.at}
    if seeds > 1 and any(epochs and epochs.mean is not None for epochs in saved.values()):
        title = f"Epochs saved {names[-1]}, phase A counted, paired by seed"
        yield from _differences(title, saved, "epochs", "{:+.1f}", scale=1)
    yield _table(
        f"At the end, {over}",
        ["parameters", "epochs", "phase A", "test acc.", "validation loss"],
        map(_end, rows),
    )


def _over_cost(row: RowResult) -> list[str]:
    final = row.final
    above = row.above_front
    return [
        row.row,
        _mean(final.multiply_adds, "{:.3g}", scale=1e-12),
        _mean(final.processor_seconds, "{:.0f}"),
        _with_std(final.val_acc, "{:.2f}", scale=100),
        _mean(above, "{:+.2f}", scale=100),
        _interval(above),
    ]


def _differences(
    title: str,
    differences: Mapping[str, Verdict | None],
    unit: str = "points",
    form: str = "{:+.2f}",
    scale: float = 100,
) -> Iterator[str]:
    """The table of the rows that have a difference, if there is any."""
    lines = [
        [
            row,
            _mean(difference, form, scale=scale),
            _interval(difference, form, scale=scale),
            p_text(difference.p),
            p_text(difference.holm),
            difference.verdict,
        ]
        for row, difference in differences.items()
        if difference
    ]
    if lines:
        yield _table(title, [unit, "95 % interval", "p", "Holm's p", ""], lines, VERDICTS)


def _passages(row: RowResult, seeds: int, goals: int) -> list[str]:
    if not row.at:
        return [row.row, *["failed"] * goals]
    last = row.at[-1]
    with_a = "-" if row.plain else _mean(last.epochs_with_phase_a, "{:.1f}")
    epochs = (_epochs(at, seeds) for at in row.at)
    seconds = _mean(last.core_seconds, "{:,.0f}")
    shared = "-" if row.plain else _mean(last.core_seconds_shared, "{:,.0f}")
    return [row.row, *epochs, with_a, _mean(last.speedup, "{:.2f}"), seconds, shared]


def _epochs(at: Passages, seeds: int) -> str:
    """Epochs to an accuracy, or how many seeds reached it."""
    if at.reached == seeds:
        return _with_std(at.epochs, "{:.1f}")
    if at.reached == 0:
        return "never"
    return f"{at.reached} of {seeds}"


def _end(row: RowResult) -> list[str]:
    final = row.final
    if row.failed:
        return [row.row, "failed"]
    return [
        row.row,
        _mean(final.parameters, "{:,.0f}"),
        _mean(final.epochs, "{:.0f}"),
        "-" if row.plain else _mean(final.phase_a_epochs, "{:.1f}"),
        _with_std(final.test_acc, "{:.2f}", scale=100),
        _mean(final.val_loss, "{:.3f}"),
    ]


def _table(
    title: str, columns: Sequence[str], lines: Iterable[Sequence[str]], caption: str = ""
) -> str:
    """A table whose lines begin with the name of a row, without columns that say nothing."""
    filled = [["", *columns]]
    for line in lines:
        missing = 1 + len(columns) - len(line)
        filled += [[*line, *["-"] * missing]]
    told = [
        column for column in zip(*filled, strict=True) if any(cell != "-" for cell in column[1:])
    ]
    escaped = ([cell.replace("|", r"\|") for cell in cells] for cells in zip(*told, strict=True))
    head, *rows = (f"| {' | '.join(cells)} |" for cells in escaped)
    rule = "|---" + "|---:" * (len(told) - 1) + "|"
    written = [f"## {title}", "", head, rule, *rows, ""]
    if caption:
        written += [caption, ""]
    return "\n".join(written)


def _over_seeds(results: Comparison) -> str:
    seeds = len(results.seeds)
    return f"mean ± std of {seeds} seeds" if seeds > 1 else "one seed"


def _interval(difference: Difference | None, form: str = "{:+.2f}", *, scale: float = 100) -> str:
    if difference is None or difference.low is None or difference.high is None:
        return "-"
    return f"{form.format(scale * difference.low)} to {form.format(scale * difference.high)}"


def p_text(value: float | None) -> str:
    """A p-value, which is never said to be zero."""
    if value is None:
        return "-"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _mean(values: Spread | Difference | None, form: str, *, scale: float = 1) -> str:
    if values is None or values.mean is None:
        return "-"
    return form.format(scale * values.mean)


def _with_std(values: Spread, form: str, *, scale: float = 1) -> str:
    mean = _mean(values, form, scale=scale)
    if values.std is None:
        return mean
    return f"{mean} ±{form.format(scale * values.std)}"
