"""The packages know each other in one direction. Read from the source, so that an import inside a
function counts like one at the top of a file."""

import ast
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("gaupipe", "stages", "store")

COMMAND_LINE = "gaupipe.cli"
INSIDE_COMPARE = {
    "cells": set(),
    "passages": set(),
    "differences": set(),
    "tables": set(),
    "trainings": {"cells", "passages"},
    "costs": {"trainings"},
    "workers": {"costs", "passages", "trainings"},
    "report": {"cells", "differences", "passages", "trainings"},
    "figures": {"cells", "trainings"},
    "run": {"cells", "trainings", "workers", "report", "figures"},
}
"""For each file of stages/compare the others that it may import."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")
}


def imports_of(source: str) -> set[str]:
    """Modules of ours that a source imports. ``from a import b`` is a.b where that is a module."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import: write the whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                imported.add(whole if whole in MODULES else node.module)
    return {name for name in imported if name.split(".")[0] in PACKAGES}


def all_imports() -> dict[str, set[str]]:
    return {name: imports_of(path.read_text()) - {name} for name, path in MODULES.items()}


def package(name: str) -> str:
    return name.split(".")[0]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_are_found_wherever_they_are_written():
    source = """
import numpy, store
from gaupipe import settings, __version__
from gaupipe.system.errors import UserError
def later():
    import gaupipe.vit.models
    from stages import phase_b as other
"""
    assert imports_of(source) == {
        "store",
        "gaupipe",
        "gaupipe.settings",
        "gaupipe.system.errors",
        "gaupipe.vit.models",
        "stages.phase_b",
    }


def test_every_import_of_ours_is_a_module_that_exists():
    missing = {
        (importer, name)
        for importer, names in all_imports().items()
        for name in names
        if name not in MODULES
    }
    assert not missing


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_no_circle_of_imports():
    assert circle(all_imports()) == []


def test_every_package_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(settings["tool"]["setuptools"]["packages"])
    assert {name for name, path in MODULES.items() if path.name == "__init__.py"} <= listed


ROOMS = {
    "gaupipe.maps": set(),
    "gaupipe.system": set(),
    "store": set(),
    "gaupipe.attention": {"gaupipe.maps"},
    "gaupipe.settings": {"gaupipe.attention", "store"},
    "gaupipe.vit": {"gaupipe.settings"},
    "gaupipe.data": {"gaupipe.settings"},
    "gaupipe.teachers": {"gaupipe.vit", "gaupipe.data"},
    "gaupipe.training": {"gaupipe.teachers"},
    "gaupipe.distillation": {"gaupipe.training", "store"},
    "stages": {"gaupipe.distillation"},
    "gaupipe": {"stages", "gaupipe.vit"},
}
"""For each package those right below it, which it may import, as it may what is below these.
``gaupipe.system`` is below all but the store and the maps."""

UPWARD = {
    ("gaupipe.attention.kernels", "gaupipe.distillation.losses"),
    ("gaupipe.settings", "store.kinds"),
}
"""Imports that are still to be turned around, and that of the settings, which ask the store for the
names of its kinds when they check one."""

ALONE = {"store", "gaupipe.maps", "gaupipe.system"}
READ_THE_STORE = {"gaupipe.distillation.kinds", "gaupipe.settings"}
"""Modules outside of stages that import store, for its types and the names of its kinds."""


def room(name: str) -> str:
    first_two = ".".join(name.split(".")[:2])
    return first_two if first_two in ROOMS else name.split(".")[0]


def below(package: str) -> set[str]:
    found = set() if package in ALONE else {"gaupipe.system"}
    for lower in ROOMS[package]:
        found |= {lower} | below(lower)
    return found


def test_packages_import_only_what_lies_below_them():
    upward = {
        (name, other)
        for name, imported in all_imports().items()
        for other in imported
        if room(other) not in {room(name), *below(room(name))} and other != "gaupipe"
    }
    assert upward <= UPWARD


def test_who_reads_the_store_in_gaupipe():
    readers = {
        name
        for name, imported in all_imports().items()
        if package(name) == "gaupipe" and any(package(other) == "store" for other in imported)
    }
    assert readers <= READ_THE_STORE


def test_few_modules_lie_outside_of_a_package():
    """All others have a room of their kind."""
    names = {path.stem for path in (ROOT / "gaupipe").glob("*.py")}
    assert names <= {"__init__", "__main__", "cli", "models", "transformers"}


def test_nothing_imports_the_command_line():
    importers = {name for name, imported in all_imports().items() if COMMAND_LINE in imported}
    assert importers == {"gaupipe.__main__"}  # python -m gaupipe


def test_inside_compare_imports_go_one_way():
    start = "stages.compare."
    graph = {
        name.removeprefix(start): {
            other.removeprefix(start) for other in imported if other.startswith("stages.compare")
        }
        for name, imported in all_imports().items()
        if name.startswith(start)
    }
    assert graph.keys() == INSIDE_COMPARE.keys()
    for name, imported in graph.items():
        assert imported <= INSIDE_COMPARE[name], name
