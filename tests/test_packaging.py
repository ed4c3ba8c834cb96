"""pyproject.toml: packages have types, dependencies have a lowest version."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_says_that_it_has_types():
    for package in ("gaupipe", "stages", "store"):
        assert (ROOT / package / "py.typed").is_file()
        assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][package]


def test_every_dependency_has_a_lowest_version():
    without = [line for line in PROJECT["project"]["dependencies"] if ">=" not in line]
    assert without == []
