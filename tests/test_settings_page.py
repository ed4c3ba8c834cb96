"""The tables of settings in docs/commands.md, and ``gaupipe settings``."""

import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import AfterValidator, TypeAdapter

from gaupipe.settings import Settings, page, scope
from gaupipe.settings.load import flatten
from gaupipe.settings.sections import Count, Fraction, Rate, Scope


def table() -> dict[str, list[str]]:
    """{setting: [type, default, effect]} of every row of the page."""
    lines = [line for line in page.page().splitlines() if line.startswith("| `")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return {name.strip(" `"): [cell.strip() for cell in rest] for name, *rest in cells}


def test_every_setting_is_on_the_page_with_its_default():
    described = table()
    shared = {"phase_a.optim.": "train.optim."}
    for key, value in flatten(Settings()).items():
        for section, same in shared.items():
            key = key.replace(section, same)
        default = yaml.safe_load(described[key][1].strip("`"))
        assert default == value or float(default) == value, key


def test_the_page_says_who_may_change_a_setting():
    """Every setting of the student and of any time, by its name or that of a section around it."""
    text = (Path(__file__).parent.parent / "docs" / "commands.md").read_text()
    text = text.split("### Who may change")[1].split("### All")[0]
    for words, kind in (("**the student**", Scope.STUDENT), ("**any time**", Scope.ANYTIME)):
        said = re.findall(r"`([a-z_.]+)`", text.split(words)[1].split(";\n* ")[0])
        for name in flatten(Settings()):
            if scope(name) is kind and not name.startswith(("model.", "data.batch")):
                assert name in said or name.split(".")[0] in said, name
        for name in said:
            assert name == "keep" or scope(name) is kind, name


def test_every_setting_has_an_effect():
    assert [name for name, (_, _, effect) in table().items() if not effect] == []


@pytest.mark.parametrize(
    "annotation,words",
    [
        (bool, "true or false"),
        (Annotated[Count | None, Scope.STUDENT], "whole number at least 0 or null"),
        (Fraction, "number from 0 to 1"),
        (tuple[Rate, Rate], "list of 2 (each: number above 0)"),
        (list[Count | None] | None, "list (each: whole number at least 0 or null) or null"),
        (tuple[str, ...], "list (each: text)"),
        (Literal["a", "b", "c"], "`a`, `b` or `c`"),
        (Annotated[dict[str, int], AfterValidator(dict)], "keywords"),
    ],
)
def test_types_in_words(annotation, words):
    assert page.type_words(TypeAdapter(annotation).json_schema()) == words


def test_the_command_prints_every_setting_a_section_or_a_configuration(in_process, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = in_process("settings")
    names = [line.split(" = ")[0] for line in out.splitlines() if " = " in line and line[0] != " "]
    assert code == 0 and {*flatten(Settings())} <= {*names}
    assert max(map(len, out.splitlines())) <= 80 and not {"`", "]("} & {*out}
    lr = Settings().train.optim.lr
    _, out, _ = in_process("settings", "train.optim.lr")
    assert out.splitlines()[:2] == [f"train.optim.lr = {lr}", "    number above 0"]
    _, out, _ = in_process("settings", "digits")
    assert out.startswith("#") and yaml.safe_load(out)["model"]["pos_embed_std"] == 0.5
