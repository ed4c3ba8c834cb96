"""What happens when Python imports a module, and which file it would take for one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Calls ``then`` once the module ``name`` has been imported: now where it has been, else right
    after its import, whoever imports it."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch(MetaPathFinder):
    """Finds one module as the finders after it do; its loader calls ``then`` at the end."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        for finder in others:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        loader = spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_then(module: ModuleType) -> None:
                execute(module)
                self.then()

            loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec


def refuse_namesakes() -> None:
    """Raises ImportError where Python would take another file for one of the packages that are
    installed beside gaupipe: it searches a script's own folder first."""
    home = Path(__file__).parents[2]
    for name in ("stages", "store"):
        spec = find_spec(name)
        if spec is None:
            continue
        folders = [os.path.realpath(folder) for folder in spec.submodule_search_locations or ()]
        if folders != [os.path.realpath(home / name)]:
            raise ImportError(
                f"{spec.origin or folders[0]} is in the way of gaupipe's package {name!r}: rename "
                "it, or move the script that imports gaupipe to another folder"
            )
