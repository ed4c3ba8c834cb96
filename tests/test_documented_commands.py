"""The commands of README.md and of docs/quickstart.md, run as they stand there, one after the other
in an empty folder, with short trainings."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEFT_OUT = ("gaupipe view", "gaupipe train --data photos")  # a server; images that nobody has


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, code) of every block of shell or Python code, in the page's order."""
    return re.findall(
        r"^```(sh|python)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )


def shortened(command: list[str]) -> list[str]:
    """What makes a training short: an epoch, of the few garments that the tests make."""
    setting = "baseline.epochs=1" if command[1] == "train" else "train.epochs=1"
    more = ["--set", setting] if command[1] in ("run", "train", "phase-b") else []
    return [*more, "--set", "data.train_images=null"] if "fashion_mnist_plain" in command else more


@pytest.mark.long
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_commands_of_a_page_work_in_order(tmp_path, page):
    ran = 0
    for language, code in blocks(page):
        if language == "python":
            commands = [[sys.executable, "-c", code]]
        else:
            code = code.replace("&& .venv/bin/", "\n")  # README's first line, without the venv
            lines = [line for line in code.splitlines() if line.startswith("gaupipe ")]
            lines = [line for line in lines if not line.startswith(LEFT_OUT)]
            words = [shlex.split(line, comments=True) for line in lines]
            commands = [[sys.executable, "-m", *line, *shortened(line)] for line in words]
        for command in commands:
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            ran += 1
    assert ran >= 6
