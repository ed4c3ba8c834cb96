"""gaupipe trains small vision transformers in fewer epochs by splitting the work in two.

``import gaupipe`` makes the ``gauvit_*`` models and the ``gau_*`` attentions known to timm.
"""

import sys
from pathlib import PurePath
from typing import Any

__version__ = "0.2.0.dev0"  # the only place; pyproject.toml reads it
__all__ = ["__version__", "capture", "open_run"]

# The command line answers at once: a command imports torch and timm when it needs them. "-m" is
# what Python calls the program while it looks for the module of ``python -m gaupipe``.
if PurePath(sys.argv[0] if hasattr(sys, "argv") and sys.argv else "").name not in ("gaupipe", "-m"):
    import gaupipe.vit.jit  # noqa: F401


def __getattr__(name: str) -> Any:
    """``gaupipe.capture`` and ``gaupipe.open_run``, imported when they are asked for: they need
    torch."""
    if name == "capture":
        from gaupipe.vit.capture import capture

        return capture
    if name == "open_run":
        from stages.open_run import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
