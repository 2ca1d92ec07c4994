"""The pages on data and optimizers name every entry of the registries, and no other."""

import dataclasses
import re

import pytest
from conftest import ROOT

from attnlab.data import DATASETS
from attnlab.training import OBJECTIVES, OPTIMIZERS, SCHEDULES


@pytest.mark.parametrize(
    ("page", "header", "registry"),
    [
        ("datasets.md", "| source |", DATASETS),
        ("optimizers.md", "| optimizer |", OPTIMIZERS),
        ("optimizers.md", "| schedule |", SCHEDULES),
    ],
)
def test_tables_name_the_entries(page, header, registry):
    """Of a dataset also its fields; together they name all tasks."""
    text = (ROOT / "docs" / "reference" / page).read_text()
    lines = text[text.index(header) :].split("\n\n")[0].splitlines()[2:]
    rows = [line.strip("|").split("|") for line in lines]
    table = [[re.findall(r"`(\w+)`", cell) for cell in row] for row in rows]
    own = [name for name, entry in registry.items() if entry.__module__.startswith("attnlab.")]
    assert [names for [names], *_ in table] == own
    if registry is DATASETS:
        for [name], _, fields, *_ in table:
            assert fields == [field.name for field in dataclasses.fields(DATASETS[name])]
        tasks = {task for _, _, _, some, _ in table for task in some}
        assert tasks == {name for name in OBJECTIVES if ":" not in name}  # no file of a test
