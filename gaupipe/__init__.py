"""gaupipe trains small vision transformers in fewer epochs by splitting the work in two.

``import gaupipe`` makes the ``gauvit_*`` models and the ``gau_*`` attentions known to timm: at once
where timm has been imported, else as soon as it is. So the import itself takes no time, and the
command line answers before torch is there.
"""

import sys
from typing import Any

from gaupipe.system.imports import refuse_namesakes, when_imported

__version__ = "0.2.0.dev0"  # the only place; pyproject.toml reads it
__all__ = ["__version__", "capture", "open_run"]


def _register() -> None:
    import gaupipe.vit.models  # noqa: F401


# ``python -m gaupipe`` comes here before __main__, which takes the current folder off the path of
# modules and looks for namesakes then.
_options = sys.orig_argv[sys.orig_argv.index("-m") :] if "-m" in sys.orig_argv else []
if _options[:2] != ["-m", "gaupipe"]:
    refuse_namesakes()
when_imported("timm", _register)


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
