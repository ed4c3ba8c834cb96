"""Compare: a plain ViT, distilled students and controls over several seeds, side by side.

run -> {workers, costs, report, figures} -> trainings -> {cells, speed}
"""

from stages.compare.report import tables
from stages.compare.run import run

__all__ = ["run", "tables"]
