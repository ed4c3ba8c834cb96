"""The table of docs/benchmarks.md is that of its raw numbers."""

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_has_every_ratio_that_was_measured():
    groups = json.loads((DOCS / "results/data/benchmarks.json").read_text())
    measured = [row for group in groups for row in group["rows"]]
    table = (DOCS / "benchmarks.md").read_text().split("|---|---|\n")[1].split("\n\n")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if "**" not in line]
    for cells, (what, ratio, _aim) in zip(rows, measured, strict=True):
        assert cells[0].strip() == what
        assert float(cells[1]) == pytest.approx(ratio, abs=0.005 if ratio < 10 else 0.5)
