"""docs/commands.md on the site has the commands and options that the program's help has."""

import re
import sys
from pathlib import Path

from typer.testing import CliRunner

from gaupipe.cli import app

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
from commands_page import all_commands

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def help_of(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    return result.output


def test_every_option_of_the_help_is_on_the_page():
    _, *sections = re.split(r"^### ", all_commands(app), flags=re.MULTILINE)
    pages = {section.split("\n", 1)[0]: section for section in sections}
    for name, page in pages.items():
        lines = (line.split()[1:3] for line in help_of(name).splitlines() if " --" in line[:6])
        left = {word for words in lines for word in words if OPTION.fullmatch(word)}
        assert {"--help"} <= left <= {"--help"} | set(OPTION.findall(page)), name
    listed = (Path(__file__).parent.parent / "docs/commands.md").read_text()
    assert pages.keys() == set(
        re.findall(r"^\| `([a-z-]+)` \|", listed.split("##")[0], re.MULTILINE)
    )
