"""Pages of the study from rows whose answers are known."""

from study_rows import of_spec
from test_head_width import bits_of, run_all

from experiments.studies.head_width import design
from experiments.studies.head_width.tuning_pages import (
    cost_page,
    rates_page,
    stage0_page,
    write_pages,
)


def test_stage_0_before_and_after_its_end(tmp_path):
    first = [of_spec(spec, bits_of(spec)) for spec in design.stage0([])[:10]]
    assert "10 runs are done, 86 are left." in stage0_page(first)
    rows = run_all(0, [])
    page = stage0_page(rows)
    assert "**By the rule of the plan `fan_in` is used from here on**" in page
    assert "| fan_in: AdamW, learning rate per matrix x 64 / fan-in | 1.9800 | 0.00" in page
    assert "| fan_in | 4x16 | python | 0.004: 2.0040 · 0.008: 1.9800 · " in page
    assert [path.name for path in write_pages(rows, tmp_path)] == ["stage0.md", "cost.md"]


def test_stage_1_and_cost():
    rows = run_all(1, run_all(0, []))
    page = rates_page(rows)
    assert "The best rate lies between two others in 41 of 41 cells." in page
    assert "| ln_head_dim | -0.000 |" in page or "| ln_head_dim | 0.000 |" in page
    line = next(line for line in cost_page(rows).splitlines() if line.startswith("| 1 "))
    assert line.split("|")[5:7] == [" 99 ", f" {205 * 99 / 3600:.2f} "]
