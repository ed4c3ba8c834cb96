"""The program's help, and docs/commands.md on the site, which has the same commands and options."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from gaupipe.settings import Settings
from gaupipe.settings.load import flatten
from stages.cli.program import app

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
from commands_page import all_commands

ROOT = Path(__file__).parent.parent

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


COMMANDS = typer.main.get_command(app).commands


def help_of(*command: str, columns: int = 200) -> str:
    env = {"COLUMNS": str(columns), "TERM": "dumb"}
    result = CliRunner().invoke(app, [*command, "--help"], env=env)
    assert result.exit_code == 0
    return result.output


def test_the_help_groups_the_commands():
    panels = re.findall(r"─ (\w+) ─", help_of(columns=80))
    assert panels == ["Options", "Train", "Measure", "Look", "Share"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_a_terminal_and_its_example_parses(name):
    text = help_of(name, columns=80)
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"<bool>|<str>|<list|\(none\)|[(\[]\[", text)
    words = [word for line in text.splitlines() for word in line.split()]
    options = {option for param in COMMANDS[name].params for option in param.opts}
    assert {option for option in options if option.startswith("--")} <= set(words)
    (example,) = re.findall(r"`gaupipe (.+)`", COMMANDS[name].help.split("Example:")[1])
    first, *arguments = shlex.split(example)
    assert first == name
    COMMANDS[name].make_context(name, arguments)  # raises where an option is unknown


def test_the_help_says_the_values_of_digits_and_not_names_of_settings():
    defaults = re.findall(r"\[default: \((.*?)\)\]", help_of("train"))
    assert not {*flatten(Settings())} & {*defaults}
    digits = yaml.safe_load((ROOT / "configs/digits.yaml").read_text())
    epochs = digits["phase_b"]["epochs"], digits["train"]["epochs"]
    assert "{} in digits, {} without a teacher".format(*epochs) in defaults


def test_every_option_of_the_help_is_on_the_page():
    _, *sections = re.split(r"^### ", all_commands(app), flags=re.MULTILINE)
    pages = {section.split("\n", 1)[0]: section for section in sections}
    for name, page in pages.items():
        lines = (line.split()[1:4] for line in help_of(name).splitlines() if " --" in line[:9])
        left = {word for words in lines for word in words if OPTION.fullmatch(word)}
        assert {"--help"} <= left <= {"--help"} | set(OPTION.findall(page)), name
    listed = (ROOT / "docs/commands.md").read_text()
    assert pages.keys() == set(
        re.findall(r"^\| `([a-z-]+)` \|", listed.split("##")[0], re.MULTILINE)
    )
