"""Commands in this process or in new ones, and what their runs leave."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stages.cli import main


def end_of(*arguments, cwd=None) -> SystemExit:
    """How a command ends that runs in this process, which saves importing torch: its exit code,
    and as its context the error that it reports."""
    with pytest.MonkeyPatch.context() as patch:
        if cwd is not None:
            patch.chdir(cwd)
        patch.setattr(sys, "argv", ["gaupipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
    return exit_.value


def run_main(*arguments, cwd=None) -> int:
    """The exit code of a command in this process."""
    return end_of(*arguments, cwd=cwd).code or 0


FRESH = """
import json, os, sys
import timm

for folder, command in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        if isinstance(command, str):
            exec(command, {"__name__": "__main__"})
        else:
            sys.argv = ["gaupipe", *command]
            from stages.cli import main
            main()
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        sys.exit(f"{command} ended with {code}")
"""


def in_new_processes(*commands: tuple[Path, list[str] | str]) -> str:
    """Stdout of commands and of Python programs, one after the other, each in a folder and in a
    process that nothing of gaupipe has been imported in; none may fail. They share the import of
    timm, which takes seconds."""
    told = json.dumps([(str(folder), command) for folder, command in commands])
    done = subprocess.run([sys.executable, "-P", "-c", FRESH, told], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def named_like_packages(folder: Path) -> None:
    """Puts modules of a user with the names of gaupipe's packages into a folder."""
    (folder / "stages").mkdir()
    for name in ("store.py", "stages/__init__.py"):
        (folder / name).write_text("raise SystemExit('a module of the user')")


def linked(folder: Path, copy: Path) -> Path:
    """A copy of a folder by hard links, but of the files that gaupipe writes in place. A test
    removes a file before it writes another one of its name."""

    def link_or_copy(source: str, target: str) -> None:
        in_place = source.endswith((".jsonl", "lock"))
        (shutil.copy2 if in_place else os.link)(source, target)

    return Path(shutil.copytree(folder, copy, copy_function=link_or_copy))


def metrics(path: Path) -> list[dict]:
    """A metrics.jsonl without what depends on the machine's speed."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    timed = ("seconds", "_per_s")
    return [{name: row[name] for name in row if not name.endswith(timed)} for row in rows]


def results(run_dir: Path) -> dict[str, list[dict]]:
    """The metrics of every training of a run."""
    paths = sorted(run_dir.glob("**/metrics.jsonl"))
    return {str(path.relative_to(run_dir)): metrics(path) for path in paths}
