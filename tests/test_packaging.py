"""What is installed: packages have types, dependencies have a lowest version, what is built runs
without the clone, and what links to the clone is found from everywhere."""

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
BUILD = "import sys; from hatchling import build; getattr(build, sys.argv[1])('.')"
"""What pip runs to build what its argument names, here without a network."""


def test_every_package_says_that_it_has_types():
    for package in ("gaupipe", "stages", "store"):
        assert (ROOT / package / "py.typed").is_file()


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


def files_in(folder: Path) -> set[Path]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path for path in files if path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of what git holds, in a folder that has the name of the package, as git names it."""
    clone = tmp_path_factory.mktemp("above") / "gaupipe"
    clone.mkdir()
    for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), ROOT / "LICENSE"):
        shutil.copy(path, clone)
    for name in ("gaupipe", "stages", "store", "configs", "docs", "examples", "tests"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    return clone


def environment(folder: Path, *options: object) -> Path:
    """The Python of a fresh environment in ``folder``, in which pip has installed what ``options``
    name. The dependencies are those of the environment of the tests, without its gaupipe."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])").strip())
    # a .pth file in a folder that a .pth file names is not read, so an editable gaupipe stays out
    there = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(there))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index"]
    run(*pip, "--no-deps", "--no-build-isolation", "--ignore-installed", *options)
    return python


FIND = (
    "from importlib.util import find_spec;"
    "print(*(find_spec(name).origin for name in ('gaupipe', 'stages', 'store')))"
)
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.long
def test_an_editable_install_is_found_from_the_folder_above_the_clone(clone, tmp_path):
    """There Python meets the clone itself first: a folder called gaupipe, which is no package."""
    python = environment(tmp_path / "fresh", "--editable", clone)
    for folder in (clone.parent, clone, tmp_path):
        found = run(python, "-c", FIND, cwd=folder, env=ALONE).split()
        assert found == [
            str(clone / name / "__init__.py") for name in ("gaupipe", "stages", "store")
        ]
        assert "max_epochs" in run(python.with_name("gaupipe"), "settings", "digits", cwd=folder)
    with_timm = "import gaupipe, timm; print(timm.is_model('gauvit_pico_patch2_8'))"
    assert run(python, "-c", with_timm, cwd=clone.parent, env=ALONE) == "True\n"


@pytest.fixture(scope="module")
def installed(clone, tmp_path_factory) -> Path:
    """The bin/ of a fresh environment with the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("packaging")
    run(sys.executable, "-c", BUILD, "build_sdist", cwd=clone)
    run(sys.executable, "-m", "tarfile", "-e", clone / f"gaupipe-{__version__}.tar.gz", folder)
    unpacked = folder / f"gaupipe-{__version__}"
    for name in ("docs/figures/view.png", "examples/tour.ipynb", "configs/sweeps/gamma.yaml"):
        assert (unpacked / name).is_file()
    run(sys.executable, "-c", BUILD, "build_wheel", cwd=unpacked)
    wheel = unpacked / f"gaupipe-{__version__}-py3-none-any.whl"
    assert "OK" in run(sys.executable, "-m", "check_wheel_contents", wheel, cwd=ROOT)
    return environment(folder / "fresh", wheel).parent


@pytest.mark.long
def test_the_wheel_of_the_sdist_runs_without_the_clone(installed, clone, tmp_path):
    options = dict(cwd=tmp_path, env=ALONE)
    for folder in (tmp_path, clone.parent):  # above the clone the wheel is found, too
        found = run(installed / "python", "-c", FIND, cwd=folder, env=ALONE).split()
        assert all(Path(path).is_relative_to(installed.parent) for path in found)
    packages = Path(found[0]).parents[1]
    for name in ("gaupipe", "stages", "store"):
        assert files_in(clone / name) <= files_in(packages / name)
    assert files_in(packages / "gaupipe" / "configs") == files_in(clone / "configs")
    assert run(installed / "gaupipe", "--version", **options) == f"gaupipe {__version__}\n"
    epoch = ["phase_a.max_epochs=1", "train.epochs=1", "threads=1"]
    epoch += ["data.train_images=64", "phase_b.warm_start=none", "phase_b.gamma_epochs=1"]
    assert "standard, distilled" in run(installed / "gaupipe", "run", *sets(*epoch), **options)
    folder = tmp_path / "runs" / "digits" / "phase_b" / "standard" / "student"
    assert (folder / "model.safetensors").is_file()
