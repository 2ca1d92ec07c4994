"""What the README and the docstrings show is what happens."""

import contextlib
import doctest
import importlib
import inspect
import io
import re

import pytest
from conftest import ROOT

import attnlab
from attnlab.observe import OF_LAYER

README = (ROOT / "README.md").read_text()


INSIDE = "((?:(?!```).)*)"


@pytest.mark.parametrize(
    ("code", "printed"),
    re.findall(f"```python\n{INSIDE}```\n```\n{INSIDE}```", README, re.DOTALL),
)
def test_readme_code_prints_what_the_readme_says(code, printed):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue() == printed


def test_the_page_on_looking_inside_prints_what_it_says():
    """Its blocks, one after the other; its table is that of the code."""
    page, names = (ROOT / "docs" / "observe.md").read_text(), {}
    blocks = re.findall(f"```python\n{INSIDE}```\n```\n{INSIDE}```", page, re.DOTALL)
    assert len(blocks) == page.count("```python") == 2
    for code, printed in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, names)
        assert out.getvalue() == printed
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows == {name: f"{v.axes} | {v.meaning}" for name, v in OF_LAYER.items()}


def test_readme_names_files_that_exist():
    named = re.findall(
        r"experiments/configs/\w+\.py|(?:attnlab|tests|colab)/\w+\.(?:py|ipynb)", README
    )
    assert len(named) > 10
    assert [n for n in named if not (ROOT / n).exists()] == []


MODULES = sorted(
    ".".join(p.relative_to(ROOT).with_suffix("").parts)
    for p in (ROOT / "attnlab").rglob("[a-z]*.py")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_every_public_function_has_an_example():
    functions = [getattr(attnlab, name) for name in attnlab.__all__]
    functions = [f for f in functions if inspect.isfunction(f)]
    assert len(functions) > 25
    assert [f.__name__ for f in functions if ">>>" not in f.__doc__] == []
