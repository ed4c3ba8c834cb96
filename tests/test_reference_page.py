"""The signatures of docs/reference.md are those of the code."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import gaupipe
from gaupipe.attention.base import StudentAttention
from store import Store

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"
VARIABLES = {"run": gaupipe.open_run, "maps": Store}  # objects that the page's examples make
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
CALLS = [node for node in ast.walk(ast.parse(CODE)) if isinstance(node, ast.Call)]


def called(name: str) -> object:
    """The function or class of a dotted name."""
    first, *rest = name.split(".")
    if first in VARIABLES:
        return getattr(VARIABLES[first], rest[0])
    if name == "gaupipe.attention.ATTENTION[name]":
        return StudentAttention
    module, _, function = name.rpartition(".")
    return getattr(import_module(module), function)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: ast.unparse(call.func))
def test_a_signature_of_the_page_is_that_of_the_code(call):
    written = [ast.unparse(argument) for argument in call.args]
    written += [ast.unparse(keyword) for keyword in call.keywords]
    expected = []
    for parameter in inspect.signature(called(ast.unparse(call.func))).parameters.values():
        if parameter.name == "self":
            continue
        default = f"={parameter.default!r}" * (parameter.default is not parameter.empty)
        stars = "**" * (parameter.kind is parameter.VAR_KEYWORD)
        expected.append(f"{stars}{parameter.name}{default}")
    assert written == expected


def test_the_page_has_the_twenty_things_that_people_import():
    assert len(CALLS) >= 20
