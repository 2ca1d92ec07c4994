"""Files and links that pages name exist."""

import re

import pytest
from conftest import ROOT
from depth import DEPTH

PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_that_exist(page):
    text = page.read_text()
    files = re.findall(r"\b(?:attnlab|experiments|tests|colab|docs)/[\w/]+\.(?:py|md|ipynb)", text)
    assert [file for file in files if not (ROOT / file).exists()] == []
    links = re.findall(r"\]\(([\w./]+\.\w+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_what_is_slow_by_name_is_there():
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [n for n in DEPTH if f"\ndef {n.partition('[')[0]}(" not in text] == []
