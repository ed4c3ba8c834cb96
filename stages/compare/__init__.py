"""Compare: a plain ViT, distilled students and controls over several seeds, side by side.

run -> {workers -> costs, report -> measures, tables, figures} -> trainings -> rows
"""

from stages.compare.run import run
from stages.compare.tables import tables

__all__ = ["run", "tables"]
