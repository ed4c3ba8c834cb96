"""How this process was started, and which files Python would take for packages of ours."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from gaupipe.system.files import from_here


def runs_as_module() -> bool:
    """True while ``python -m gaupipe`` looks for the module that it runs: there is a program only
    afterwards, and its arguments may be anything."""
    if hasattr(sys.modules["__main__"], "__file__"):
        return False
    for position, argument in enumerate(sys.orig_argv):
        if argument in ("-c", "-m"):  # the last option of Python itself
            return sys.orig_argv[position : position + 2] == ["-m", "gaupipe"]
    return False


def pip_install(extra: str) -> str:
    """The command that adds an ``extra`` to this installation of gaupipe, from where it was
    installed, whichever environment is active."""
    here = os.path.dirname(sys.executable)
    pip = "pip"
    if os.path.dirname(shutil.which("pip") or "") != here:
        pip = f"{from_here(sys.executable)} -m pip"
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"{pip} install -e '{from_here(clone)}[{extra}]'"
    return f"{pip} install 'gaupipe[{extra}]{origin()}'"


def origin() -> str:
    """`` @ URL`` of the clone or the repository that pip installed gaupipe from, as pip notes it;
    empty for a release."""
    noted = distribution("gaupipe").read_text("direct_url.json")
    if noted is None:
        return ""
    place = json.loads(noted)
    url = place["url"]
    if "vcs_info" in place:
        url = f"{place['vcs_info']['vcs']}+{url}"
    return f" @ {url}"


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
