"""Pages of the study from rows whose answers are known."""

import pytest
from simulated_study import rows_of
from test_head_width import run_all

from experiments.studies.head_width.tuning_pages import (
    cost_page,
    rates_page,
    stage0_page,
    write_pages,
)


def test_stage_0(tmp_path):
    rows = run_all(0, [])
    page = stage0_page(rows)
    assert "**By the rule of the plan `fan_in` is used from here on**" in page
    assert "| fan_in: AdamW, learning rate per matrix x 64 / fan-in | 1.9800 | 0.00" in page
    assert "| fan_in | 4x16 | python | 0.004: 2.0040 · 0.008: 1.9800 · " in page
    with pytest.raises(ValueError, match="stage 1"):
        write_pages(rows, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_stage_1_and_cost():
    rows = rows_of(range(2, 7))
    page = rates_page(rows)
    assert "The best rate lies between two others in 41 of 41 cells." in page
    assert "| ln_head_dim | -0.000 |" in page or "| ln_head_dim | 0.000 |" in page
    line = next(line for line in cost_page(rows).splitlines() if line.startswith("| 1 "))
    assert line.split("|")[5:7] == [" 99 ", f" {205 * 99 / 3600:.2f} "]
