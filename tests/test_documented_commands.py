"""The commands of README.md and of docs/quickstart.md, run as they stand there, one after the other
in an empty folder, with short trainings."""

import re
import shlex
from pathlib import Path

import pytest

from arguments import sets
from runs import in_new_processes

ROOT = Path(__file__).parent.parent
LEFT_OUT = ("gaupipe view", "gaupipe train --data photos")  # a server; images that nobody has


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, code) of every block of shell or Python code, in the page's order."""
    return re.findall(
        r"^```(sh|python)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )


def shortened(command: list[str]) -> list[str]:
    """What makes a training short: an epoch, of few digits, or of the garments that the tests
    make."""
    name, *more = command
    changes = {
        "run": ["phase_a.max_epochs=1", "train.epochs=1"],
        "train": ["train.epochs=1"],
        "phase-a": ["phase_a.max_epochs=1"],
        "phase-b": ["train.epochs=1"],
    }.get(name, [])
    if "fashion_mnist_plain" in more:
        changes.append("data.train_images=null")
    elif name in ("run", "train", "phase-a"):
        changes.append("data.train_images=200")
    return [*command, *sets(*changes)]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_commands_of_a_page_work_in_order(page, tmp_path, in_process):
    """Python's in a process of its own, which has to import what it needs."""
    ran = 0
    for language, code in blocks(page):
        if language == "python":
            in_new_processes((tmp_path, code))
            continue
        code = code.replace("&& .venv/bin/", "\n")  # README's first line, without the venv
        for line in code.splitlines():
            if line.startswith("gaupipe ") and not line.startswith(LEFT_OUT):
                command = shortened(shlex.split(line, comments=True)[1:])
                end, _, err = in_process(*command, cwd=tmp_path)
                assert end == 0, (line, err)
                ran += 1
    assert ran >= 5


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: page.stem)
def test_no_line_begins_with_a_percent_sign(page):
    """The site takes it for a comment, and leaves it out."""
    assert not re.search(r"^\s*%", page.read_text(), re.MULTILINE)
