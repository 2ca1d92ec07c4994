"""The pages on data and optimizers name every row there is, and no other."""

import dataclasses
import re

import pytest
from conftest import ROOT

from attnlab.data import DATASETS
from attnlab.training import OPTIMIZERS, SCHEDULES
from attnlab.training.objectives import OBJECTIVES


def rows(page, header):
    """First cell -> the other cells of a table of docs/reference/."""
    text = (ROOT / "docs" / "reference" / page).read_text()
    table = text[text.index(header) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {first.strip("`"): rest for first, *rest in cells}


def test_data():
    found = rows("datasets.md", "| source |")
    ours = [name for name, kind in DATASETS.items() if kind.__module__.startswith("attnlab.")]
    assert list(found) == ours
    for name, (_, fields, tasks, configs) in found.items():
        told = re.findall(r"`(\w+)`", fields)
        assert told == [field.name for field in dataclasses.fields(DATASETS[name])]
        assert set(re.findall(r"`(\w+)`", tasks)) <= set(OBJECTIVES)
        for config in re.findall(r"`(\w+\.py)`", configs):
            assert (ROOT / "experiments" / "configs" / config).exists()
        for config in re.findall(r"`(\w+/\w+\.py)`", configs):
            assert (ROOT / "experiments" / "studies" / config).exists()
    assert {t for _, _, tasks, _ in found.values() for t in re.findall(r"`(\w+)`", tasks)} == set(
        OBJECTIVES
    )


@pytest.mark.parametrize(
    ("header", "table"), [("| optimizer |", OPTIMIZERS), ("| schedule |", SCHEDULES)]
)
def test_optimizers(header, table):
    own = [name for name, entry in table.items() if entry.__module__.startswith("attnlab.")]
    assert list(rows("optimizers.md", header)) == own
