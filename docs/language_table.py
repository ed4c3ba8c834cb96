"""The table of which-attention.md, from the trainings of examples/language_model.py:

python docs/language_table.py docs/results/data/language.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from stages.compare.measures import differences, spread

HEAD = (
    "| attention | parameters | training loss | validation loss | difference | 95 % interval "
    "| Holm's p | step, ms | ratio | memory, MB |"
)


def table(trainings: list[dict]) -> list[str]:
    """Markdown lines, an attention each. The difference is to standard attention with the same
    seed; Holm's correction is for all rows of the table."""
    attentions = defaultdict(list)
    for training in sorted(trainings, key=lambda training: training["seed"]):
        attentions[training["name"]].append(training)
    standard = attentions["standard"]
    gains = {
        name: [run["val"] - other["val"] for run, other in zip(runs, standard, strict=True)]
        for name, runs in attentions.items()
        if name != "standard"
    }
    judged = differences(gains)
    standard_ms = mean_ms(standard)
    lines = [HEAD, "|---" * 10 + "|"]
    for name, runs in attentions.items():
        difference = judged.get(name)
        cells = [name, f"{runs[0]['parameters']:,}"]
        cells += [mean_and_std(run[key] for run in runs) for key in ("train", "val")]
        if difference is None or difference.p is None:
            cells += ["", "", ""]
        else:
            cells.append(f"{difference.mean:+.3f}")
            cells.append(f"{difference.low:+.3f} to {difference.high:+.3f}")
            cells.append(f"{difference.holm:.3f}")
        ms = mean_ms(runs)
        cells += [f"{ms:.1f}", f"{ms / standard_ms:.2f}", f"{runs[0]['step_bytes'] / 1e6:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def mean_ms(runs: list[dict]) -> float:
    return 1000 * fmean(run["step_seconds"] for run in runs)


def mean_and_std(values) -> str:
    result = spread(list(values))
    if result.std is None:
        return f"{result.mean:.3f}"
    return f"{result.mean:.3f} ± {result.std:.3f}"


if __name__ == "__main__":
    print("\n".join(table(json.loads(Path(sys.argv[1]).read_text()))))
