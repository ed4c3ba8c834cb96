"""The commands of README.md and of docs/quickstart.md, run as they stand there, one after the other
in an empty folder, with short trainings."""

import re
import shlex
from pathlib import Path

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


def test_the_commands_of_a_page_work_in_order(tmp_path):
    commands = []
    for page in ("README.md", "docs/quickstart.md"):
        folder = tmp_path / Path(page).stem
        folder.mkdir()
        before = len(commands)
        for language, code in blocks(page):
            if language == "python":
                commands.append((folder, code))
                continue
            code = code.replace("&& .venv/bin/", "\n")  # README's first line, without the venv
            lines = [line for line in code.splitlines() if line.startswith("gaupipe ")]
            lines = [line for line in lines if not line.startswith(LEFT_OUT)]
            words = [shlex.split(line, comments=True)[1:] for line in lines]
            commands += [(folder, shortened(command)) for command in words]
        assert len(commands) > before, page
    in_new_processes(*commands)
