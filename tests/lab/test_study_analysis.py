"""The page of the analysis, from rows of a simulated study and from those there are today."""

import csv
import os
import runpy

import numpy as np
import pytest
from conftest import ROOT
from simulated_study import Simulation, rows_of

from attnlab.lab.head_width import analysis, design, hypotheses, page
from attnlab.lab.head_width.rows import columns, flat, read_rows

FOLDER = ROOT / "docs/results/head_width"


@pytest.fixture(scope="module")
def simulated():
    rows = rows_of((2, 3, 4, 5, 6))
    sim = Simulation(rows)
    return [r for r in rows if r.spec.stage < 2] + sim.drawn_rows(np.random.default_rng(3))


def write_rows(path, rows):
    """What append_row writes, at once."""

    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(flat, rows))
    assert read_rows(path) == rows


def test_a_complete_study_fills_every_blank(simulated, tmp_path):
    paths = page.write_analysis(simulated, tmp_path)
    assert [p.name for p in paths[2:]] == [f"figure{i}.svg" for i in (1, 2, 3, 4)]
    text = (tmp_path / "analysis.md").read_text()
    sentence = next(line for line in text.splitlines() if line.startswith("> "))
    assert "not run yet" not in sentence
    assert "stage 7 (P1, second look) lacks 32 runs" in text
    # albert is 0.12 worse, 2x32 and 4x16 are equal
    results = {r.name: r for r in hypotheses.secondary(hypotheses.read_study(simulated))}
    assert results["S4"].found.low < 0.12 < results["S4"].found.high
    assert results["S4"].conclusion == "significant"
    for path in paths[2:]:
        drawing = path.read_text()
        assert "prefers-color-scheme:dark" in drawing
        assert "#000000" not in drawing


def test_numpy_alone_gives_the_same_numbers(simulated, tmp_path, monkeypatch):
    write_rows(tmp_path / "runs.csv", simulated)
    monkeypatch.chdir(tmp_path)
    text = page.page(simulated, hypotheses.read_study(simulated), [])
    script = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "check.py").write_text(script)
    found = runpy.run_path(os.fspath(tmp_path / "check.py"))["RESULTS"]
    study = hypotheses.read_study(simulated)
    looks = {f"P1 {look.name}": look.paired for look in hypotheses.looks(study)}
    ours = looks | {r.name: r.found for r in hypotheses.secondary(study) if r.pairs}
    for n, h in design.POINTS[64]:
        if (n, h) not in ((4, 16), (2, 32)):
            pairs = page.against(study, 64, n, h, "standard")
            ours[f"{n}x{h}"] = analysis.over_texts(pairs)
    narrow = {f"{n}x{h} narrow": (n, h) for n, h in design.NARROW}
    for name, point in narrow.items():
        ours[name] = analysis.over_texts(page.against(study, 64, *point, "narrow"))
    assert set(found) == set(ours)
    for name, one in ours.items():
        mean, error, count = found[name]
        assert (one.value, one.error, one.count) == (
            pytest.approx(mean, abs=1e-12), pytest.approx(error, abs=1e-12), count)  # fmt: skip


def test_the_first_look_does_not_change_with_later_stages(simulated, tmp_path):
    early = [row for row in simulated if row.spec.stage in (0, 1, 3)]
    for name, rows in (("all", simulated), ("early", early)):
        (tmp_path / name).mkdir()
        page.write_analysis(rows, tmp_path / name, first_look=True)
    pages = [(tmp_path / name / "first_look.md").read_text() for name in ("all", "early")]
    assert pages[0] == pages[1]
    late = hypotheses.looks(hypotheses.read_study(simulated))
    assert late == hypotheses.looks(hypotheses.read_study(early))
    assert [look.name for look in late] == ["first look"]


def test_an_incomplete_stage_has_no_numbers(simulated, tmp_path):
    last = [row for row in simulated if row.spec.stage == 3][-1]
    rows = [row for row in simulated if row is not last]
    page.write_analysis(rows, tmp_path)
    text = (tmp_path / "analysis.md").read_text()
    assert "stage 3 (surface, D = 64) lacks 1 runs" in text
    assert not (tmp_path / "figure2.svg").exists()
    assert "not run yet: 80 bytes per parameter" in (
        page.page([r for r in rows if r.spec.stage != 6], hypotheses.read_study(rows), [])
    )
    results = hypotheses.primary(hypotheses.read_study(rows))
    results += hypotheses.secondary(hypotheses.read_study(rows))
    assert {r.conclusion for r in results} == {"not run yet"}


def test_the_rows_of_today(tmp_path):
    rows = read_rows(FOLDER / "runs.csv")
    paths = page.write_analysis(rows, tmp_path)
    assert paths[0].read_text().startswith("# Head-width study: analysis")
