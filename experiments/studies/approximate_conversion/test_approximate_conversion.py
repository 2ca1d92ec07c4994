"""The published page, and a tiny run."""

import dataclasses

import pandas
import pytest
from conftest import ROOT

from experiments.studies.approximate_conversion import study

RESULTS = ROOT / "docs/results/approximate_conversion"


def test_the_page_is_that_of_its_rows():
    rows = pandas.read_csv(RESULTS.with_suffix(".csv"))
    assert study.page(rows) == RESULTS.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_tiny_run(tmp_path):
    train, more = (
        dataclasses.replace(a, steps=2, seeds=a.seeds[:2]) for a in (study.TRAIN, study.MORE)
    )
    path = tmp_path / "rows.csv"
    pandas.DataFrame(study.run(train, more)).to_csv(path, index=False)
    rows = pandas.read_csv(path)
    assert len(rows) == 2 * (1 + 2 * len(study.HEADS))
    assert "| MQA | least squares | 16 |" in study.page(rows)
