"""gaupipe trains small vision transformers in fewer epochs by splitting the work in two.

``import gaupipe`` is cheap. It makes the ``gauvit_*`` models and the ``gau_*`` attention keys known to timm as soon as
timm is imported, before or after, without importing torch itself: the command line has to answer at once.
"""

import importlib.abc
import importlib.util
import sys

__version__ = "0.1.0"

STUDENTS = ("standard", "belief", "belief_star", "xsa", "belief2", "attentionx")
"""Keys of the attentions a student can have."""


class _RegisterAfterTimm(importlib.abc.MetaPathFinder):
    """Imports ``gaupipe.models``, which registers on import, right after ``timm.models``."""

    def find_spec(self, name, path=None, target=None):
        if name != "timm.models":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            if "gaupipe.attention" not in sys.modules:  # else it is importing timm just now, and does this at its end
                import gaupipe.models  # noqa: F401

        spec.loader.exec_module = execute_and_register
        return spec


if "timm.models" in sys.modules:
    import gaupipe.models  # noqa: F401
else:
    sys.meta_path.insert(0, _RegisterAfterTimm())
