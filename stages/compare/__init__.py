"""Compare: a plain ViT, distilled students and controls over several seeds, side by side.

run -> {workers -> costs, report -> measures, tables, figures} -> trainings -> rows
"""

from stages.compare.run import report_in, run
from stages.compare.tables import summary

__all__ = ["report_in", "run", "summary"]
