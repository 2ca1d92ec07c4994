"""What the README, the pages of docs/ and the docstrings show is what happens."""

import contextlib
import doctest
import importlib
import inspect
import io
import re
import sys
from unittest import mock

import pytest
from conftest import ROOT

import attnlab
from attnlab.heads.inputs import HEAD_VALUES
from attnlab.interpret import STATISTICS
from attnlab.models import FFN, Experts
from attnlab.models.ffn import ffn_values
from attnlab.models.layer import LAYER_VALUES

DOCS = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "results").glob("*.md"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
INSIDE = "((?:(?!```).)*)"
SHOWN = {
    page.name: re.findall(f"```python\n{INSIDE}```\n```\n{INSIDE}```", page.read_text(), re.DOTALL)
    for page in PAGES
}


@pytest.mark.parametrize("page", [name for name, blocks in SHOWN.items() if blocks])
def test_code_prints_what_the_page_says(page):
    """Its blocks, one after the other."""
    names: dict = {}
    for code, printed in SHOWN[page]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), mock.patch.dict(attnlab.LAYOUTS):  # a page's own row
            exec(code, names)
        assert out.getvalue() == printed


def test_the_table_of_names_is_that_of_the_code():
    page = (ROOT / "docs" / "observe.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE))
    of_ffn = ffn_values(FFN()) | ffn_values(FFN(experts=Experts(num_experts=2)))
    assert rows == HEAD_VALUES | LAYER_VALUES | of_ffn


def test_the_table_of_statistics_is_that_of_the_code():
    page = (ROOT / "docs" / "interpret.md").read_text().replace(r"\|", "!")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    table = [(name, one.unit, one.formula.replace("|", "!")) for name, one in STATISTICS.items()]
    assert [row for row in rows if row[0] in STATISTICS] == table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_exist(page):
    """Paths from the root of the checkout; links, from the page."""
    text = page.read_text()
    named = re.findall(r"(?<![\w/])(?:experiments|attnlab|tests|colab)/[\w/]+\.(?:py|ipynb)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    here = [link for link in links if link and "://" not in link]
    assert [link for link in here if not (page.parent / link).exists()] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 160


MODULES = sorted(
    ".".join(p.relative_to(ROOT).with_suffix("").parts)
    for p in (ROOT / "attnlab").rglob("[a-z]*.py")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


EXAMPLES = (
    "adapters",
    "attention",
    "heads",
    "sharing",
    "models",
    "transforms",
    "interpret",
    "plotting",
)
"""Packages of which every public function has an example, beside those of `attnlab` itself."""


def test_every_public_function_has_an_example():
    packages = [attnlab, *(getattr(attnlab, name) for name in EXAMPLES)]
    public = [(p.__name__, f) for p in packages for f in getattr(p, "__all__", None) or dir(p)]
    functions = [getattr(sys.modules[package], name) for package, name in public]
    functions = [f for f in functions if inspect.isfunction(f)]
    assert len(functions) > 150
    assert [f.__name__ for f in functions if ">>>" not in f.__doc__] == []
