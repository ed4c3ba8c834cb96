"""Compare: a plain ViT, distilled students and controls over several seeds, side by side.

run -> {workers -> costs, report -> measures, tables, figures} -> trainings -> rows
"""

from stages.compare.run import compare, report_in
from stages.compare.tables import summary

__all__ = ["compare", "report_in", "summary"]
