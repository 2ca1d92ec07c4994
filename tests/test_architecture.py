"""docs/architecture.md draws the house as it stands."""

import re

import pytest
from conftest import ROOT
from depth import DEPTH
from test_imports import APART, ATTNLAB, FLOORS

PAGE = (ROOT / "docs/architecture.md").read_text()


def exists(room):
    return any(name == room or name.startswith(f"{room}.") for name in ATTNLAB)


def test_the_floors_are_drawn_as_they_are_held():
    drawn = [set(line.split(" · ")) for line in re.findall(r"^\d  (.+)$", PAGE, re.MULTILINE)]
    assert drawn[::-1] == [{room for room in floor if exists(room)} for floor in FLOORS]
    beside = re.search(r"^beside the stairs: (.+)$", PAGE, re.MULTILINE)
    assert set(beside[1].split(" · ")) == set(APART)


def test_every_room_that_is_named_is_there_and_every_room_is_named():
    rows = re.findall(r"^\| `([\w/*.]+)` \| [^|]+ \|([^|]*)\|$", PAGE, re.MULTILINE)
    for room, files in rows:
        folder = room.rstrip("/").removesuffix("/*.py")
        assert (ROOT / folder).exists(), room
        for file in re.findall(r"`([\w/]+(?:\.py|/))`", files):
            assert (ROOT / folder / file).exists(), (room, file)
    folders = [
        p.parent for top in ("attnlab", "experiments") for p in ROOT.glob(f"{top}/*/__init__.py")
    ]
    assert {f"{p.relative_to(ROOT)}/" for p in folders} <= {room for room, _ in rows}


def test_every_table_that_is_named_is_there():
    rows = re.findall(r"^\| [^|]+ \| `([A-Z_]+)` \| `([\w/.]+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) > 15
    for table, file in rows:
        assert re.search(rf"^{table}\b.* = ", (ROOT / file).read_text(), re.MULTILINE), table


def test_every_step_of_a_call_is_there():
    steps = re.findall(r"^ *(?:task\.)?(\w+)\(.*?\)  +([\w/]+(?:\.py)?)", PAGE, re.MULTILINE)
    assert len(steps) > 8
    for function, place in steps:
        path = ROOT / "attnlab" / place
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        text = "".join(file.read_text() for file in files)
        assert re.search(rf"def {function}\b|^    {function}: |nn\.Module", text, re.MULTILINE), (
            place
        )


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
