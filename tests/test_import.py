"""``import gaupipe`` from a user's program: timm knows the names whoever starts the program and
whatever is imported first, and a file of the user that hides one of gaupipe's packages is named."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path
from types import ModuleType

import pytest

from gaupipe.system import imports
from gaupipe.system.imports import pip_install

BUILD = """
import store
assert store.Schema
model = timm.create_model("vit_tiny_patch16_224", attn_layer="gau_belief", depth=1)
print(type(model.blocks[0].attn).__name__, timm.is_model("gauvit_pico_patch2_8"))
"""


def python(*command, cwd, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, text=True, capture_output=True, **options
    )


@pytest.mark.parametrize(
    "files, started",
    [
        (
            {
                "mine/__init__.py": "import gaupipe.attention.base\n",
                "mine/train.py": f"import timm\n{BUILD}",
            },
            ["-m", "mine.train", "-m", "gaupipe"],
        ),
        ({"gaupipe": f"import timm\nimport gaupipe\n{BUILD}"}, ["gaupipe", "-m", "gaupipe"]),
    ],
    ids=["a package run as a module", "a script called gaupipe, after timm"],
)
def test_timm_knows_the_names_however_a_program_starts(tmp_path, files, started):
    """Any module of gaupipe can be the first that a program imports, and options of the program are
    its own, whatever they are called. A folder ``store`` that holds no module is in nobody's way:
    Python prefers a package further down its path."""
    (tmp_path / "store").mkdir()
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    done = python(*started, cwd=tmp_path)
    assert done.stdout == "BeliefAttention True\n", done.stderr


def test_a_program_in_the_command_line_is_not_gaupipe(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    for command, ours in (("-c pass -m gaupipe", False), ("-m gaupipe -c x", True)):
        monkeypatch.setattr(sys, "orig_argv", ["python", *command.split()])
        assert imports.runs_as_module() == ours


@pytest.mark.parametrize("name", ["store.py", "stages/__init__.py"])
@pytest.mark.parametrize("started", ["script", "module", "before"])
def test_a_file_of_the_user_in_the_place_of_a_package_is_named(tmp_path, name, started):
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("")
    before = "import store, stages\n" if started == "before" else ""
    (tmp_path / "train.py").write_text(f"{before}import gaupipe\n")
    command = ["-m", "train"] if started == "module" else ["train.py"]
    done = python(*command, cwd=tmp_path)
    package = name.partition(".")[0].partition("/")[0]
    said = done.stderr.splitlines()[-1]
    assert said == (
        f"ImportError: {mine} is in the way of gaupipe's package {package!r}: rename it, or move "
        "the script that imports gaupipe to another folder"
    )


def test_the_command_that_adds_an_extra_works_where_gaupipe_is_a_clone(tmp_path, monkeypatch):
    """From any folder, with the pip of this environment."""
    for folder in (tmp_path, Path(__file__).parents[1]):
        monkeypatch.chdir(folder)
        *pip, _install, edit, named = shlex.split(pip_install("view"))
        clone, extra = named.removesuffix("]").split("[")
        project = tomllib.loads(Path(clone, "pyproject.toml").read_text())["project"]
        assert edit == "-e" and project["name"] == "gaupipe"
        assert extra in project["optional-dependencies"]
        assert pip[:-2] in ([], [sys.executable], [os.path.relpath(sys.executable)])


@pytest.mark.parametrize(
    "noted, source",
    [
        (None, ""),
        ({"url": "file:///a/clone", "dir_info": {}}, " @ file:///a/clone"),
        (
            {"url": "https://a.org/b.git", "vcs_info": {"vcs": "git", "commit_id": "c"}},
            " @ git+https://a.org/b.git",
        ),
    ],
)
def test_an_extra_comes_from_where_gaupipe_was_installed(tmp_path, monkeypatch, noted, source):
    """``direct_url.json`` as the packaging standard has it, and names as pip takes them."""
    folder = tmp_path / "gaupipe-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: gaupipe")
    if noted is not None:
        (folder / "direct_url.json").write_text(json.dumps(noted))
    monkeypatch.setattr(imports, "distribution", lambda name: PathDistribution(folder))
    monkeypatch.setattr(imports, "__file__", str(tmp_path / "gaupipe/system/imports.py"))
    wanted = shlex.split(pip_install("view"))[-1]
    assert wanted == f"gaupipe[view]{source}"
