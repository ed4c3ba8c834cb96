"""Raw results: from the JSON of a comparison to the rows of docs/results/data, and from those to
the tables of pages.

    python docs/results/collect.py rows RUN/local.json --data cifar10 --images 3000 --command ...
    python docs/results/collect.py pages           # draws the tables of all pages
    python docs/results/collect.py pages --check   # exit code 1 if a table is not its file's

A file holds a list of trainings: name, command, commit, data, images, epochs, seed, val (null for
a teacher without Gaussians for validation images), test (left out where nobody looked) and
core_seconds. ``val`` and ``test`` are accuracies of the last epoch, ``core_seconds`` those of the
processor, those of a teacher's training and export included; ``teacher_seconds`` are the latter
alone, left out where they were not recorded.

In a page, a table stands between two comments. The first names the file, which trainings are
meant, how many seeds a row needs to be shown (``seeds=5``), their order (``order=test``; else that
of the file), and pairs of rows, whose differences of test accuracy
are tested as one family, over seeds and, where both rows have ``right``, a bit for each of
``test_images``, over the images too:

    <!-- table judge.json seeds=5 "slice - labels" "slice, maps - slice" -->
    <!-- /table -->

A table of pairs has these differences alone:

    <!-- pairs local.json data=clothes "local - labels" "tuned, local - tuned, labels" -->
    <!-- /pairs -->

A table of ratios has what benchmarks measured, each in one run or two:

    <!-- ratios benchmarks.json set=None -->
    <!-- /ratios -->

A table of ways has a line for each data set: what a linear probe and an SVM say of some of its
images, and how a training from random weights and one from pretrained weights ended:

    <!-- ways which_way.json -->
    <!-- /ways -->

A table of retests is of the rows of ``benchmarks/retest.py``; names are those that are shown:

    <!-- retests retest.json data=digits epochs=12 "table, sampled" predicted -->
    <!-- /retests -->

A table of maps has what ``benchmarks/explain.py`` measured of each map that is named:

    <!-- maps explain.json "gradient rollout" random -->
    <!-- /maps -->
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gaupipe.training.scores import unpacked
from stages.compare.measures import (
    Verdict,
    differences,
    gains_of_images,
    spread,
)
from stages.compare.tables import p_text

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "results" / "data"
TABLE = re.compile(
    r"(<!-- (?P<kind>table|pairs|ratios|ways|retests|maps)"
    r" (?P<file>\S+)(?P<words>.*?) -->\n)"
    r".*?(<!-- /(?P=kind) -->)",
    re.DOTALL,
)

PARTS_OF_MAPS = ("removed, grey", "kept, grey", "inside")
"""Of what ``benchmarks/explain.py`` measures of a map, what a table shows."""

Training = dict[str, Any]


def rows(results: dict[str, Any], facts: dict[str, Any], curves: bool = False) -> list[Training]:
    """The trainings of a comparison's ``results``; ``facts`` are the same for all. With ``curves``
    they have the validation accuracy after each epoch, and the epochs of a teacher."""
    trainings = []
    for row in results["rows"]:
        for run in row["runs"]:
            training = {
                "name": row["row"],
                **facts,
                "epochs": len(run["val_acc"]),
                "seed": run["seed"],
                "val": round(run["val_acc"][-1], 4),
            }
            if run["test_acc"] is not None:
                training["test"] = round(run["test_acc"], 4)
                training["test_images"] = run["test_images"]
                training["right"] = run["right"]
            if curves:
                training["teacher_epochs"] = run["phase_a_epochs"]
                training["curve"] = [round(accuracy, 4) for accuracy in run["val_acc"]]
            teacher_seconds = run["phase_a_costs"].get("processor_seconds", 0)
            training["core_seconds"] = round(run["costs"]["processor_seconds"] + teacher_seconds)
            training["teacher_seconds"] = round(teacher_seconds)
            trainings.append(training)
    return trainings


def draw_tables(page: str) -> str:
    """A page's text with each table drawn from its file."""

    def drawn(match: re.Match[str]) -> str:
        options: dict[str, str] = {}
        pairs = []
        names = []
        for word in shlex.split(match["words"]):
            if " - " in word:
                pairs.append(tuple(word.split(" - ")))
            elif "=" in word:
                key, value = word.split("=", 1)
                options[key] = value
            else:
                names.append(word)
        arguments: dict[str, Any] = {}
        if pairs:
            arguments["pairs"] = pairs
        if names:
            arguments["names"] = names
        if "seeds" in options:
            arguments["least_seeds"] = int(options.pop("seeds"))
        if options.pop("order", None) == "test":
            arguments["by_test"] = True
        text = DRAWERS[match["kind"]](read(match["file"], options), **arguments)
        return f"{match[1]}\n{text}\n\n{match[5]}"

    return TABLE.sub(drawn, page)


def read(file: str, options: dict[str, str]) -> list[Training]:
    """The trainings, or what was measured, of a file that have these values."""
    trainings = [
        training
        for training in json.loads((DATA / file).read_text())
        if all(str(training.get(key)) == wanted for key, wanted in options.items())
    ]
    if not trainings:
        raise SystemExit(f"no training of {file} has {options}")
    return trainings


def table_of_ratios(groups: list[dict[str, Any]]) -> str:
    """Markdown table of ratios below what they are ratios of; the lowest and the highest where
    there were several runs."""
    lines = ["| | ratio |", "|---|---|"]
    for group in groups:
        lines.append(f"| **{group['title']}**: {group['ratio']} | |")
        for label, values in group["rows"].items():
            ends = [ratio(end) for end in (min(values), max(values))]
            lines.append(f"| {label} | {' to '.join(dict.fromkeys(ends))} |")
    return "\n".join(lines)


def ratio(value: float) -> str:
    """With two digits behind the point, which a ratio of 10 or more does not need."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def table_of_ways(trainings: list[Training]) -> str:
    """Markdown table of data sets: the advice of ``gaupipe plan --model``, and which training won,
    by the ``test`` accuracy, or by ``val`` where a training has no other."""
    columns = ["images", "probe", "SVM", "advice", "random weights", "pretrained", "right"]
    lines = [f"| photos of | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    by_data: dict[str, dict[str, Training]] = {}
    for training in trainings:
        by_data.setdefault(training["data"], {})[training["name"]] = training
    for data, rows in by_data.items():
        probe = rows["linear probe, 200 images"]
        svm = rows["SVM on gradients, 200 images"]
        ways = {name: rows[name] for name in ("random weights", "pretrained") if name in rows}
        score = "test" if all("test" in row for row in ways.values()) else "val"
        accuracies = {name: row[score] for name, row in ways.items()}
        advice = "pretrained" if probe["val"] > svm["val"] else "random weights"
        right = "-"
        if len(accuracies) == 2:
            right = "yes" if max(accuracies, key=lambda name: accuracies[name]) == advice else "no"
        shares = [probe["val"], svm["val"], *(accuracies.get(name) for name in columns[4:6])]
        cells = ["-" if share is None else f"{100 * share:.1f}" for share in shares]
        cells[2:2] = [advice]
        lines.append(f"| {' | '.join([data, format(probe['images'], ','), *cells, right])} |")
    return "\n".join(lines)


def table_of_retests(rows: list[Training], names: list[str] | None = None) -> str:
    """Markdown table of how well two fits of the same images agree, means over seeds."""
    lines = [
        "| parameters | seeds | same image | another of its class | nearest is the image's own "
        "| of its class | right without | right with another's |",
        "|---" * 8 + "|",
    ]
    fits = by_row_and_seed(rows)
    for name in names or fits:
        runs = [*fits[name].values()]
        cells = [name, str(len(runs))]
        distances = ("same_image", "of_its_class")
        cells += [f"{statistics.fmean(run[key] for run in runs):.2f}" for key in distances]
        for key in ("nearest_is_image", "nearest_is_class", "none", "of_another_image"):
            found = percents(runs, key)
            cells.append(f"{statistics.fmean(found):.0f} %" if found else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_row_and_seed(trainings: list[Training]) -> dict[str, dict[int, Training]]:
    """{row: {seed: training}}, seeds in order. Raises ValueError for two trainings of one row with
    one seed, of which a table would show the last."""
    rows: dict[str, dict[int, Training]] = {}
    for training in sorted(trainings, key=lambda training: training["seed"]):
        of_row = rows.setdefault(training["name"], {})
        if training["seed"] in of_row:
            raise ValueError(f"{training['name']}: two trainings with seed {training['seed']}")
        of_row[training["seed"]] = training
    return rows


def table_of_pairs(trainings: list[Training], pairs: list[tuple[str, ...]]) -> str:
    """Markdown table of the differences of test accuracy of pairs of rows, over the seeds that
    both have; Holm's correction is for all of them."""
    lines = [
        "| row | minus | points of test accuracy (95 % interval) | Holm's p | verdict |",
        "|---" * 5 + "|",
    ]
    for (name, other), cells in compared(trainings, pairs).items():
        lines.append(f"| {' | '.join([name, other, *cells])} |")
    return "\n".join(lines)


def compared(
    trainings: list[Training], pairs: list[tuple[str, ...]]
) -> dict[tuple[str, ...], list[str]]:
    """Of each pair the cells of a table: the difference, Holm's p, the verdict."""
    tests = by_row_and_seed([training for training in trainings if "test" in training])
    points = {}
    of_images = {}
    for name, other in pairs:
        seeds = sorted(tests[name].keys() & tests[other].keys())
        mine = [tests[name][seed] for seed in seeds]
        others = [tests[other][seed] for seed in seeds]
        points[name, other] = [
            100 * (one["test"] - another["test"]) for one, another in zip(mine, others, strict=True)
        ]
        gains = gains_of_images([*map(right_images, mine)], [*map(right_images, others)])
        if gains is not None:
            of_images[name, other] = 100 * gains
    cells: dict[tuple[str, ...], list[str]] = {}
    for pair, verdict in differences(points, of_images).items():
        word = verdict.verdict
        if verdict.seeds_only and word != "not decided":
            word += ", seeds only"
        cells[pair] = [*difference_cells(verdict), word]
    return cells


def right_images(training: Training) -> np.ndarray | None:
    """Which test images a training got right, bool [N]; None for older trainings."""
    if "right" not in training:
        return None
    bits = 4 * len(training["right"])
    return unpacked(training["right"], training.get("test_images", bits))


def table(
    trainings: list[Training],
    pairs: Sequence[tuple[str, ...]] = (),
    least_seeds: int = 1,
    by_test: bool = False,
) -> str:
    """Markdown table with a row for each name and number of epochs: means and standard deviations
    over the seeds, without rows of fewer than ``least_seeds``, in the file's order or, ``by_test``,
    in that of their accuracy. Accuracies are those of the test
    images, and of the validation images too where a row has no others. The core seconds of a
    teacher stand apart if all trainings have them. A column is left out where it is empty, and
    epochs and seeds where they are the same in all rows.

    Each of ``pairs`` stands beside its first row.
    """
    groups: dict[tuple[str, int], list[Training]] = {}
    for training in sorted(trainings, key=lambda training: training["seed"]):
        groups.setdefault((training["name"], training["epochs"]), []).append(training)
    groups = {key: runs for key, runs in groups.items() if len(runs) >= least_seeds}
    if by_test:
        accuracies = {
            key: statistics.mean(run["test"] for run in runs) for key, runs in groups.items()
        }
        groups = {key: groups[key] for key in sorted(groups, key=accuracies.__getitem__)}
    beside: dict[str, list[str]] = {}
    if pairs:
        for (name, other), (points, p, verdict) in compared(trainings, [*pairs]).items():
            holm = "" if verdict == "not decided" else f"p {p}, "
            beside.setdefault(name, []).append(f"{points} above `{other}`: {holm}{verdict}")

    every_run = [run for runs in groups.values() for run in runs]
    teachers_apart = all("teacher_seconds" in run for run in every_run)
    rows_of_cells = []
    for (name, epochs), runs in groups.items():
        cells = [name, str(epochs), str(len(runs))]
        cells += [mean_and_std(percents(runs, key)) for key in ("val", "test")]
        seconds = [run["core_seconds"] for run in runs if run["core_seconds"] is not None]
        of_teacher: list[int] = []
        if teachers_apart:  # one pass of a teacher took as long as the machine of its day let it
            of_teacher = [run["teacher_seconds"] for run in runs]
            seconds = [both - one for both, one in zip(seconds, of_teacher, strict=True)]
        cells += [mean_seconds(seconds), mean_seconds(of_teacher)]
        cells.append("<br>".join(beside.get(name, [])))
        rows_of_cells.append(cells)

    head = [
        "row",
        "epochs",
        "seeds",
        "validation",
        "test",
        "core seconds",
        "and its teacher's",
        "points of test accuracy",
    ]
    needless = set()
    if len({epochs for _, epochs in groups}) == 1:
        needless.add("epochs")
    numbers_of_seeds = {len(runs) for runs in groups.values()}
    if len(numbers_of_seeds) == 1:
        needless.add("seeds")
        seeds = numbers_of_seeds.pop()
        head[0] = f"row ({seeds} seed{'s' * (seeds > 1)})"
    if all("test" in run for run in every_run):
        needless.add("validation")
    columns = [
        column
        for column in zip(head, *rows_of_cells, strict=True)
        if any(column[1:]) and column[0] not in needless
    ]
    first, *rest = (f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True))
    return "\n".join([first, "|---" * len(columns) + "|", *rest])


def mean_seconds(seconds: list[int]) -> str:
    """Empty where nothing was measured, or nothing spent."""
    return f"{statistics.mean(seconds):,.0f}" if any(seconds) else ""


def difference_cells(verdict: Verdict) -> list[str]:
    """Difference with its interval, and Holm's p; the difference alone where there is one seed."""
    if verdict.p is None:
        return [f"{verdict.mean:+.1f}", ""]
    return [
        f"{verdict.mean:+.1f} ({verdict.low:+.1f} to {verdict.high:+.1f})",
        p_text(verdict.holm),
    ]


def percents(runs: list[Training], key: str) -> list[float]:
    """The accuracies of the runs that have them."""
    return [100 * run[key] for run in runs if run.get(key) is not None]


def mean_and_std(numbers: list[float]) -> str:
    """Mean and standard deviation; empty where there is no number."""
    if not numbers:
        return ""
    result = spread(numbers)
    if result.std is None:
        return f"{result.mean:.1f}"
    return f"{result.mean:.1f} ± {result.std:.1f}"


def table_of_maps(maps: list[dict[str, Any]], names: list[str] | None = None) -> str:
    """Markdown table of the means over photos that ``benchmarks/explain.py`` measured of each map,
    with their standard errors. The best of a column is bold, and so is what is within two standard
    errors of it, photo by photo; names are the maps that are shown."""
    photos: dict[str, dict[str, list[float]]] = {part: {} for part in PARTS_OF_MAPS}
    for row in maps:
        for part in photos.keys() & row["photos"].keys():
            photos[part][row["title"]] = row["photos"][part]
    photos = {part: measured for part, measured in photos.items() if measured}
    bold = {
        part: best_maps(measured, lower=part.startswith("removed"))
        for part, measured in photos.items()
    }
    lines = [f"| map | {' | '.join(photos)} |", "|---" * (1 + len(photos)) + "|"]
    for title in names or dict.fromkeys(row["title"] for row in maps):
        cells = []
        for part, measured in photos.items():
            mean, error = mean_and_error(measured[title])
            cell = f"{mean:.3f} ± {error:.3f}"
            cells.append(f"**{cell}**" if title in bold[part] else cell)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def best_maps(photos: dict[str, list[float]], lower: bool) -> set[str]:
    """The map with the best mean, and those within two standard errors of it, photo by photo."""
    sign = 1 if lower else -1
    best = min(photos, key=lambda name: sign * statistics.fmean(photos[name]))
    chosen = set()
    for name, values in photos.items():
        pairs = zip(values, photos[best], strict=True)
        mean, error = mean_and_error([sign * (one - other) for one, other in pairs])
        if mean <= 2 * error:
            chosen.add(name)
    return chosen


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


DRAWERS: dict[str, Callable[..., str]] = {
    "table": table,
    "pairs": table_of_pairs,
    "ratios": table_of_ratios,
    "ways": table_of_ways,
    "retests": table_of_retests,
    "maps": table_of_maps,
}


def checked_out() -> str:
    """The commit of the code that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    collecting = verbs.add_parser("rows")
    collecting.add_argument("file", type=Path, nargs="+")
    collecting.add_argument("--data", help="the data set's name in the rows", required=True)
    collecting.add_argument("--images", type=int, help="training images", required=True)
    collecting.add_argument("--command", help="what made the comparison", required=True)
    collecting.add_argument("--curves", action="store_true", help="accuracies of all epochs")
    collecting.add_argument("--commit", help="of its code; default: what is checked out")
    drawing = verbs.add_parser("pages")
    drawing.add_argument("--check", action="store_true")
    arguments = parser.parse_args()

    if arguments.verb == "rows":
        facts = {
            "command": arguments.command,
            "commit": arguments.commit or checked_out(),
            "data": arguments.data,
            "images": arguments.images,
        }
        comparisons = [json.loads(path.read_text()) for path in arguments.file]
        trainings = [
            training
            for results in comparisons
            for training in rows(results, facts, arguments.curves)
        ]
        json.dump(trainings, sys.stdout, indent=1)
        return

    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page = path.read_text()
        redrawn = draw_tables(page)
        if redrawn == page:
            continue
        if arguments.check:
            raise SystemExit(f"{path.relative_to(ROOT)}: a table is not what its raw file says")
        path.write_text(redrawn)


if __name__ == "__main__":
    main()
