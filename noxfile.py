"""The checks of .ci/run, and the tests on every Python and on the lowest dependencies.

``nox`` runs all of it, ``nox -s lowest`` one part; what follows ``--`` goes to pytest. nox uses pip
and the interpreters that are installed, and leaves out those that are not. Pythons and lowest
versions are read from pyproject.toml, so there is no second list to keep.
"""

from __future__ import annotations

import nox
from packaging.requirements import Requirement

PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)


@nox.session(python=PYTHONS[0])
def lint(session: nox.Session) -> None:
    """Style, types, and the documentation as a site, in which a broken link is an error."""
    session.install("-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("sphinx-build", "-qEW", "--keep-going", "-c", "docs", ".", "build/site")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests on the newest dependencies that a Python can have."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "-q", "-m", "", *session.posargs)


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """All tests on the lowest versions that pyproject.toml allows."""
    session.install("-e", ".[test]", *lowest_versions())
    session.run("python", "-m", "pytest", "-q", "-m", "", *session.posargs)


def lowest_versions() -> list[str]:
    """``name==version`` for the ``name>=version`` of every dependency."""
    requirements = map(Requirement, PROJECT["project"]["dependencies"])
    return [
        f"{requirement.name}=={bound.version}"
        for requirement in requirements
        for bound in requirement.specifier
        if bound.operator == ">="
    ]
