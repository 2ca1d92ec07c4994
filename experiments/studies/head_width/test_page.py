"""The pages, from rows of a simulated study and from those that are published."""

import dataclasses
import os
import runpy

import numpy as np
import pandas
import pytest
from matplotlib.text import Text

from experiments.studies.head_width import analysis, design, gpu_page, hypotheses, page
from experiments.studies.head_width.gpu import COLUMNS
from experiments.studies.head_width.rows import append_csv, read_csv, read_rows
from experiments.studies.head_width.simulated import PUBLISHED, Simulation, check_page, study_rows


@pytest.fixture(scope="module")
def published():
    return hypotheses.read_study(read_rows(PUBLISHED / "runs.csv"))


@pytest.fixture(scope="module")
def simulated():
    rows = study_rows((2, 3, 4, 5, 6))
    drawn = Simulation(rows).drawn_rows(np.random.default_rng(4))
    return pandas.concat([rows[rows["stage"] < 2], drawn], ignore_index=True)


def worse(rows, which):
    """The rows with 1 bit more where `which` is true."""
    return rows.assign(heldout_bits=rows["heldout_bits"] + which)


def test_the_pages_are_those_of_the_published_rows(published):
    """P1 was decided at the first look; two of twenty points are not worse after correction."""
    rows = read_rows(PUBLISHED / "runs.csv")
    check_page(page.analysis_page(rows, published), "analysis.md")
    for name, made in (("stage0", page.stage0_page), ("stage1", page.stage1_page),
                       ("cost", page.cost_page)):  # fmt: skip
        assert made(rows) == (PUBLISHED / f"{name}.md").read_text()
    check_page(gpu_page.page(read_csv(PUBLISHED / "gpu_runs.csv", COLUMNS)), "gpu.md")


def test_a_complete_study_fills_every_blank(simulated, tmp_path):
    append_csv(tmp_path / "runs.csv", simulated)
    paths = page.write_pages(tmp_path)
    drawings = [path for path in paths if path.suffix == ".svg"]
    assert [path.stem for path in drawings] == [f"figure{i}" for i in (1, 2, 3, 4)]
    text = (tmp_path / "analysis.md").read_text()
    assert "Stage 7 (the second look at P1), since the first look is inconclusive." in text
    # albert is 0.12 worse, 2x32 and 4x16 are equal
    results = {r.name: r for r in hypotheses.secondary(hypotheses.read_study(simulated))}
    assert results["S4"].found.low < 0.12 < results["S4"].found.high
    assert results["S4"].conclusion == "significant"
    for path in drawings:
        assert "prefers-color-scheme:dark" in path.read_text()
        assert "#000000" not in path.read_text()


@pytest.mark.slow
def test_numpy_alone_gives_the_same_numbers(simulated, tmp_path, monkeypatch):
    append_csv(tmp_path / "runs.csv", simulated)
    monkeypatch.chdir(tmp_path)
    study = hypotheses.read_study(simulated)
    text = page.analysis_page(simulated, study)
    (tmp_path / "check.py").write_text(text.split("```python\n")[1].split("```")[0])
    made = runpy.run_path(os.fspath(tmp_path / "check.py"))
    found = made["RESULTS"]
    alone = next(fit for fit in hypotheses.fits(study) if fit.name == "D = 64 alone")
    assert made["BEST"] + 4 == pytest.approx(alone.optimum.best.value, abs=1e-3)
    ours = {r.name: r.found for r in hypotheses.secondary(study) if r.pairs}
    for n, h in design.POINTS[64]:
        if (n, h) != (4, 16):
            pairs = hypotheses.against(study, 64, n, h, "standard")
            ours[f"{n}x{h}"] = analysis.over_texts(pairs)
    narrow = {f"{n}x{h} narrow": (n, h) for n, h in design.NARROW}
    for name, point in narrow.items():
        ours[name] = analysis.over_texts(hypotheses.against(study, 64, *point, "narrow"))
    assert set(found) == set(ours)
    for name, one in ours.items():
        mean, error, count = found[name]
        assert (one.value, one.error, one.count) == (
            pytest.approx(mean, abs=1e-12), pytest.approx(error, abs=1e-12), count)  # fmt: skip


def test_the_first_look_reads_stages_1_and_3_alone(simulated):
    [look] = hypotheses.looks(hypotheses.read_study(simulated))
    others = worse(simulated, simulated["stage"].isin((2, 4, 5, 6)))
    assert hypotheses.looks(hypotheses.read_study(others)) == [look]
    assert look.name == "first look"


def test_texts_of_figures_are_inside_their_figures(published):
    rows = read_rows(PUBLISHED / "runs.csv")
    for name, figure in page.figures(published, rows).items():
        figure.canvas.draw()
        for text in (t for axes in figure.axes for t in axes.get_children() if isinstance(t, Text)):
            assert text.get_window_extent().x1 <= figure.bbox.x1, (name, text.get_text())


def test_the_error_of_a_rate_is_that_of_the_parabola(published):
    """Scores k (x + 0.3)^2 at the two rates of each text: the best rate is 0.3 below in ln r."""
    x = published.frame["tuning"]
    bits = published.tuning_k * (x + 0.3) ** 2 + 0.1
    study = dataclasses.replace(published, frame=published.frame.assign(bits=bits))
    assert page.rate_error(study, study.point(8, 8)) == pytest.approx(0.3)
    assert page.rate_error(published, published.point(1, 64)) == pytest.approx(-0.18, abs=0.005)


def test_a_difference_at_equal_seconds_counts_the_seconds_that_are_saved(published):
    """Half the seconds are worth ln 2 times the slope of the loss; equal ones nothing."""
    by_flops = analysis.over_texts(hypotheses.against(published, 64, 2, 32, "standard")).value
    for ratio in (1.0, 0.5):
        frame = published.frame.assign(cpu_seconds=1.0)
        frame.loc[published.point(2, 32).index, "cpu_seconds"] = ratio
        study = dataclasses.replace(published, frame=frame)
        found = float(page.at_equal_seconds(study, 64, 2, 32, "standard").split()[0])
        saved = published.slope.value * np.log(ratio)
        assert found == pytest.approx(by_flops - saved, abs=6e-5)
