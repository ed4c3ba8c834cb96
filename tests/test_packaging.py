"""What is installed: packages have types, dependencies have a lowest version, and what is built
runs without the clone."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from arguments import sets
from gaupipe import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])('.')"
"""What pip runs to build what its argument names, here without a network."""


def test_every_package_says_that_it_has_types():
    for package in ("gaupipe", "stages", "store"):
        assert (ROOT / package / "py.typed").is_file()
        assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][package]


def test_every_dependency_has_a_lowest_version():
    without = [line for line in PROJECT["project"]["dependencies"] if ">=" not in line]
    assert without == []


def test_the_version_is_that_of_the_changelog():
    heading = re.search(r"^## \[(.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version, date = heading.groups()
    assert __version__ == (f"{version}.dev0" if date == "unreleased" else version)


def run(*command: object, **options) -> str:
    """Stdout of a command that should succeed."""
    done = subprocess.run([*map(str, command)], text=True, capture_output=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin/ of a fresh environment with the wheel that was built from the sdist. The
    dependencies are those of the environment of the tests, without its gaupipe."""
    folder = tmp_path_factory.mktemp("packaging")
    clone = folder / "clone"
    clone.mkdir()
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "MANIFEST.in"):
        shutil.copy(path, clone)
    for name in ("gaupipe", "stages", "store", "configs", "docs", "examples", "tests"):
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, clone / name, ignore=left_out)
    run(sys.executable, "-c", BUILD, "build_sdist", cwd=clone)
    run(sys.executable, "-m", "tarfile", "-e", clone / f"gaupipe-{__version__}.tar.gz", folder)
    unpacked = folder / f"gaupipe-{__version__}"
    assert (unpacked / "docs" / "figures" / "view.png").is_file()
    assert (unpacked / "examples" / "tour.ipynb").is_file()
    run(sys.executable, "-c", BUILD, "build_wheel", cwd=unpacked)
    wheel = unpacked / f"gaupipe-{__version__}-py3-none-any.whl"
    assert "OK" in run(sys.executable, "-m", "check_wheel_contents", wheel, cwd=ROOT)

    venv.create(folder / "fresh", symlinks=True)
    python = folder / "fresh" / "bin" / "python"
    packages = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])").strip())
    # a .pth file in a folder that a .pth file names is not read, so an editable gaupipe stays out
    there = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(there))
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "-q", "--no-index", "--no-deps", "--ignore-installed", wheel)
    return python.parent


@pytest.mark.long
def test_the_wheel_of_the_sdist_runs_without_the_clone(installed, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = dict(cwd=tmp_path, env=environment)
    find = "from importlib.util import find_spec; print(find_spec('stages').origin)"
    stages = Path(run(installed / "python", "-c", find, **options).strip()).parent
    assert stages.is_relative_to(installed.parent)
    assert (stages / "view" / "static" / "index.html").is_file()
    assert run(installed / "gaupipe", "--version", **options) == f"gaupipe {__version__}\n"
    epoch = ["phase_a.max_epochs=1", "train.epochs=1", "baseline.epochs=0", "threads=1"]
    epoch += ["data.train_images=64", "phase_b.warm_start=none", "phase_b.gamma_epochs=1"]
    assert "standard, distilled" in run(installed / "gaupipe", "run", *sets(*epoch), **options)
    folder = tmp_path / "runs" / "digits" / "phase_b" / "standard" / "student"
    assert (folder / "model.safetensors").is_file()
