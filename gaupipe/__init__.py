"""gaupipe shows where vision transformers look, and trains small ones that are told where to look.

``import gaupipe`` makes the ``gauvit_*`` models and the ``gau_*`` attentions known to timm.
"""

import sys
from typing import Any

from gaupipe.system.imports import refuse_namesakes, runs_as_module
from gaupipe.system.version import __version__

__all__ = ["__version__", "capture", "export", "open_run", "register", "run", "show", "train"]

if not runs_as_module():  # else __main__ first takes the current folder off the path of modules
    refuse_namesakes()
    # The command line answers before torch is there: a command imports what it needs.
    if "stages.cli" not in sys.modules:
        import gaupipe.vit.jit
        import gaupipe.vit.resnet  # noqa: F401


def __getattr__(name: str) -> Any:
    """What is imported when it is asked for, because it needs torch or belongs to the commands."""
    if name == "capture":
        from gaupipe.vit.capture import capture

        return capture
    if name == "open_run":
        from stages.open_run import Run

        return Run
    if name == "show":
        from stages.view.notebook import show

        return show
    if name in ("export", "run", "train"):
        from stages import functions

        return getattr(functions, name)
    if name == "register":
        from gaupipe.vit.models import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
