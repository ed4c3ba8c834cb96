"""The table of benchmarks.md, from the measured ratios:

python docs/benchmarks_table.py docs/results/data/benchmarks.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(groups: list[dict]) -> list[str]:
    """Markdown lines, a ratio each, below what it is a ratio of."""
    lines = ["| | ratio |", "|---|---|"]
    for group in groups:
        lines.append(f"| **{group['title']}**: {group['ratio']} | |")
        for what, ratio, _aim in group["rows"]:
            lines.append(f"| {what} | {ratio:.{2 if ratio < 10 else 0}f} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table(json.loads(Path(sys.argv[1]).read_text()))))
