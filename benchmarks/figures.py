"""Measures the rows of docs/benchmarks.md anew, one command after the other.

    python benchmarks/figures.py OUT [--only 'Phase B']    nothing else should run meanwhile

The commands are those of docs/results/data/benchmarks.json. OUT.jsonl gets a line for every figure,
with its command, median and quartiles; a figure of the page is a range of two such runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROWS = Path(__file__).parents[1] / "docs/results/data/benchmarks.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="the title of some rows")
    arguments = parser.parse_args()
    os.environ["BENCHMARKS"] = str(arguments.out.with_suffix(".jsonl").resolve())
    failed = []
    for entry in json.loads(ROWS.read_text()):
        on_page = entry.get("set") is None
        if arguments.only not in (None, entry["title"]) or not on_page:
            continue
        for command in entry["command"].split("; "):
            print(command, flush=True)
            words = shlex.split(command)
            if words[0] == "python":
                words[0] = sys.executable
            if subprocess.run(words, check=False).returncode != 0:
                failed.append(command)
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
