"""The run directory and what guards it, the chosen settings, and what a run takes."""
