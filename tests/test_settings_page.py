"""docs/settings.md says what the settings are."""

import importlib
import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator

from gaupipe.settings import load as config
from gaupipe.settings.sections import Count, Fraction, Rate, Scope

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "settings.md"


@pytest.fixture(scope="module")
def settings_page():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("settings_page")


def table() -> dict[str, list[str]]:
    """{setting: [type, default, effect]} of every row of the page."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return {name.strip(" `"): [cell.strip() for cell in rest] for name, *rest in cells}


def test_the_page_is_what_the_settings_say(settings_page):
    assert settings_page.page() == PAGE.read_text(), (
        "the settings changed: python docs/settings_page.py > docs/settings.md"
    )


def test_every_setting_is_on_the_page_with_its_default():
    described = table()
    shared = {"phase_b.optim.": "phase_a.optim."}
    for key, value in config.flatten(config.Settings()).items():
        for section, same in shared.items():
            key = key.replace(section, same)
        default = config.yaml.safe_load(described[key][1].strip("`"))
        assert default == value or float(default) == value, key


def test_every_setting_has_an_effect():
    assert [name for name, (_, _, effect) in table().items() if not effect] == []


@pytest.mark.parametrize(
    "annotation,words",
    [
        (bool, "true or false"),
        (Annotated[Count | None, Scope.PHASE], "whole number at least 0 or null"),
        (Fraction, "number from 0 to 1"),
        (tuple[Rate, Rate], "list of 2 (each: number above 0)"),
        (list[Count | None] | None, "list (each: whole number at least 0 or null) or null"),
        (tuple[str, ...], "list (each: text)"),
        (Literal["a", "b", "c"], "`a`, `b` or `c`"),
        (Annotated[dict[str, int], AfterValidator(dict)], "keywords"),
    ],
)
def test_types_in_words(settings_page, annotation, words):
    assert settings_page.type_words(annotation) == words
