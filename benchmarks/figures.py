"""Measures the rows of docs/benchmarks.md anew, one command after the other.

    python benchmarks/figures.py OUT [--only 'Phase B']    nothing else should run meanwhile
    python benchmarks/figures.py OUT --quick               two rounds of each, to see that all work

The commands are those of docs/results/data/benchmarks.json: "page" where "command" measures more
than the page has. OUT.jsonl gets a line for every figure, with its command, median and quartiles; a
figure of the page is a range of two such runs. timm's train.py and photos, which "Training" wants,
are looked for in the working directory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from timing import core_seconds

ROWS = Path(__file__).parents[1] / "docs/results/data/benchmarks.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="the title of some rows")
    parser.add_argument("--quick", action="store_true", help="two rounds of each")
    arguments = parser.parse_args()
    os.environ["BENCHMARKS"] = str(arguments.out.with_suffix(".jsonl").resolve())
    failed = []
    for entry in json.loads(ROWS.read_text()):
        on_page = entry.get("set") is None
        if arguments.only not in (None, entry["title"]) or not on_page:
            continue
        for command in entry.get("page", entry["command"]).split("; "):
            if arguments.quick:
                command = re.sub(r"--rounds \d+", "--rounds 2", command)
            words = shlex.split(command)
            words = [sys.executable if word == "python" else word for word in words]
            try:
                print(f"{core_seconds(words):.0f} core seconds: {command}", flush=True)
            except subprocess.CalledProcessError:
                failed.append(command)
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
