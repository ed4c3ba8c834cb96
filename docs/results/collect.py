"""Raw results: from the JSON of a comparison to the rows of docs/results/data, and from those to a
table of a page.

    python docs/results/collect.py rows RUN/strong.json --data cifar10 --images 3000 --command ...
    python docs/results/collect.py table docs/results/data/local.json

A file holds a list of trainings: name, command, commit, data, images, epochs, seed, val (null for a
teacher without Gaussians for validation images), test (left out where nobody looked) and
core_seconds. ``val`` and ``test`` are accuracies of the last epoch, ``core_seconds`` those of the
processor, a teacher's included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


def rows_of(results: dict[str, Any], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The trainings of a comparison's ``results``; ``facts`` are the same for all."""
    return [
        {
            "name": row["row"],
            **facts,
            "epochs": len(run["val_acc"]),
            "seed": run["seed"],
            "val": round(run["val_acc"][-1], 4),
            **({} if run["test_acc"] is None else {"test": round(run["test_acc"], 4)}),
            "core_seconds": round(
                run["costs"]["processor_seconds"] + run["phase_a_costs"].get("processor_seconds", 0)
            ),
        }
        for row in results["rows"]
        for run in row["runs"]
    ]


def table(trainings: list[dict[str, Any]]) -> str:
    """A Markdown table: for each data set and row mean and standard deviation over the seeds."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for training in trainings:
        key = training["data"], training["images"], training["name"], training["epochs"]
        groups.setdefault(key, []).append(training)
    lines = [
        "| data, training images | row | epochs | seeds | validation | test | core seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for (data, images, name, epochs), runs in groups.items():
        seconds = round(statistics.mean(run["core_seconds"] for run in runs))
        val = spread([run["val"] for run in runs if run.get("val") is not None])
        test = spread([run["test"] for run in runs if run.get("test") is not None])
        lines.append(
            f"| {data}, {images:,} | {name} | {epochs} | {len(runs)} | {val} | {test} "
            f"| {seconds:,} |"
        )
    return "\n".join(lines)


def spread(shares: list[float]) -> str:
    """Mean and standard deviation of shares, in percent."""
    if not shares:
        return ""
    mean = f"{100 * statistics.mean(shares):.1f}"
    if len(shares) == 1:
        return mean
    return f"{mean} ± {100 * statistics.stdev(shares):.1f}"


def commit() -> str:
    """The commit of the code that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("rows", "table"))
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--data", help="the data set's name in the rows")
    parser.add_argument("--images", type=int, help="training images")
    parser.add_argument("--command", help="what made the comparison")
    parser.add_argument("--commit", help="of the code that made it; default: what is checked out")
    arguments = parser.parse_args()
    held = [json.loads(path.read_text()) for path in arguments.file]
    if arguments.what == "table":
        print(table([training for trainings in held for training in trainings]))
        return
    facts = {
        "command": arguments.command,
        "commit": arguments.commit or commit(),
        "data": arguments.data,
        "images": arguments.images,
    }
    rows = [row for results in held for row in rows_of(results, facts)]
    json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
