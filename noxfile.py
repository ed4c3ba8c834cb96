#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.5.1"]
# ///
"""The checks of .ci/run, the tests on every Python and on the lowest dependencies, and the files of
a release.

``nox`` runs the checks and the tests, ``nox -s wheel`` one part; what follows ``--`` goes to
pytest. nox uses the interpreters that are installed, and leaves out those that are not. Pythons and
lowest versions are read from pyproject.toml, so there is no second list to keep.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"

PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)

STUDENTS = {
    "digits": ("digits",),
    "fashion-mnist": ("fashion_mnist_plain", "--set", "data.name=torch/fashion_mnist"),
    "cifar10": ("cifar10_small", "--set", "data.name=torch/cifar10"),
}
"""Students that a release has, each smaller than 1 MB: what ``gaupipe train`` gets."""


@nox.session(python=PYTHONS[0])
def lint(session: nox.Session) -> None:
    """Style, types, and the documentation as a site, in which a broken link is an error."""
    session.install("-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("biome", "ci")
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


@nox.session(python=PYTHONS[0], default=False)
def wheel(session: nox.Session) -> None:
    """Sdist and wheel of the last commit in dist/, checked, installed, and run without the clone.
    ``-- https://github.com/OWNER/NAME/blob/TAG`` is where README's links lead."""
    session.install("build", "check-wheel-contents", "twine")
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder / "clone", ignore_errors=True)
    shutil.rmtree("dist", ignore_errors=True)
    session.run("git", "clone", "-q", ".", str(folder / "clone"), external=True)
    if session.posargs:
        name_repository(folder / "clone", session.posargs[0])
    session.run("python", "-m", "build", "-o", "dist", str(folder / "clone"))
    (built,) = Path("dist").resolve().glob("*.whl")
    session.run("check-wheel-contents", str(built))
    session.run("twine", "check", "--strict", "dist/*")
    session.install(str(built))
    with session.chdir(folder):
        session.run("gaupipe", "run", "--run-dir", "run")


def name_repository(clone: Path, url: str) -> None:
    """Makes the links and pictures of README.md absolute, as a package index needs them."""
    readme = (clone / "README.md").read_text()
    pictures = re.sub(r"(!\[.*?\]\()(?!\w+:)", rf"\g<1>{url.replace('/blob/', '/raw/')}/", readme)
    (clone / "README.md").write_text(re.sub(r"\]\((?!\w+:|#)", f"]({url}/", pictures))
    urls = f'\n[project.urls]\nRepository = "{url.split("/blob/")[0]}"\n'
    with (clone / "pyproject.toml").open("a") as project:
        project.write(urls)


@nox.session(python=PYTHONS[0], default=False)
def weights(session: nox.Session) -> None:
    """Students with model cards for people to try: build/weights/NAME.zip."""
    session.install("-e", ".")
    folder = Path("build/weights")
    shutil.rmtree(folder, ignore_errors=True)
    for name, config in STUDENTS.items():
        run = ("--run-dir", str(folder / "runs" / name))
        arguments = (*config, "--set", "download=true", *session.posargs)
        session.run("gaupipe", "train", *arguments, "--student", "belief", *run)
        out = folder / f"gaupipe-{name}"
        session.run("gaupipe", "publish", "belief", "--plain", *run, "--out", str(out))
        shutil.make_archive(str(out), "zip", folder, out.name)


def lowest_versions() -> list[str]:
    """``name==version`` for the ``name>=version`` of every dependency."""
    requirements = map(Requirement, PROJECT["project"]["dependencies"])
    return [
        f"{requirement.name}=={bound.version}"
        for requirement in requirements
        for bound in requirement.specifier
        if bound.operator == ">="
    ]


if __name__ == "__main__":
    nox.main()
