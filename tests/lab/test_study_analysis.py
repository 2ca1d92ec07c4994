"""The page of the analysis, from rows of a simulated study and from those there are today."""

import csv
import dataclasses
import os
import runpy

import numpy as np
import pytest
from conftest import ROOT
from matplotlib.text import Text
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
    assert "Stage 7 (P1, second look) lacks 32 runs" in text
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
    made = runpy.run_path(os.fspath(tmp_path / "check.py"))
    found, study = made["RESULTS"], hypotheses.read_study(simulated)
    alone = next(fit for fit in hypotheses.fits(study) if fit.name == "D = 64 alone")
    assert made["BEST"] + 4 == pytest.approx(alone.optimum.best.value, abs=1e-3)
    ours = {r.name: r.found for r in hypotheses.secondary(study) if r.pairs}
    for n, h in design.POINTS[64]:
        if (n, h) != (4, 16):
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


def test_one_point_that_no_parabola_fits_moves_the_registered_best_head_and_not_that_of_another_d(
    simulated,
):
    """h = 2 at D = 32 is 1 bit worse."""

    def best(rows):
        return {fit.name: fit for fit in hypotheses.fits(hypotheses.read_study(rows))}

    bent = [
        dataclasses.replace(
            row, scores=dataclasses.replace(row.scores, heldout_bits=row.scores.heldout_bits + 1)
        )
        if row.spec.stage == 2 and row.spec.variant.head_dim == 2
        else row
        for row in simulated
    ]
    before, after = best(simulated), best(bent)
    moved = {n for n in before if before[n].optimum.best != after[n].optimum.best}
    assert moved == {"all complete stages (the registered model)", "D = 32 alone"}
    registered = "all complete stages (the registered model)"
    assert after[registered].residual_sd > 2 * before[registered].residual_sd


def test_compute_multiples_are_marked_until_every_model_size_is_there(simulated):
    found = analysis.over_texts({"a": [0.1], "b": [0.2]})
    whole = hypotheses.read_study(simulated)
    assert "†" not in hypotheses.multiple(found, whole)
    two = hypotheses.read_study([row for row in simulated if row.spec.stage != 4])
    assert two.slope_widths == (32, 64)
    assert hypotheses.multiple(found, two).endswith("†")
    one = hypotheses.read_study([row for row in simulated if row.spec.stage not in (2, 4)])
    assert hypotheses.multiple(found, one) == "not run yet"


def test_the_first_look_does_not_change_with_later_stages(simulated):
    early = [row for row in simulated if row.spec.stage in (0, 1, 3)]
    late = hypotheses.looks(hypotheses.read_study(simulated))
    assert late == hypotheses.looks(hypotheses.read_study(early))
    assert [look.name for look in late] == ["first look"]


def test_stage_7_is_missing_only_where_the_first_look_did_not_decide():
    today = read_rows(FOLDER / "runs.csv")
    text = page.page(today, hypotheses.read_study(today), [])
    assert "lacks 32 runs" not in text
    assert "Stage 7 (the second look at P1) is not run, since the first look decided." in text


def test_an_incomplete_stage_has_no_numbers(simulated, tmp_path):
    last = [row for row in simulated if row.spec.stage == 3][-1]
    rows = [row for row in simulated if row is not last]
    page.write_analysis(rows, tmp_path)
    text = (tmp_path / "analysis.md").read_text()
    assert "Stage 3 (surface, D = 64) lacks 1 runs" in text
    assert not (tmp_path / "figure2.svg").exists()
    assert "not run yet: 80 bytes per parameter" in (
        page.page([r for r in rows if r.spec.stage != 6], hypotheses.read_study(rows), [])
    )
    results = hypotheses.primary(hypotheses.read_study(rows))
    results += hypotheses.secondary(hypotheses.read_study(rows))
    assert {r.conclusion for r in results} == {"not run yet"}


def test_texts_of_figures_are_inside_their_figures():
    rows = read_rows(FOLDER / "runs.csv")
    for name, figure in page.figures(hypotheses.read_study(rows), rows).items():
        figure.canvas.draw()
        for text in (t for axes in figure.axes for t in axes.get_children() if isinstance(t, Text)):
            assert text.get_window_extent().x1 <= figure.bbox.x1, (name, text.get_text())


def test_decisions_of_the_registered_hypotheses():
    study = hypotheses.read_study(read_rows(FOLDER / "runs.csv"))
    assert {r.name: r.conclusion for r in hypotheses.secondary(study)} == {
        "S1": "interior", "S2": "significant", "S3": "significant", "S4": "significant",
        "S5": "worse",
    }  # fmt: skip
