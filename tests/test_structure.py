"""The packages know each other in one direction. Read from the source, so that an import inside a
function counts like one at the top of a file."""

import ast
import importlib
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("gaupipe", "stages", "store")

ROOMS = {
    "gaupipe.maps": set(),
    "gaupipe.system": set(),
    "store": set(),
    "gaupipe.attention": {"gaupipe.maps"},
    "gaupipe.settings": {"gaupipe.attention", "store"},
    "gaupipe.data": {"gaupipe.settings"},
    "gaupipe.vit": {"gaupipe.data"},
    "gaupipe.training": {"gaupipe.vit"},
    "gaupipe.teachers": {"gaupipe.training", "store"},
    "gaupipe.distillation": {"gaupipe.teachers"},
    "stages": {"gaupipe.distillation"},
    "stages.cli": {"stages"},
    "gaupipe": {"stages.cli", "gaupipe.vit"},
}
"""For each package those right below it, which it may import, as it may what is below these.
``gaupipe.system`` is below all but the store and the maps."""

ALONE = {"store", "gaupipe.maps", "gaupipe.system"}
READ_THE_STORE = {"gaupipe.distillation", "gaupipe.settings", "gaupipe.teachers"}
"""Packages outside of stages that import store; the settings know the names of its kinds."""


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


IMPORTS = {name: imports_of(path.read_text()) - {name} for name, path in MODULES.items()}


def room(name: str) -> str:
    first_two = ".".join(name.split(".")[:2])
    return first_two if first_two in ROOMS else name.split(".")[0]


def below(package: str) -> set[str]:
    lower = set() if package in ALONE else {"gaupipe.system"}
    return lower.union(*({name} | below(name) for name in ROOMS[package]))


def test_packages_import_only_what_exists_and_lies_below_them_without_a_circle():
    upward = {
        (name, other)
        for name, imported in IMPORTS.items()
        for other in imported
        if room(other) not in {room(name), *below(room(name))} and other != "gaupipe"
    }
    assert not upward
    assert set().union(*IMPORTS.values()) <= MODULES.keys()
    TopologicalSorter(IMPORTS).prepare()  # names the modules of a circle


def test_who_reads_the_store_in_gaupipe():
    readers = {name for name, imported in IMPORTS.items() if "store" in map(room, imported)}
    assert {room(name) for name in readers if name.startswith("gaupipe.")} <= READ_THE_STORE


def test_every_package_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert {*PACKAGES, "configs"} == {*settings["targets"]["wheel"]["only-include"]}


def test_few_modules_lie_outside_of_a_package_and_nothing_imports_the_command_line():
    names = {path.stem for path in (ROOT / "gaupipe").glob("*.py")}
    assert names <= {"__init__", "__main__", "models", "transformers"}
    importers = {name for name, imported in IMPORTS.items() if "stages.cli" in map(room, imported)}
    assert {name for name in importers if room(name) != "stages.cli"} == {"gaupipe.__main__"}


def test_no_test_imports_from_another_test():
    """What two need is in a module of tests/ that is no test."""
    for path in Path(__file__).parent.glob("*.py"):
        modules = [
            node.module or ""
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        ]
        tests = [name for name in modules if name.startswith(("test_", "conftest"))]
        assert not tests, f"{path.name} imports from {tests}"


def test_the_first_line_of_a_test_file_says_what_it_owns():
    """So that who changes a module finds the file that its test belongs to."""
    for path in (ROOT / "tests").glob("test_*.py"):
        assert len(ast.get_docstring(ast.parse(path.read_text())) or "") > 15, path


def test_every_public_name_is_there():
    lines = (ROOT / "docs" / "public_names.txt").read_text().splitlines()
    names = [line for line in lines if line.startswith(("gaupipe.", "stages.", "store."))]
    assert len(names) > 50
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name
